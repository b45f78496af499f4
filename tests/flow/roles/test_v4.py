"""V4 over prefill, store and decode: equal to one engine, rows as the formulas say. Its prefill
replica holds all weights, and there are no decoder rows anywhere."""

from __future__ import annotations

import pytest

from headrace.core import faults
from headrace.core.rows import StartKind, floor_grain, plan_decode, plan_resume, record_position
from headrace.kvstore import Kind
from headrace.router.policy import size_up

MODEL = "v4-toy"
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_prefill_replica_holds_all_layers(cluster) -> None:
    model = cluster.prefill.engine.model
    assert not model.encoder_only and len(model.params.layers) == 6
    assert all(layer.wq_b.numel() for layer in model.params.layers)
    assert cluster.keep_tokens == 1 and cluster.card.n_decoder_layers == 0


@pytest.mark.parametrize("n_tokens", [129, 256, 257, 500])
async def test_a_handoff_equals_one_engine(cluster, yardstick, prompt, n_tokens: int) -> None:
    ids = prompt(n_tokens, f"v4 {n_tokens}")
    before = cluster.prefill.driver.stats.encoder_rows_total
    call = await cluster.handoff(cluster.request(ids))
    assert await call.result() == await yardstick.text(ids, 8)
    await cluster.at_rest()
    hit, p = floor_grain(n_tokens), record_position(n_tokens, 1)
    assert cluster.prefill.driver.stats.encoder_rows_total == before + hit
    times = call.times
    assert (times.encoder_rows, times.decoder_rows) == (n_tokens - p, 0)
    assert (times.hit_tokens, times.window_position) == (hit, p)
    assert times.start_kind == (StartKind.WINDOW if p else StartKind.COLD)
    card = cluster.card
    record = card.window_record_bytes if p else 0
    assert times.load_bytes == hit // 128 * card.block_bytes + record
    # The router reckons with the same rows.
    work = size_up(n_tokens, 8, 0, (), 1, yardstick.geometry, 100)
    assert work.wants_prefill and work.prefill_plan.encoder_rows == hit
    assert work.handed_start == p


async def test_the_next_turn_starts_from_the_record_made_while_decoding(
    cluster, yardstick, prompt
) -> None:
    first = prompt(360, "v4 turn")
    answer = await (await cluster.handoff(cluster.request(first, 40))).result()
    await cluster.at_rest()
    await cluster.written()
    second = [*first, *answer, *prompt(30, "v4 more")]
    call = await cluster.local(cluster.request(second, 6), decode=1)
    assert await call.result() == await yardstick.text(second, 6)
    times = call.times
    assert (times.hit_tokens, times.window_position) == (384, 384)
    assert times.encoder_rows == len(second) - 384
    await cluster.at_rest()


async def test_a_damaged_record_costs_rows_not_text(cluster, yardstick, prompt) -> None:
    ids = prompt(500, "v4 damaged")
    request = cluster.request(ids)
    await (await cluster.handoff(request)).result()
    await cluster.at_rest()
    await cluster.written()
    await cluster.damage(Kind.SWA, request.digests[2])
    call = await cluster.local(cluster.request(ids), decode=1)
    assert await call.result() == await yardstick.text(ids, 8)
    plan = plan_decode(500, 384, 1, (), yardstick.geometry)
    assert plan.start == 384 - 186 and plan.kind is StartKind.REPLAY
    assert (call.times.start_kind, call.times.encoder_rows) == (plan.kind, plan.encoder_rows)
    await cluster.at_rest()


@pytest.mark.parametrize("given", [1, 12, 13])
async def test_a_resume_is_a_prompt_of_m_tokens(cluster, yardstick, prompt, given: int) -> None:
    """244 + 12 is the border of a block: its last row is that of the token that never left."""
    ids, domain = prompt(244, "v4 resume"), f"v4 {given}"
    text = await yardstick.text(ids, 20)
    faults.arm(f"decode.token=raise@{given}")
    first = cluster.request(ids, 20, domain=domain)
    call = await cluster.handoff(first)
    await call.failure()
    assert faults.fired("decode.token") == 1
    assert tuple(call.token_ids) == text[:given]
    await cluster.at_rest()
    await cluster.written()
    again = cluster.request(ids, 20, epoch=1, request_id=first.request_id, domain=domain)
    call = await cluster.local(again, decode=1, generated=text[:given])
    assert await call.result() == text[given:]
    hit = floor_grain(244 + given)
    assert call.times.hit_tokens == hit
    plan = plan_resume(244 + given, hit, 0, (128,), yardstick.geometry)
    assert (call.times.encoder_rows, call.times.decoder_rows) == (plan.encoder_rows, 0)
    await cluster.at_rest()
