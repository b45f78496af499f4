"""Two prompts that share rows meet on one prefill replica: the rows run once, counted. And decode
loads while prefill still seals, whenever it was bound."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.rows import floor_grain, plan_prefill
from headrace.prefill.jobs import JobState

MODEL = "toy"
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(condition, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def rows(cluster) -> int:
    return int(cluster.prefill.driver.stats.encoder_rows_total)


async def test_two_equal_prompts_run_their_rows_once(cluster, yardstick, prompt) -> None:
    ids, before = prompt(1000, "equal"), rows(cluster)
    waited = cluster.prefill.work.counts.awaited
    calls = [await cluster.handoff(cluster.request(ids), decode=i) for i in (0, 1)]
    for call in calls:
        assert await call.result() == await yardstick.text(ids, 8)
    assert rows(cluster) == before + floor_grain(1000)
    assert sorted(call.prefilled.encoder_rows for call in calls) == [0, floor_grain(1000)]
    assert cluster.prefill.work.counts.awaited > waited
    assert cluster.prefill.work.counts.wait_ended == 0
    await cluster.at_rest(5.0)


async def test_a_common_prefix_is_computed_once(cluster, yardstick, prompt) -> None:
    head = prompt(640, "common head")
    prompts = [[*head, *prompt(400, f"tail {i}")] for i in range(2)]
    before = rows(cluster)
    first = await cluster.handoff(cluster.request(prompts[0]))
    second = await cluster.handoff(cluster.request(prompts[1]), decode=1)
    for call, ids in zip((first, second), prompts, strict=True):
        assert await call.result() == await yardstick.text(ids, 8)
    assert (first.prefilled.hit_tokens, second.prefilled.hit_tokens) == (0, 640)
    keep, geometry = cluster.keep_tokens, yardstick.geometry
    # The second one computes its own blocks, and replays the rows that its windows need.
    alone = plan_prefill(1040, 640, keep, (), geometry).encoder_rows
    assert second.prefilled.encoder_rows == alone
    assert rows(cluster) == before + floor_grain(1040) + alone
    await cluster.at_rest(5.0)


async def test_when_the_first_one_is_cancelled_the_second_goes_on(
    cluster, yardstick, prompt
) -> None:
    ids, before = prompt(1500, "first is cancelled"), rows(cluster)
    first = await cluster.handoff(cluster.request(ids))
    await until(lambda: rows(cluster) >= before + 256)
    second = await cluster.handoff(cluster.request(ids), decode=1)
    jobs = cluster.prefill.work.jobs
    await until(lambda: second.prefill_key in jobs)
    await until(lambda: jobs[second.prefill_key].state is JobState.PENDING)
    await cluster.router.cancel(first)
    assert await second.result() == await yardstick.text(ids, 8)
    # What the first one had sealed is found; nothing of it is computed again.
    assert second.prefilled.hit_tokens >= 128
    assert cluster.prefill.work.counts.wait_ended == 0
    await cluster.at_rest(5.0)


@pytest.mark.parametrize("bind", ["early", "late"])
async def test_decode_loads_while_prefill_still_seals(cluster, yardstick, prompt, bind) -> None:
    ids, decode = prompt(1500, f"loads early {bind}"), cluster.decodes[0]
    loaded = decode.work.counts.loaded_blocks
    call = await cluster.handoff(cluster.request(ids), bind=bind)
    await until(lambda: decode.work.counts.loaded_blocks > loaded or call.prefilled)
    assert call.prefilled is None, "nothing was loaded before PrefillDone"
    assert await call.result() == await yardstick.text(ids, 8)
    if bind == "late":
        asked = next(message for message in call.progress if message.wanted)
        assert 0 < asked.rows_left <= 128  # a later one, while decode is silent, may tell 0
    await cluster.at_rest(5.0)
