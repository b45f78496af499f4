"""What a job in a decode replica's line will open is in the arena before its turn, and its text is
that of anybody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from headrace_tests_kvstore_disk import Hanging

from headrace.core.role import RoleSettings
from headrace.core.rows import StartKind, floor_grain, plan_decode, record_position
from headrace.engine import EngineSettings

MODEL = "t1"
N_TOKENS = 700
BLOCKS = N_TOKENS // 128
# One after the other: who waits does so until the one before has ended.
ENGINE = EngineSettings(
    n_blocks=60, n_slots=1, max_rows_per_step=128, replay_rows_per_step=128, park_after_tokens=0
)
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]


@pytest.fixture(scope="module")
def disk() -> Hanging:
    return Hanging()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    roles: Callable[..., RoleSettings],
    store_settings: Callable[..., Any],
    yardstick: Any,
    router_end: Any,
    tag: str,
    prompt: Any,
    disk: Hanging,
    starters: tuple[Any, Any],
) -> AsyncIterator[Any]:
    """Engines and an arena that are empty, and a disk with the prompts "0" to "3"."""
    start_store, start_replicas = starters
    settings = store_settings(tag, window_cost_share=1.0, disk_least_s=60.0)
    async with (
        start_store(roles("store"), settings),
        start_replicas(roles, yardstick, router_end(), ENGINE) as all_,
    ):
        for seed in range(4):
            await (await all_.handoff(all_.request(prompt(N_TOKENS, str(seed))))).result()
        await all_.at_rest()
    start = start_store(roles("store"), settings, calls=disk)
    async with start, start_replicas(roles, yardstick, router_end(), ENGINE) as all_:
        yield all_


@pytest.fixture
def occupied(cluster: Any, prompt: Any) -> Any:
    """`async with occupied(decode)`: another stream has the replica's only slot."""

    @contextlib.asynccontextmanager
    async def stand(decode: int = 0) -> AsyncIterator[None]:
        call = await cluster.local(cluster.request(prompt(5, "occupied"), 1000), decode)
        await _until(lambda: call.begun.is_set() or call.failures)
        assert not call.failures, call.failures
        yield
        assert not call.ended.is_set()
        await cluster.router.cancel(call)

    return stand


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(90.0):
        while not condition():
            await asyncio.sleep(0.005)


async def _loads(cluster: Any, at_least: int) -> Any:
    async with asyncio.timeout(90.0):
        while (stat := await cluster.prefill.store.stat()).loads < at_least:
            await asyncio.sleep(0.01)
    return stat


async def test_blocks_and_window_are_there_before_the_turn(
    cluster: Any, yardstick: Any, prompt: Any, occupied: Any, disk: Hanging
) -> None:
    ids = prompt(N_TOKENS, "0")
    text = await yardstick.text(ids, 8)
    before = await cluster.prefill.store.stat()
    assert before.arena_resident == before.loads == 0
    async with occupied():
        disk.armed = True
        call = await cluster.local(cluster.request(ids))
        await _until(lambda: disk.stood)
        job = cluster.decodes[0].work.jobs[call.key]
        assert job.waits_for_room
        disk.armed = False
        disk.go.set()
        stat = await _loads(cluster, BLOCKS + 1)
        assert job.waits_for_room and not job.fills
        assert (stat.leased_objects, stat.prefetched) == (BLOCKS + 1, 0)
        reads = disk.reads
    assert await call.result() == text
    assert disk.reads == reads, "something was read after the turn had come"
    p = record_position(N_TOKENS, cluster.keep_tokens)
    hit = floor_grain(N_TOKENS)
    plan = plan_decode(N_TOKENS, hit, cluster.keep_tokens, (p,), yardstick.geometry)
    assert (call.times.hit_tokens, call.times.encoder_rows) == (hit, plan.encoder_rows)
    assert (call.times.start_kind, call.times.window_position) == (StartKind.WINDOW, p)
    await cluster.at_rest()
    after = await cluster.prefill.store.stat()
    assert (after.loads, after.prefetched) == (BLOCKS + 1, BLOCKS + 1)
    assert after.hits - before.hits >= BLOCKS + 1


async def test_a_job_that_finds_room_asks_for_nothing_in_advance(
    cluster: Any, yardstick: Any, prompt: Any
) -> None:
    ids = prompt(N_TOKENS, "1")
    before = await cluster.prefill.store.stat()
    call = await cluster.local(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()
    after = await cluster.prefill.store.stat()
    assert (after.loads - before.loads, after.prefetched) == (BLOCKS + 1, before.prefetched)


async def test_what_the_engine_still_has_is_not_brought(
    cluster: Any, yardstick: Any, prompt: Any, occupied: Any
) -> None:
    ids = prompt(N_TOKENS, "1")  # of the test before
    before = await cluster.prefill.store.stat()
    async with occupied():
        call = await cluster.local(cluster.request(ids))
        await _until(lambda: call.key in cluster.decodes[0].work.jobs)
        await asyncio.sleep(0.3)
        assert (await cluster.prefill.store.stat()).leased_objects <= 1  # the window record
    assert await call.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()
    assert (await cluster.prefill.store.stat()).loads == before.loads


async def test_who_is_cancelled_in_line_leaves_nothing(
    cluster: Any, prompt: Any, occupied: Any, disk: Hanging
) -> None:
    before = await cluster.prefill.store.stat()
    async with occupied():
        disk.stood, disk.armed = 0, True
        disk.go.clear()
        call = await cluster.local(cluster.request(prompt(N_TOKENS, "2")))
        await _until(lambda: disk.stood)
        await cluster.router.cancel(call)
        await _until(lambda: call.key not in cluster.decodes[0].work.jobs)
        disk.armed = False
        disk.go.set()
    await cluster.at_rest()
    after = await cluster.prefill.store.stat()
    assert after.prefetched == before.prefetched
    assert after.lapsed == before.lapsed


async def test_two_replicas_want_the_same_and_one_reads(
    cluster: Any, yardstick: Any, prompt: Any, occupied: Any
) -> None:
    ids = prompt(N_TOKENS, "3")
    before = await cluster.prefill.store.stat()
    async with occupied(0), occupied(1):
        calls = [await cluster.local(cluster.request(ids), decode) for decode in (0, 1)]
        for decode, call in zip(cluster.decodes, calls, strict=True):
            await _until(lambda d=decode, c=call: c.key in d.work.jobs)
        stat = await _loads(cluster, before.loads + BLOCKS + 1)
    for call in calls:
        assert await call.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()
    stat = await cluster.prefill.store.stat()
    assert stat.loads == before.loads + BLOCKS + 1
