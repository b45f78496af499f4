"""Late binding: prefill runs first, its decode replica is chosen when it asks, and chosen anew when
that one is lost before its first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.card import Role
from headrace.core.ids import JobKey
from headrace.core.messages import JobFailed

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
LONG = [300 + i % 3000 for i in range(600)]
BODY = {"model": "scripted", "prompt": LONG, "max_tokens": 64}
SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 64}
FAILED = JobFailed(JobKey("", 0), "replica_lost", "it went wrong", True)  # type: ignore[arg-type]


def the_ticket(rig: Any) -> Any:
    (ticket,) = rig.router.desk._live.values()
    return ticket


async def test_nobody_is_bound_before_prefill_asks_and_then_by_the_loads_of_now(rigs: Any) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0) as rig:
        asks, rig.prefills[0].script.gate = rig.gate_at(0)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await rig.until(lambda: rig.prefills[0].running)
        (charged,) = rig.router.ledger._accounts["prefill-0/" + rig.prefills[0].boot].open.values()
        assert charged.tokens == 600
        assert [rig.router.ledger.own(f"{d.name}/{d.boot}") for d in rig.decodes] == [(0, 0)] * 2
        # Meanwhile one decode replica fills up; by turns it would have been as good as the other.
        for decode, tokens in zip(rig.decodes, (4000, 0), strict=True):
            decode.report(running_requests=1, free_blocks=64 - tokens // 128)
        await rig.until(lambda: rig.router.ledger.last_report(f"decode-0/{rig.decodes[0].boot}"))
        await rig.until(lambda: rig.router.ledger.last_report(f"decode-1/{rig.decodes[1].boot}"))
        assert not any(decode.jobs for decode in rig.decodes)
        asks.set()
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert [len(decode.jobs) for decode in rig.decodes] == [0, 1]
        record = rig.records()[-1]
        assert (record["prefill"], record["decode"]) == ("prefill-0", "decode-1")
        assert "prefill-0" in record["why"] and "decode-1" in record["why"]
        assert record["stages"]["bind_s"] >= 0 and record["stages"]["queue_s"] >= 0
        assert (record["attempts"], record["rebinds"], record["prefill_rows"]) == (1, 0, 600)
        assert record["bind"] == "late"
        await rig.until(rig.nothing_held)


async def test_bound_early_both_are_given_it_at_once(rigs: Any) -> None:
    async with rigs(decodes=1, prefills=1, local_prefill_rows=0, bind="early") as rig:
        asks, rig.prefills[0].script.gate = rig.gate_at(0)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await rig.until(lambda: rig.decodes[0].running and rig.prefills[0].binds)
        (prefill_job,), (decode_job,) = rig.prefills[0].jobs, rig.decodes[0].jobs
        assert decode_job.await_prefill
        assert rig.prefills[0].binds[0].decode_key == decode_job.request.key
        assert prefill_job.request.epoch + 1 == decode_job.request.epoch
        asks.set()
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        await rig.until(rig.nothing_held)


@pytest.mark.parametrize("bind", ["late", "early"])
@pytest.mark.parametrize("told", [False, True])
async def test_a_decode_lost_before_its_first_token_is_replaced_and_its_prefill_is_not(
    rigs: Any, bind: str, told: bool
) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0, bind=bind) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(0)
        prefill = rig.prefills[0]
        done, prefill.script.gate = rig.gate_at(1)
        if told:
            done.set()
        task = asyncio.create_task(rig.read_stream(BODY))
        await rig.until(lambda: any(decode.running for decode in rig.decodes))
        await rig.until(lambda: the_ticket(rig).attempt.told == told)
        victim = next(decode for decode in rig.decodes if decode.running)
        other = next(decode for decode in rig.decodes if decode is not victim)
        other.script.gate = lambda index: None
        await victim.die()
        await rig.until(lambda: len(prefill.binds) == 2)
        done.set()
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        # One job of prefill, two of decode, each under an epoch of its own.
        (job,) = prefill.jobs
        assert not prefill.cancels
        epochs = [victim.jobs[0].request.epoch, other.jobs[0].request.epoch]
        assert [job.request.epoch, *epochs] == [0, 1, 2]
        assert [bind.decode_epoch for bind in prefill.binds] == [1, 2]
        assert other.jobs[0].await_prefill and other.jobs[0].prefill_name == prefill.name
        record = rig.records()[-1]
        assert (record["attempts"], record["rebinds"], record["resumes"]) == (2, 1, 0)
        assert record["bind"] == bind
        assert record["prefill_rows"] == 600 and record["decode"] == other.name
        await rig.until(lambda: not prefill.running)
        await rig.until(rig.nothing_held)


async def test_a_decode_that_refuses_is_replaced_and_retries_are_limited(rigs: Any) -> None:
    async with rigs(decodes=4, prefills=1, local_prefill_rows=0, retries=2) as rig:
        for decode in rig.decodes:
            decode.script.fail = FAILED
        answer = await rig.client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["message"]) == (502, "it went wrong")
        assert sorted(len(decode.jobs) for decode in rig.decodes) == [0, 1, 1, 1]
        assert len(rig.prefills[0].jobs) == 1
        assert rig.records()[-1]["rebinds"] == 2
        # The last refusal was no decode's word to prefill: it is told to let go.
        await rig.until(lambda: rig.prefills[0].cancels and not rig.prefills[0].running)
        await rig.until(rig.nothing_held)


async def test_prefill_tells_that_it_cannot_reach_the_one_it_is_bound_to(rigs: Any) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0) as rig:
        prefill = rig.prefills[0]
        done, prefill.script.gate = rig.gate_at(1)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await rig.until(lambda: prefill.binds and any(decode.jobs for decode in rig.decodes))
        first = next(decode for decode in rig.decodes if decode.jobs)
        (peer,) = prefill.server.routers()
        lost = JobFailed(prefill.binds[0].decode_key, "replica_lost", "cannot be reached", True)
        peer.post(lost)
        peer.post(lost)
        await rig.until(lambda: len(prefill.binds) == 2)
        peer.post(lost)  # names a bind that is over
        await rig.until(lambda: rig.router.desk.late["job_failed"] == 1)
        await rig.until(lambda: first.cancels)
        assert [cancel.key for cancel in first.cancels] == [first.jobs[0].request.key]
        done.set()
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert (len(prefill.jobs), len(prefill.binds)) == (1, 2)
        await rig.until(rig.nothing_held)


async def test_both_lost_at_once_is_one_further_attempt(rigs: Any) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(0)
        prefill = rig.prefills[0]
        _, prefill.script.gate = rig.gate_at(1)
        task = asyncio.create_task(rig.read_stream(BODY))
        await rig.until(lambda: any(decode.running for decode in rig.decodes))
        victim = next(decode for decode in rig.decodes if decode.running)
        other = next(decode for decode in rig.decodes if decode is not victim)
        other.script.gate = lambda index: None
        await asyncio.gather(victim.die(), prefill.die())
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        assert not other.jobs[-1].await_prefill
        await rig.until(rig.nothing_held)


async def test_a_prefill_lost_while_its_request_waits_for_decode_begins_again(rigs: Any) -> None:
    async with rigs(prefills=1, local_prefill_rows=0, queue_ahead=0) as rig:
        (decode,), (prefill,) = rig.decodes, rig.prefills
        frees, decode.script.gate = rig.gate_at(0)
        fillers = [
            asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
            for _ in range(decode.n_slots)
        ]
        await rig.until(lambda: len(decode.running) == decode.n_slots)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await rig.until(lambda: rig.router.desk.waiting_requests == 1)
        assert the_state(rig, 600) == "binding"
        await prefill.die()
        await rig.until(lambda: the_state(rig, 600) == "accepted")
        frees.set()
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        for filler in fillers:
            await filler
        await rig.until(rig.nothing_held)


def the_state(rig: Any, n_tokens: int) -> str:
    found = [t for t in rig.router.desk._live.values() if t._base.n_tokens == n_tokens]
    return str(found[0].state) if found else ""


async def test_who_has_begun_is_bound_before_who_has_not(rigs: Any) -> None:
    async with rigs(prefills=1, local_prefill_rows=0, queue_ahead=0) as rig:
        (decode,), (prefill,) = rig.decodes, rig.prefills
        decode.n_slots = 1
        await decode.announce()
        await rig.until(lambda: rig.router.replicas.routable(Role.DECODE)[0].member.n_slots == 1)
        frees, decode.script.gate = rig.gate_at(0)
        asks, prefill.script.gate = rig.gate_at(0)
        post = rig.client.post
        filler = asyncio.create_task(post("/v1/completions", json=SHORT))
        await rig.until(lambda: decode.running)
        begun = asyncio.create_task(post("/v1/completions", json=BODY))
        await rig.until(lambda: prefill.running)
        waits = asyncio.create_task(post("/v1/completions", json=SHORT))
        await rig.until(lambda: rig.router.desk.waiting_requests == 1)
        asks.set()
        await rig.until(lambda: rig.router.desk.waiting_requests == 2)
        frees.set()
        for task in (filler, begun, waits):
            assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert [job.request.n_tokens for job in decode.jobs][1] == 600
        await rig.until(rig.nothing_held)


async def test_a_full_prefill_pool_makes_wait_and_does_not_keep_others_from_decode(
    rigs: Any,
) -> None:
    async with rigs(prefills=1, local_prefill_rows=0, queue_ahead=0) as rig:
        (prefill,) = rig.prefills
        asks, prefill.script.gate = rig.gate_at(0)
        tasks = [
            asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
            for _ in range(prefill.n_slots + 1)
        ]
        await rig.until(lambda: rig.router.desk.waiting_requests == 1)
        await rig.until(lambda: len(prefill.jobs) == prefill.n_slots)
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.json()["choices"][0]["text"] == REFERENCE
        asks.set()
        for task in tasks:
            assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert len(prefill.jobs) == prefill.n_slots + 1
        await rig.until(rig.nothing_held)


async def test_equal_replicas_are_bound_in_turn(rigs: Any) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0) as rig:
        for _ in range(4):
            assert (await rig.client.post("/v1/completions", json=BODY)).status_code == 200
        assert [len(decode.jobs) for decode in rig.decodes] == [2, 2]
