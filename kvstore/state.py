"""The store's memory of itself: objects, arena slots, reservations and leases, without I/O.

Everything here runs on one thread and waits for nothing. Time comes from a `Clock`; the arena is
memory only. Whoever does the input and output (`loads`, `writer`, `publisher`) pins an entry first
and tells the outcome afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.core.clock import Clock
from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.messages import Place
from headrace.core.states import VISIBILITY_TABLE, Visibility, VisibilityEvent
from headrace.kvstore.arena import Arena, Reading
from headrace.kvstore.books import check_books
from headrace.kvstore.counters import Counters, Eviction
from headrace.kvstore.disks import DiskBook
from headrace.kvstore.eviction import RecyclePlan
from headrace.kvstore.grants import GrantBook
from headrace.kvstore.kin import Kin
from headrace.kvstore.layout import ObjectFacts, SlotHeader, checksum
from headrace.kvstore.leases import LeaseBook
from headrace.kvstore.objects import DiskPlace, Entry, Reservation, Saving, object_key
from headrace.kvstore.policy import StorePolicy
from headrace.kvstore.reservations import ReservationBook
from headrace.kvstore.residents import Residents
from headrace.kvstore.saving import SaveQueue, first_saving
from headrace.kvstore.settings import Kind


class StoreState:
    """Objects by key. `on_unsaved` is called when something waits to be written, `on_dirty` when an
    index record may have to change, `on_dirty_tier` when only its tier may, so that there is no
    haste; `residents.on_room` when a slot may be had."""

    def __init__(
        self,
        arena: Arena,
        boot: BootId,
        clock: Clock,
        *,
        lease_s: float,
        reserve_s: float,
        policy: StorePolicy | None = None,
        ssd_bytes: int = 0,
    ) -> None:
        self._policy = policy or StorePolicy()
        self.boot = boot
        self.clock = clock
        self.count = Counters()
        self.leases = LeaseBook(clock, lease_s)
        self.residents = Residents(arena, self._policy, clock)
        self.residents.on_evict = self._evicted
        self.objects: dict[bytes, Entry] = {}
        self.disks = DiskBook(self._policy, ssd_bytes, self.residents.group)
        self.kin = Kin()
        self.dirty: dict[bytes, None] = {}  # keys whose index record may have to change
        self.on_unsaved: Callable[[], None] = lambda: None
        self.on_dirty: Callable[[], None] = lambda: None
        self.on_dirty_tier: Callable[[], None] = lambda: None
        self.reserving = ReservationBook(self.residents, clock, reserve_s)
        self.granted = GrantBook(self.residents, clock, reserve_s, self._policy.ahead_slots)
        self.unsaved = SaveQueue()
        self.pending: set[Entry] = set()  # wait for their sync: a kill loses these
        self.by_kind = dict.fromkeys(Kind, 0)

    # looking up ------------------------------------------------------------------------------

    def find(self, kind: Kind, namespace: bytes, digest: Digest) -> Entry | None:
        return self.objects.get(object_key(kind, namespace, digest))

    def group(self, entry: Entry) -> int:
        """The number of the group of domains that an object counts for."""
        return self.residents.group(entry.facts.domain)

    def use(self, entry: Entry, *, again: bool, here: bool = True) -> None:
        """A request has opened the object; `again` unless its own request has just put it, `here`
        if that found it in the arena.

        What is used again stays longer in both tiers, and a record that was held back is written.
        """
        if again:
            entry.touched = True
            entry.proven = entry.proven or (here and entry.slot is not None)
            if entry.saving is Saving.HELD_BACK and not entry.dropped:
                self.to_save(entry)
                self.residents.settle(entry)
        self.residents.touch(entry)

    def place(self, entry: Entry) -> Place | None:
        """Where readers find the bytes now; None when they are not in the arena."""
        if entry.slot is None or entry.dropped:
            return None
        offset = self.residents.regions[entry.facts.kind].offset(entry.slot)
        size = entry.facts.payload_bytes
        return Place(self.boot, offset, size, entry.generation, entry.checksum)

    def has_window(self, block: Entry) -> bool:
        """Whether the window record at the end of a block is stored here too."""
        return self.kin.has_child(block, Kind.SWA)

    # writing ---------------------------------------------------------------------------------

    def reserve(
        self, connection: int, facts: ObjectFacts, lease: JobKey | None
    ) -> Reservation | None:
        """As `ReservationBook.make`."""
        return self.reserving.make(connection, facts, lease)

    def offset(self, reservation: Reservation) -> int:
        return self.residents.regions[reservation.facts.kind].offset(reservation.slot)

    def seal(self, connection: int, number: int, checksum: int) -> Entry | None:
        """The written slot becomes an object, readable by every process of the host.

        Returns the object of that key: this one, or an earlier one if another writer was first
        (its bytes stay; it may have left the arena, then the caller brings it back). None for a
        reservation that is not this connection's any more."""
        made = self.reserving.redeem(connection, number)
        if made is None:
            self.count.refused += 1
            return None
        entry = self.objects.get(made.key)
        if entry is None:
            entry = Entry(
                made.key,
                made.facts,
                checksum,
                int(self.clock.wall_s()),
                VISIBILITY_TABLE.step(made.visibility, VisibilityEvent.SEAL, made.number).state,
                first_saving(made.facts, self, self._policy.window_cost_share),
            )
            self.enter_new(entry, made.slot)
            if entry.saving is Saving.WAITING:
                self.to_save(entry)
        else:
            entry.step(VisibilityEvent.SEAL)  # ignored by the table: the first writer won
            self.residents.give(entry.kind, made.slot, made.facts.domain)
        if made.lease is not None:
            self.leases.hold(made.lease, entry)
        self.residents.settle(entry)
        return entry

    def enter_new(self, entry: Entry, slot: int) -> None:
        """An object that was not known lies in this reserved slot."""
        self.know({entry.key: entry})
        self.residents.enter(entry, slot)
        if entry.kind is not Kind.STATE:
            self.mark(entry)

    def returned(self, entry: Entry, slot: int) -> None:
        """A known object that was on disk alone lies in this granted slot now, which its second
        writer filled. The caller settles it."""
        self.residents.enter_written((entry,), (slot,))
        self.mark(entry, soon=False)

    # leases ----------------------------------------------------------------------------------

    def hold(self, owner: JobKey, entries: Sequence[Entry]) -> bool:
        """Lease objects; False for an owner that is over."""
        free = [entry for entry in entries if not entry.leases and not entry.pins]
        held = self.leases.hold_all(owner, entries)
        for entry in free if held else ():
            self.residents.settle(entry)
        return held

    def release(self, owner: JobKey, kind: Kind | None) -> None:
        self._let_go(self.leases.release(owner, kind))
        if self.granted.twins and kind in (None, Kind.KV):
            self.granted.free_twins(lambda held: held != owner)

    def expire(self) -> None:
        """End what has had its time: leases, reservations, idle windows and pictures in the arena.
        Called several times a second."""
        self._let_go(self.leases.expire())
        self.reserving.expire()
        self.granted.expire()
        self.granted.free_twins(self.leases.__contains__)
        now_s = self.clock.now_s()
        idle_s = {Kind.SWA: self._policy.window_ttl_s, Kind.MM: self._policy.picture_ttl_s}
        for kind, ttl_s in idle_s.items():
            if kind in self.residents.orders:
                for entry in self.residents.orders[kind].unused_since(now_s - ttl_s):
                    self.residents.leave(entry)
                    self._left(entry, Eviction.IDLE)

    def _let_go(self, entries: Iterable[Entry]) -> None:
        """A lease on them has ended. A sequence's state is of use to its own attempt alone, so its
        slot is free when nobody leases it any more."""
        for entry in _tail_first(entries):
            if entry.kind is Kind.STATE and not entry.leases:
                self.drop(entry, erase=False)
            else:
                self.residents.settle(entry)

    def pin(self, entry: Entry) -> None:
        entry.pins += 1
        if entry.pins == 1:
            self.residents.settle(entry)

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if not entry.pins:
            self.residents.settle(entry)

    def unpin_all(self, entries: Sequence[Entry]) -> None:
        """As `unpin` for each, the last first: of a chain the tail leaves before the head. What is
        leased needs no settling: it stays, and is not dropped."""
        free: list[Entry] = []
        for entry in reversed(entries):
            entry.pins -= 1
            if not entry.pins and not entry.leases:
                free.append(entry)
        self.residents.settle_all(free)

    # between arena and disk ------------------------------------------------------------------

    def take_unsaved(self, limit_bytes: int) -> list[Entry]:
        """The oldest objects that wait to be written, at least one and about `limit_bytes`; pinned
        until `saved` or `not_saved`."""
        taken = self.unsaved.take(limit_bytes)
        for entry in taken:
            entry.pins += 1  # what waits to be saved may not leave, so nothing is to be settled
        return taken

    def to_save(self, entry: Entry, *, first: bool = False) -> None:
        """It waits to be written from now on; the caller settles it."""
        self.unsaved.add(entry, first=first)
        self.pending.add(entry)
        self.on_unsaved()

    def saved(self, writes: Sequence[tuple[Entry, DiskPlace]]) -> None:
        """The slots of these objects are written and synced; the last may leave first."""
        kept = [write for write in writes if not write[0].dropped]
        for entry, _ in kept:
            entry.step(VisibilityEvent.SYNC)
            entry.saving = Saving.SAVED
            self._changed(entry)
        self.disks.put(kept)
        self.count.writes += len(kept)
        self.on_dirty()
        for entry, disk in writes:
            self.pending.discard(entry)
            entry.pins -= 1
            if entry.dropped:
                self.disks.to_erase.append(disk)  # nobody may find it again after a restart
        self.residents.settle_all([entry for entry, _ in reversed(writes) if not entry.pins])

    def not_saved(self, entry: Entry, disk: DiskPlace | None = None) -> None:
        """The object stays in the arena only. `disk`: a slot that may hold part of it."""
        entry.saving = Saving.GIVEN_UP
        self.pending.discard(entry)
        if disk is not None:
            self.disks.to_erase.append(disk)
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
            self.disks.leave(known)
            self.kin.discard(known)
            known.checksum, known.facts = header.checksum, facts
            self.kin.add(known)
            self.disks.put(((known, disk),))
            return
        entry = Entry(
            key, facts, header.checksum, header.written_at_s, Visibility.DURABLE, Saving.SAVED
        )
        self.know({key: entry})
        self.disks.put(((entry, disk),))
        self.mark(entry)

    def plan_recycle(self, segment: int, slots: int, room: int) -> RecyclePlan | None:
        """As `DiskBook.plan`, with the objects that hang on each other as they are now."""
        return self.disks.plan(segment, self.kin, slots, room)

    def recycle(self, segment: int, plan: RecyclePlan) -> tuple[bytes, ...]:
        """Forget what a reuse of the segment loses; the keys of all that lay there.

        What is kept and lies in the arena waits to be written again, before all others. What lies
        on disk only is nobody's until the caller has written its bytes anew (`moved`)."""
        for entry in plan.drop:
            here = entry.disk is not None and entry.disk.segment == segment
            self.count.evict(Eviction.RECYCLED if here else Eviction.ORPHANED)
            self.drop(entry, erase=not here)
        for entry in reversed(plan.keep):
            if entry.slot is not None:
                self.disks.leave(entry)
                self.to_save(entry, first=True)
                self.residents.settle(entry)
                self.count.evict(Eviction.MOVED)
            else:
                self.drop(entry, erase=False)
        return tuple(entry.key for entry in (*plan.drop, *plan.keep))

    def moved(self, header: SlotHeader, disk: DiskPlace) -> None:
        """Bytes kept from a reused segment are written and synced at this place. Whoever put the
        object anew meanwhile was first; then nobody needs this copy."""
        facts = header.facts
        if object_key(facts.kind, facts.namespace, facts.digest) in self.objects:
            self.disks.to_erase.append(disk)
        else:
            self.adopt(header, disk)
            self.count.evict(Eviction.MOVED)

    # ends ------------------------------------------------------------------------------------

    def drop(self, entry: Entry, *, erase: bool) -> None:
        """The object is gone for everybody. `erase`: its disk slot is to be blanked too."""
        if not entry.step(VisibilityEvent.DROP):
            return
        if self.objects.get(entry.key) is entry:
            del self.objects[entry.key]
            self.by_kind[entry.kind] -= 1
        self.pending.discard(entry)
        self.kin.discard(entry)
        disk = entry.disk
        self.disks.leave(entry)
        if erase and disk is not None:
            self.disks.to_erase.append(disk)
            self.on_unsaved()
        self.residents.hide(entry)
        self.leases.forget(entry)
        self.mark(entry)
        self.residents.settle(entry)

    def doom(self, place: Place, namespace: bytes, digest: Digest) -> bool:
        """A reader says that the bytes at `place` did not verify. True when it was right.

        The store looks itself: a stale place or a reader's mistake ends no object. One on disk
        loses its arena copy alone; of others a header is written anew if the payload is sound."""
        found = (arena := self.residents.arena).locate(place.offset)
        entry = None if found is None else self.find(found[0].kind, namespace, digest)
        mine = None if entry is None else self.place(entry)
        if entry is None or mine is None or mine != place:
            self.count.refused += 1
            return False
        if arena.read(mine, namespace, digest, None) is Reading.GOOD:
            self.count.refused += 1
            return False
        self.count.damaged += 1
        if entry.saving is Saving.SAVED and not entry.pins:
            self.residents.leave(entry)
            self.mark(entry)
        elif entry.slot is not None and checksum(arena.bytes_at(mine)) == entry.checksum:
            self.residents.show(entry, entry.slot)
        else:
            self.drop(entry, erase=True)
        return True

    # books -----------------------------------------------------------------------------------

    def check(self) -> None:
        check_books(self)

    def _evicted(self, entry: Entry) -> None:
        self._left(entry, Eviction.ROOM)

    def _left(self, entry: Entry, why: Eviction) -> None:
        """The object has lost its arena slot."""
        self.count.evicted += 1
        self.count.evict(why)
        if entry.disk is None:
            self.drop(entry, erase=False)
        else:
            self.mark(entry, soon=False)

    def know(self, fresh: Mapping[bytes, Entry]) -> None:
        """Objects of one kind, of new keys; the caller says where they lie."""
        self.objects.update(fresh)
        entries = list(fresh.values())
        self.by_kind[entries[0].kind] += len(entries)
        self.kin.add_all(entries)

    def mark(self, entry: Entry, *, soon: bool = True) -> None:
        """The index may have to tell otherwise of it; not `soon`: of its tier alone."""
        self._changed(entry)
        (self.on_dirty if soon else self.on_dirty_tier)()

    def _changed(self, entry: Entry) -> None:
        if entry.copy:
            return
        self.dirty[entry.key] = None
        if entry.kind is Kind.SWA:  # the record of its block, its parent, tells of it
            self.dirty[object_key(Kind.KV, entry.facts.namespace, entry.facts.parent)] = None


def _tail_first(entries: Iterable[Entry]) -> list[Entry]:
    # What is settled first is evicted first, and a chain without its head is dead weight.
    return sorted(entries, key=lambda entry: -entry.facts.block)
