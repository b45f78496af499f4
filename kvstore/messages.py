"""Messages between a client and the store of its host, on a unix socket.

    client -> store   Attach first; OpenPrefix, OpenWindow, OpenObjects, Prefetch, Reserve, Seal,
                      Abandon, Ahead, Commit, GiveBack, Cancel, Renew, Release, Doom, AskStat, Ping,
                      Question
    store  -> client  Attached (with the arena's descriptor), Opened, Prefetched, Reserved, Sealed,
                      Granted, Done, Stat, Answer

`call` numbers the client's questions; an answer carries the same number. No payload is ever on the
socket: the arena is shared memory. What comes once an object is packed into one bytes field, little
endian: a batch of 16 blocks is a dozen values for msgpack, not two hundred.

    digests   32 bytes each
    sizes     u32 each
    grants    u64 reservation | u64 offset of the payload in the arena; reservation 0: none
    written   u64 reservation | u64 checksum, xxh3-64 of the writer's own bytes
    slots     u32 slot of the region for blocks | u32 its generation
    places    u64 offset | u32 payload bytes | u32 generation | u64 checksum; 0 bytes: no place
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from itertools import count as numbers_from
from typing import Any

from headrace.core.errors import WireError
from headrace.core.ids import DIGEST_BYTES, BootId, Digest, JobKey
from headrace.core.messages import Place
from headrace.core.wire import MessageTable
from headrace.kvstore.arena import Region
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.questions import Answer, Question
from headrace.kvstore.settings import Kind, StoreStat

MAX_OBJECTS = 1 << 16  # of one message: 8.4 million tokens
_PLACE = struct.Struct("<QIIQ")
_PAIR = struct.Struct("<QQ")
_SLOT = struct.Struct("<II")
_NO_PLACE = bytes(_PLACE.size)
# From a tuple; `_make` costs three times as much.
_FACTS: Callable[[tuple[Any, ...]], ObjectFacts] = partial(tuple.__new__, ObjectFacts)


def pack_places(places: Iterable[Place | None]) -> bytes:
    return b"".join(
        [
            _NO_PLACE
            if place is None
            else _PLACE.pack(place.offset, place.payload_bytes, place.generation, place.checksum)
            for place in places
        ]
    )


def pack_place_rows(rows: Iterable[tuple[int, int, int, int]]) -> bytes:
    """Places as their fields: offset, payload bytes, generation, checksum. 0 bytes: no place."""
    return b"".join([_PLACE.pack(*row) for row in rows])


def unpack_places(data: bytes, store: BootId) -> tuple[Place | None, ...]:
    """Places of that store's life. Raises `WireError` for what is no whole number of them."""
    _refuse_part(data, _PLACE.size, "places")
    return tuple(
        [
            Place(store, offset, size, generation, checksum) if size else None
            for offset, size, generation, checksum in _PLACE.iter_unpack(data)
        ]
    )


def pack_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    """Grants, or written reservations. Raises `struct.error` for numbers over 64 bits."""
    return struct.pack(f"<{2 * len(pairs)}Q", *chain.from_iterable(pairs))


def unpack_pairs(data: bytes) -> tuple[tuple[int, int], ...]:
    """Raises `WireError` for what is no whole number of pairs."""
    _refuse_part(data, _PAIR.size, "pairs")
    return tuple(_PAIR.iter_unpack(data))


def pack_slots(slots: Sequence[tuple[int, int]]) -> bytes:
    """Slots granted in advance: number of the slot, generation."""
    return struct.pack(f"<{2 * len(slots)}I", *chain.from_iterable(slots))


def unpack_slots(data: bytes) -> tuple[tuple[int, int], ...]:
    """Raises `WireError` for what is no whole number of slots."""
    _refuse_part(data, _SLOT.size, "slots")
    return tuple(_SLOT.iter_unpack(data))


def pack_sizes(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sizes)}I", *sizes)


def unpack_sizes(data: bytes) -> tuple[int, ...]:
    """Raises `WireError` for what is no whole number of sizes."""
    _refuse_part(data, 4, "sizes")
    return struct.unpack(f"<{len(data) // 4}I", data)


def cut_digests(data: bytes) -> list[Digest]:
    """Raises `WireError` for what is no whole number of digests."""
    _refuse_part(data, DIGEST_BYTES, "digests")
    return [
        Digest(data[begin : begin + DIGEST_BYTES]) for begin in range(0, len(data), DIGEST_BYTES)
    ]


def _refuse_part(data: bytes, size: int, what: str) -> None:
    count, rest = divmod(len(data), size)
    if rest:
        raise WireError(f"{what} of {size} bytes each, got {len(data)} bytes")
    if count > MAX_OBJECTS:
        raise WireError(f"a message names at most {MAX_OBJECTS} objects, got {count}")


@dataclass(frozen=True, slots=True)
class Attach:
    """Who connects, and the one namespace (32 bytes) that everything on this connection is in."""

    name: str
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Attached:
    """The frame's first byte carries the arena's descriptor (SCM_RIGHTS)."""

    boot: BootId
    regions: tuple[Region, ...]
    reserve_s: float  # how long reservations and slots granted in advance wait for their client


@dataclass(frozen=True, slots=True)
class OpenPrefix:
    call: int
    digests: bytes  # of blocks, from the root on
    lease: JobKey | None


@dataclass(frozen=True, slots=True)
class OpenWindow:
    call: int
    digests: bytes  # of window records, best first
    lease: JobKey | None


@dataclass(frozen=True, slots=True)
class Opened:
    """OpenPrefix: places of the leading digests, `first` 0. OpenWindow: at most one place, of
    `digests[first]`. OpenObjects: a place or none for each, `first` 0."""

    call: int
    first: int
    places: bytes


@dataclass(frozen=True, slots=True)
class OpenObjects:
    """Objects of one kind that do not depend on each other."""

    call: int
    kind: Kind
    digests: bytes
    lease: JobKey | None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Objects that a request in line is going to open. Answered when they are in the arena, leased,
    which may take as long as the request stands there."""

    call: int
    kind: Kind
    digests: bytes
    lease: JobKey


@dataclass(frozen=True, slots=True)
class Prefetched:
    """`count` of the digests from number `first` on are there."""

    call: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Room for a batch of objects. With a lease the store waits up to `wait_s` for it.

    Of kind KV they follow each other from block `first_block` on, and `parent` is the digest before
    the first; of other kinds both describe each."""

    call: int
    kind: Kind
    digests: bytes
    sizes: bytes  # of the payloads
    parent: Digest
    first_block: int
    domain: bytes
    lease: JobKey | None
    wait_s: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """One item an object in both: a grant to be written and sealed, or the place of an object that
    is already there, or neither (no room). `places` is empty when none was there."""

    call: int
    grants: bytes
    places: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    call: int
    written: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    call: int
    places: bytes


@dataclass(frozen=True, slots=True)
class Ahead:
    """The client puts block after block of this domain: it would like up to `count` slots more in
    advance; fewer than `least` are of no use, so there are none then."""

    call: int
    domain: bytes
    count: int
    least: int


@dataclass(frozen=True, slots=True)
class Granted:
    """As many of them as it may have now, perhaps none: grants are numbered from `first` on.
    Nobody else gets them until it commits or gives them back, its connection ends, or `reserve_s`
    is over."""

    call: int
    first: int
    slots: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """Blocks that follow each other, whose payloads and headers stand in slots granted in advance:
    `written` has a grant and a checksum for each. Answered with Done, `good` if all were new."""

    call: int
    kind: Kind
    digests: bytes
    sizes: bytes
    parent: Digest
    first_block: int
    domain: bytes
    lease: JobKey | None
    written: bytes


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Slots granted in advance that the client does not need. No answer."""

    grants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Reservations that will not be sealed. No answer."""

    reservations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer to `call` is not awaited any more. No answer; what a finished call has leased
    stays leased."""

    call: int


@dataclass(frozen=True, slots=True)
class Renew:
    call: int
    lease: JobKey


@dataclass(frozen=True, slots=True)
class Release:
    call: int
    lease: JobKey
    kind: Kind | None


@dataclass(frozen=True, slots=True)
class Doom:
    """Bytes that did not verify. Answered if `call` is not 0."""

    call: int
    place: Place
    digest: Digest


@dataclass(frozen=True, slots=True)
class AskStat:
    call: int


@dataclass(frozen=True, slots=True)
class Ping:
    call: int


@dataclass(frozen=True, slots=True)
class Done:
    call: int
    good: bool


@dataclass(frozen=True, slots=True)
class Stat:
    call: int
    stat: StoreStat


def facts_of(namespace: bytes, asked: Reserve | Commit) -> list[ObjectFacts]:
    """What goes into the headers. Raises `WireError` for lengths and numbers that are none."""
    digests, sizes = cut_digests(asked.digests), unpack_sizes(asked.sizes)
    if len(asked.parent) != 32 or len(asked.domain) != 16 or len(digests) != len(sizes):
        raise WireError("a digest has 32 bytes, a domain tag 16, and each object a size")
    last = asked.first_block + len(digests)
    if not 0 <= asked.first_block <= last < 1 << 32:
        raise WireError(f"a block number has 32 bits, got {asked.first_block}")
    chained = asked.kind is Kind.KV
    parents = [asked.parent, *digests] if chained else repeat(asked.parent)
    blocks = numbers_from(asked.first_block, step=int(chained))
    same = repeat(asked.kind), repeat(namespace)
    rows = zip(*same, digests, parents, blocks, repeat(asked.domain), sizes, strict=False)
    return list(map(_FACTS, rows))


STORE_MESSAGES = MessageTable(
    {
        1: Attach,
        2: Attached,
        3: OpenPrefix,
        4: OpenWindow,
        5: Opened,
        6: Reserve,
        7: Reserved,
        8: Seal,
        9: Sealed,
        10: Abandon,
        11: Cancel,
        12: Renew,
        13: Release,
        14: Doom,
        15: AskStat,
        16: Ping,
        17: Done,
        18: Stat,
        19: OpenObjects,
        20: Question,
        21: Answer,
        22: Ahead,
        23: Granted,
        24: Commit,
        25: GiveBack,
        26: Prefetch,
        27: Prefetched,
    }
)
