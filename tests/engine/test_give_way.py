"""Who gives way: the rules one by one, then a replica without a model under random arrivals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.chain import as_token_ids
from headrace.core.ids import JobKey, RequestId
from headrace.core.request import GenRequest
from headrace.core.rows import Geometry, plan_decode
from headrace.engine import EngineSettings, Half, Holder, Job, Room, TokenSampled, Way, give_way
from headrace.engine.admission import ModelLimits, blocks_to_reserve
from headrace.engine.blocks import BlockPool
from headrace.engine.fills import FillGuard
from headrace.engine.lease import Resources, SlotPool
from headrace.engine.parking import hold, park, room, unpark
from headrace.engine.plan import StepResult
from headrace.engine.scheduler import Scheduler

T1 = Geometry(32, 6, 6)
NEW_STEPS = 8  # steps in which known rows of all slots run


def key(name: str) -> JobKey:
    return JobKey(RequestId(name), 0)


def runs(name: str, since_tokens: int, *blocks: int) -> Holder:
    return Holder(key(name), frozenset(blocks), runs=True, since_tokens=since_tokens)


def parked(name: str, *blocks: int) -> Holder:
    return Holder(key(name), frozenset(blocks), runs=False, since_tokens=99)


def choose(slots: int, blocks: int, *holders: Holder, after: int = 10, **shared: int) -> str:
    """Names of those who give way, with a + where blocks go too."""
    references = {int(block[1:]): count for block, count in shared.items()}
    ways = give_way(Room(slots, blocks, holders, references), after)
    return " ".join(way.key.request_id + "+" * way.gives_blocks for way in ways)


def test_nobody_gives_way_for_nothing() -> None:
    assert choose(0, 0, runs("a", 50, 1)) == ""
    assert choose(1, 0) == ""
    assert choose(1, 0, runs("a", 9, 1)) == ""  # not yet
    assert choose(1, 0, runs("a", 50, 1), after=0) == ""  # switched off
    assert choose(1, 0, parked("p", 1)) == ""  # it has no slot to give
    assert choose(0, 3, runs("a", 50, 1, 2)) == ""  # its blocks would not be enough
    assert choose(1, 1, parked("p", 1)) == ""  # blocks without a slot are of no use
    assert choose(0, 2, runs("a", 50, 1, 2), runs("b", 9, 2), s2=2) == ""  # 2 stays with b


def test_the_one_that_had_its_slot_longest_goes_first() -> None:
    assert choose(1, 0, runs("a", 10, 1), runs("b", 12, 2), runs("c", 9, 3)) == "b"
    assert choose(1, 0, runs("a", 10, 1), runs("b", 10, 2)) == "b"  # the later one


def test_blocks_come_from_the_parked_before_those_who_run() -> None:
    assert choose(0, 1, runs("a", 50, 1), parked("p", 2), parked("q", 3)) == "q+"
    assert choose(1, 1, runs("a", 50, 1), parked("p", 2)) == "p+ a"
    assert choose(0, 2, runs("a", 50, 1), parked("p", 2)) == "p+ a+"
    assert choose(1, 1, runs("a", 50, 1)) == "a+"


def test_no_more_give_way_than_it_takes() -> None:
    """The first two add nothing to the third's; a shared block counts once, when all let it go."""
    assert choose(0, 3, runs("a", 30, 1), runs("b", 20, 2), runs("c", 10, 3, 4, 5)) == "c+"
    assert choose(0, 1, runs("a", 30, 1), runs("b", 20, 1), s1=2) == "a+ b+"
    assert choose(0, 1, runs("a", 30, 1), runs("b", 20, 2), s1=2) == "b+"


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(Exception, match="park_after_tokens must be .* got -1"):
        EngineSettings(park_after_tokens=-1)


# ---- a replica without a model ---------------------------------------------------------------


@dataclass
class Life:
    request: GenRequest
    arrives: int
    tokens: list[int] = field(default_factory=list)
    since_tokens: int = 0
    in_engine: bool = False
    blocks_kept: bool = False
    parked: int = 0
    first_since: int = 0  # step at which it became the first in line


class Replica:
    """A line before a scheduler, as a decode replica keeps it."""

    def __init__(self, sizes: EngineSettings, answer: Callable[..., StepResult]) -> None:
        resources = Resources(BlockPool(sizes.n_blocks), SlotPool(sizes.n_slots), FillGuard())
        limits = ModelLimits(4096, 4096)
        self.scheduler = Scheduler(sizes, Half.FULL, T1, limits, resources, 8192)
        self.after = sizes.park_after_tokens
        self.answer = answer
        self.line: deque[Life] = deque()
        self.lives: dict[JobKey, Life] = {}
        self.steps = 0
        self.longest_first = 0

    def arrive(self, life: Life) -> None:
        self.lives[life.request.key] = life
        self._queue(life)

    def _queue(self, life: Life) -> None:
        self.line.append(life)
        self.line[0].first_since = min(self.line[0].first_since, self.steps)
        if self.line[0] is life:
            life.first_since = self.steps

    def serve(self) -> None:
        while self.line:
            first = self.line[0]
            if self._seat(first):
                self.longest_first = max(self.longest_first, self.steps - first.first_since)
                self.line.popleft()
                if self.line:
                    self.line[0].first_since = self.steps
                continue
            ways = give_way(self._room(first), self.after)
            if not ways:
                return
            for way in ways:
                self._give_way(way)
            assert self._room(first).suffices  # nobody gave way in vain

    def _wanted(self, life: Life) -> Job:
        rows = max(0, life.request.n_tokens + len(life.tokens) - 1) if life.tokens else 0
        return Job(life.request, as_token_ids(life.tokens), rows // 128)

    def _room(self, first: Life) -> Room:
        since = {k: life.since_tokens for k, life in self.lives.items() if life is not first}
        return room(self.scheduler, None if first.blocks_kept else self._wanted(first), since)

    def _seat(self, life: Life) -> bool:
        request, scheduler = life.request, self.scheduler
        if life.blocks_kept:
            sequence = scheduler.sequence(request.key)
            assert sequence is not None
            if not unpark(scheduler, sequence):
                return False
        else:
            admission = scheduler.admit(self._wanted(life))
            if admission is None:
                return False
            for fill in admission.fills:
                assert scheduler.resources.guard.enter(fill.ticket, fill.block)
                scheduler.resources.guard.leave(fill.ticket, fill.block, complete=True)
            cold = plan_decode(request.n_tokens, 0, request.keep_tokens, (), T1)
            if life.tokens:
                assert scheduler.adopt(request.key, life.tokens[-1], cold)
            else:
                assert scheduler.start(request.key, cold)
        life.since_tokens, life.blocks_kept, life.in_engine = 0, False, True
        return True

    def _give_way(self, way: Way) -> None:
        life = self.lives[way.key]
        sequence = self.scheduler.sequence(way.key)
        assert sequence is not None
        if not life.blocks_kept:
            assert life.since_tokens >= self.after
            assert hold(self.scheduler, way.key)
            park(sequence)
            life.parked += 1
            life.blocks_kept = True
            self._queue(life)
        if way.gives_blocks:
            self.scheduler.release(way.key)
            life.blocks_kept = False

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.steps += 1
        if plan is None:
            return
        for event in self.scheduler.advance(self.answer(plan)):
            if isinstance(event, TokenSampled):
                life = self.lives[event.key]
                assert event.index == len(life.tokens)
                life.tokens.append(event.token_id)
                life.since_tokens += 1
                if event.finish is not None:
                    self.scheduler.release(event.key)
                    del self.lives[event.key]

    def check(self) -> None:
        leases = [s.lease for s in self.scheduler.sequences()]
        self.scheduler.resources.blocks.check([b for lease in leases for b in lease.blocks])
        self.scheduler.resources.slots.check([x.slot for x in leases if x.slot >= 0])


arrivals = st.lists(
    st.tuples(
        st.integers(0, 60),  # step of arrival
        st.integers(1, 300),  # prompt
        st.integers(1, 60),  # tokens
        st.integers(1, 4),  # seed of the prompt: equal ones have equal blocks
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=25, deadline=None)
@given(arrivals, st.integers(1, 3), st.integers(3, 8), st.integers(1, 12))
def test_everybody_gets_on_under_random_arrivals(
    new_request, answer, wishes, n_slots: int, n_blocks: int, after: int
) -> None:
    sizes = EngineSettings(n_blocks=n_blocks, n_slots=n_slots, park_after_tokens=after)
    replica = Replica(sizes, answer)
    to_come = sorted(
        (
            Life(new_request(n, name=f"r{i}", max_tokens=more, seed=seed), step)
            for i, (step, n, more, seed) in enumerate(wishes)
        ),
        key=lambda life: life.arrives,
    )
    everyone, waiting = tuple(to_come), deque(to_come)
    assert all(blocks_to_reserve(life.request, Half.FULL) <= n_blocks for life in everyone)
    work = sum(life.request.max_tokens + NEW_STEPS for life in everyone)
    while waiting or replica.lives:
        while waiting and waiting[0].arrives <= replica.steps:
            replica.arrive(waiting.popleft())
        replica.serve()
        replica.check()
        replica.step()
        assert replica.steps <= 60 + work, "something runs in circles"
    # No token is missing or came twice, no row ran twice, and nobody waited at the head for longer
    # than those who run need until they may be parked.
    assert all(len(life.tokens) == life.request.max_tokens for life in everyone)
    rows = sum(life.request.n_tokens + life.request.max_tokens - 1 for life in everyone)
    assert replica.scheduler.totals.encoder_rows == rows
    assert replica.longest_first <= after + NEW_STEPS
    replica.check()


def test_without_a_line_nobody_is_parked_and_with_one_they_take_turns(new_request, answer) -> None:
    replica = Replica(EngineSettings(n_blocks=8, n_slots=2, park_after_tokens=4), answer)
    lives = [Life(new_request(20, name=f"r{i}", max_tokens=40), 0) for i in range(4)]
    for life in lives[:2]:
        replica.arrive(life)
    for _ in range(12):
        replica.serve()
        replica.step()
    assert [life.parked for life in lives] == [0, 0, 0, 0]
    for life in lives[2:]:
        replica.arrive(life)
    while replica.lives:
        replica.serve()
        replica.step()
    # The first two have 28 tokens to make when the others come: turns of 4 until those end.
    assert all(4 <= life.parked <= 8 for life in lives), [life.parked for life in lives]
