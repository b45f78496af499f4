"""J8: every order in which two hand-offs and their troubles can come, within a stated bound, over
the real tables and the real books of who holds what."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from headrace.core.errors import HeadraceError
from headrace.core.states import StateTable
from headrace.decode.handoff import DECODE_TABLE, DecodeEvent, DecodeState
from headrace.engine import EngineDamaged
from headrace.engine.fills import FillGuard
from headrace.kvstore.leases import LeaseBook

MOST_STATES = 200_000  # against a world that grows without end
FAULTS = ("abort", "crash", "timeout")


def explore(steps: ModuleType, make: Any, most: dict[str, int]) -> tuple[int, int]:
    """Visit every reachable state once: (states, states at rest). Depth first; the parts of a world
    cannot be copied, so each further step from a state begins by doing its steps again."""
    seen: set[Any] = set()
    rests = 0
    paths: list[tuple[str, ...]] = [()]
    while paths:
        path, world = paths.pop(), make()
        for name in path:
            steps.again(world, name)
        while True:
            steps.check(world)
            mark = steps.fingerprint(world)
            if mark in seen:
                break
            seen.add(mark)
            assert len(seen) < MOST_STATES
            names = steps.enabled(world, most)
            if all(name.split()[0] in FAULTS for name in names):
                rests += 1
                paths += [(*path, name) for name in names]
                try:
                    steps.check_end(world)  # which uses this world up
                except AssertionError as error:
                    raise AssertionError(f"{error}, after: {'; '.join(path)}") from None
                break
            *others, last = names
            paths += [(*path, name) for name in others]
            path = (*path, last)
            steps.again(world, last)
    return len(seen), rests


# (requests, retries, begun, faults at most) -> states that are at least found. The small ones show
# each request's own frames in every order; the larger ones what two do to each other.
BOUNDS = {
    "one, a crash and a timeout": ("a", 1, True, (0, 1, 1), 2000),
    "one, an abort and a crash": ("a", 1, True, (1, 1, 0), 2000),
    "one from its first frame, an abort and a timeout": ("a", 0, False, (1, 0, 1), 500),
    "two, nothing goes wrong": ("ab", 0, False, (0, 0, 0), 1000),
    "two, an abort": ("ab", 0, True, (1, 0, 0), 1000),
    "two, a crash": ("ab", 0, True, (0, 1, 0), 1000),
    "two, a timeout": ("ab", 0, True, (0, 0, 1), 500),
}


SLOW = ("one, a crash and a timeout", "one, an abort and a crash", "two, a timeout")


@pytest.mark.parametrize(
    "bound",
    [pytest.param(b, marks=pytest.mark.slow) if b in SLOW else b for b in BOUNDS],
)
def test_every_order_ends_well(model: Any, bound: str, capsys: Any) -> None:
    requests, retries, begun, most, floor = BOUNDS[bound]

    def make() -> Any:
        return model.world.World(requests, retries=retries, begun=begun)

    states, rests = explore(model.steps, make, dict(zip(FAULTS, most, strict=True)))
    with capsys.disabled():
        print(f"\n{bound}: {states} states, {rests} at rest")
    assert states > floor and rests > 0


def walk(model: Any, seed: int, laws: Any = None) -> None:
    """Two requests, two attempts each, up to two faults of every kind, in a drawn order."""
    draw, path = random.Random(seed), []
    world = model.world.World("ab", laws)
    most = dict.fromkeys(FAULTS, 2)
    try:
        while names := model.steps.enabled(world, most):
            calm = [name for name in names if name.split()[0] not in FAULTS]
            if not calm and draw.random() < 0.5:
                break
            path.append(draw.choice(calm if calm and draw.random() < 0.8 else names))
            model.steps.do(world, path[-1])
        model.steps.check_end(world)
    except (AssertionError, HeadraceError, EngineDamaged) as error:
        raise AssertionError(f"{error}; seed {seed}: {'; '.join(path)}") from error


def test_long_drawn_orders_end_well(model: Any) -> None:
    for seed in range(1500):
        walk(model, seed)


# ---- controls: broken parts are found out --------------------------------------------------------


class LeakyGuard(FillGuard):
    """Does not say which blocks still have a writer inside."""

    def close(self, ticket: int) -> frozenset[int]:
        super().close(ticket)
        return frozenset()


class Immortal(LeaseBook):
    """Lets nothing expire."""

    def expire(self) -> tuple[Any, ...]:
        return ()


def without(*pairs: tuple[DecodeState, DecodeEvent]) -> StateTable[DecodeState, DecodeEvent]:
    """The decode table that ignores what it should act on."""
    moves = {pair: to for pair, to in DECODE_TABLE.transitions.items() if pair not in pairs}
    return StateTable("broken", moves, DECODE_TABLE.ignored | set(pairs))


S, E = DecodeState, DecodeEvent
BROKEN: dict[str, Callable[[Any], Any]] = {
    "a block is free under its writer": lambda laws: replace(laws, guard=LeakyGuard),
    "a lease has no end": lambda laws: replace(laws, leases=Immortal),
    "a stall is ignored": lambda laws: replace(
        laws, decode=without((S.AWAITING, E.STALLED), (S.QUEUED_OPEN, E.STALLED))
    ),
    "a lost prefill is ignored": lambda laws: replace(
        laws, decode=without((S.AWAITING, E.PREFILL_GONE), (S.AWAITING, E.STALLED))
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_part_is_found_out(model: Any, broken: str) -> None:
    laws = BROKEN[broken](model.world.Laws())
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(1500):
            walk(model, seed, laws)
