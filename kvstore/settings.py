"""What a store is told at start, the kinds and tiers it knows, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.chain import BLOCK_TOKENS
from headrace.core.errors import ConfigError
from headrace.kvstore.policy import StorePolicy, check_number


class Kind(StrEnum):
    """What an object is; each kind has slots of its own size."""

    KV = "kv"  # one block: 128 tokens of global KV
    SWA = "swa"  # one window record
    STATE = "state"  # a sequence's private state, parked or handed over; never persisted
    MM = "mm"  # the rows of one picture; without `picture_bytes` every put answers None

    __hash__ = str.__hash__  # an Enum's own is a call of Python, and each block asks a dozen times


class Tier(StrEnum):
    HOST = "host"  # in the arena
    SSD = "ssd"  # in a synced segment
    SHARED = "shared"  # the same, in a folder that other hosts have mounted: they read it there


@dataclass(frozen=True, slots=True)
class StoreSettings(StorePolicy):
    """Settings of one store, with its policy. Raises `ConfigError` naming key, bound and value.

    `directory` holds segments, salt and lock; one process owns it. `arena_bytes` is shared memory,
    taken at start; `window_share` of it goes to window records, `picture_share` to pictures and
    `state_share` to the states of sequences, which are never persisted.
    `ssd_bytes` is taken at start too, in files of `segment_bytes`. `block_bytes`, `window_bytes`,
    `picture_bytes` (0: no pictures are stored) and `state_bytes` (0: no states) are the largest
    payloads of the slot classes, from the model. A group of written slots is synced after
    `group_bytes` or `group_s`, whichever comes first. On `metrics_port` (0: none) of loopback the
    store answers a Prometheus scrape. With `peer_listen` it serves other stores there and asks them
    for what it lacks. A read from SSD or a transfer may take as long as computing its tokens anew,
    at `recompute_tokens_per_s`, would. What requests in line have brought in advance of their turn
    is at most `prefetch_share` of each kind's slots (0: nothing is). With `lock_memory` the arena
    is kept from being swapped out, where RLIMIT_MEMLOCK allows it."""

    directory: str
    arena_bytes: int
    ssd_bytes: int
    segment_bytes: int
    block_bytes: int
    window_bytes: int
    picture_bytes: int = 0
    state_bytes: int = 0
    lock_memory: bool = True
    window_share: float = 0.25
    picture_share: float = 0.1
    state_share: float = 0.1
    group_bytes: int = 64 << 20
    group_s: float = 0.2
    index_deadline_s: float = 0.05  # every call to Redis; no retries
    claim_s: float = 10.0  # how long one store alone may persist an object
    drain_s: float = 5.0  # at stop: how long objects may still be made durable
    metrics_port: int = 0
    peer_listen: str = ""  # tcp://host:port
    shared: bool = False  # `directory` lies in a folder that other hosts mount
    shared_directories: Sequence[str] = ()  # of other stores, mounted here
    disk_least_s: float = 2.0  # what a read from SSD is always given, however little it saves
    peer_least_s: float = 0.05  # the same for another store
    recompute_tokens_per_s: float = 10_000.0  # how fast this cluster would compute blocks anew
    recompute_window_tokens: int = 2_540  # rows that a missing window record costs
    prefetch_share: float = 0.25
    absent_s: float = 0.5  # how long an object is believed absent from the index
    absent_keys: int = 65_536
    forget_stores_s: float = 3600.0  # a store gone for so long leaves the index; 0: never

    def __post_init__(self) -> None:
        StorePolicy.__post_init__(self)
        if not self.directory:
            raise ConfigError("directory must name the store's directory, got ''")
        for name, least in (
            ("arena_bytes", 1),
            ("ssd_bytes", 1),
            ("segment_bytes", 1),
            ("block_bytes", 1),
            ("window_bytes", 1),
            ("picture_bytes", 0),
            ("state_bytes", 0),
            ("group_bytes", 1),
            ("metrics_port", 0),
            ("recompute_window_tokens", 1),
            ("absent_keys", 0),
            ("ahead_slots", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, low, high in (
            ("window_share", 0.01, 0.9),
            ("picture_share", 0.01, 0.9),
            ("state_share", 0.01, 0.9),
            ("group_s", 0.0, 60.0),
            ("index_deadline_s", 0.001, 10.0),
            ("claim_s", 0.1, 3600.0),
            ("drain_s", 0.0, 600.0),
            ("metrics_port", 0, 65535),
            ("ahead_slots", 0, 65536),
            ("disk_least_s", 0.001, 60.0),
            ("peer_least_s", 0.001, 60.0),
            ("recompute_tokens_per_s", 1.0, 1e9),
            ("prefetch_share", 0.0, 0.9),
            ("absent_s", 0.0, 60.0),
            ("forget_stores_s", 0.0, 1e8),
        ):
            check_number(name, getattr(self, name), low, high)
        if not isinstance(self.lock_memory, bool):
            raise ConfigError(f"lock_memory must be true or false, got {self.lock_memory!r}")

    def recompute_s(self, kind: Kind, n_objects: int) -> float:
        """How long computing so many blocks, or one window record for each, anew would take."""
        tokens = BLOCK_TOKENS if kind is Kind.KV else self.recompute_window_tokens
        return n_objects * tokens / self.recompute_tokens_per_s

    def payload_bytes(self) -> dict[Kind, int]:
        """The largest payload of every kind that has slots, in the order of their regions."""
        sizes = {
            Kind.KV: self.block_bytes,
            Kind.SWA: self.window_bytes,
            Kind.MM: self.picture_bytes,
            Kind.STATE: self.state_bytes,
        }
        return {kind: size for kind, size in sizes.items() if size}

    def share(self, kind: Kind) -> float:
        """The part of the arena that goes to `kind`; blocks take what the others leave."""
        pictures = self.picture_share if self.picture_bytes else 0.0
        states = self.state_share if self.state_bytes else 0.0
        others: dict[Kind, float] = {
            Kind.SWA: self.window_share,
            Kind.MM: pictures,
            Kind.STATE: states,
        }
        return others.get(kind, 1.0 - sum(others.values()))


@dataclass(frozen=True, slots=True)
class StoreStat:
    """A store's own account, at one moment.

    In every class `free + reserved + resident == total` slots hold; counters start at 0 with the
    process. `pending` objects wait for their sync; a kill loses these and no others."""

    boot: str
    blocks: int  # kv objects known, wherever they lie
    windows: int
    pictures: int
    states: int  # of sequences that are parked or being handed over
    arena_slots: int
    arena_free: int
    arena_reserved: int
    arena_resident: int  # second copies that were promised for a lease included
    arena_bytes: int  # payload bytes resident in the arena
    arena_lock: str  # locked | off | refused: whether its memory may be swapped out
    ssd_objects: int
    ssd_bytes: int  # payload bytes that are durable
    ssd_segments: int
    ssd_segments_free: int
    pending: int
    leases: int
    leased_objects: int
    reservations: int
    granted: int  # arena slots that clients hold in advance, among the reserved
    connections: int
    hits: int
    misses: int
    damaged: int
    dropped: int  # puts refused for want of room in the arena
    unsaved: int  # objects that stay in the arena only: claimed elsewhere, no room, or an error
    refused: int  # stale reservations, late leases, wrong sizes
    lapsed: int  # leases that ended by their time: their owners died, or forgot them
    loads: int  # objects brought from SSD into the arena
    prefetched: int  # objects brought while their request stood in line, and there at its turn
    writes: int  # objects made durable
    evicted: int  # arena copies that made room
    recycled: int  # segments reused
    write_errors: int
    index: str  # off | ok | away
    index_unlisted: int  # objects whose record is still to be written
    index_errors: int
    peer_fetched: int  # objects that came from other stores
    peer_failed: int  # that did not: gone, damaged, late, or nobody there
    peer_sent: int  # to other stores
