"""Which objects lie in the arena and which of them may go; `order` says who goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.states import Visibility
from headrace.kvstore.arena import Arena, Region
from headrace.kvstore.layout import domain_tag, header_packer, pack_slot_header
from headrace.kvstore.objects import Entry, Saving
from headrace.kvstore.order import LeaveOrder
from headrace.kvstore.policy import COMMON, StorePolicy, allowances
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind
from headrace.kvstore.slots import SlotPool

_WRITTEN_ENOUGH = (Saving.SAVED, Saving.GIVEN_UP, Saving.HELD_BACK)


class StoreDamaged(HeadraceError):
    """The store's own books do not add up: a bug. Raised by `check` only."""

    code = "store_damaged"


def may_leave(entry: Entry) -> bool:
    """Whether an object's arena slot may be given to another: nobody holds or uses it, and it is on
    disk or will never be."""
    return (
        not entry.pins
        and not entry.leases
        and entry.slot is not None
        and entry.saving in _WRITTEN_ENOUGH
        and entry.visibility is not Visibility.DROPPED
    )


class Residents:
    """The arena's slots and the objects in them, one `LeaveOrder` a kind.

    `on_room` is called when a slot became free or evictable; `on_evict(entry)` before an object
    loses its slot to another. `groups` numbers the domains that have a share of their own, by
    their tag; all others are `COMMON`."""

    def __init__(self, arena: Arena, policy: StorePolicy, clock: Clock) -> None:
        self.arena = arena
        self.payload_bytes = 0  # of what lies in the arena
        self.groups = {
            domain_tag(share.domain): number
            for number, share in enumerate(policy.domain_shares, COMMON + 1)
        }
        self.regions: dict[Kind, Region] = {region.kind: region for region in arena.regions}
        self.pools = {region.kind: SlotPool(region.slots) for region in arena.regions}
        self.on_room: Callable[[], None] = lambda: None
        self.on_evict: Callable[[Entry], None] = lambda entry: None
        self.orders: dict[Kind, LeaveOrder[Entry]] = {
            region.kind: LeaveOrder(
                region.slots,
                allowances(policy.domain_shares, region.slots),
                policy.probation_share,
                clock,
            )
            for region in arena.regions
        }
        self._ghosts: set[Entry] = set()  # dropped while pinned: their slot is still in use

    def fits(self, kind: Kind, payload_bytes: int) -> bool:
        """Whether such an object can have a slot at all."""
        region = self.regions.get(kind)
        return region is not None and 0 < payload_bytes <= region.payload_bytes

    def group(self, domain: bytes) -> int:
        """The number of the group that a domain's tag belongs to."""
        return self.groups.get(domain, COMMON)

    def take(self, kind: Kind, domain: bytes) -> int | None:
        """As `take_all`, one slot; None when nothing may go."""
        return next(iter(self.take_all(kind, domain, 1)), None)

    def take_all(self, kind: Kind, domain: bytes, count: int) -> list[int]:
        """Reserve slots for objects of a domain, evicting if there is need; fewer when nothing more
        may go. Their headers are blank: from here on no reader believes what lay there."""
        pool, order, group = self.pools[kind], self.orders[kind], self.group(domain)
        slots: list[int] = []
        while len(slots) < count:
            if not pool.free or order.full_for(group):
                entry = order.victim(group)
                if entry is None:
                    break
                self.leave(entry)
                self.on_evict(entry)
            part = pool.take(min(count - len(slots), order.room(group)))
            if not part:
                break
            order.taken[group] += len(part)
            slots += part
        for slot in slots:
            self.arena.blank_header(self.regions[kind], slot)
        return slots

    def give(self, kind: Kind, slot: int, domain: bytes) -> None:
        """A slot reserved for that domain comes back unused."""
        self.pools[kind].give_reserved(slot)
        self.orders[kind].taken[self.group(domain)] -= 1
        self.on_room()

    def enter(self, entry: Entry, slot: int) -> None:
        """A reserved slot holds this object's payload now; its header makes it readable."""
        self.enter_written((entry,), (slot,))
        self.show(entry, slot)

    def show(self, entry: Entry, slot: int) -> None:
        """Write the header of an object in its slot."""
        at = (ARENA_SEGMENT, slot, entry.generation)
        header = pack_slot_header(entry.facts, entry.checksum, *at, entry.written_at_s)
        self.arena.header(self.regions[entry.facts.kind], slot)[:] = header

    def show_all(self, entries: Iterable[Entry]) -> None:
        """As `show`, for objects of one kind that lie in their slots."""
        common: tuple[bytes, bytes, int] | None = None
        for entry in entries:
            facts, slot = entry.facts, entry.slot
            assert slot is not None
            alike = (facts.namespace, facts.domain, entry.written_at_s)
            if alike != common:
                common, pack = alike, header_packer(facts.kind, *alike)
                region = self.regions[facts.kind]
            at = (ARENA_SEGMENT, slot, entry.generation, facts.payload_bytes, entry.checksum)
            header = pack(facts.digest, facts.parent, facts.block, *at)
            self.arena.header(region, slot)[:] = header

    def enter_written(self, entries: Sequence[Entry], slots: Sequence[int]) -> None:
        """As `enter`, for objects of one kind and domain whose headers their writer has written."""
        facts = entries[0].facts
        pool, order, group = (
            self.pools[facts.kind],
            self.orders[facts.kind],
            self.group(facts.domain),
        )
        pool.fill(len(slots))
        for entry, slot in zip(entries, slots, strict=True):
            self.payload_bytes += entry.facts.payload_bytes
            entry.slot, entry.generation = slot, pool.generation(slot)
            entry.proven = entry.proven or order.left_lately(entry.departure)
            order.enter(entry, group, proven=entry.proven)

    def enter_new(self, entries: Sequence[Entry], slots: Sequence[int]) -> None:
        """As `enter_written`, for objects that were not known before."""
        facts = entries[0].facts
        pool, group = self.pools[facts.kind], self.group(facts.domain)
        pool.fill(len(slots))
        for entry, slot in zip(entries, slots, strict=True):
            entry.slot, entry.generation = slot, pool.generation(slot)
        self.payload_bytes += sum([entry.facts.payload_bytes for entry in entries])
        self.orders[facts.kind].enter_all(entries, group)

    def leave(self, entry: Entry) -> None:
        """The object's slot is free again; readers of it miss from here on."""
        assert entry.slot is not None
        self.arena.blank_header(self.regions[entry.kind], entry.slot)
        self.pools[entry.kind].give_resident(entry.slot)
        self.payload_bytes -= entry.facts.payload_bytes
        entry.slot = None
        order = self.orders[entry.kind]
        order.leave(entry)
        entry.departure, entry.proven = order.departures, False
        self.on_room()

    def blank(self, kind: Kind, slot: int) -> None:
        """No reader believes what lies in this slot from here on."""
        self.arena.blank_header(self.regions[kind], slot)

    def hide(self, entry: Entry) -> None:
        """Readers miss from here on, though the slot may still be in use."""
        if entry.slot is not None:
            self.blank(entry.kind, entry.slot)

    def settle(self, entry: Entry) -> None:
        """After any change: the entry stands among the evictable ones iff it may leave, and the
        slot of a dropped one is freed as soon as nothing uses it."""
        if entry.slot is not None and entry.dropped:
            if entry.pins:
                self._ghosts.add(entry)
            else:
                self._ghosts.discard(entry)
                self.leave(entry)
        order = self.orders[entry.facts.kind]
        if not may_leave(entry):
            order.forbid(entry)
        elif order.allow(entry):
            self.on_room()

    def settle_all(self, entries: Iterable[Entry]) -> None:
        """As `settle`, for each; those of one kind should stand together."""
        room = False
        for kind, group in groupby(entries, key=_kind):
            order, free = self.orders[kind], list[Entry]()
            for entry in group:
                if entry.slot is None or entry.visibility is Visibility.DROPPED:
                    self.settle(entry)
                elif may_leave(entry):
                    free.append(entry)
                else:
                    order.forbid(entry)
            room |= order.allow_all(free)
        if room:
            self.on_room()

    def touch(self, entry: Entry) -> None:
        """The object was used: it leaves the arena later than others."""
        self.orders[entry.facts.kind].use(entry, again=entry.proven)

    def check(self, objects: Iterable[Entry]) -> None:
        """Count anew. Raises `StoreDamaged` naming what does not add up."""
        known = [*objects, *self._ghosts]
        for kind, pool in self.pools.items():
            entries = [entry for entry in known if entry.kind is kind]
            slots = [entry.slot for entry in entries if entry.slot is not None]
            if len(set(slots)) != len(slots) or len(slots) != pool.resident:
                raise StoreDamaged(f"{kind}: {len(slots)} objects in {pool.resident} slots")
            if pool.free_slots() & set(slots):
                raise StoreDamaged(f"{kind}: a slot is free and holds an object")
            if pool.free + pool.reserved + pool.resident != pool.total:
                raise StoreDamaged(
                    f"{kind}: {pool.free} free, {pool.reserved} reserved and {pool.resident}"
                    f" resident of {pool.total} slots"
                )
            order = self.orders[kind]
            if {e for e in entries if may_leave(e)} != order.may_leave():
                raise StoreDamaged(f"{kind}: an object is wrongly evictable or wrongly held")
            if sum(order.taken) != pool.reserved + pool.resident or len(order) != pool.resident:
                raise StoreDamaged(f"{kind}: domains hold {sum(order.taken)} slots, not those used")
            if order.in_probation != sum(e.slot is not None and not e.proven for e in entries):
                raise StoreDamaged(f"{kind}: probation is counted wrongly")


def _kind(entry: Entry) -> Kind:
    return entry.facts.kind
