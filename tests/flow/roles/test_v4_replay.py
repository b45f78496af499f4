"""V4 in mode `replay`: all layers from max(0, p - depth); equal to one engine doing the same."""

from __future__ import annotations

import pytest

from headrace.core.request import HandoffMode
from headrace.core.rows import StartKind, plan_decode
from headrace.engine import BlockDone, Engine, EngineSettings, Half, Job, TokenSampled
from headrace.model import Numerics, load_named

MODEL = "v4-toy"
DEPLOYMENT = {"handoff_mode": HandoffMode.REPLAY}
N_TOKENS, P = 500, 384
pytestmark = pytest.mark.asyncio(loop_scope="module")


def reference(request, depths: list[int]) -> list[tuple[list[int], StartKind]]:
    """Tokens of a replay of each depth over the blocks of a cold run, one engine a run."""
    trunk = load_named(MODEL, 0, Numerics.INVARIANT)
    blocks: dict[int, bytes] = {}
    answers = []
    for depth in [None, *depths]:
        engine = Engine(
            trunk,
            EngineSettings(n_blocks=8, n_slots=1),
            Half.FULL,
            record_spacing_tokens=8192,
            poison=True,
        )
        hit = 0 if depth is None else P // 128
        admission = engine.admit(Job(request, type(request.token_ids)("I"), hit))
        for fill in admission.fills:
            engine.write_fill(fill, blocks[fill.index])
        plan = plan_decode(N_TOKENS, hit * 128, 1, (), engine.geometry, depth_tokens=depth)
        engine.start(request.key, plan)
        tokens = []
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, BlockDone) and depth is None:
                    blocks[event.index] = bytes(engine.block_view(event.block))
                elif isinstance(event, TokenSampled):
                    tokens.append(event.token_id)
        answers.append((tokens, plan.kind))
    return answers[1:]


@pytest.mark.parametrize("depth", [32, 186])
async def test_a_replay_equals_its_reference(
    cluster, yardstick, prompt, new_decode, depth: int
) -> None:
    ids = prompt(N_TOKENS, "v4 replay")
    request = cluster.request(ids, 8)
    ((expected, kind),) = reference(request, [depth])
    await (await cluster.handoff(cluster.request(ids, 1))).result()
    await cluster.at_rest()
    decode = await new_decode(f"decode-{depth}", replay_depth_tokens=depth)
    to_decode = await cluster.router.connect(decode.shell.address)
    call = await cluster.router.send(request, to_decode)
    assert list(await call.result()) == expected
    assert call.times.start_kind == kind
    assert call.times.encoder_rows == N_TOKENS - (P - depth)
    if depth == 32:
        assert call.times.exactness == "replayed"
    else:
        assert tuple(expected) == await yardstick.text(ids, 8)
    await cluster.at_rest()
