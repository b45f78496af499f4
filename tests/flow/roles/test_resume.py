"""A decode replica lost after g tokens: the next one goes on with the same text, rows by the resume
formulas; the same at a client's end of the HTTP stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace.core import faults
from headrace.core.card import Role
from headrace.core.request import Sampling
from headrace.core.rows import StartKind, floor_grain, plan_resume
from headrace.router.keys import ApiKey
from headrace.router.role import RouterProcess
from headrace.router.settings import RouterSettings
from headrace.router.tokens import TextStream, Vocabulary

MODEL = "t1"
PROCESSES = {"decode-7": ("decode", "decode.token=exit@12")}
pytestmark = pytest.mark.asyncio(loop_scope="module")

N_TOKENS = 244
MORE = 6  # tokens of an answer behind the loss
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)
# 244 + 12 is the border of a block: its last row is that of the token that never left. 32 is W.
GIVEN = (0, 1, 2, 11, 12, 13, 14, 31, 32, 33)
# By default every g greedy, and seeded: none, the first token, the block's border, W.
SEEDED_BY_DEFAULT = (0, 1, 12, 32)
CASES = [pytest.param(g, Sampling(), id=f"{g}-greedy") for g in GIVEN] + [
    pytest.param(
        g, SEEDED, id=f"{g}-seeded", marks=[] if g in SEEDED_BY_DEFAULT else pytest.mark.slow
    )
    for g in GIVEN
]


async def lose_after(cluster: Any, request: Any, g: int) -> list[int]:
    """Tokens of an attempt on decode-0, by hand-off, that fails after `g` tokens."""
    faults.arm(f"decode.token=raise@{g}" if g else "decode.first_token=raise")
    call = await cluster.handoff(request, decode=0)
    failed = await call.failure()
    assert faults.fired("decode.token" if g else "decode.first_token") == 1
    assert failed.retryable and len(call.token_ids) == g
    faults.disarm()
    await cluster.router.cancel(call)  # before a first token prefill holds what it sealed
    await cluster.at_rest()
    return call.token_ids


@pytest.mark.parametrize(("g", "sampling"), CASES)
async def test_the_text_goes_on(cluster, yardstick, prompt, g: int, sampling: Sampling) -> None:
    ids, domain = prompt(N_TOKENS, "resume"), f"resume {g} {sampling.seed}"
    max_tokens = g + MORE
    text = await yardstick.text(ids, max(GIVEN) + MORE, None, sampling)
    first = cluster.request(ids, max_tokens, sampling=sampling, domain=domain)
    got = await lose_after(cluster, first, g)
    assert tuple(got) == text[:g]
    await cluster.written()
    options = {"epoch": 1, "request_id": first.request_id, "sampling": sampling, "domain": domain}
    second = cluster.request(ids, max_tokens, **options)
    call = await cluster.local(second, decode=1, generated=got)
    assert tuple(got) + await call.result() == text[:max_tokens]
    times, hit = call.times, floor_grain(N_TOKENS + g)
    assert times.hit_tokens == hit
    if g:
        floor = N_TOKENS - cluster.keep_tokens
        plan = plan_resume(N_TOKENS + g, hit, floor, (128,), yardstick.geometry)
        assert (times.encoder_rows, times.decoder_rows) == (plan.encoder_rows, plan.decoder_rows)
        assert (times.window_position, times.start_kind) == (128, StartKind.WINDOW)
    await cluster.at_rest()


@pytest.mark.parametrize("g", [1, 13])
async def test_the_text_goes_on_when_nothing_is_stored_any_more(
    cluster, yardstick, prompt, g: int
) -> None:
    """Another cache domain finds none of the first attempt's bytes."""
    ids = prompt(N_TOKENS, "resume")
    first = cluster.request(ids, g + MORE, domain=f"cold {g}")
    got = await lose_after(cluster, first, g)
    options = {"epoch": 1, "request_id": first.request_id, "domain": f"empty {g}"}
    second = cluster.request(ids, g + MORE, **options)
    call = await cluster.local(second, decode=1, generated=got)
    assert tuple(got) + await call.result() == await yardstick.text(ids, g + MORE)
    assert (call.times.hit_tokens, call.times.encoder_rows) == (0, N_TOKENS + g)
    await cluster.at_rest()


# ---- over the router's HTTP ------------------------------------------------------------------

KEY = "key-of-the-resume-tests"


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster, roles, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    role = roles("router-http")
    settings = RouterSettings(
        salt_directory=str(tmp_path), keys=(ApiKey(KEY, "tenant-a"),), port=0, drain_s=0.2
    )
    router, stop, up = RouterProcess(role, settings), asyncio.Event(), asyncio.Event()
    members: list[Any] = []
    serving = asyncio.create_task(router.serve(lambda m: (members.append(m), up.set())[1], stop))
    await up.wait()
    headers = {"authorization": f"Bearer {KEY}"}
    url = members[0].address.replace("tcp://", "http://")
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, verify=False) as http:
        http.router = router  # type: ignore[attr-defined]
        yield http
    stop.set()
    await serving
    await router.close()


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[Any]]:
    text, rest = "", []
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            value = json.loads(data) if data.startswith("{") else data
            if isinstance(value, dict):
                for choice in value["choices"]:
                    text += choice["text"]
                    rest += filter(None, [choice["finish_reason"]])
                if value.get("usage"):
                    rest.append(value["usage"]["completion_tokens"])
            elif value:
                rest.append(value)
    return text, rest


@pytest.mark.fault
async def test_a_client_sees_nothing_of_a_killed_decode(
    cluster, yardstick, prompt, processes, client
) -> None:
    process, replicas = processes["decode-7"], client.router.replicas
    async with asyncio.timeout(60):
        while len(replicas.routable(Role.DECODE)) < 3:
            await asyncio.sleep(0.01)
    # Too short for a hand-off: all three are given to a replica at once, so each has one.
    vocabulary, prompts = Vocabulary("tokenizer-4096"), [prompt(160, f"http {i}") for i in range(3)]
    body = {"model": "t1", "max_tokens": 24, "temperature": 0}
    tasks = [asyncio.create_task(stream(client, body | {"prompt": ids})) for ids in prompts]
    answers = await asyncio.gather(*tasks)
    assert await process.ended() == 137 and not Path(f"/proc/{process.pid}").exists()
    for (text, rest), ids in zip(answers, prompts, strict=True):
        expected = await yardstick.text(ids, 24)
        assert 1 not in expected  # no end of the text among them
        spoken = TextStream(vocabulary)
        assert text == spoken.push(expected) + spoken.finish()
        assert rest == ["length", 24, "[DONE]"]
    lines = Path(client.router._role.run_dir, "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[-3:]]
    assert sorted(record["resumes"] for record in records) == [0, 0, 1]
    await cluster.at_rest(within_s=6)
