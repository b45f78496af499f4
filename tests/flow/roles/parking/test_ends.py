"""Streams that end while they are parked, in every way: all that they held comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.limits import LeaseTimes
from headrace.engine import EngineSettings

MODEL = "toy"
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=20.0)}  # a loaded machine is no lost one
STREAMS = tuple((n_tokens, 100) for n_tokens in (40, 125, 256, 250, 300, 377))
STORE = {"state_bytes": 65536}
ENGINE = EngineSettings(
    n_blocks=60, n_slots=2, max_rows_per_step=128, replay_rows_per_step=128, park_after_tokens=4
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("sizes", [{}, {"n_blocks": 8, "n_slots": 6}], ids=["slots", "blocks"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "older", "router leaves"])
async def test_an_end_while_parked_gives_all_back(
    cluster, prompt, streams, join, wait_until, new_router, sizes, how: str
) -> None:
    number = await join(replace(ENGINE, **sizes)) if sizes else 0
    six = streams(cluster, number)
    if how == "router leaves":
        six.cluster = replace(cluster, router=await new_router("router-2"))
        six.cluster.to_decode = [six.cluster.router.to[f"decode-{number}"]] * (number + 1)
    await six.begin(prompt, f"ends {how} {sizes}", STREAMS)
    async with six.stopped_with(1) as parked:
        for job in parked:
            assert job.is_parked
            if how == "cancel":
                six.work.cancel(job.key)
            elif how == "deadline":
                six.work._expired(job)
            elif how == "older":
                newer = replace(job.request, epoch=job.key.epoch + 1, deadline_s=0.01)
                six.work.accept(job.router, replace(job.message, request=newer))
        if how == "router leaves":
            await six.cluster.router.close()
        await wait_until(lambda: not six.parked)
    for call, *_ in six.calls:
        await six.cluster.router.cancel(call)  # at both ends: prefill holds what has no token yet
    await cluster.at_rest(within_s=5)


async def test_a_drain_lets_the_parked_finish(cluster, prompt, streams, join, wait_until) -> None:
    six = streams(cluster, await join(ENGINE))
    await six.begin(prompt, "drains", [(n_tokens, 12) for n_tokens, _ in STREAMS])
    await wait_until(lambda: len(six.parked) >= 1 and six.all_arrived)
    six.work.draining = True
    refused = await cluster.local(cluster.request(prompt(20, "late")), six.number)
    assert (await refused.failure()).retryable
    await six.texts_are_those_of_streams_alone()
    await cluster.at_rest()


async def test_a_replica_that_stops_gives_the_parked_up_too(
    cluster, prompt, streams, join, wait_until
) -> None:
    """Its links end first, which is what tells routers to resume elsewhere."""
    six = streams(cluster, await join(ENGINE))
    await six.begin(prompt, "stops", STREAMS)
    await wait_until(lambda: len(six.parked) >= 2)
    work, peer = six.work, cluster.to_decode[-1]
    await six.decode.close()
    await wait_until(lambda: peer.link.closed)
    assert not work.jobs
    for call, *_ in six.calls:
        await cluster.router.cancel(call)
    del cluster.decodes[-1], cluster.to_decode[-1]
    await cluster.at_rest(within_s=5)
