"""One terminal event a request: retries, lost replicas, late words, clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.core.card import Role
from headrace.core.ids import JobKey
from headrace.core.messages import JobFailed, PrefillDone, PrefillProgress, TokenItem
from headrace.core.request import FinishReason

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
LONG = [300 + i % 3000 for i in range(600)]
SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 64}
FAILED = JobFailed(JobKey("", 0), "replica_lost", "it went wrong", True)  # type: ignore[arg-type]


def long_body(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": LONG, "max_tokens": 64} | more


async def test_a_long_prompt_goes_through_prefill(rigs: Any) -> None:
    async with rigs(decodes=2, prefills=1, local_prefill_rows=0) as rig:
        rig.prefills[0].script.hit_tokens = 128
        answer = (await rig.client.post("/v1/completions", json=long_body())).json()
        assert answer["choices"][0]["text"] == REFERENCE
        (prefill_job,) = rig.prefills[0].jobs
        (decode_job,) = rig.decodes[0].jobs + rig.decodes[1].jobs
        assert decode_job.await_prefill and decode_job.prefill_name == "prefill-0"
        # Each end has an epoch of its own; the bind names both.
        assert (prefill_job.request.epoch, decode_job.request.epoch) == (0, 1)
        (bind,) = rig.prefills[0].binds
        assert (bind.key, bind.decode_key) == (prefill_job.request.key, decode_job.request.key)
        chosen = next(d for d in rig.decodes if d.jobs)
        assert (bind.decode_address, bind.decode_name) == (chosen.address, chosen.name)
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
        event, rig.prefills[0].script.gate = rig.gate_at(1)
        task = asyncio.create_task(rig.read_stream(long_body()))
        await rig.until(lambda: rig.prefills[0].running and rig.decodes[0].running)
        await rig.prefills[0].die()
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        first, second = rig.decodes[0].jobs
        assert first.request.request_id == second.request.request_id
        assert (first.request.epoch, second.request.epoch) == (1, 2)
        assert first.await_prefill and not second.await_prefill
        assert [cancel.key for cancel in rig.decodes[0].cancels] == [first.request.key]
        assert rig.records()[-1]["attempts"] == 2
        await rig.until(rig.nothing_held)


async def test_a_prefill_that_gives_up_is_replaced_by_another(rigs: Any) -> None:
    async with rigs(decodes=1, prefills=2, local_prefill_rows=0) as rig:
        for prefill in rig.prefills:
            prefill.script.fail = FAILED
        task = asyncio.create_task(rig.read_stream(long_body()))
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        # Each was asked once, then decode did it alone.
        assert [len(prefill.jobs) for prefill in rig.prefills] == [1, 1]
        assert [job.await_prefill for job in rig.decodes[0].jobs] == [False]
        await rig.until(rig.nothing_held)


async def test_a_decode_lost_before_the_first_byte_is_replaced(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        events = [rig.gate_at(0) for _ in rig.decodes]
        for decode, (_, gate) in zip(rig.decodes, events, strict=True):
            decode.script.gate = gate
        task = asyncio.create_task(rig.read_stream(SHORT))
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


async def test_without_resume_a_decode_lost_after_the_first_byte_is_one_error_event(
    rigs: Any,
) -> None:
    async with rigs(decodes=2, resumes=0) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(3)
        body = SHORT | {"stream": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            got = [await anext(lines)]
            victim = next(d for d in rig.decodes if d.running)
            await victim.die()
            got += [line async for line in lines]
        text, rest = rig.texts(got)
        assert REFERENCE.startswith(text) and text
        (error,) = rest  # no finish, no [DONE]
        assert error["error"]["code"] == "replica_lost"
        assert error["error"]["type"] == "replica_error"
        assert sum(len(d.jobs) for d in rig.decodes) == 1
        assert rig.records()[-1]["finish"] == "replica_lost"
        await rig.until(rig.nothing_held)


async def test_without_resume_a_plain_answer_begins_again(rigs: Any) -> None:
    async with rigs(decodes=2, resumes=0) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(3)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        victim = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not victim)
        other.script.gate = lambda index: None
        (ticket,) = rig.router.desk._live.values()
        await rig.until(lambda: len(ticket._received) == 3)
        await victim.die()
        answer = await task
        assert answer.json()["choices"][0]["text"] == REFERENCE
        assert answer.json()["usage"]["completion_tokens"] == len(rig.reference_ids)


async def test_the_only_decode_lost_is_a_503_where_nothing_waits_for_it(rigs: Any) -> None:
    async with rigs(resume_wait_s=0) as rig:
        _, rig.decodes[0].script.gate = rig.gate_at(0)
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
        codes = []
        for _ in range(20):
            answer = await rig.client.post("/v1/completions", json=SHORT)
            codes.append((answer.status_code, answer.json()["error"]["code"]))
        n_retried = rig.router.desk.retried  # both attempts of these failed; the rest had one
        assert codes.count((502, "replica_lost")) == n_retried
        assert codes.count((503, "retry_budget_spent")) == 20 - n_retried
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
        events = [rig.gate_at(4) for _ in rig.decodes]
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
        assert rig.texts(got) == (REFERENCE, ["stop", "[DONE]"])
        before = late["tokens"]
        owner.say(TokenItem(key, 99, (5,), None, None))  # after the end
        owner.say(TokenItem(key, 99, (), FinishReason.STOP, None))
        await rig.until(lambda: late["tokens"] == before + 2)
        await rig.pulse()


async def test_a_gap_in_the_tokens_is_another_attempt(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        _, gate = rig.gate_at(0)
        for decode in rig.decodes:
            decode.script.gate = gate
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        owner = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not owner)
        other.script.gate = lambda index: None
        owner.say(TokenItem(owner.jobs[0].request.key, 3, (5, 6), None, None))
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        await rig.until(lambda: len(owner.cancels) == 1)


async def test_old_words_of_prefill_are_ignored_and_counted(rigs: Any) -> None:
    async with rigs(prefills=1, local_prefill_rows=0) as rig:
        event, rig.decodes[0].script.gate = rig.gate_at(0)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=long_body()))
        await rig.until(lambda: rig.decodes[0].running and rig.prefills[0].jobs)
        key, bound = rig.prefills[0].jobs[0].request.key, rig.decodes[0].jobs[0].request.key
        (ticket,) = rig.router.desk._live.values()
        await rig.until(lambda: ticket.attempt.told)
        (peer,) = rig.prefills[0].server.routers()
        late = rig.router.desk.late
        peer.post(PrefillDone(bound, 1, 2, 0.0))  # twice
        peer.post(PrefillDone(key, 1, 2, 0.0))  # what is said of a hand-off names decode's attempt
        peer.post(PrefillDone(JobKey(key.request_id, 9), 1, 2, 0.0))
        peer.post(JobFailed(key, "replica_lost", "after being done", True))
        peer.post(JobFailed(bound, "replica_lost", "the decode replica is lost", True))
        peer.post(JobFailed(JobKey(key.request_id, 9), "replica_lost", "other epoch", True))
        await rig.until(lambda: (late["prefill_done"], late["job_failed"]) == (3, 3))
        # One that asks although it is needed no more is told so; one that was bound, again to whom.
        peer.post(PrefillProgress(JobKey(key.request_id, 9), 0, True))
        await rig.until(lambda: late["prefill_progress"] == 1 and rig.prefills[0].cancels)
        peer.post(PrefillProgress(key, 0, True))
        await rig.until(lambda: len(rig.prefills[0].binds) == 2)
        assert rig.prefills[0].binds[0] == rig.prefills[0].binds[1]
        event.set()
        assert (await task).json()["choices"][0]["text"] == REFERENCE
        assert rig.records()[-1]["prefill_rows"] == 600
        assert rig.records()[-1]["attempts"] == 1
        await rig.until(lambda: len(rig.prefills[0].cancels) == 2)  # it may still hold something
        peer.post(PrefillProgress(key, 0, True))  # after the end
        await rig.until(lambda: late["prefill_progress"] == 2)
        await rig.until(lambda: rig.prefills[0].cancels[-1].key == key)
