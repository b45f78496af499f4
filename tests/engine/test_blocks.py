"""The block pool, the fill guard and leases: conservation under every order of calls."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.ids import Digest
from headrace.engine.blocks import BlockPool
from headrace.engine.errors import EngineDamaged
from headrace.engine.fills import FillGuard
from headrace.engine.lease import Lease, Resources, SlotPool


def digest(number: int) -> Digest:
    return Digest(hashlib.sha256(bytes([number])).digest())


def resources(n_blocks: int = 8, n_slots: int = 2) -> Resources:
    return Resources(BlockPool(n_blocks), SlotPool(n_slots), FillGuard())


class PoolMachine(RuleBasedStateMachine):
    """Takes, shares, commits and drops at random; a plain model says what must be resident."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[int] = []
        self.committed: dict[int, Digest] = {}  # block -> digest, as the pool answered
        self.lru: list[int] = []  # evictable blocks, oldest first

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        free = 6 - len(set(self.held)) - len(self.lru)
        taken = self.pool.take(count)
        if count > free + len(self.lru):
            assert taken is None
            return
        assert taken is not None and len(set(taken)) == count
        assert not set(taken) & set(self.held)
        evicted = self.lru[: max(0, count - free)]
        assert set(self.lru) & set(taken) == set(evicted)
        for block in evicted:
            self.lru.remove(block)
            del self.committed[block]
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 5))
    def commit(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if self.committed.get(block, digest(number)) != digest(number):
            with pytest.raises(EngineDamaged):
                self.pool.commit(block, digest(number))
            return
        known = {d: b for b, d in self.committed.items()}
        first = known.get(digest(number), block) == block
        assert self.pool.commit(block, digest(number)) is first
        if first:
            self.committed[block] = digest(number)

    @rule(number=st.integers(0, 5))
    def share(self, number: int) -> None:
        known = {d: b for b, d in self.committed.items()}
        if digest(number) not in known:
            with pytest.raises(KeyError):
                self.pool.share(digest(number))
            return
        block = self.pool.share(digest(number))
        assert block == known[digest(number)]
        self.held.append(block)
        if block in self.lru:
            self.lru.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.drop(block)
        if block not in self.held and block in self.committed:
            self.lru.append(block)

    @invariant()
    def conserved(self) -> None:
        self.pool.check(self.held)
        assert self.pool.n_available == 6 - len(set(self.held))
        assert self.pool.n_evictable == len(self.lru)
        for number in range(6):
            resident = digest(number) in self.committed.values()
            assert self.pool.resident_prefix([digest(number)]) == int(resident)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_second_drop_is_damage() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    assert taken is not None
    pool.drop(taken[0])
    with pytest.raises(EngineDamaged):
        pool.drop(taken[0])


def test_check_sees_a_leak() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    assert taken is not None
    pool.check(taken)
    with pytest.raises(EngineDamaged):
        pool.check([])


def test_the_end_of_a_chain_is_evicted_first() -> None:
    cut = resources(n_blocks=4)
    chain = [digest(i) for i in range(4)]
    lease = Lease.reserve(cut, chain[:0], 4)
    assert lease is not None
    for index, name in enumerate(chain):
        lease.commit(index, name)
    lease.close()
    assert cut.blocks.resident_prefix(chain) == 4
    assert cut.blocks.take(1) is not None
    assert cut.blocks.resident_prefix(chain) == 3


def test_reserve_takes_all_or_nothing() -> None:
    cut = resources(n_blocks=4, n_slots=2)
    first = Lease.reserve(cut, [], 2)
    assert first is not None
    first.commit(0, digest(0))
    assert Lease.reserve(cut, [digest(0)], 4) is None  # one shared, three wanted, two there
    cut.blocks.check(first.blocks)
    cut.slots.check([first.slot])
    second = Lease.reserve(cut, [digest(0)], 3)
    assert second is not None
    assert second.n_shared == 1 and second.blocks[0] == first.blocks[0]
    assert Lease.reserve(cut, [], 0) is None  # no slot is left
    for lease in (first, second):
        lease.close()
    cut.blocks.check([])
    cut.slots.check([])


def test_a_lease_closes_once() -> None:
    cut = resources()
    lease = Lease.reserve(cut, [], 3)
    assert lease is not None
    lease.close()
    with pytest.raises(EngineDamaged, match="closed twice"):
        lease.close()
    cut.blocks.check([])


def test_a_block_behind_a_gap_is_not_shared() -> None:
    cut = resources()
    first = Lease.reserve(cut, [], 3)
    assert first is not None
    for index in (0, 2):
        first.commit(index, digest(index))
    second = Lease.reserve(cut, [digest(0), digest(1), digest(2)], 3)
    assert second is not None
    assert second.n_shared == 1
    assert not set(second.blocks[1:]) & set(first.blocks)
    assert not cut.blocks.commit(second.blocks[2], digest(2))  # a private copy
    second.close()
    first.close()
    assert cut.blocks.n_evictable == 2
    cut.blocks.check([])


def test_make_private_swaps_only_what_will_be_written() -> None:
    cut = resources(n_blocks=6)
    first = Lease.reserve(cut, [], 3)
    assert first is not None
    names = [digest(i) for i in range(3)]
    for index, name in enumerate(names):
        first.commit(index, name)
    second = Lease.reserve(cut, names, 4)
    assert second is not None and second.n_shared == 3
    before = list(second.blocks)
    assert second.make_private(1)
    assert second.blocks[0] == before[0] and second.blocks[3] == before[3]
    assert not set(second.blocks[1:3]) & set(first.blocks)
    cut.blocks.check(first.blocks + second.blocks)
    third = Lease.reserve(resources(n_blocks=1), [], 1)
    assert third is not None and third.make_private(0)


def test_make_private_without_room_changes_nothing() -> None:
    cut = resources(n_blocks=3)
    first = Lease.reserve(cut, [], 3)
    assert first is not None
    first.commit(0, digest(0))
    second = Lease.reserve(cut, [digest(0)], 1)
    assert second is not None
    assert not second.make_private(0)
    cut.blocks.check(first.blocks + second.blocks)


@given(st.lists(st.sampled_from(["enter", "leave", "close", "open"]), max_size=40))
def test_a_block_with_a_writer_inside_is_never_handed_out(actions: list[str]) -> None:
    cut = resources(n_blocks=1, n_slots=1)
    lease: Lease | None = None
    writers: list[tuple[int, int]] = []
    for action in actions:
        if action == "open" and lease is None:
            lease = Lease.reserve(cut, [digest(0)], 1)
            assert (lease is None) == bool(writers)
        elif action == "close" and lease is not None:
            lease.close()
            lease = None
        elif action == "enter" and lease is not None:
            assert cut.guard.enter(lease.ticket, lease.blocks[0])
            writers.append((lease.ticket, lease.blocks[0]))
        elif action == "leave" and writers:
            ticket, block = writers.pop()
            counts = cut.guard.leave(ticket, block, complete=True)
            assert counts == (lease is not None)
        cut.reclaim()
        cut.blocks.check(lease.blocks if lease else [])
    for ticket, block in writers:
        cut.guard.leave(ticket, block, complete=True)
    if lease is not None:
        lease.close()
    cut.reclaim()
    assert cut.blocks.n_available == 1


def test_a_late_ticket_cannot_write_into_its_former_block() -> None:
    cut = resources(n_blocks=1)
    first = Lease.reserve(cut, [digest(0)], 1)
    assert first is not None
    first.close()
    second = Lease.reserve(cut, [digest(1)], 1)
    assert second is not None and second.blocks == first.blocks
    assert not cut.guard.enter(first.ticket, first.blocks[0])
    assert cut.guard.enter(second.ticket, second.blocks[0])
    assert cut.guard.look(second.ticket) == (frozenset(), True)
    assert cut.guard.leave(second.ticket, second.blocks[0], complete=True)
    assert cut.guard.look(second.ticket) == (frozenset(second.blocks), False)
