"""Mode `state`: prefill runs both halves and the first token, decode goes on at N; equal to one
engine with the same keep. What is missing is run as in `exact`: the same text."""

from __future__ import annotations

from typing import Any

import headrace_tests_flow_engines as flow
import pytest

from headrace.core import faults
from headrace.core.request import FinishReason, HandoffMode, Sampling
from headrace.core.rows import StartKind, floor_grain
from headrace.model import Numerics, load_named

MODEL = "t1"
DEPLOYMENT = {"handoff_mode": HandoffMode.STATE}
STORE = {"state_bytes": 65536}
pytestmark = pytest.mark.asyncio(loop_scope="module")


def state_bytes(layout: Any, n_tokens: int) -> int:
    """Header, windows of all layers, W rows of each drafter stage, compressor tails in fp64, groups
    of the incomplete block."""
    rows = layout.n_layers * layout.window_record_rows + layout.n_stages * layout.window_tokens
    windows = rows * layout.swa_row_bytes
    tails = sum(t.history_tokens * 2 * t.width for t in layout.tails) * 8
    entries = sum(
        n_tokens % 128 // s.ratio * (s.main_row_bytes + s.index_data_bytes + s.index_scale_bytes)
        for s in layout.sources
    )
    return 36 + windows + tails + entries


@pytest.mark.parametrize(
    ("n_tokens", "keep_tokens"), [(172, 44), (255, 32), (256, 44), (257, 44), (383, 64), (500, 187)]
)
async def test_decode_goes_on_where_prefill_stopped(
    cluster, yardstick, prompt, n_tokens: int, keep_tokens: int
) -> None:
    ids = prompt(n_tokens, f"state {n_tokens}")
    call = await cluster.handoff(cluster.request(ids, 9, keep_tokens=keep_tokens))
    assert await call.result() == await yardstick.text(ids, 9, keep_tokens)
    times, done = call.times, call.prefilled
    assert (done.encoder_rows, done.decoder_rows) == (n_tokens, keep_tokens)
    # Not one row of the prompt on decode; the first token is prefill's.
    assert (times.start_kind, times.encoder_rows, times.decoder_rows) == (StartKind.STATE, 0, 0)
    assert times.hit_tokens == floor_grain(n_tokens)
    assert times.load_bytes == n_tokens // 128 * cluster.card.block_bytes + state_bytes(
        yardstick.layout, n_tokens
    )
    await cluster.at_rest()


@pytest.mark.parametrize(("n_tokens", "keep_tokens"), [(500, 44), (301, 187), (512, 44)])
async def test_bound_early_every_stored_byte_is_the_all_engines(
    cluster, stored_blocks, n_tokens: int, keep_tokens: int
) -> None:
    """Decode loads while prefill still seals. What both have stored at the end, and the text, are
    those of one engine that ran all rows."""
    n_out = 16  # 500 and 12 end a block
    ids = list(flow.request(n_tokens, keep_tokens, (), n_out).token_ids)
    trunk = load_named(MODEL, 0, Numerics.INVARIANT)
    wanted = flow.cold_run(trunk, n_tokens, keep_tokens, (), n_out)
    request = cluster.request(ids, n_out, keep_tokens=keep_tokens, domain=f"bits {n_tokens}")
    call = await cluster.handoff(request, bind="early")
    assert list(await call.result()) == wanted.tokens
    assert (call.times.start_kind, call.times.encoder_rows) == (StartKind.STATE, 0)
    await cluster.at_rest()
    await cluster.written()
    stored = await stored_blocks(cluster.prefill.store, [*ids, *wanted.tokens], request.chain_root)
    assert len(stored) == (n_tokens + n_out - 1) // 128
    assert stored == [wanted.done_blocks[i] for i in range(len(stored))]


async def test_seeded_draws_and_the_ends_of_an_answer(cluster, yardstick, prompt) -> None:
    ids, seeded = prompt(300, "state ends"), Sampling(temperature=1.1, seed=5)
    text = await yardstick.text(ids, 9, None, seeded)
    call = await cluster.handoff(cluster.request(ids, 9, sampling=seeded))
    assert await call.result() == text
    await cluster.at_rest()
    call = await cluster.handoff(cluster.request(ids, 1, sampling=seeded), decode=1)
    assert await call.result() == text[:1] and call.finish is FinishReason.LENGTH
    await cluster.at_rest()
    call = await cluster.handoff(cluster.request(ids, 9, sampling=seeded, stop=(text[0],)))
    assert await call.result() == () and call.finish is FinishReason.STOP
    await cluster.at_rest()


async def test_a_second_turn_loads_and_runs_what_is_new_on_prefill(
    cluster, yardstick, prompt
) -> None:
    first = prompt(500, "state turn")
    answer = await (await cluster.handoff(cluster.request(first, 20))).result()
    await cluster.at_rest()
    await cluster.written()
    second = [*first, *answer, *prompt(80, "more")]
    call = await cluster.handoff(cluster.request(second, 6), decode=1)
    assert await call.result() == await yardstick.text(second, 6)
    assert call.prefilled.hit_tokens == 512
    assert call.prefilled.encoder_rows < 600 - 384 + 1
    assert (call.times.start_kind, call.times.encoder_rows) == (StartKind.STATE, 0)
    await cluster.at_rest()


@pytest.mark.parametrize("hit", [1, 2, 3])
async def test_damage_on_the_way_is_run_as_in_exact(cluster, yardstick, prompt, hit: int) -> None:
    """Two blocks and the state are read: whichever is damaged, decode runs rows, the text stays."""
    ids = prompt(300, f"state damaged {hit}")
    faults.arm(f"decode.load=flip@{hit}")
    call = await cluster.handoff(cluster.request(ids, 6))
    assert await call.result() == await yardstick.text(ids, 6)
    assert faults.fired("decode.load") == 1
    assert call.times.start_kind != StartKind.STATE and call.times.encoder_rows > 0
    await cluster.at_rest()


async def test_a_lost_announcement_of_the_state_costs_rows_only(cluster, yardstick, prompt) -> None:
    ids = prompt(200, "state untold")
    faults.arm("prefill.announce=drop@2")  # one block, then the state
    call = await cluster.handoff(cluster.request(ids, 6))
    assert await call.result() == await yardstick.text(ids, 6)
    assert faults.fired("prefill.announce") == 1
    assert call.times.start_kind == StartKind.WINDOW
    await cluster.at_rest()


async def test_a_resume_starts_as_in_exact(cluster, yardstick, prompt) -> None:
    ids = prompt(300, "state resumed")
    text = await yardstick.text(ids, 20)
    faults.arm("decode.token=raise@5")
    request = cluster.request(ids, 20)
    call = await cluster.handoff(request)
    await call.failure()
    assert tuple(call.token_ids) == text[:5]
    await cluster.at_rest()
    again = cluster.request(ids, 20, epoch=1, request_id=request.request_id)
    call = await cluster.local(again, decode=1, generated=text[:5])
    assert await call.result() == text[5:]
    await cluster.at_rest()
