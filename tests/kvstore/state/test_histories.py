"""Random histories of the store's books, against a model of what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from headrace.core.ids import JobKey
from headrace.kvstore import grants
from headrace.kvstore.commits import commit_blocks
from headrace.kvstore.layout import checksum
from headrace.kvstore.loads import end_load
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.settings import Kind

NUMBERS = st.integers(0, 7)
OWNERS = st.one_of(st.none(), st.integers(0, 3))
CONNECTIONS = st.integers(1, 3)


class Granted(NamedTuple):
    number: int
    slot: int
    connection: int
    expires_s: float


class Machine(RuleBasedStateMachine):
    """Random histories. A model remembers what was sealed and what is held; after every step the
    books add up, what is readable is right, and what is held is readable."""

    make_world: Callable[..., Any]

    @initialize()
    def begin(self) -> None:
        self.world = self.make_world(slots=5)
        self.open: list = []
        self.granted: list = []  # slots that connections hold in advance
        self.copies: dict[JobKey, list] = {}  # by lease: places that were promised for it
        self.writing: list = []
        self.loading: list = []
        # by owner and object: whether it must be readable (a lease may outlive the arena copy)
        self.held: dict[JobKey, dict[int, bool]] = {}
        self.until: dict[JobKey, float] = {}
        self.over: dict[JobKey, float] = {}
        self.damaged: set[int] = set()
        self.damages = 0

    # the model's leases
    def _hold(self, owner: JobKey, number: int) -> None:
        now = self.world.clock.now_s()
        if self.over.get(owner, 0) > now:
            return
        entry = self.world.state.find(Kind.KV, self.world.namespace, self.world.digest(number))
        self.held.setdefault(owner, {})[number] = entry.slot is not None
        self.until[owner] = now + 30

    @rule(number=NUMBERS, owner=OWNERS, connection=CONNECTIONS)
    def reserve(self, number: int, owner: int | None, connection: int) -> None:
        free_before = self.world.free
        key = None if owner is None else self.world.lease(owner)
        made = self.world.state.reserve(connection, self.world.facts(number), key)
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
        known = self.world.state.find(Kind.KV, self.world.namespace, made.facts.digest)
        number = made.facts.block
        entry = self.world.state.seal(
            made.connection, made.number, checksum(self.world.content(number))
        )
        assert (entry is not None) == alive
        if entry is not None:
            assert known is None or entry is known
            if made.lease is not None:
                self._hold(made.lease, number)

    @rule(connection=CONNECTIONS, count=st.integers(1, 3))
    def grant(self, connection: int, count: int) -> None:
        made = self.world.state.granted.make(connection, bytes(16), count)
        for number, slot in enumerate(made.slots, made.first) if made is not None else ():
            self.granted.append(Granted(number, slot, connection, made.expires_s))

    @rule(at=st.integers(0, 20))
    def give_back(self, at: int) -> None:
        if self.granted:
            slot = self.granted.pop(at % len(self.granted))
            self.world.state.granted.give_back(slot.connection, (slot.number,))

    @rule(at=st.integers(0, 20), number=NUMBERS, owner=OWNERS)
    def commit(self, at: int, number: int, owner: int | None) -> None:
        if not self.granted:
            return
        slot = self.granted.pop(at % len(self.granted))
        place = self.world.write_granted(slot.slot, number)
        known = self.world.state.find(Kind.KV, self.world.namespace, self.world.digest(number))
        key = None if owner is None else self.world.lease(owner)
        alive = slot.expires_s > self.world.clock.now_s()
        new = commit_blocks(
            self.world.state,
            slot.connection,
            [self.world.facts(number)],
            [(slot.number, place.checksum)],
            key,
        )
        assert new == (known is None)
        assert alive
        if key is not None:
            self._hold(key, number)
            if self.over.get(key, 0) <= self.world.clock.now_s():
                self.copies.setdefault(key, []).append((number, place))

    @rule(connection=CONNECTIONS)
    def close(self, connection: int) -> None:
        self.world.state.reserving.close_connection(connection)
        self.world.state.granted.close_connection(connection)
        self.granted = [slot for slot in self.granted if slot.connection != connection]
        self.open = [made for made in self.open if made.connection != connection]

    @rule(owner=st.integers(0, 3), number=NUMBERS)
    def hold(self, owner: int, number: int) -> None:
        entry = self.world.state.find(Kind.KV, self.world.namespace, self.world.digest(number))
        if entry is not None and entry.slot is not None:
            self.world.state.hold(self.world.lease(owner), [entry])
            self._hold(self.world.lease(owner), number)

    @rule(owner=st.integers(0, 3), kind=st.sampled_from([None, Kind.KV, Kind.SWA]))
    def release(self, owner: int, kind: Kind | None) -> None:
        self.world.state.release(self.world.lease(owner), kind)
        if kind is not Kind.SWA:
            self.held.pop(self.world.lease(owner), None)
            self.copies.pop(self.world.lease(owner), None)
        if kind is None:
            self.over[self.world.lease(owner)] = self.world.clock.now_s() + 30

    @rule(seconds=st.sampled_from([1, 12, 31]))
    def time(self, seconds: int) -> None:
        self.world.clock.advance(seconds)
        self.world.state.expire()
        now = self.world.clock.now_s()
        self.held = {o: v for o, v in self.held.items() if self.until[o] > now}
        self.copies = {o: v for o, v in self.copies.items() if self.until[o] > now}
        self.over = {o: t for o, t in self.over.items() if t > now}
        self.open = [made for made in self.open if made.expires_s > now]
        self.granted = [slot for slot in self.granted if slot.expires_s > now]

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
                self.world.state.saved([(entry, place)])
            else:
                self.world.state.not_saved(entry, place)

    @rule(number=NUMBERS)
    def begin_load(self, number: int) -> None:
        entry = self.world.state.find(Kind.KV, self.world.namespace, self.world.digest(number))
        if entry is None or entry.slot is not None or any(e is entry for e, _ in self.loading):
            return
        slot = self.world.state.residents.take(Kind.KV, bytes(16))
        if slot is not None:
            self.world.state.pin(entry)
            self.loading.append((entry, slot))

    @rule(sound=st.sampled_from([True, True, False, None]))
    def end_load(self, sound: bool | None) -> None:
        if not self.loading:
            return
        entry, slot = self.loading.pop(0)
        if sound:
            self.world.write_granted(slot, entry.facts.block)
        end_load(self.world.state, [(entry, slot)], [sound])
        self.world.state.unpin(entry)
        self._changed(entry.facts.block)

    @rule(number=NUMBERS)
    def damage_and_doom(self, number: int) -> None:
        entry = self.world.state.find(Kind.KV, self.world.namespace, self.world.digest(number))
        place = None if entry is None else self.world.state.place(entry)
        if place is None:
            return
        self.world.arena.payload(*self.world.arena.locate(place.offset), self.world.size_bytes)[
            0
        ] ^= 1
        self.damages += 1
        assert self.world.state.doom(place, self.world.namespace, self.world.digest(number))
        self._changed(number)

    @rule(segment=st.integers(0, 2))
    def recycle(self, segment: int) -> None:
        plan = self.world.state.plan_recycle(segment, 8, 8)
        if plan is not None:
            self.world.state.recycle(segment, plan)

    def _changed(self, number: int) -> None:
        """Damage or a load: the object is gone, has lost its arena copy, or has one again."""
        entry = self.world.state.find(Kind.KV, self.world.namespace, self.world.digest(number))
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
            assert self.world.reads(number) in (None, self.world.content(number))

    @invariant()
    def what_is_held_is_readable(self) -> None:
        for held in self.held.values():
            for number, readable in held.items():
                assert not readable or self.world.reads(number) == self.world.content(number)

    @invariant()
    def a_promised_place_reads_right_or_not_at_all(self) -> None:
        """It may fail only by damage, or with the object."""
        for owner, promised in self.copies.items():
            for number, place in promised:
                read = self.world.reads_at(place, number)
                assert read in (None, self.world.content(number))
                held = owner in self.held and self.held[owner].get(number, False)
                assert not held or self.damages or read is not None

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
            end_load(state, [(entry, slot)], [None])
            state.unpin(entry)
        for connection in (1, 2, 3):
            state.reserving.close_connection(connection)
            state.granted.close_connection(connection)
        self.world.clock.advance(31)
        state.expire()
        self.world.save()
        assert len(state.leases) == 0
        pool = state.residents.pools[Kind.KV]
        assert pool.reserved == 0 and not state.granted.twins
        slots = [state.residents.take(Kind.KV, bytes(16)) for _ in range(pool.total)]
        assert None not in slots and state.residents.take(Kind.KV, bytes(16)) is None


def test_random_histories(make_world, monkeypatch) -> None:
    monkeypatch.setattr(grants, "SHARE", 2)  # of five slots two may be granted

    class Made(Machine):
        pass

    Made.make_world = staticmethod(make_world)
    settings = hypothesis_settings(max_examples=120, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(Made, settings=settings)
