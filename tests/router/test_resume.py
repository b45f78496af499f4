"""A decode replica lost after tokens came: the answer goes on where it stood, on another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.ids import JobKey
from headrace.core.messages import JobFailed, TokenItem
from headrace.core.request import FinishReason

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
BODY = {"model": "scripted", "prompt": "x", "max_tokens": 64}
FAILED = JobFailed(JobKey("", 0), "replica_lost", "it went wrong", True)  # type: ignore[arg-type]


async def lose_at(rig: Any, n_tokens: int, body: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A request whose decode dies after `n_tokens` reached the router: (answer's task, victim,
    the other)."""
    for decode in rig.decodes:
        _, decode.script.gate = rig.gate_at(n_tokens)
    if body.get("stream"):
        task = asyncio.create_task(rig.read_stream(body))
    else:
        task = asyncio.create_task(rig.client.post("/v1/completions", json=body))
    await rig.until(lambda: any(d.running for d in rig.decodes))
    victim = next(d for d in rig.decodes if d.running)
    other = next(d for d in rig.decodes if d is not victim)
    other.script.gate = lambda index: None
    (ticket,) = rig.router.desk._live.values()
    await rig.until(lambda: len(ticket._received) == n_tokens)
    await victim.die()
    return task, victim, other


@pytest.mark.parametrize("n_tokens", [1, 2, 5])
async def test_a_stream_goes_on_without_a_gap_or_a_repetition(rigs: Any, n_tokens: int) -> None:
    async with rigs(decodes=2) as rig:
        body = BODY | {"stream": True, "temperature": 0.7}
        task, victim, other = await lose_at(rig, n_tokens, body)
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        (first,), (second,) = victim.jobs, other.jobs
        assert list(second.generated_ids) == rig.reference_ids[:n_tokens]
        assert (first.request.epoch, second.request.epoch) == (0, 1)
        # Seed, keep (and so F) and max_tokens are those of the first run.
        assert second.request.sampling == first.request.sampling
        assert second.request.keep_tokens == first.request.keep_tokens
        assert second.request.max_tokens == first.request.max_tokens
        record = rig.records()[-1]
        assert (record["attempts"], record["resumes"], record["finish"]) == (2, 1, "stop")
        assert record["completion_tokens"] == len(rig.reference_ids)
        await rig.until(rig.nothing_held)


async def test_a_plain_answer_goes_on_too_and_counts_each_token_once(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        task, _, other = await lose_at(rig, 3, BODY)
        answer = (await task).json()
        assert answer["choices"][0]["text"] == REFERENCE
        assert answer["usage"]["completion_tokens"] == len(rig.reference_ids)
        assert len(other.jobs[0].generated_ids) == 3


async def test_a_resumed_answer_calls_nothing_cached_that_it_computed(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        for decode in rig.decodes:
            decode.script.hit_tokens = 1  # what the second one finds is the first one's work
        task, _, _ = await lose_at(rig, 3, BODY)
        assert (await task).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_decode_that_gives_up_in_the_middle_is_resumed_elsewhere(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        events: list[asyncio.Event] = []
        for decode in rig.decodes:
            decode.script.fail, decode.script.fail_after = FAILED, 4
            event, decode.script.gate = rig.gate_at(0)  # until it is known who is asked first
            events.append(event)
        task = asyncio.create_task(rig.read_stream(BODY))
        await rig.until(lambda: any(d.jobs for d in rig.decodes))
        first = next(d for d in rig.decodes if d.jobs)
        next(d for d in rig.decodes if d is not first).script.fail = None
        for event in events:
            event.set()
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        assert rig.records()[-1]["resumes"] == 1


async def test_attempts_that_give_no_token_are_limited_after_a_resume_too(rigs: Any) -> None:
    async with rigs(decodes=4, retries=2) as rig:
        for decode in rig.decodes:
            decode.script.fail, decode.script.fail_after = FAILED, 4
        text, rest = await rig.read_stream(BODY)
        assert REFERENCE.startswith(text) and text
        assert rest[0]["error"]["message"] == "it went wrong" and len(rest) == 1
        # One gave four tokens; two more gave none.
        assert [len(d.jobs) for d in rig.decodes].count(1) == 3
        await rig.until(rig.nothing_held)


async def test_resumes_are_limited_in_all(rigs: Any) -> None:
    async with rigs(decodes=4, resumes=2, retries=5) as rig:
        for decode in rig.decodes:
            decode.script = replace(decode.script, fail=FAILED, fail_after=64, fail_each=2)
        text, rest = await rig.read_stream(BODY)
        assert [len(d.jobs) for d in rig.decodes].count(1) == 3
        assert rest[0]["error"]["code"] == "replica_lost"
        six = b"".join(rig.vocabulary.token_bytes(i) for i in rig.reference_ids[:6]).decode()
        assert six.startswith(text) and len(text) > len(six) // 2
        assert rig.records()[-1]["resumes"] == 2
        await rig.until(rig.nothing_held)


async def test_a_lost_frame_of_tokens_is_asked_for_again(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(2)
        task = asyncio.create_task(rig.read_stream(BODY))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        owner = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not owner)
        other.script.gate = lambda index: None
        (ticket,) = rig.router.desk._live.values()
        await rig.until(lambda: len(ticket._received) == 2)
        key, ids = owner.jobs[0].request.key, rig.reference_ids
        owner.say(TokenItem(key, 3, (ids[3],), None, None))  # token 2 was dropped on the way
        owner.say(TokenItem(key, 4, (), FinishReason.STOP, None))
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        assert list(other.jobs[0].generated_ids) == ids[:2]
        await rig.until(lambda: [cancel.key for cancel in owner.cancels] == [key])
