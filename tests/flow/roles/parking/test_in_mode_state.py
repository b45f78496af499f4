"""Turns in mode `state`: what began with a delivered state is parked with one of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.limits import LeaseTimes
from headrace.core.request import HandoffMode
from headrace.engine import EngineSettings

MODEL = "t1"
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=20.0), "handoff_mode": HandoffMode.STATE}
STORE = {"state_bytes": 65536}
ENGINE = EngineSettings(
    n_blocks=60, n_slots=2, max_rows_per_step=128, replay_rows_per_step=128, park_after_tokens=4
)
SHORT = {"n_blocks": 6, "n_slots": 4}
pytestmark = pytest.mark.asyncio(loop_scope="module")


# Short of blocks by default, short of slots with `-m slow`; in mode `replay` the other way round.
@pytest.mark.parametrize(
    "sizes",
    [pytest.param({}, marks=pytest.mark.slow, id="slots"), pytest.param(SHORT, id="blocks")],
)
async def test_streams_take_turns(cluster, prompt, streams, join, sizes) -> None:
    number = await join(replace(ENGINE, **sizes)) if sizes else 0
    four = streams(cluster, number)
    async with four.arriving():
        await four.begin(prompt, f"state {sizes}", ((250, 30), (300, 24), (130, 30), (256, 24)))
    await four.texts_are_those_of_streams_alone()
    four.no_row_ran_twice()
    assert [call.times.start_kind for call, *_ in four.calls] == ["cold", "state", "state", "cold"]
    assert four.counted("parkings") >= 2
    assert (four.counted("parkings_lost"), four.counted("parkings_refused")) == (0, 0)
    await cluster.at_rest()
