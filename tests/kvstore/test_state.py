"""The store's books without sockets, with a clock that only moves when told to."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from headrace.core.clock import FakeClock
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.states import Visibility, VisibilityEvent
from headrace.kvstore.arena import Reading, Region, create_arena
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts, SlotHeader, checksum
from headrace.kvstore.objects import DiskPlace, Saving
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.residents import StoreDamaged
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

NS = bytes(32)
SIZE = 100


def digest(number: int) -> Digest:
    return Digest(bytes([number]) * 32)


def facts(number: int, kind: Kind = Kind.KV) -> ObjectFacts:
    return ObjectFacts(kind, NS, digest(number), NO_DIGEST, number, bytes(16), SIZE)


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def lease(number: int) -> JobKey:
    return JobKey(RequestId(f"r{number}"), 0)


class World:
    """A state over a small real arena, and the disk as it would be."""

    def __init__(self, slots: int = 4) -> None:
        regions = (Region(Kind.KV, 0, 4096, slots), Region(Kind.SWA, slots * 4096, 4096, 2))
        descriptor, self.arena = create_arena(regions)
        os.close(descriptor)
        self.clock = FakeClock()
        self.state = StoreState(self.arena, BootId("b"), self.clock, lease_s=30.0, reserve_s=30.0)
        self.disk = 0

    def write(self, reservation) -> None:
        found = self.arena.locate(self.state.offset(reservation))
        self.arena.payload(*found, SIZE)[:] = content(reservation.facts.block)

    def put(self, number: int, owner: JobKey | None = None, connection: int = 1):
        made = self.state.reserve(connection, facts(number), owner)
        if made is None:
            return None
        self.write(made)
        return self.state.seal(connection, made.number, checksum(content(number)))

    def save(self) -> None:
        for entry in self.state.take_unsaved(1 << 30):
            self.disk += 1
            self.state.saved(entry, DiskPlace(0, self.disk, 1))

    def reads(self, number: int) -> bytes | None:
        entry = self.state.find(Kind.KV, NS, digest(number))
        place = None if entry is None else self.state.place(entry)
        dest = bytearray(SIZE)
        if place is None or self.arena.read(place, NS, digest(number), dest) is not Reading.GOOD:
            return None
        return bytes(dest)

    @property
    def free(self) -> int:
        return self.state.residents.pools[Kind.KV].free


def test_nothing_is_readable_before_the_seal():
    world = World()
    made = world.state.reserve(1, facts(1), None)
    world.write(made)
    assert world.state.find(Kind.KV, NS, digest(1)) is None
    region, slot = world.arena.locate(world.state.offset(made))
    assert SlotHeader.unpack(world.arena.header(region, slot)) is None
    entry = world.state.seal(1, made.number, checksum(content(1)))
    assert entry.visibility is Visibility.SEALED and world.reads(1) == content(1)
    assert SlotHeader.unpack(world.arena.header(region, slot)).segment == ARENA_SEGMENT


def test_visibilities_come_in_order_and_durable_does_not_wait_for_the_index():
    world = World()
    one, two = world.put(1), world.put(2)
    assert one.step(VisibilityEvent.LIST) and one.visibility is Visibility.LISTED
    world.save()
    assert one.visibility is two.visibility is Visibility.DURABLE
    assert not two.step(VisibilityEvent.LIST) and two.visibility is Visibility.DURABLE


def test_only_the_connection_that_reserved_may_seal_and_only_once():
    world = World()
    made = world.state.reserve(1, facts(1), None)
    assert world.state.seal(2, made.number, 5) is None
    assert world.state.seal(1, made.number, checksum(content(1))) is not None
    assert world.state.seal(1, made.number, 5) is None
    assert world.state.seal(1, 999, 5) is None
    assert world.state.count.refused == 3
    world.state.check()


def test_the_second_writer_of_an_object_gives_its_slot_back():
    world = World()
    first, second = (world.state.reserve(c, facts(1), None) for c in (1, 2))
    world.write(second)
    entry = world.state.seal(2, second.number, checksum(content(1)))
    assert world.state.seal(1, first.number, 12345) is entry
    assert entry.checksum == checksum(content(1)) and world.free == 3
    world.state.check()


def test_a_closed_or_silent_connection_frees_its_reservations():
    world = World()
    for connection in (1, 1, 2):
        world.state.reserve(connection, facts(connection), None)
    late = world.state.reserve(2, facts(3), None)
    assert world.free == 0 and world.state.reserve(3, facts(4), None) is None
    assert world.state.close_connection(1) == 2 and world.free == 2
    world.clock.advance(29.9)
    world.state.expire()
    assert world.state.reservations == 2
    world.clock.advance(0.2)
    world.state.expire()
    assert world.state.reservations == 0 and world.free == 4
    assert world.state.seal(2, late.number, 1) is None  # too late
    assert world.state.abandon(2, [late.number]) == 0
    world.state.check()


def test_leases_expire_are_renewed_and_end_for_good():
    world = World()
    entry = world.put(1, lease(1))
    world.clock.advance(20)
    assert world.state.leases.renew(lease(1)) and not world.state.leases.renew(lease(2))
    world.clock.advance(20)
    world.state.expire()
    assert entry.leases == {lease(1)}
    world.clock.advance(10)
    world.state.expire()
    assert entry.leases == set() and len(world.state.leases) == 0
    # expiry does not end the owner, release does: for one lease time
    assert world.state.hold(lease(1), entry)
    world.state.release(lease(1), None)
    world.state.release(lease(1), None)
    assert not world.state.hold(lease(1), entry) and world.state.leases.late == 1
    world.clock.advance(31)
    world.state.expire()
    assert world.state.hold(lease(1), entry)
    world.state.check()


def test_two_owners_hold_one_object():
    world = World()
    entry = world.put(1, lease(1))
    world.state.hold(lease(2), entry)
    world.save()
    world.state.release(lease(1), None)
    for number in (2, 3, 4):
        world.put(number)
    assert world.put(5) is None  # nothing may go: 1 is held, 2..4 are not saved
    world.state.release(lease(2), None)
    assert world.put(5) is not None and world.reads(1) is None
    assert world.state.find(Kind.KV, NS, digest(1)) is entry  # on disk still
    world.state.check()


def test_a_chain_loses_its_tail_first_and_the_least_used_goes_before_others():
    world = World()
    for number in (1, 2, 3):
        world.put(number, lease(1))
    world.put(9)
    world.save()
    world.state.release(lease(1), None)  # 9 could go before, so it goes first
    gone = []
    for number in (20, 21, 22):
        world.put(number)
        gone.append([n for n in (1, 2, 3, 9) if world.reads(n) is None])
    assert gone == [[9], [3, 9], [2, 3, 9]]
    world.save()
    world.state.residents.touch(world.state.find(Kind.KV, NS, digest(1)))
    world.put(30)
    assert world.reads(1) == content(1) and world.reads(20) is None


def test_what_cannot_be_saved_goes_for_good_when_room_is_needed():
    world = World()
    for number in range(4):
        world.put(number)
    for entry in world.state.take_unsaved(1 << 30):
        world.state.not_saved(entry, None)
    assert world.put(10) is not None
    assert world.state.find(Kind.KV, NS, digest(0)) is None
    assert world.state.take_unsaved(1 << 30)[0].facts.digest == digest(10)
    world.state.check()


def test_a_pinned_slot_is_not_given_away_even_if_its_object_is_dropped():
    world = World()
    entry = world.put(1)
    (writing,) = world.state.take_unsaved(1)
    assert writing is entry and entry.saving is Saving.WRITING
    world.state.drop(entry, erase=True)
    assert world.reads(1) is None and world.free == 3
    world.state.check()
    world.state.saved(entry, DiskPlace(0, 7, 1))
    assert world.free == 4 and world.state.to_erase == [DiskPlace(0, 7, 1)]
    assert not world.state.by_segment.get(0)
    world.state.check()


def test_doom_ends_only_what_is_damaged():
    world = World()
    entry = world.put(1)
    place = world.state.place(entry)
    assert not world.state.doom(place, NS, digest(1))  # a false alarm
    assert not world.state.doom(place, NS, digest(2))  # another object's
    assert not world.state.doom(place, bytes(31) + b"x", digest(1))
    assert world.reads(1) == content(1) and world.state.count.refused == 3
    world.arena.payload(*world.arena.locate(place.offset), SIZE)[5] ^= 1
    assert world.reads(1) is None and world.state.doom(place, NS, digest(1))
    assert world.state.find(Kind.KV, NS, digest(1)) is None and world.free == 4
    assert not world.state.doom(place, NS, digest(1))  # twice
    assert world.state.count.damaged == 1
    # damage of the arena copy of a saved object costs that copy only
    entry = world.put(2, lease(1))
    world.save()
    place = world.state.place(entry)
    world.arena.payload(*world.arena.locate(place.offset), SIZE)[5] ^= 1
    assert world.state.doom(place, NS, digest(2))
    assert entry.slot is None and entry.disk is not None and entry.leases == {lease(1)}
    world.state.check()


def test_a_segment_with_leased_objects_is_not_free():
    world = World()
    entry = world.put(1, lease(1))
    world.save()
    assert not world.state.segment_is_free(0) and world.state.segment_is_free(1)
    world.state.release(lease(1), None)
    assert world.state.segment_is_free(0)
    assert world.state.drop_segment(0) == (entry.key,)
    assert world.free == 4 and not world.state.objects and not world.state.to_erase


def test_check_finds_a_book_that_is_wrong():
    world = World()
    entry = world.put(1)
    entry.slot = None
    with pytest.raises(StoreDamaged):
        world.state.check()


NUMBERS = st.integers(0, 7)
OWNERS = st.one_of(st.none(), st.integers(0, 3))
CONNECTIONS = st.integers(1, 3)


class Machine(RuleBasedStateMachine):
    """Random histories. A model remembers what was sealed and what is held; after every step the
    books add up, what is readable is right, and what is held is readable."""

    @initialize()
    def begin(self) -> None:
        self.world = World(slots=5)
        self.open: list = []
        self.writing: list = []
        self.loading: list = []
        # by owner and object: whether it must be readable (a lease may outlive the arena copy)
        self.held: dict[JobKey, dict[int, bool]] = {}
        self.until: dict[JobKey, float] = {}
        self.over: dict[JobKey, float] = {}
        self.damaged: set[int] = set()

    # the model's leases
    def _hold(self, owner: JobKey, number: int) -> None:
        now = self.world.clock.now_s()
        if self.over.get(owner, 0) > now:
            return
        entry = self.world.state.find(Kind.KV, NS, digest(number))
        self.held.setdefault(owner, {})[number] = entry.slot is not None
        self.until[owner] = now + 30

    @rule(number=NUMBERS, owner=OWNERS, connection=CONNECTIONS)
    def reserve(self, number: int, owner: int | None, connection: int) -> None:
        free_before = self.world.free
        key = None if owner is None else lease(owner)
        made = self.world.state.reserve(connection, facts(number), key)
        assert made is not None or free_before == 0
        if made is not None:
            self.world.write(made)
            self.open.append(made)

    @rule(at=st.integers(0, 20), connection=CONNECTIONS)
    def seal(self, at: int, connection: int) -> None:
        if not self.open:
            return
        made = self.open.pop(at % len(self.open))
        alive = made.expires_s > self.world.clock.now_s()
        known = self.world.state.find(Kind.KV, NS, made.facts.digest)
        number = made.facts.block
        entry = self.world.state.seal(made.connection, made.number, checksum(content(number)))
        assert (entry is not None) == alive
        if entry is not None:
            assert known is None or entry is known
            if made.lease is not None:
                self._hold(made.lease, number)

    @rule(connection=CONNECTIONS)
    def close(self, connection: int) -> None:
        self.world.state.close_connection(connection)
        self.open = [made for made in self.open if made.connection != connection]

    @rule(owner=st.integers(0, 3), number=NUMBERS)
    def hold(self, owner: int, number: int) -> None:
        entry = self.world.state.find(Kind.KV, NS, digest(number))
        if entry is not None and entry.slot is not None:
            self.world.state.hold(lease(owner), entry)
            self._hold(lease(owner), number)

    @rule(owner=st.integers(0, 3), kind=st.sampled_from([None, Kind.KV, Kind.SWA]))
    def release(self, owner: int, kind: Kind | None) -> None:
        self.world.state.release(lease(owner), kind)
        if kind is not Kind.SWA:
            self.held.pop(lease(owner), None)
        if kind is None:
            self.over[lease(owner)] = self.world.clock.now_s() + 30

    @rule(seconds=st.sampled_from([1, 12, 31]))
    def time(self, seconds: int) -> None:
        self.world.clock.advance(seconds)
        self.world.state.expire()
        now = self.world.clock.now_s()
        self.held = {o: v for o, v in self.held.items() if self.until[o] > now}
        self.over = {o: t for o, t in self.over.items() if t > now}
        self.open = [made for made in self.open if made.expires_s > now]

    @rule(limit=st.sampled_from([1, 1000]))
    def begin_writing(self, limit: int) -> None:
        self.writing += self.world.state.take_unsaved(limit)

    @rule(good=st.booleans())
    def end_writing(self, good: bool) -> None:
        if self.writing:
            entry = self.writing.pop(0)
            self.world.disk += 1
            place = DiskPlace(self.world.disk % 3, self.world.disk, 1)
            if good:
                self.world.state.saved(entry, place)
            else:
                self.world.state.not_saved(entry, place)

    @rule(number=NUMBERS)
    def begin_load(self, number: int) -> None:
        entry = self.world.state.find(Kind.KV, NS, digest(number))
        if entry is None or entry.slot is not None or any(e is entry for e, _ in self.loading):
            return
        slot = self.world.state.residents.take(Kind.KV)
        if slot is not None:
            self.world.state.pin(entry)
            self.loading.append((entry, slot))

    @rule(sound=st.sampled_from([True, True, False, None]))
    def end_load(self, sound: bool | None) -> None:
        if not self.loading:
            return
        entry, slot = self.loading.pop(0)
        region = self.world.state.residents.regions[Kind.KV]
        self.world.arena.payload(region, slot, SIZE)[:] = content(entry.facts.block)
        self.world.state.loaded(entry, slot, sound=sound)
        self.world.state.unpin(entry)
        self._changed(entry.facts.block)

    @rule(number=NUMBERS)
    def damage_and_doom(self, number: int) -> None:
        entry = self.world.state.find(Kind.KV, NS, digest(number))
        place = None if entry is None else self.world.state.place(entry)
        if place is None:
            return
        self.world.arena.payload(*self.world.arena.locate(place.offset), SIZE)[0] ^= 1
        assert self.world.state.doom(place, NS, digest(number))
        self._changed(number)

    @rule(segment=st.integers(0, 2))
    def recycle(self, segment: int) -> None:
        if self.world.state.segment_is_free(segment):
            self.world.state.drop_segment(segment)

    def _changed(self, number: int) -> None:
        """Damage or a load: the object is gone, has lost its arena copy, or has one again."""
        entry = self.world.state.find(Kind.KV, NS, digest(number))
        for held in self.held.values():
            if number in held and entry is not None:
                held[number] = entry.slot is not None
            elif entry is None:
                held.pop(number, None)
        self.held = {owner: held for owner, held in self.held.items() if held}

    @invariant()
    def the_books_add_up(self) -> None:
        self.world.state.check()

    @invariant()
    def what_is_readable_is_right(self) -> None:
        for number in range(8):
            assert self.world.reads(number) in (None, content(number))

    @invariant()
    def what_is_held_is_readable(self) -> None:
        for held in self.held.values():
            for number, readable in held.items():
                assert not readable or self.world.reads(number) == content(number)

    @invariant()
    def the_leases_are_those_of_the_model(self) -> None:
        assert set(self.world.state.leases.owners()) == set(self.held)

    def teardown(self) -> None:
        """Everything ends: the arena is empty of holds, and every slot can be had again."""
        if not hasattr(self, "world"):
            return
        state = self.world.state
        for entry in self.writing:
            state.not_saved(entry)
        for entry, slot in self.loading:
            state.loaded(entry, slot, sound=None)
            state.unpin(entry)
        for connection in (1, 2, 3):
            state.close_connection(connection)
        self.world.clock.advance(31)
        state.expire()
        self.world.save()
        assert len(state.leases) == 0
        pool = state.residents.pools[Kind.KV]
        assert pool.reserved == 0
        slots = [state.residents.take(Kind.KV) for _ in range(pool.total)]
        assert None not in slots and state.residents.take(Kind.KV) is None


Machine.TestCase.settings = hypothesis_settings(
    max_examples=120, stateful_step_count=50, deadline=None
)
TestHistories = Machine.TestCase
