"""A full line for room refuses who is new, and nobody who has begun."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.limits import EdgeLimits

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
BODY = {"model": "scripted", "prompt": "x", "max_tokens": 64}


async def test_what_has_begun_is_not_refused_for_a_full_line(rigs: Any) -> None:
    edge = EdgeLimits(queued_requests=1)
    async with rigs(decodes=2, edge=edge, queue_ahead=0) as rig:
        gates = {}
        for decode in rig.decodes:
            decode.n_slots = 1
            await decode.announce()
            gates[decode], decode.script.gate = rig.gate_at(3)
        await rig.until(lambda: {r.member.n_slots for r in rig.router.replicas.all()} == {1})
        streams = [asyncio.create_task(rig.read_stream(BODY)) for _ in rig.decodes]
        live = rig.router.desk._live
        await rig.until(lambda: [len(ticket._received) for ticket in live.values()] == [3, 3])
        last = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await rig.until(lambda: rig.router.desk.waiting_requests == 1)
        assert (await rig.client.post("/v1/completions", json=BODY)).status_code == 429

        lost, other = rig.decodes
        await lost.die()
        await rig.until(lambda: rig.router.desk.waiting_requests == 2)
        gates[other].set()
        assert await asyncio.gather(*streams) == [(REFERENCE, ["stop", "[DONE]"])] * 2
        assert (await last).json()["choices"][0]["text"] == REFERENCE
        # the lost one's stream, with its three tokens, before the one that had not begun
        assert [len(job.generated_ids) for job in other.jobs] == [0, 3, 0]
        await rig.until(rig.nothing_held)


@pytest.mark.parametrize("limit", ["queue_wait_s", "request_deadline_s"])
async def test_a_line_that_takes_too_long_refuses_at_once_and_says_until_when(
    rigs: Any, limit: str
) -> None:
    """One slot, and answers of 5 s each by the ledger's account: the first in line waits 5 s, the
    second 10, the third would wait 15."""
    edge = EdgeLimits(**({"request_deadline_s": 600.0, "queue_wait_s": 600.0} | {limit: 12.0}))
    async with rigs(edge=edge, queue_ahead=0) as rig:
        (decode,) = rig.decodes
        decode.n_slots = 1
        await decode.announce()
        await rig.until(lambda: {r.member.n_slots for r in rig.router.replicas.all()} == {1})
        assert (await rig.client.post("/v1/completions", json=BODY)).status_code == 200
        (account,) = rig.router.ledger._accounts.values()
        account.stay_s = 5.0
        event, decode.script.gate = rig.gate_at(0)
        tasks = []
        for n_waiting in (0, 1, 2):
            tasks.append(asyncio.create_task(rig.client.post("/v1/completions", json=BODY)))
            await rig.until(lambda: rig.router.desk.waiting_requests == n_waiting)  # noqa: B023
            await rig.until(lambda: decode.running)
        begun_s = asyncio.get_running_loop().time()
        answer = await rig.client.post("/v1/completions", json=BODY)
        assert asyncio.get_running_loop().time() - begun_s < 12.0  # neither after 15 nor the limit
        assert answer.status_code == 429
        name = "queue_wait_s" if limit == "queue_wait_s" else "the deadline"
        message = answer.json()["error"]["message"]
        assert message == f"{name} is 12 s, a wait of 15 s is predicted"
        assert answer.headers["retry-after"] == "3"
        event.set()
        answers = [(await task).json()["choices"][0]["text"] for task in tasks]
        assert answers == [REFERENCE] * 3
        await rig.until(rig.nothing_held)


async def test_those_whom_a_full_line_refuses_are_promised_one_place_after_the_other(
    rigs: Any,
) -> None:
    """One slot, answers of 10 s each, two in line: places are free after 10, 20 and 30 s. Who comes
    after is told no more than that, whether those before him come back or not."""
    edge = EdgeLimits(queued_requests=2, request_deadline_s=600.0, queue_wait_s=600.0)
    async with rigs(edge=edge, queue_ahead=0) as rig:
        (decode,) = rig.decodes
        decode.n_slots = 1
        await decode.announce()
        await rig.until(lambda: {r.member.n_slots for r in rig.router.replicas.all()} == {1})
        assert (await rig.client.post("/v1/completions", json=BODY)).status_code == 200
        (account,) = rig.router.ledger._accounts.values()
        account.stay_s = 10.0
        event, decode.script.gate = rig.gate_at(0)
        tasks = []
        for n_waiting in (0, 1, 2):
            tasks.append(asyncio.create_task(rig.client.post("/v1/completions", json=BODY)))
            await rig.until(lambda: rig.router.desk.waiting_requests == n_waiting)  # noqa: B023
            await rig.until(lambda: decode.running)
        told = []
        for _ in range(5):
            answer = await rig.client.post("/v1/completions", json=BODY)
            assert answer.status_code == 429
            told.append(int(answer.headers["retry-after"]))
        event.set()
        assert [(await task).status_code for task in tasks] == [200] * 3
        await rig.until(rig.nothing_held)
    # Time passes between two questions, which may be a second on a busy machine.
    assert told[0] == 10 < told[1] <= 20 < told[2] + 3 and told[1] < told[2] <= 30, told
    assert max(told) == max(told[2:]) <= 30
