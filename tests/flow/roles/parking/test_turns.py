"""Decode with more streams than slots or blocks: they take turns, the texts are those of streams
alone and no row runs twice; what was kept for a parked one may be lost, and the text stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.limits import LeaseTimes
from headrace.engine import EngineSettings

MODEL = "toy"
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=20.0)}  # a loaded machine is no lost one
STORE = {"state_bytes": 65536}
ENGINE = EngineSettings(
    n_blocks=60, n_slots=2, max_rows_per_step=128, replay_rows_per_step=128, park_after_tokens=4
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_six_streams_in_two_slots(cluster, prompt, streams) -> None:
    six = streams(cluster)
    async with six.arriving():
        await six.begin(prompt, "slots")
    await six.texts_are_those_of_streams_alone()
    six.no_row_ran_twice()
    assert six.counted("parkings") >= 2
    assert (six.counted("parkings_lost"), six.counted("parkings_refused")) == (0, 0)
    await cluster.at_rest()


async def test_six_streams_in_eight_blocks(cluster, prompt, streams, join, wait_until) -> None:
    """Slots for all; no two of the longer ones fit in together with a third."""
    number = await join(replace(ENGINE, n_blocks=8, n_slots=6))
    six = streams(cluster, number)
    async with six.arriving():
        await six.begin(prompt, "blocks")
    await wait_until(lambda: any(job.parked.blocks is not None for job in six.parked if job.parked))
    await six.texts_are_those_of_streams_alone()
    six.no_row_ran_twice()
    assert six.counted("parkings") >= 2
    assert (six.counted("parkings_lost"), six.counted("parkings_refused")) == (0, 0)
    await cluster.at_rest()


async def test_nobody_is_parked_while_nobody_waits(cluster, prompt, streams) -> None:
    two = streams(cluster)
    await two.begin(prompt, "nobody waits", ((40, 30), (50, 30)))
    await two.texts_are_those_of_streams_alone()
    assert two.counted("parkings") == 0
    await cluster.at_rest()


async def test_reports_tell_of_parked_streams(cluster, prompt, streams) -> None:
    six = streams(cluster)
    await six.begin(prompt, "reports")
    async with six.stopped_with(2) as parked:
        report = six.decode.load_report(0)
        assert report.parked_requests == len(parked)
        assert report.waiting_requests >= len(parked)
        assert report.waiting_requests + report.running_requests <= 6
    await six.texts_are_those_of_streams_alone()
    await cluster.at_rest()
