"""No decode replica is left: what had begun waits for one to come back, what comes is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.card import Role

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
BODY = {"model": "scripted", "prompt": "x", "max_tokens": 64}


async def lose_the_only_one(rig: Any, n_tokens: int) -> tuple[Any, Any]:
    """A stream whose decode, the only one, dies after `n_tokens` reached the router: (task of the
    stream, its ticket). When this returns the ticket waits for a replica."""
    (decode,) = rig.decodes
    _, decode.script.gate = rig.gate_at(n_tokens)
    task = asyncio.create_task(rig.read_stream(BODY))
    await rig.until(lambda: decode.running)
    (ticket,) = rig.router.desk._live.values()
    await rig.until(lambda: len(ticket._received) == n_tokens)
    await decode.die()
    await rig.until(lambda: not rig.router.replicas.routable(Role.DECODE))
    await rig.until(lambda: ticket.epoch == 1)
    return task, ticket


@pytest.mark.parametrize("n_tokens", [0, 1, 5])
async def test_an_answer_goes_on_when_the_only_decode_replica_is_back(
    rigs: Any, n_tokens: int
) -> None:
    async with rigs(decodes=1, retries=1, member_s=1.0) as rig:
        task, _ = await lose_the_only_one(rig, n_tokens)
        refused = await rig.client.post("/v1/completions", json=BODY)  # that one has not begun
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await rig.client.get("/ready")).status_code == 503
        assert not task.done()
        again = await rig.add(Role.DECODE, "decode-0")
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        assert list(again.jobs[0].generated_ids) == rig.reference_ids[:n_tokens]
        assert rig.records()[-1]["resumes"] == (n_tokens > 0)
        await rig.pulse()


@pytest.mark.parametrize("resume_wait_s", [0.0, 0.3])
async def test_nobody_comes_back(rigs: Any, resume_wait_s: float) -> None:
    async with rigs(decodes=1, resume_wait_s=resume_wait_s) as rig:
        task, _ = await lose_the_only_one(rig, 5)
        text, rest = await task
        assert REFERENCE.startswith(text) and text
        assert [event["error"]["code"] for event in rest] == ["no_replica"]
        await rig.until(rig.nothing_held)
        await rig.add(Role.DECODE, "decode-1")
        await rig.until_routable(1, 0)
        await rig.pulse()


async def test_another_model_does_not_go_on_with_it(rigs: Any) -> None:
    async with rigs(decodes=1) as rig:
        task, _ = await lose_the_only_one(rig, 5)
        card = replace(rig.decodes[0].card, weights="seed-1")
        other = await rig.add(Role.DECODE, "decode-0", card)
        _, rest = await task
        assert [event["error"]["code"] for event in rest] == ["no_replica"]
        assert other.jobs == []
        await rig.pulse()


async def test_who_waits_may_leave(rigs: Any) -> None:
    async with rigs(decodes=1) as rig:
        task, _ = await lose_the_only_one(rig, 5)
        task.cancel()
        await rig.until(rig.nothing_held)
        assert rig.records()[-1]["finish"] == "cancelled"


async def test_a_router_that_stops_does_not_wait_for_a_replica(rigs: Any) -> None:
    async with rigs(decodes=1, drain_s=0.1) as rig:
        task, _ = await lose_the_only_one(rig, 5)
        rig.stop_router()
        _, rest = await task
        assert [event["error"]["message"] for event in rest] == ["this router is shutting down"]
        await rig.until(rig.nothing_held)


async def test_of_several_that_wait_all_go_on(rigs: Any) -> None:
    async with rigs(decodes=1, retries=1) as rig:
        (decode,) = rig.decodes
        _, decode.script.gate = rig.gate_at(2)
        tasks = [asyncio.create_task(rig.read_stream(BODY)) for _ in range(6)]
        tickets = rig.router.desk._live
        await rig.until(lambda: [len(t._received) for t in tickets.values()] == [2] * 6)
        await decode.die()
        await rig.until(lambda: all(t.epoch == 1 for t in tickets.values()))
        again = await rig.add(Role.DECODE, "decode-0")
        assert await asyncio.gather(*tasks) == [(REFERENCE, ["stop", "[DONE]"])] * 6
        assert len(again.jobs) == 6
        await rig.until(rig.nothing_held)
