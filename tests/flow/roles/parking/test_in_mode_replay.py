"""Turns in mode `replay`: approximate windows and blocks are parked as they are, so the text is
that of the same stream which never gave way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.limits import LeaseTimes
from headrace.core.request import HandoffMode
from headrace.engine import EngineSettings

MODEL = "t1"
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=20.0), "handoff_mode": HandoffMode.REPLAY}
STORE = {"state_bytes": 65536}
ENGINE = EngineSettings(
    n_blocks=60, n_slots=2, max_rows_per_step=128, replay_rows_per_step=128, park_after_tokens=4
)
SHORT = {"n_blocks": 6, "n_slots": 4}
pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = ((250, 30), (300, 24), (383, 30), (256, 24))


# Short of slots by default, short of blocks with `-m slow`; in mode `state` the other way round.
@pytest.mark.parametrize(
    "sizes",
    [pytest.param({}, id="slots"), pytest.param(SHORT, marks=pytest.mark.slow, id="blocks")],
)
async def test_streams_take_turns(cluster, prompt, streams, join, sizes) -> None:
    alone = []
    for i, (n_tokens, max_tokens) in enumerate(STREAMS):
        ids = prompt(n_tokens, f"replay {i}")
        request = cluster.request(ids, max_tokens, domain=f"alone {sizes}")
        call = await cluster.handoff(request, 1)
        alone.append((await call.result(), call.times))
    await cluster.at_rest()
    number = await join(replace(ENGINE, **sizes)) if sizes else 0
    four = streams(cluster, number)
    calls = []
    for i, (n_tokens, max_tokens) in enumerate(STREAMS):
        ids = prompt(n_tokens, f"replay {i}")
        request = cluster.request(ids, max_tokens, domain=f"together {sizes}")
        calls.append(await cluster.handoff(request, number))
    for call, (text, times) in zip(calls, alone, strict=True):
        assert await call.result() == text
        assert (call.times.start_kind, call.times.exactness) == (times.start_kind, times.exactness)
    assert {call.times.exactness for call in calls} == {"replayed"}
    assert four.counted("parkings") >= 2
    assert (four.counted("parkings_lost"), four.counted("parkings_refused")) == (0, 0)
    await cluster.at_rest()
