"""Messages between a client and the store of its host, on a unix socket.

    client -> store   Attach first; OpenPrefix, OpenWindow, OpenObjects, Reserve, Seal, Abandon,
                      Cancel, Renew, Release, Doom, AskStat, Ping
    store  -> client  Attached (with the arena's descriptor), Opened, Found, Reserved, Sealed, Done,
                      Stat

`call` numbers the client's questions; an answer carries the same number. No payload is ever on the
socket: the arena is shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.messages import Place
from headrace.core.wire import MessageTable
from headrace.kvstore.arena import Region
from headrace.kvstore.settings import Kind, StoreStat


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


@dataclass(frozen=True, slots=True)
class OpenPrefix:
    call: int
    digests: tuple[Digest, ...]  # of blocks, from the root on
    lease: JobKey | None


@dataclass(frozen=True, slots=True)
class OpenWindow:
    call: int
    digests: tuple[Digest, ...]  # of window records, best first
    lease: JobKey | None


@dataclass(frozen=True, slots=True)
class Opened:
    """OpenPrefix: places of the leading digests, `first` 0. OpenWindow: at most one place, of
    `digests[first]`."""

    call: int
    first: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class OpenObjects:
    """Objects of one kind that do not depend on each other."""

    call: int
    kind: Kind
    digests: tuple[Digest, ...]
    lease: JobKey | None


@dataclass(frozen=True, slots=True)
class Found:
    """One item a digest of OpenObjects: its place, or None."""

    call: int
    places: tuple[Place | None, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    digest: Digest
    parent: Digest
    block: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Room for a batch of objects. With a lease the store waits up to `wait_s` for it."""

    call: int
    kind: Kind
    wishes: tuple[Wish, ...]
    domain: bytes
    lease: JobKey | None
    wait_s: float


@dataclass(frozen=True, slots=True)
class Grant:
    reservation: int
    offset: int  # of the payload, in the arena


@dataclass(frozen=True, slots=True)
class Reserved:
    """One item a wish in both: a grant to be written and sealed, or the place of an object that is
    already there, or neither (no room)."""

    call: int
    grants: tuple[Grant | None, ...]
    places: tuple[Place | None, ...]


@dataclass(frozen=True, slots=True)
class Written:
    reservation: int
    checksum: int  # xxh3-64 of the payload, taken from the writer's own bytes


@dataclass(frozen=True, slots=True)
class Seal:
    call: int
    written: tuple[Written, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    call: int
    places: tuple[Place | None, ...]


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
        20: Found,
    }
)
