"""The engine in its thread: order of calls, delivery of events, ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.chain import as_token_ids
from headrace.core.errors import Unavailable
from headrace.core.request import GenRequest
from headrace.core.rows import plan_decode
from headrace.engine import Engine, EngineDriver, Event, Job, TokenSampled

NewEngine = Callable[..., Engine]
NewRequest = Callable[..., GenRequest]
NO_IDS = as_token_ids([])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_tokens_arrive_in_the_loop_and_equal_a_plain_loop(
    new_engine: NewEngine, new_request: NewRequest, run_alone: Any
) -> None:
    wanted = run_alone(new_engine(), new_request(60, max_tokens=6))
    events: list[Event] = []
    where: set[str] = set()

    def take(some: list[Event]) -> None:
        where.add(threading.current_thread().name)
        events.extend(some)

    engine = new_engine()
    driver = EngineDriver(engine, take, name="engine-under-test")
    driver.start()
    request = new_request(60, max_tokens=6)
    assert await driver.call(engine.admit, Job(request, NO_IDS, 0)) is not None
    plan = plan_decode(60, 0, 44, (), engine.geometry)
    assert await driver.call(engine.start, request.key, plan)
    await until(lambda: bool(events) and getattr(events[-1], "finish", None) is not None)
    assert [e.token_id for e in events if isinstance(e, TokenSampled)] == wanted.tokens
    assert where == {threading.current_thread().name}
    await driver.call(engine.release, request.key)
    assert driver.stats.held_blocks == 0 and driver.stats.steps == 6
    assert await driver.call(threading.current_thread) is not threading.current_thread()
    await driver.stop()
    await driver.stop()
    with pytest.raises(Unavailable):
        await driver.call(engine.release, request.key)


async def test_an_exception_of_a_call_is_the_caller_s(new_engine: NewEngine) -> None:
    engine = new_engine()
    driver = EngineDriver(engine, lambda events: None)
    driver.start()
    with pytest.raises(ZeroDivisionError):
        await driver.call(lambda: 1 // 0)
    assert await driver.call(lambda: 5) == 5
    await driver.stop()


async def test_a_call_runs_although_its_caller_left(
    new_engine: NewEngine, new_request: NewRequest
) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: complaints.append(what))
    engine = new_engine()
    driver = EngineDriver(engine, lambda events: None)
    driver.start()
    gate = threading.Event()
    holding = asyncio.create_task(driver.call(gate.wait, 10))
    await asyncio.sleep(0.05)
    request = new_request(60)
    admitting = asyncio.create_task(driver.call(engine.admit, Job(request, NO_IDS, 0)))
    await asyncio.sleep(0)
    admitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admitting
    gate.set()
    assert await holding
    assert (await driver.call(engine.stats)).waiting == 1
    await driver.call(engine.release, request.key)
    assert driver.stats.free_slots == 4 and driver.stats.waiting == 0
    await driver.stop()
    assert complaints == []  # nothing was told to the future of the caller that left


async def test_a_broken_engine_ends_loudly(
    new_engine: NewEngine, new_request: NewRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    heard: list[Exception] = []
    driver = EngineDriver(engine, lambda events: None, on_failure=heard.append)
    driver.start()
    request = new_request(60)
    await driver.call(engine.admit, Job(request, NO_IDS, 0))

    def broken(result: object) -> None:
        raise MemoryError("no accounts left")

    monkeypatch.setattr(engine.scheduler, "advance", broken)
    plan = plan_decode(60, 0, 44, (), engine.geometry)
    await driver.call(engine.start, request.key, plan)
    await until(lambda: bool(heard))
    assert isinstance(heard[0], MemoryError) and driver.failure is heard[0]
    with pytest.raises(Unavailable):
        await driver.call(engine.stats)
    await driver.stop()


async def test_an_idle_engine_takes_no_steps(new_engine: NewEngine) -> None:
    engine = new_engine()
    driver = EngineDriver(engine, lambda events: None)
    driver.start()
    looked = 0

    class Counting(type(engine.scheduler)):  # type: ignore[misc]
        @property
        def has_work(self) -> bool:
            nonlocal looked
            looked += 1
            return bool(super().has_work)

    engine.scheduler.__class__ = Counting
    await asyncio.sleep(0.2)
    assert looked <= 2
    await driver.stop()
