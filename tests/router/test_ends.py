"""Ends of requests: clients that leave, deadlines, stop strings, full replicas, a stop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from headrace.core.limits import EdgeLimits
from headrace.core.messages import PrefillJob
from headrace.router.generate import OFF_LOOP_CHARS
from headrace.router.tokens import Vocabulary

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
LONG = [300 + i % 3000 for i in range(600)]
SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 64}


def long_body(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": LONG, "max_tokens": 64} | more


async def begun(rig: Any, n_tokens: int) -> None:
    """The one live request has so many tokens in the router."""
    await rig.until(
        lambda: [len(t._received) for t in rig.router.desk._live.values()] == [n_tokens]
    )


STAGES = ("queued", "prefilling", "binding", "handing off", "waiting for decode", "mid decode")
ONE_SIDED = ("prefilling", "binding")  # no decode replica knows of it


async def test_a_client_that_leaves_while_its_text_is_encoded_reaches_no_replica(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, let_go = threading.Event(), threading.Event()
    encode = Vocabulary.encode_plain

    def held(vocabulary: Vocabulary, text: str) -> Any:
        entered.set()
        assert let_go.wait(20)
        return encode(vocabulary, text)

    async with rigs(prefills=1, local_prefill_rows=0) as rig:
        monkeypatch.setattr(Vocabulary, "encode_plain", held)
        body = SHORT | {"prompt": "a b " * (OFF_LOOP_CHARS // 4 + 1)}
        async with rig.new_client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            await rig.until(entered.is_set)
            assert not rig.nothing_held()
            task.cancel()
        await rig.until(rig.nothing_held, 5.0)
        assert not let_go.is_set()  # given up while the text was still in the encoder
        let_go.set()
        await rig.pulse()
        assert [len(r.jobs) for r in (*rig.prefills, *rig.decodes)] == [0, 1]  # the pulse's own
        scrape = (await rig.client.get("/metrics")).text
        assert 'outcome="cancelled"} 1.0' in scrape


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_is_cancelled_everywhere(
    rigs: Any, stage: str, streamed: bool
) -> None:
    prefills = 1 if stage in ("prefilling", "binding", "handing off") else 0
    full = stage in ("queued", "binding")
    slots = {"queue_ahead": 0} if full else {}
    async with rigs(prefills=prefills, local_prefill_rows=0, **slots) as rig:
        decode = rig.decodes[0]
        _, decode.script.gate = rig.gate_at(3 if stage == "mid decode" else 0)
        fillers: list[asyncio.Task[Any]] = []
        if full:
            for _ in range(decode.n_slots):
                fillers.append(asyncio.create_task(rig.client.post("/v1/completions", json=SHORT)))
            await rig.until(lambda: len(decode.running) == decode.n_slots)
        if prefills:
            _, rig.prefills[0].script.gate = rig.gate_at(0 if stage == "prefilling" else 1)
        body = long_body(stream=streamed)
        async with rig.new_client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            if full:
                await rig.until(lambda: rig.router.desk.waiting_requests == 1)
            elif stage != "prefilling":
                await rig.until(lambda: decode.running)
            if stage == "mid decode":
                await begun(rig, 3)
            if prefills:
                await rig.until(lambda: rig.prefills[0].running)
            task.cancel()
        for filler in fillers:
            filler.cancel()
        await rig.until(rig.nothing_held, 5.0)
        await rig.until(lambda: not decode.running)
        ended = [record["finish"] for record in rig.records()]
        assert ended == ["cancelled"] * (1 + len(fillers))
        # Whoever was given it was told, and nobody else.
        assert len(decode.cancels) == len(decode.jobs)
        assert len(decode.jobs) == len(fillers) + (stage not in (*ONE_SIDED, "queued"))
        if prefills:
            (job,) = rig.prefills[0].jobs
            assert isinstance(job, PrefillJob)
            await rig.until(lambda: rig.prefills[0].cancels)
            assert [cancel.key for cancel in rig.prefills[0].cancels] == [job.request.key]
            assert not rig.prefills[0].running
        elif stage != "queued":
            assert [cancel.key for cancel in decode.cancels] == [decode.jobs[0].request.key]


async def test_the_deadline_is_a_504_or_an_error_event(rigs: Any) -> None:
    async with rigs(edge=EdgeLimits(request_deadline_s=0.3)) as rig:
        decode = rig.decodes[0]
        _, decode.script.gate = rig.gate_at(0)
        for streamed in (False, True):  # of a stream nothing was sent yet
            body = SHORT | {"stream": streamed}
            answer = await rig.client.post("/v1/completions", json=body)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
        await rig.until(lambda: len(decode.cancels) == len(decode.jobs))  # some may have come late
        assert not decode.running
        assert all(0 < job.request.deadline_s <= 0.3 for job in decode.jobs)
        await rig.until(rig.nothing_held)


async def test_the_deadline_of_a_stream_is_an_error_event(rigs: Any) -> None:
    for deadline_s in (0.5, 4.0, 30.0):  # on a busy machine no token may come within the shorter
        async with rigs(edge=EdgeLimits(request_deadline_s=deadline_s)) as rig:
            decode = rig.decodes[0]
            _, decode.script.gate = rig.gate_at(2)
            answer = await rig.client.post("/v1/completions", json=SHORT | {"stream": True})
            if answer.status_code == 504:
                continue
            text, rest = rig.texts(answer.text.splitlines())
            assert text and REFERENCE.startswith(text)
            # one event, not a comment before it
            assert [event["error"]["code"] for event in rest] == ["deadline_exceeded"]
            await rig.until(lambda: decode.cancels and not decode.running)  # noqa: B023
            await rig.until(rig.nothing_held)
            return
    pytest.fail("no token within 30 s")


async def test_a_stop_string_ends_the_job(rigs: Any) -> None:
    async with rigs() as rig:
        _, rig.decodes[0].script.gate = rig.gate_at(len(rig.reference_ids) - 1)
        for streamed in (False, True):
            body = SHORT | {"stop": [" mill", "nothing"], "stream": streamed}
            if streamed:
                assert await rig.read_stream(body) == ("The river runs to the", ["stop", "[DONE]"])
            else:
                answer = (await rig.client.post("/v1/completions", json=body)).json()
                assert answer["choices"][0]["text"] == "The river runs to the"
                assert answer["choices"][0]["finish_reason"] == "stop"
        await rig.until(lambda: len(rig.decodes[0].cancels) == 2)
        assert not rig.decodes[0].running
        assert [record["finish"] for record in rig.records()] == ["stop", "stop"]
        await rig.until(rig.nothing_held)


async def test_tokens_behind_a_stop_string_in_one_frame_are_neither_said_nor_counted(
    rigs: Any,
) -> None:
    """How many tokens come together is chance."""
    async with rigs() as rig:
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
        stop = {"stop": [" mill"], "max_tokens": 64}
        heard = []
        for together in (1, 2, 3, 64):
            rig.decodes[0].script.together = together
            for path, body in (("completions", SHORT), ("chat/completions", chat)):
                answer = (await rig.client.post(f"/v1/{path}", json=body | stop)).json()
                heard.append((path, answer["usage"]["completion_tokens"]))
                (choice,) = answer["choices"]
                said = choice["text"] if "text" in choice else choice["message"]["content"]
                assert said == "The river runs to the"
        pieces = [rig.vocabulary.token_bytes(i) for i in rig.reference_ids]
        before = next(n for n in range(64) if b" mill" in b"".join(pieces[:n]))
        assert set(heard) == {("completions", before), ("chat/completions", before)}
        assert {record["completion_tokens"] for record in rig.records()} == {before}


async def test_a_silent_stream_is_kept_alive_and_may_still_be_retried(rigs: Any) -> None:
    async with rigs(decodes=2, keepalive_s=0.05) as rig:
        _, gate = rig.gate_at(0)
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
        assert rig.texts(kept) == (REFERENCE, ["stop", "[DONE]"])


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
        event, rig.decodes[0].script.gate = rig.gate_at(0)
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
        event, rig.decodes[0].script.gate = rig.gate_at(0)
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
        event, rig.decodes[0].script.gate = rig.gate_at(2)
        task = asyncio.create_task(rig.read_stream(SHORT))
        await begun(rig, 2)
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
        _, rig.decodes[0].script.gate = rig.gate_at(2)
        task = asyncio.create_task(rig.read_stream(SHORT))
        await begun(rig, 2)  # before that it would be refused, not ended
        rig.stop_router()
        text, rest = await task
        assert REFERENCE.startswith(text)
        assert [event["error"]["code"] for event in rest] == ["no_replica"]
        await rig.until(lambda: len(rig.decodes[0].cancels) == 1)


async def test_nobody_answers_without_a_decode_replica(rigs: Any) -> None:
    async with rigs(decodes=0, prefills=1) as rig:
        answer = await rig.client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        ready = await rig.client.get("/ready")
        assert ready.status_code == 503 and ready.json()["replicas"]["decode"] == 0
        assert isinstance(answer, httpx.Response)
