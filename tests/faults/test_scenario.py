"""The framework itself: a fault that missed is an error, one control for each kind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.core import faults as points

pytestmark = pytest.mark.fault
SOON_S = 0.3


@pytest.fixture
def sleeper() -> Iterator[Callable[[], int]]:
    """`sleeper()`: the pid of a process that does nothing."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        made.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return made[-1].pid

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    points.disarm()


async def nothing() -> str:
    return "done"


async def missed(kinds: ModuleType, fault: Any) -> None:
    with pytest.raises(kinds.FaultMissed, match="took no effect"):
        await fault.happen(SOON_S)


def test_a_fault_without_verify_is_an_error(kinds: ModuleType) -> None:
    with pytest.raises(TypeError):
        kinds.Fault("unseen", lambda: None)
    with pytest.raises(kinds.NoVerify, match="unseen"):
        kinds.Fault("unseen", lambda: None, None)


async def test_kill_is_seen_and_its_control_misses(kinds: ModuleType, sleeper: Any) -> None:
    target, other = kinds.kill(sleeper()), kinds.kill(sleeper())
    await missed(kinds, kinds.aimed_elsewhere(target, other))
    await target.happen(SOON_S * 20)


async def test_stop_is_seen_undone_and_its_control_misses(kinds: ModuleType, sleeper: Any) -> None:
    pid = sleeper()
    target, other = kinds.stop(pid), kinds.stop(sleeper())
    await missed(kinds, kinds.aimed_elsewhere(target, other))
    seen = []

    async def load() -> None:
        await kinds.until(lambda: kinds.process_state(pid) == "T", 5, "never stopped")
        seen.append("T")

    await kinds.Scenario(load, [target], []).run()
    await kinds.until(lambda: kinds.process_state(pid) == "S", 5, "never went on")
    assert seen == ["T"]


async def test_a_point_is_seen_and_its_control_misses(kinds: ModuleType) -> None:
    target, other = kinds.at_point("decode.load=drop"), kinds.at_point("prefill.seal=drop")

    async def load() -> str:
        while points.hit("decode.load") is None:
            await asyncio.sleep(0.001)
        return "dropped"

    assert await kinds.Scenario(load, [target], []).run() == "dropped"
    points.disarm()
    passing = asyncio.create_task(load())
    await missed(kinds, kinds.aimed_elsewhere(target, other))
    passing.cancel()


async def test_a_moment_that_never_comes_is_an_error_even_if_the_load_is_well(
    kinds: ModuleType,
) -> None:
    late = kinds.Fault("late", lambda: None, lambda: True, when=lambda: False)
    with pytest.raises(kinds.FaultMissed, match="moment never came"):
        await kinds.Scenario(nothing, [late], [], within_s=SOON_S).run()


async def test_checks_get_the_result_after_everything_is_undone(kinds: ModuleType) -> None:
    order: list[str] = []
    fault = kinds.Fault(
        "noted", lambda: order.append("act"), lambda: True, undo=lambda: order.append("undo")
    )

    async def check(result: str) -> None:
        order.append(result)

    await kinds.Scenario(nothing, [fault], [check]).run()
    assert order == ["act", "undo", "done"]

    def failing(result: str) -> None:
        raise AssertionError(result)

    with pytest.raises(AssertionError, match="done"):
        await kinds.Scenario(nothing, [], [failing]).run()


async def test_a_load_that_hangs_is_an_error_and_what_happened_is_undone(
    kinds: ModuleType,
) -> None:
    undone: list[bool] = []

    async def hang() -> None:
        await asyncio.sleep(600)

    fault = kinds.Fault("hung", lambda: None, lambda: True, undo=lambda: undone.append(True))
    with pytest.raises(TimeoutError):
        await kinds.Scenario(hang, [fault], [], within_s=SOON_S).run()
    assert undone == [True]


def test_the_framework_stays_small(root: Path) -> None:
    """It is read before every scenario: should it grow, the scenarios are too clever."""
    assert len((root / "tests/faults/scenario.py").read_text().splitlines()) < 200
