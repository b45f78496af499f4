"""One terminal event a request: retries, lost replicas, late words, clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from headrace.core.card import Role
from headrace.core.ids import JobKey
from headrace.core.limits import EdgeLimits
from headrace.core.messages import JobFailed, PrefillDone, PrefillJob, TokenItem
from headrace.core.request import FinishReason

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
LONG = [300 + i % 3000 for i in range(600)]
SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 64}
FAILED = JobFailed(JobKey("", 0), "replica_lost", "it went wrong", True)  # type: ignore[arg-type]


def long_body(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": LONG, "max_tokens": 64} | more


def gate_at(index: int) -> tuple[asyncio.Event, Any]:
    event = asyncio.Event()
    return event, lambda i: event if i >= index else None


def texts(lines: list[str]) -> tuple[str, list[Any]]:
    """Text of a completion stream, and everything that is not text."""
    text, rest = "", []
    for line in lines:
        if not line:
            continue
        data = line.removeprefix("data: ")
        value = data if not data.startswith("{") else json.loads(data)
        if isinstance(value, dict) and "choices" in value:
            text += value["choices"][0]["text"]
            if value["choices"][0]["finish_reason"]:
                rest.append(value["choices"][0]["finish_reason"])
        else:
            rest.append(value)
    return text, rest


async def read_stream(rig: Any, body: dict[str, Any]) -> tuple[str, list[Any]]:
    async with rig.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        return texts([line async for line in answer.aiter_lines()])


async def test_a_long_prompt_goes_through_prefill(rigs: Any) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0) as rig:
        rig.prefills[0].script.hit_tokens = 128
        answer = (await rig.client.post("/v1/completions", json=long_body())).json()
        assert answer["choices"][0]["text"] == REFERENCE
        (prefill_job,) = rig.prefills[0].jobs
        (decode_job,) = rig.decodes[0].jobs + rig.decodes[1].jobs
        assert decode_job.await_prefill and decode_job.prefill_name == "prefill-0"
        assert prefill_job.request.key == decode_job.request.key
        chosen = next(d for d in rig.decodes if d.jobs)
        assert prefill_job.decode_address == chosen.address
        assert prefill_job.decode_name == chosen.name
        # What prefill found stored is cached; what it has just computed is not.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        record = rig.records()[-1]
        assert record["prefill_rows"] == 600 - 128 and record["prefill"] == "prefill-0"
        assert record["prefill_hit_tokens"] == 128 and record["cached_tokens"] == 128
        await rig.until(rig.nothing_held)


async def test_without_a_prefill_replica_decode_does_all(rigs: Any) -> None:
    async with rigs(local_prefill_rows=0) as rig:
        rig.decodes[0].script.hit_tokens = 256
        answer = (await rig.client.post("/v1/completions", json=long_body())).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
        assert not rig.decodes[0].jobs[0].await_prefill
        assert "no prefill replica" in rig.records()[-1]["why"]


async def test_a_lost_prefill_begins_again_under_a_new_epoch(rigs: Any) -> None:
    async with rigs(decodes=1, prefills=1, local_prefill_rows=0) as rig:
        event, rig.prefills[0].script.gate = gate_at(0)
        task = asyncio.create_task(read_stream(rig, long_body()))
        await rig.until(lambda: rig.prefills[0].running and rig.decodes[0].running)
        await rig.prefills[0].die()
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        first, second = rig.decodes[0].jobs
        assert first.request.request_id == second.request.request_id
        assert (first.request.epoch, second.request.epoch) == (0, 1)
        assert first.await_prefill and not second.await_prefill
        assert [cancel.key for cancel in rig.decodes[0].cancels] == [first.request.key]
        assert rig.records()[-1]["attempts"] == 2
        await rig.until(rig.nothing_held)


async def test_a_prefill_that_gives_up_is_replaced_by_another(rigs: Any) -> None:
    async with rigs(decodes=1, prefills=2, local_prefill_rows=0) as rig:
        for prefill in rig.prefills:
            prefill.script.fail = FAILED
        task = asyncio.create_task(read_stream(rig, long_body()))
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        # Each was asked once, then decode did it alone.
        assert [len(prefill.jobs) for prefill in rig.prefills] == [1, 1]
        assert [job.await_prefill for job in rig.decodes[0].jobs] == [True, True, False]
        await rig.until(rig.nothing_held)


async def test_a_decode_lost_before_the_first_byte_is_replaced(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        events = [gate_at(0) for _ in rig.decodes]
        for decode, (_, gate) in zip(rig.decodes, events, strict=True):
            decode.script.gate = gate
        task = asyncio.create_task(read_stream(rig, SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        victim = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not victim)
        await victim.die()
        await rig.until(lambda: other.jobs)
        for event, _ in events:
            event.set()
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        assert other.jobs[0].request.epoch == 1
        # The draw of a position depends on the seed alone, so it must travel unchanged.
        assert other.jobs[0].request.sampling == victim.jobs[0].request.sampling


async def test_a_decode_lost_after_the_first_byte_is_one_error_event(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = gate_at(3)
        body = SHORT | {"stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            got = [await anext(lines)]
            victim = next(d for d in rig.decodes if d.running)
            await victim.die()
            got += [line async for line in lines]
        text, rest = texts(got)
        assert REFERENCE.startswith(text) and text
        (error,) = rest  # no finish, no [DONE]
        assert error["error"]["code"] == "replica_lost"
        assert error["error"]["type"] == "replica_error"
        assert sum(len(d.jobs) for d in rig.decodes) == 1
        assert rig.records()[-1]["finish"] == "replica_lost"
        await rig.until(rig.nothing_held)


async def test_a_plain_answer_survives_a_decode_lost_in_the_middle(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = gate_at(3)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        victim = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not victim)
        other.script.gate = lambda index: None
        await asyncio.sleep(0.05)  # some tokens are there
        await victim.die()
        answer = await task
        assert answer.json()["choices"][0]["text"] == REFERENCE
        assert answer.json()["usage"]["completion_tokens"] == len(rig.reference_ids)


async def test_the_only_decode_lost_is_an_early_503(rigs: Any) -> None:
    async with rigs() as rig:
        _, rig.decodes[0].script.gate = gate_at(0)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: rig.decodes[0].running)
        await rig.decodes[0].die()
        answer = await task
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_replica"
        await rig.until(rig.nothing_held)
        assert (await rig.client.get("/ready")).status_code == 503
        await rig.add(Role.DECODE, "decode-1")
        await rig.until_routable(1, 0)
        assert (await rig.client.get("/ready")).status_code == 200
        await rig.pulse()


async def test_attempts_are_limited(rigs: Any) -> None:
    async with rigs(decodes=4, retries=2) as rig:
        for decode in rig.decodes:
            decode.script.fail = FAILED
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 502
        assert answer.json()["error"]["message"] == "it went wrong"
        assert sum(len(d.jobs) for d in rig.decodes) == 3
        assert max(len(d.jobs) for d in rig.decodes) == 1
        assert rig.records()[-1]["attempts"] == 3
        await rig.until(rig.nothing_held)


async def test_the_retry_budget_ends_a_storm(rigs: Any) -> None:
    async with rigs(decodes=2, retries=1, retry_share=0.1) as rig:
        for decode in rig.decodes:
            decode.script.fail = FAILED
        for _ in range(20):
            answer = await rig.client.post("/v1/completions", json=SHORT)
            assert answer.status_code == 502
        # 10 to begin with, and one for every ten requests.
        assert sum(len(d.jobs) for d in rig.decodes) in (31, 32)
        assert rig.router.desk.retried in (11, 12)


async def test_a_final_failure_is_not_repeated(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        key = JobKey("", 0)  # type: ignore[arg-type]
        for decode in rig.decodes:
            decode.script.fail = JobFailed(key, "invalid_value", "no such thing", False)
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "no such thing"
        assert sum(len(d.jobs) for d in rig.decodes) == 1


async def test_late_duplicate_and_strange_tokens_are_ignored_and_counted(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        events = [gate_at(4) for _ in rig.decodes]
        for decode, (_, gate) in zip(rig.decodes, events, strict=True):
            decode.script.gate = gate
        body = SHORT | {"stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            got = [await anext(lines)]
            owner = next(d for d in rig.decodes if d.running)
            other = next(d for d in rig.decodes if d is not owner)
            key = owner.jobs[0].request.key
            late = rig.router.desk.late
            ids = tuple(rig.reference_ids)
            owner.say(TokenItem(key, 0, ids[:2], None, None))  # seen before
            owner.say(TokenItem(JobKey(key.request_id, key.epoch - 1), 0, (5, 5), None, None))
            owner.say(TokenItem(JobKey(key.request_id, 7), 0, (5, 5), None, None))
            owner.say(TokenItem(JobKey("nobody", 0), 0, (5,), None, None))  # type: ignore[arg-type]
            other.say(TokenItem(key, 4, (5, 5), FinishReason.STOP, None))  # not its request
            await rig.until(lambda: late["tokens"] == 5)
            owner.say(TokenItem(key, 2, ids[2:5], None, None))  # one new one among old ones
            for event, _ in events:
                event.set()
            got += [line async for line in lines]
        assert texts(got) == (REFERENCE, ["stop", "[DONE]"])
        before = late["tokens"]
        owner.say(TokenItem(key, 99, (5,), None, None))  # after the end
        owner.say(TokenItem(key, 99, (), FinishReason.STOP, None))
        await rig.until(lambda: late["tokens"] == before + 2)
        await rig.pulse()


async def test_a_gap_in_the_tokens_is_another_attempt(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        _, gate = gate_at(0)
        for decode in rig.decodes:
            decode.script.gate = gate
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        owner = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not owner)
        other.script.gate = lambda index: None
        owner.say(TokenItem(owner.jobs[0].request.key, 3, (5, 6), None, None))
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert len(owner.cancels) == 1


async def test_old_reports_of_prefill_are_ignored_and_counted(rigs: Any) -> None:
    async with rigs(prefills=1, local_prefill_rows=0) as rig:
        event, rig.decodes[0].script.gate = gate_at(0)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=long_body()))
        await rig.until(lambda: rig.decodes[0].running and rig.prefills[0].jobs)
        key = rig.prefills[0].jobs[0].request.key
        await rig.until(lambda: not rig.prefills[0].running)
        (peer,) = rig.prefills[0].server.routers()
        late = rig.router.desk.late
        peer.post(PrefillDone(key, 1, 2, 0.0))  # twice
        peer.post(PrefillDone(JobKey(key.request_id, 9), 1, 2, 0.0))
        peer.post(JobFailed(key, "replica_lost", "after being done", True))
        peer.post(JobFailed(JobKey(key.request_id, 9), "replica_lost", "other epoch", True))
        await rig.until(lambda: (late["prefill_done"], late["job_failed"]) == (2, 2))
        event.set()
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert rig.records()[-1]["prefill_rows"] == 600
        assert rig.records()[-1]["attempts"] == 1


STAGES = ("queued", "prefilling", "waiting for decode", "mid decode")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_is_cancelled_everywhere(
    rigs: Any, stage: str, streamed: bool
) -> None:
    prefills = 1 if stage == "prefilling" else 0
    slots = {"queue_ahead": 0} if stage == "queued" else {}
    async with rigs(prefills=prefills, local_prefill_rows=0, **slots) as rig:
        decode = rig.decodes[0]
        _, decode.script.gate = gate_at(3 if stage == "mid decode" else 0)
        fillers: list[asyncio.Task[Any]] = []
        if stage == "queued":
            for _ in range(decode.n_slots):
                fillers.append(asyncio.create_task(rig.client.post("/v1/completions", json=SHORT)))
            await rig.until(lambda: len(decode.running) == decode.n_slots)
        if stage == "prefilling":
            _, rig.prefills[0].script.gate = gate_at(0)
        body = long_body(stream=streamed)
        async with rig.new_client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            if stage == "queued":
                await rig.until(lambda: rig.router.desk.waiting_requests == 1)
            else:
                await rig.until(lambda: decode.running)
            if stage == "mid decode":
                await asyncio.sleep(0.05)
            if stage == "prefilling":
                await rig.until(lambda: rig.prefills[0].running)
            task.cancel()
        for filler in fillers:
            filler.cancel()
        await rig.until(rig.nothing_held, 1.0)
        await rig.until(lambda: not decode.running)
        ended = [record["finish"] for record in rig.records()]
        assert ended == ["cancelled"] * (1 + len(fillers))
        if stage == "queued":  # it was never given to anybody
            assert len(decode.cancels) == len(decode.jobs) == len(fillers)
            return
        key = decode.jobs[0].request.key
        assert [cancel.key for cancel in decode.cancels] == [key]
        if stage == "prefilling":
            assert isinstance(rig.prefills[0].jobs[0], PrefillJob)
            assert [cancel.key for cancel in rig.prefills[0].cancels] == [key]
            assert not rig.prefills[0].running


async def test_the_deadline_is_a_504_or_an_error_event(rigs: Any) -> None:
    async with rigs(edge=EdgeLimits(request_deadline_s=0.3)) as rig:
        decode = rig.decodes[0]
        _, decode.script.gate = gate_at(0)
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        answer = await rig.client.post("/v1/completions", json=SHORT | {"stream": True})
        assert answer.status_code == 504  # nothing was streamed yet
        _, decode.script.gate = gate_at(2)
        _, rest = await read_stream(rig, SHORT)
        (error,) = rest
        assert error["error"]["code"] == "deadline_exceeded"
        assert len(decode.cancels) == 3 and not decode.running
        assert 0 < decode.jobs[0].request.deadline_s <= 0.3
        await rig.until(rig.nothing_held)


async def test_a_stop_string_ends_the_job(rigs: Any) -> None:
    async with rigs() as rig:
        _, rig.decodes[0].script.gate = gate_at(len(rig.reference_ids) - 1)
        for streamed in (False, True):
            body = SHORT | {"stop": [" mill", "nothing"], "stream": streamed}
            if streamed:
                assert await read_stream(rig, body) == ("The river runs to the", ["stop", "[DONE]"])
            else:
                answer = (await rig.client.post("/v1/completions", json=body)).json()
                assert answer["choices"][0]["text"] == "The river runs to the"
                assert answer["choices"][0]["finish_reason"] == "stop"
        await rig.until(lambda: len(rig.decodes[0].cancels) == 2)
        assert not rig.decodes[0].running
        assert [record["finish"] for record in rig.records()] == ["stop", "stop"]
        await rig.until(rig.nothing_held)


async def test_a_silent_stream_is_kept_alive_and_may_still_be_retried(rigs: Any) -> None:
    async with rigs(decodes=2, keepalive_s=0.05) as rig:
        _, gate = gate_at(0)
        for decode in rig.decodes:
            decode.script.gate = gate
        body = SHORT | {"stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keepalive"
            owner = next(d for d in rig.decodes if d.running)
            for decode in rig.decodes:
                decode.script.gate = lambda index: None
            await owner.die()
            got = [line async for line in lines]
        kept = [line for line in got if not line.startswith(":")]
        assert texts(kept) == (REFERENCE, ["stop", "[DONE]"])


async def test_max_tokens_ends_with_length(rigs: Any) -> None:
    async with rigs() as rig:
        answer = (await rig.client.post("/v1/completions", json=SHORT | {"max_tokens": 3})).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
        without = {"model": "scripted", "prompt": "x"}
        await rig.client.post("/v1/completions", json=without)
        assert rig.decodes[0].jobs[-1].request.max_tokens == 256


async def test_full_replicas_make_a_line_and_a_full_line_an_early_429(rigs: Any) -> None:
    edge = EdgeLimits(queued_requests=2)
    async with rigs(edge=edge, queue_ahead=0) as rig:
        event, rig.decodes[0].script.gate = gate_at(0)
        tasks = [
            asyncio.create_task(rig.client.post("/v1/completions", json=SHORT)) for _ in range(10)
        ]
        await rig.until(lambda: rig.router.desk.waiting_requests == 2)
        await rig.until(lambda: len(rig.decodes[0].running) == rig.decodes[0].n_slots)
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert "queued_requests is limited to 2" in answer.json()["error"]["message"]
        event.set()
        assert [(await task).status_code for task in tasks] == [200] * 10
        await rig.until(rig.nothing_held)


async def test_open_requests_are_bounded(rigs: Any) -> None:
    async with rigs(open_requests=2) as rig:
        event, rig.decodes[0].script.gate = gate_at(0)
        tasks = [
            asyncio.create_task(rig.client.post("/v1/completions", json=SHORT)) for _ in range(2)
        ]
        await rig.until(lambda: len(rig.decodes[0].running) == 2)
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 429
        assert "open_requests is limited to 2" in answer.json()["error"]["message"]
        event.set()
        assert [(await task).status_code for task in tasks] == [200, 200]


async def test_a_stop_lets_streams_finish_and_takes_nothing_new(rigs: Any) -> None:
    async with rigs(drain_s=5.0) as rig:
        event, rig.decodes[0].script.gate = gate_at(2)
        task = asyncio.create_task(read_stream(rig, SHORT))
        await rig.until(lambda: rig.decodes[0].running)
        await asyncio.sleep(0.05)
        async with rig.new_client() as client:
            assert (await client.get("/ready")).status_code == 200
            rig.stop_router()
            await rig.until(lambda: rig.router.desk.draining)
            assert (await client.get("/ready")).status_code == 503
            refused = await client.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503 and "retry-after" in refused.headers
        event.set()
        assert await task == (REFERENCE, ["stop", "[DONE]"])


async def test_a_stop_ends_what_does_not_finish_in_time_with_an_error(rigs: Any) -> None:
    async with rigs(drain_s=0.1) as rig:
        _, rig.decodes[0].script.gate = gate_at(2)
        task = asyncio.create_task(read_stream(rig, SHORT))
        await rig.until(lambda: rig.decodes[0].running)
        await asyncio.sleep(0.05)
        rig.stop_router()
        text, rest = await task
        assert REFERENCE.startswith(text)
        assert [event["error"]["code"] for event in rest] == ["no_replica"]
        assert len(rig.decodes[0].cancels) == 1


async def test_nobody_answers_without_a_decode_replica(rigs: Any) -> None:
    async with rigs(decodes=0, prefills=1) as rig:
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        ready = await rig.client.get("/ready")
        assert ready.status_code == 503 and ready.json()["replicas"]["decode"] == 0
        assert isinstance(answer, httpx.Response)
