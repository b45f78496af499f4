"""What was kept for a parked stream is lost or finds no room: the text stays, and rows pay for it.
Every fault is seen to have taken effect."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from headrace.core.limits import LeaseTimes
from headrace.engine import EngineSettings

MODEL = "toy"
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=20.0)}  # a loaded machine is no lost one
STREAMS = ((40, 30), (125, 12), (256, 20), (250, 9), (300, 25), (377, 16))
STORE = {"state_bytes": 65536}
ENGINE = EngineSettings(
    n_blocks=60, n_slots=2, max_rows_per_step=128, replay_rows_per_step=128, park_after_tokens=4
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def flip(store: Any, job: Any) -> None:
    """One bit of a parked state, in the memory that all processes of the host map."""
    boot, arena = store._mapped
    place = job.parked.place
    assert boot == place.store
    region, slot = arena.locate(place.offset)
    payload = arena.payload(region, slot, place.payload_bytes)
    assert xxhash.xxh3_64_intdigest(payload) == place.checksum
    payload[place.payload_bytes // 2] ^= 0x04
    assert xxhash.xxh3_64_intdigest(payload) != place.checksum


@pytest.mark.parametrize("sizes", [{}, {"n_blocks": 8, "n_slots": 6}], ids=["slots", "blocks"])
async def test_a_flipped_bit_in_a_parked_state(cluster, prompt, streams, join, sizes) -> None:
    number = await join(replace(ENGINE, **sizes)) if sizes else 0
    six = streams(cluster, number)
    await six.begin(prompt, f"flip {sizes}")
    async with six.stopped_with(1) as parked:
        for job in parked:
            flip(six.decode.store, job)
        n_flipped = len(parked)
    await six.texts_are_those_of_streams_alone()
    assert six.counted("parkings_lost") == six.counted("damaged") == n_flipped
    await cluster.at_rest()


@pytest.mark.fault
async def test_a_store_that_dies_while_streams_are_parked(
    cluster_with_store_process, prompt, streams, wait_until
) -> None:
    cluster, store = cluster_with_store_process
    six = streams(cluster)
    await six.begin(prompt, "store dies")
    async with six.stopped_with(2) as parked:
        os.kill(store.pid, signal.SIGKILL)
        assert await store.ended() == -signal.SIGKILL and not Path(f"/proc/{store.pid}").exists()
        await wait_until(lambda: not six.decode.store.connected)
        # Its memory is still mapped, and what is in it is still right: only a new one ends that.
        await store.start()
        await wait_until(lambda: six.decode.store.connected)
        n_parked = len(parked)
    await six.texts_are_those_of_streams_alone()
    assert six.counted("parkings_lost") == n_parked
    await cluster.at_rest()


@pytest.mark.fault
async def test_without_a_store_nobody_is_parked(
    cluster_with_store_process, prompt, streams, wait_until
) -> None:
    cluster, store = cluster_with_store_process
    os.kill(store.pid, signal.SIGKILL)
    assert await store.ended() == -signal.SIGKILL and not Path(f"/proc/{store.pid}").exists()
    six = streams(cluster)
    await wait_until(lambda: not six.decode.store.connected)
    await six.begin(prompt, "no store", tuple((n, more) for n, more in STREAMS if n < 128))
    more = streams(cluster)
    await more.begin(prompt, "no store either", ((30, 20), (20, 20)))
    await six.texts_are_those_of_streams_alone()
    await more.texts_are_those_of_streams_alone()
    assert six.counted("parkings") == 0 < six.counted("parkings_refused")
    await store.start()
    await wait_until(lambda: all(r.store.connected for r in (cluster.prefill, *cluster.decodes)))
    await cluster.at_rest()


@pytest.mark.fault
async def test_a_store_that_stands_still_holds_no_stream_up_for_long(
    cluster_with_store_process, prompt, streams, wait_until
) -> None:
    """Who is asked to give way goes on when the store does not answer; who waited waits on."""
    cluster, store = cluster_with_store_process
    three = streams(cluster)
    await three.begin(prompt, "store stands", ((40, 120), (100, 120)), local=True)
    jobs = three.work.jobs
    await wait_until(lambda: len(jobs) == 2)
    await wait_until(lambda: all(job.length_tokens and job.task.done() for job in jobs.values()))
    os.kill(store.pid, signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{store.pid}/stat")
        await wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")
        await three.begin(prompt, "and one that waits", ((60, 6),), local=True)
        await three.texts_are_those_of_streams_alone()
        assert three.counted("parkings") == 0 < three.counted("parkings_refused")
    finally:
        os.kill(store.pid, signal.SIGCONT)
    await wait_until(lambda: all(r.store.connected for r in (cluster.prefill, *cluster.decodes)))
    await cluster.at_rest(within_s=25)
