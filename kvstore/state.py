"""The store's memory of itself: objects, arena slots, reservations and leases, without I/O.

Everything here runs on one thread and waits for nothing. Time comes from a `Clock`; the arena is
memory only. Whoever does the input and output (`loads`, `writer`, `publisher`) pins an entry first
and tells the outcome afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.messages import Place
from headrace.core.states import VISIBILITY_TABLE, Visibility, VisibilityEvent
from headrace.kvstore.arena import Arena, Reading
from headrace.kvstore.layout import ObjectFacts, SlotHeader
from headrace.kvstore.leases import LeaseBook
from headrace.kvstore.objects import DiskPlace, Entry, Reservation, Saving, object_key
from headrace.kvstore.residents import Residents, StoreDamaged
from headrace.kvstore.settings import Kind


@dataclass(slots=True)
class Counters:
    """What happened since the start; read by `stat`."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    dropped: int = 0  # puts refused for want of room
    unsaved: int = 0  # objects that stay in the arena only
    refused: int = 0
    loads: int = 0
    writes: int = 0
    evicted: int = 0


class StoreState:
    """Objects by key. `on_unsaved` is called when something waits to be written, `on_dirty` when an
    index record may have to change, `residents.on_room` when a slot may be had."""

    def __init__(
        self, arena: Arena, boot: BootId, clock: Clock, *, lease_s: float, reserve_s: float
    ) -> None:
        self.boot = boot
        self.clock = clock
        self.count = Counters()
        self.leases = LeaseBook(clock, lease_s)
        self.residents = Residents(arena)
        self.residents.on_evict = self._evicted
        self.objects: dict[bytes, Entry] = {}
        self.by_segment: dict[int, set[Entry]] = {}
        self.dirty: dict[bytes, None] = {}  # keys whose index record may have to change
        self.to_erase: list[DiskPlace] = []  # damaged or orphaned slots, to be blanked on disk
        self.on_unsaved: Callable[[], None] = lambda: None
        self.on_dirty: Callable[[], None] = lambda: None
        self._reserve_s = reserve_s
        self._reservations: dict[int, Reservation] = {}
        self._numbers = 0
        self._unsaved: deque[Entry] = deque()

    # looking up ------------------------------------------------------------------------------

    def find(self, kind: Kind, namespace: bytes, digest: Digest) -> Entry | None:
        return self.objects.get(object_key(kind, namespace, digest))

    def place(self, entry: Entry) -> Place | None:
        """Where readers find the bytes now; None when they are not in the arena."""
        if entry.slot is None or entry.dropped:
            return None
        return Place(
            store=self.boot,
            offset=self.residents.regions[entry.kind].offset(entry.slot),
            payload_bytes=entry.facts.payload_bytes,
            generation=entry.generation,
            checksum=entry.checksum,
        )

    # writing ---------------------------------------------------------------------------------

    def reserve(
        self, connection: int, facts: ObjectFacts, lease: JobKey | None
    ) -> Reservation | None:
        """A slot for one writer; None when there is no room now. The object must fit its kind.

        Two writers of one object both get a slot; the first to seal wins."""
        slot = self.residents.take(facts.kind)
        if slot is None:
            return None
        self._numbers += 1
        key = object_key(facts.kind, facts.namespace, facts.digest)
        expires_s = self.clock.now_s() + self._reserve_s
        made = Reservation(self._numbers, connection, key, facts, slot, lease, expires_s)
        self._reservations[made.number] = made
        return made

    def offset(self, reservation: Reservation) -> int:
        return self.residents.regions[reservation.facts.kind].offset(reservation.slot)

    def seal(self, connection: int, number: int, checksum: int) -> Entry | None:
        """The written slot becomes an object, readable by every process of the host.

        Returns the object of that key: this one, or an earlier one if another writer was first
        (its bytes stay; it may have left the arena, then the caller brings it back). None for a
        reservation that is not this connection's any more."""
        made = self._reservations.get(number)
        if made is None or made.connection != connection:
            self.count.refused += 1
            return None
        del self._reservations[number]
        entry = self.objects.get(made.key)
        if entry is None:
            entry = Entry(
                made.key,
                made.facts,
                checksum,
                int(self.clock.wall_s()),
                VISIBILITY_TABLE.step(made.visibility, VisibilityEvent.SEAL, made.number).state,
                Saving.GIVEN_UP if made.facts.kind is Kind.STATE else Saving.WAITING,
            )
            self.objects[made.key] = entry
            self.residents.enter(entry, made.slot)
            if entry.saving is Saving.WAITING:
                self._unsaved.append(entry)
                self._mark(entry)
                self.on_unsaved()
        else:
            entry.step(VisibilityEvent.SEAL)  # ignored by the table: the first writer won
            self.residents.give(entry.kind, made.slot)
        if made.lease is not None:
            self.leases.hold(made.lease, entry)
        self.residents.settle(entry)
        return entry

    def abandon(self, connection: int, numbers: Iterable[int]) -> int:
        """Give reservations back unsealed; how many of them were this connection's."""
        mine = [
            made
            for made in (self._reservations.get(number) for number in numbers)
            if made is not None and made.connection == connection
        ]
        for made in mine:
            self._cancel(made)
        return len(mine)

    def close_connection(self, connection: int) -> int:
        """Free everything a connection reserved; how many slots that were."""
        mine = [made for made in self._reservations.values() if made.connection == connection]
        for made in mine:
            self._cancel(made)
        return len(mine)

    @property
    def reservations(self) -> int:
        return len(self._reservations)

    # leases ----------------------------------------------------------------------------------

    def hold(self, owner: JobKey, entry: Entry) -> bool:
        held = self.leases.hold(owner, entry)
        self.residents.settle(entry)
        return held

    def release(self, owner: JobKey, kind: Kind | None) -> None:
        for entry in _tail_first(self.leases.release(owner, kind)):
            self.residents.settle(entry)

    def expire(self) -> None:
        """End the leases and reservations whose time is over. Called several times a second."""
        for entry in _tail_first(self.leases.expire()):
            self.residents.settle(entry)
        now_s = self.clock.now_s()
        for made in [r for r in self._reservations.values() if r.expires_s <= now_s]:
            self._cancel(made)

    def pin(self, entry: Entry) -> None:
        entry.pins += 1
        self.residents.settle(entry)

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        self.residents.settle(entry)

    # between arena and disk ------------------------------------------------------------------

    def loaded(self, entry: Entry, slot: int, *, sound: bool | None) -> None:
        """A load of a pinned entry into a reserved slot ended. Unsound bytes end the object; None
        (given up before it ended) only gives the slot back."""
        if sound and not entry.dropped and entry.slot is None:
            self.residents.enter(entry, slot)
            self.count.loads += 1
            self._mark(entry)
        else:
            self.residents.give(entry.kind, slot)
        if sound is False:
            self.count.damaged += 1
            self.drop(entry, erase=True)
        self.residents.settle(entry)

    def take_unsaved(self, limit_bytes: int) -> list[Entry]:
        """The oldest objects that wait to be written, at least one and about `limit_bytes`; pinned
        until `saved` or `not_saved`."""
        taken: list[Entry] = []
        total = 0
        while self._unsaved and (not taken or total < limit_bytes):
            entry = self._unsaved.popleft()
            if entry.dropped or entry.saving is not Saving.WAITING:
                continue
            entry.saving = Saving.WRITING
            self.pin(entry)
            taken.append(entry)
            total += entry.facts.payload_bytes
        return taken

    @property
    def unsaved(self) -> int:
        return sum(1 for e in self._unsaved if not e.dropped and e.saving is Saving.WAITING)

    def saved(self, entry: Entry, disk: DiskPlace) -> None:
        """The object's slot is written and synced."""
        if entry.dropped:
            self.to_erase.append(disk)  # nobody may find it again after a restart
        else:
            entry.step(VisibilityEvent.SYNC)
            entry.saving = Saving.SAVED
            self._put_on_disk(entry, disk)
            self.count.writes += 1
            self._mark(entry)
        self.unpin(entry)

    def not_saved(self, entry: Entry, disk: DiskPlace | None = None) -> None:
        """The object stays in the arena only. `disk`: a slot that may hold part of it."""
        entry.saving = Saving.GIVEN_UP
        if disk is not None:
            self.to_erase.append(disk)
        self.unpin(entry)

    def adopt(self, header: SlotHeader, disk: DiskPlace) -> None:
        """An object found on disk at start. Of two of one key the later call wins. One of a kind
        that has no slots any more is left to the next use of its segment."""
        facts = header.facts
        if facts.kind not in self.residents.regions:
            return
        key = object_key(facts.kind, facts.namespace, facts.digest)
        known = self.objects.get(key)
        if known is not None:
            self._leave_disk(known)
            known.checksum, known.facts = header.checksum, facts
            self._put_on_disk(known, disk)
            return
        entry = Entry(
            key, facts, header.checksum, header.written_at_s, Visibility.DURABLE, Saving.SAVED
        )
        self.objects[key] = entry
        self._put_on_disk(entry, disk)
        self._mark(entry)

    def segment_is_free(self, segment: int) -> bool:
        """Whether nothing in this segment is leased or in use, so that it may be recycled."""
        return not any(e.leases or e.pins for e in self.by_segment.get(segment, ()))

    def drop_segment(self, segment: int) -> tuple[bytes, ...]:
        """Forget every object of a segment that is about to be reused; their keys."""
        entries = tuple(self.by_segment.get(segment, ()))
        for entry in entries:
            self.drop(entry, erase=False)
        return tuple(entry.key for entry in entries)

    # ends ------------------------------------------------------------------------------------

    def drop(self, entry: Entry, *, erase: bool) -> None:
        """The object is gone for everybody. `erase`: its disk slot is to be blanked too."""
        if not entry.step(VisibilityEvent.DROP):
            return
        if self.objects.get(entry.key) is entry:
            del self.objects[entry.key]
        disk = entry.disk
        self._leave_disk(entry)
        if erase and disk is not None:
            self.to_erase.append(disk)
            self.on_unsaved()
        self.residents.hide(entry)
        self.leases.forget(entry)
        self._mark(entry)
        self.residents.settle(entry)

    def doom(self, place: Place, namespace: bytes, digest: Digest) -> bool:
        """A reader says that the bytes at `place` did not verify. True when it was right.

        The store looks itself: a stale place or a reader's mistake ends no object. Damage in the
        arena costs an object that is also on disk only its arena copy."""
        found = self.residents.arena.locate(place.offset)
        entry = None if found is None else self.find(found[0].kind, namespace, digest)
        mine = None if entry is None else self.place(entry)
        if entry is None or mine is None or mine != place:
            self.count.refused += 1
            return False
        if self.residents.arena.read(mine, namespace, digest, None) is Reading.GOOD:
            self.count.refused += 1
            return False
        self.count.damaged += 1
        if entry.saving is Saving.SAVED and not entry.pins:
            self.residents.leave(entry)
            self._mark(entry)
        else:
            self.drop(entry, erase=True)
        return True

    # books -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Count everything anew. Raises `StoreDamaged` naming what does not add up."""
        self.residents.check(self.objects.values())
        reserved = sum(pool.reserved for pool in self.residents.pools.values())
        if reserved < len(self._reservations):  # loads reserve too
            raise StoreDamaged(f"{len(self._reservations)} reservations in {reserved} slots")
        held = {e for owner in self.leases.owners() for e in self.leases.entries(owner)}
        if held != {e for e in self.objects.values() if e.leases}:
            raise StoreDamaged("leases and leased objects differ")
        if any(e.pins < 0 for e in self.objects.values()):
            raise StoreDamaged("an object was unpinned twice")

    def _evicted(self, entry: Entry) -> None:
        self.count.evicted += 1
        if entry.saving is Saving.GIVEN_UP:
            self.drop(entry, erase=False)
        else:
            self._mark(entry)

    def _cancel(self, made: Reservation) -> None:
        step = VISIBILITY_TABLE.step(made.visibility, VisibilityEvent.DROP, made.number)
        made.visibility = step.state
        del self._reservations[made.number]
        self.residents.give(made.facts.kind, made.slot)

    def _put_on_disk(self, entry: Entry, disk: DiskPlace) -> None:
        entry.disk = disk
        self.by_segment.setdefault(disk.segment, set()).add(entry)

    def _leave_disk(self, entry: Entry) -> None:
        if entry.disk is not None:
            self.by_segment[entry.disk.segment].discard(entry)
            entry.disk = None

    def _mark(self, entry: Entry) -> None:
        self.dirty[entry.key] = None
        self.on_dirty()


def _tail_first(entries: Iterable[Entry]) -> list[Entry]:
    # What is settled first is evicted first, and a chain without its head is dead weight.
    return sorted(entries, key=lambda entry: -entry.facts.block)
