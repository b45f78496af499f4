"""Processes that die or stop in the middle of a hand-off, and a request lost twice: the right
text under another attempt, or one explicit failure, and everything held comes back. Every fault is
seen to have taken effect."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace.core import faults
from headrace.core.ids import new_request_id
from headrace.core.rows import floor_grain, plan_resume
from headrace.prefill.jobs import JobState

MODEL = "toy"
PROCESSES = {
    "prefill-5": ("prefill", "prefill.chunk=exit@3"),
    "decode-5": ("decode", "decode.first_token=exit"),
    "decode-6": ("decode", ""),
}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]

LONG = "the same in several domains"  # a prompt


async def until(condition, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


async def test_a_prefill_that_dies_in_the_middle(cluster, yardstick, prompt, processes) -> None:
    process = processes["prefill-5"]
    to_prefill = await cluster.router.connect(process.address)
    ids = prompt(1500, LONG)
    request = cluster.request(ids, domain="prefill dies")
    first = await cluster.router.send(
        request,
        cluster.to_decode[0],
        to_prefill,
        decode_address=cluster.decodes[0].shell.address,
        bind="early",
    )
    failed = await first.failure()
    assert await process.ended() == 137 and gone(process.pid)
    assert (failed.code, failed.retryable) == ("replica_lost", True)
    await until(lambda: to_prefill.link.closed)

    second = await cluster.handoff(
        cluster.request(ids, epoch=1, request_id=request.request_id, domain="prefill dies"),
        decode=1,
    )
    assert await second.result() == await yardstick.text(ids, 8)
    # What the dead one had sealed is found by the next attempt.
    assert 0 < second.prefilled.hit_tokens < floor_grain(1500)
    assert second.prefilled.encoder_rows < floor_grain(1500)
    # Leases of the first attempt: decode ended them, or they expire.
    await cluster.at_rest(within_s=6)


async def test_a_decode_that_dies_before_its_first_token(
    cluster, yardstick, prompt, processes
) -> None:
    process, prefill = processes["decode-5"], cluster.prefill
    to_decode = await cluster.router.connect(process.address)
    ids = prompt(1000, "decode dies")
    before = prefill.driver.stats.encoder_rows_total
    first = await cluster.router.send(
        cluster.request(ids), to_decode, cluster.to_prefill, decode_address=process.address
    )
    assert await process.ended() == 137 and gone(process.pid)
    await until(lambda: to_decode.link.closed)
    assert not first.token_ids and first.finish is None
    # Prefill had done its part. It holds the product for another one, and asks for that one.
    assert first.prefilled is not None
    assert prefill.work.jobs[first.prefill_key].state is JobState.HELD
    assert (await first.failure()).retryable
    await until(lambda: len(first.progress) >= 2)

    second = await cluster.rebind(first)
    assert await second.result() == await yardstick.text(ids, 8)
    # Bound anew, not prefilled anew: its rows ran once, and decode's are those of a whole hand-off.
    assert prefill.driver.stats.encoder_rows_total == before + floor_grain(1000)
    assert second.prefilled.encoder_rows == floor_grain(1000)
    assert second.times.hit_tokens == floor_grain(1000)
    assert second.times.encoder_rows <= cluster.keep_tokens + 127
    await cluster.at_rest(within_s=7)  # the dead one's lease of the record expires after 5 s


async def test_a_decode_that_dies_under_a_running_prefill_is_replaced(
    cluster, yardstick, prompt, processes
) -> None:
    process, prefill = processes["decode-6"], cluster.prefill
    to_decode = await cluster.router.connect(process.address)
    ids = prompt(1900, "receiver dies")
    before = prefill.driver.stats.encoder_rows_total
    call = await cluster.router.send(
        cluster.request(ids),
        to_decode,
        cluster.to_prefill,
        decode_address=process.address,
        bind="early",
    )
    await until(lambda: prefill.driver.stats.encoder_rows_total >= before + 256)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.ended() == -signal.SIGKILL and gone(process.pid)
    failed = await call.failure(within_s=2)
    assert (failed.code, failed.retryable) == ("replica_lost", True)
    assert failed.key == call.key  # the bind failed, not the prefill
    assert prefill.work.jobs[call.prefill_key].state is JobState.RUNNING
    other = await cluster.rebind(call)
    assert await other.result() == await yardstick.text(ids, 8)
    assert prefill.driver.stats.encoder_rows_total == before + floor_grain(1900)
    assert other.prefilled.encoder_rows == other.times.hit_tokens == floor_grain(1900)
    await cluster.at_rest()


async def test_a_second_loss_is_resumed_too_and_by_hand_off(cluster, yardstick, prompt) -> None:
    """More was generated than keep and than the decoder's reach, so D lies above F; the last
    attempt gets the prompt's blocks from a prefill replica."""
    ids, n_more, given = prompt(300, "long answer"), 76, 71
    text = await yardstick.text(ids, n_more)
    reach = 32 + 31
    assert given > reach > cluster.keep_tokens
    request_id, got = new_request_id(), list(text[:given])
    faults.arm("decode.token=raise@2")
    request = cluster.request(ids, n_more, epoch=1, request_id=request_id)
    call = await cluster.local(request, decode=0, generated=got)
    await call.failure()
    assert faults.fired("decode.token") == 1
    got += call.token_ids
    assert tuple(got) == text[: given + 2]
    request = cluster.request(ids, n_more, epoch=2, request_id=request_id)
    call = await cluster.handoff(request, decode=1, generated=got)
    assert await call.result() == text[given + 2 :]
    plan = plan_resume(302 + given, 256, 300 - cluster.keep_tokens, (256,), yardstick.geometry)
    assert plan.decoder_start == 302 + given - reach
    assert call.times.decoder_rows == plan.decoder_rows == reach
    await cluster.at_rest()


async def test_redis_stopped_during_a_handoff_changes_nothing(
    cluster, yardstick, prompt, valkey
) -> None:
    ids = prompt(1500, LONG)
    before = cluster.prefill.driver.stats.encoder_rows_total
    valkey.process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: state(valkey.process.pid) == "T")
        call = await cluster.handoff(cluster.request(ids, domain="redis stops"))
        assert await call.result() == await yardstick.text(ids, 8)
        assert state(valkey.process.pid) == "T"
    finally:
        valkey.process.send_signal(signal.SIGCONT)
    assert call.prefilled.encoder_rows == floor_grain(1500)
    assert cluster.prefill.driver.stats.encoder_rows_total == before + floor_grain(1500)
    assert call.times.encoder_rows <= max(1500 - call.times.hit_tokens, cluster.keep_tokens + 127)
    await cluster.at_rest()


@pytest.mark.parametrize(
    "rows_before", [384, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1280))]
)
async def test_a_store_that_dies_in_the_middle(
    cluster_with_store_process, yardstick, prompt, rows_before: int
) -> None:
    cluster, store = cluster_with_store_process
    ids, domain = prompt(1500, LONG), f"store dies {rows_before}"
    before = cluster.prefill.driver.stats.encoder_rows_total
    call = await cluster.handoff(cluster.request(ids, domain=domain))
    await until(lambda: cluster.prefill.driver.stats.encoder_rows_total >= before + rows_before)
    os.kill(store.pid, signal.SIGKILL)
    assert await store.ended() == -signal.SIGKILL and gone(store.pid)
    await asyncio.wait_for(call.ended.wait(), 60)
    if call.failures:
        assert call.failures[0].retryable and not call.token_ids
    else:
        assert tuple(call.token_ids) == await yardstick.text(ids, 8)
    await until(lambda: not cluster.prefill.store.connected)
    await cluster.at_rest()
    # Serving goes on without a store, and with the next one.
    again = await cluster.handoff(cluster.request(ids, domain=domain))
    assert await again.result() == await yardstick.text(ids, 8)
    await store.start()
    await until(lambda: all(r.store.connected for r in (cluster.prefill, *cluster.decodes)))
    ids = prompt(500, f"store is back {rows_before}")
    last = await cluster.handoff(cluster.request(ids))
    assert await last.result() == await yardstick.text(ids, 8)
    assert last.times.hit_tokens == 384
    await cluster.at_rest()
