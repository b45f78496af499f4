"""V4 in mode `state`: prefill runs the prompt and the first token, decode goes on at N."""

from __future__ import annotations

import pytest

from headrace.core import faults
from headrace.core.request import HandoffMode
from headrace.core.rows import StartKind, floor_grain

MODEL = "v4-toy"
DEPLOYMENT = {"handoff_mode": HandoffMode.STATE}
STORE = {"state_bytes": 1 << 20}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("n_tokens", [129, 256, 500])
async def test_decode_goes_on_where_prefill_stopped(
    cluster, yardstick, prompt, n_tokens: int
) -> None:
    ids = prompt(n_tokens, f"v4 state {n_tokens}")
    call = await cluster.handoff(cluster.request(ids, 9))
    assert await call.result() == await yardstick.text(ids, 9)
    assert (call.prefilled.encoder_rows, call.prefilled.decoder_rows) == (n_tokens, 0)
    times = call.times
    assert (times.start_kind, times.encoder_rows, times.decoder_rows) == (StartKind.STATE, 0, 0)
    assert times.hit_tokens == floor_grain(n_tokens)
    await cluster.at_rest()


async def test_a_damaged_state_is_run_as_in_exact(cluster, yardstick, prompt) -> None:
    ids = prompt(300, "v4 state damaged")
    faults.arm("decode.load=flip@3")  # two blocks, then the state
    call = await cluster.handoff(cluster.request(ids, 6))
    assert await call.result() == await yardstick.text(ids, 6)
    assert faults.fired("decode.load") == 1
    assert call.times.start_kind != StartKind.STATE and call.times.encoder_rows > 0
    await cluster.at_rest()
