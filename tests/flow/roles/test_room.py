"""A full arena is backpressure on prefill: it waits for room, and nothing that a hand-off needs is
dropped; what never finds room is computed by decode."""

from __future__ import annotations

import pytest

from headrace.core.rows import floor_grain

MODEL = "toy"
# Nine blocks and six window records of the toy model.
STORE = {"arena_bytes": 96 << 10, "ssd_bytes": 8 << 20, "segment_bytes": 1 << 20}
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_two_handoffs_share_an_arena_that_holds_one(cluster, yardstick, prompt) -> None:
    stat = await cluster.prefill.store.stat()
    assert stat.arena_slots == 15
    prompts = [prompt(700 + 128 * i, f"room {i}") for i in range(3)]  # 5, 6 and 7 blocks
    calls = [
        await cluster.handoff(cluster.request(ids), decode=i % 2) for i, ids in enumerate(prompts)
    ]
    for call, ids in zip(calls, prompts, strict=True):
        assert await call.result() == await yardstick.text(ids, 8)
        assert call.times.hit_tokens == floor_grain(len(ids))
    assert cluster.prefill.work.counts.cut_short == 0
    await cluster.at_rest()


async def test_a_handoff_larger_than_the_arena_ends_in_the_right_text(
    cluster, yardstick, prompt
) -> None:
    ids = prompt(1700, "too large")  # 13 blocks
    call = await cluster.handoff(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    assert cluster.prefill.work.counts.cut_short == 1
    assert 0 < call.times.hit_tokens <= 9 * 128
    assert call.times.encoder_rows >= 1700 - call.times.hit_tokens
    await cluster.at_rest()
