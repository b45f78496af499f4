"""What the store knows of one object, and of one promise to a writer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.core.ids import Digest, JobKey
from headrace.core.states import VISIBILITY_TABLE, Visibility, VisibilityEvent
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.records import KIND_CODES, KINDS_BY_CODE
from headrace.kvstore.settings import Kind


def object_key(kind: Kind, namespace: bytes, digest: bytes) -> bytes:
    """The key of the object table: kind, namespace and digest in full (65 bytes). One digest under
    two namespaces is two objects."""
    return bytes((KIND_CODES[kind],)) + namespace + digest


def split_key(key: bytes) -> tuple[Kind, bytes, Digest]:
    return KINDS_BY_CODE[key[0]], key[1:33], Digest(key[33:])


class Saving(StrEnum):
    """How far an object is on its way to disk; apart from who can see it."""

    WAITING = "waiting"
    WRITING = "writing"
    SAVED = "saved"
    GIVEN_UP = "given_up"  # no room, an error, or another store has claimed it: arena only
    HELD_BACK = "held_back"  # a window record that has not earned its bytes: written when used


PENDING = frozenset((Saving.WAITING, Saving.WRITING))


NO_LEASES: frozenset[JobKey] = frozenset()


class DiskPlace(NamedTuple):
    """One slot of one use of a segment."""

    segment: int
    slot: int
    generation: int


@dataclass(slots=True, eq=False)
class Entry:
    """One stored object. Mutable, owned by `StoreState`; compared by identity.

    `slot` and `generation` say where it lies in the arena (None: not there). While `pins` > 0 some
    input or output uses its slot or its disk place, and neither is given to another."""

    key: bytes
    facts: ObjectFacts
    checksum: int
    written_at_s: int
    visibility: Visibility
    saving: Saving
    slot: int | None = None
    generation: int = 0
    disk: DiskPlace | None = None
    proven: bool = False  # a second request has used it since it came into the arena
    departure: int = 0  # the number of its last leave from the arena, counted from 1 a kind
    touched: bool = False  # used since it was written to its disk place
    leases: frozenset[JobKey] = NO_LEASES
    pins: int = 0
    copy: bool = False  # of another store's object, which alone lists it

    @property
    def kind(self) -> Kind:
        return self.facts.kind

    @property
    def dropped(self) -> bool:
        return self.visibility is Visibility.DROPPED

    def __str__(self) -> str:
        return self.facts.digest[:8].hex()

    def step(self, event: VisibilityEvent) -> bool:
        """Apply an event; False when it came late or twice and changed nothing."""
        result = VISIBILITY_TABLE.step(self.visibility, event, self)
        self.visibility = result.state
        return not result.ignored


@dataclass(slots=True, eq=False)
class Reservation:
    """An arena slot that one connection may write until it seals, abandons, closes or expires."""

    number: int
    connection: int
    key: bytes
    facts: ObjectFacts
    slot: int
    lease: JobKey | None
    expires_s: float
    visibility: Visibility = Visibility.RESERVED
