"""The retry budget: one for a lost replica, one for each failure of a living one, and what a client
is told when it is used up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.card import Role
from headrace.core.messages import JobFailed
from headrace.core.states import ReplicaState
from headrace.router.budget import RETRY_BURST, Loss, RetryBudget

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
BODY = {"model": "scripted", "prompt": "x", "max_tokens": 64}
N = 40  # more on each of two replicas than the budget holds


def test_a_loss_has_one_answer_for_all() -> None:
    budget = RetryBudget(0.1)
    losses = [Loss(budget) for _ in range(int(RETRY_BURST) + 1)]
    assert [loss.take() for loss in losses] == [True] * 10 + [False]
    budget.earn()
    assert not budget.take()
    for _ in range(10):
        budget.earn()
    assert budget.take() and not budget.take()
    assert [loss.take() for loss in losses] == [True] * 10 + [False]


async def widen(rig: Any) -> None:
    """Room for all requests on any one replica."""
    for decode in rig.decodes:
        decode.n_slots, decode.n_blocks = N, 64 * N
        await decode.announce()
        decode.report()
    replicas = rig.router.replicas.all
    await rig.until(lambda: all(r.member.n_slots == N for r in replicas()))


async def barren_on_two(rig: Any) -> tuple[list[asyncio.Task[Any]], list[asyncio.Event]]:
    """N requests on two replicas, none with a token yet, and what lets each replica go on."""
    await widen(rig)
    events = []
    for decode in rig.decodes:
        event, decode.script.gate = rig.gate_at(0)
        events.append(event)
    tasks = [asyncio.create_task(rig.client.post("/v1/completions", json=BODY)) for _ in range(N)]
    await rig.until(lambda: sum(len(decode.running) for decode in rig.decodes) == N)
    assert min(len(decode.running) for decode in rig.decodes) > RETRY_BURST
    return tasks, events


@pytest.mark.parametrize("n_lost", [1, 2])
async def test_all_requests_of_lost_replicas_go_on(rigs: Any, n_lost: int) -> None:
    async with rigs(decodes=2) as rig:
        tasks, events = await barren_on_two(rig)
        if n_lost == 2:
            await rig.add(Role.DECODE, "decode-2")
            await widen(rig)
            await rig.until_routable(3, 0)
        victims, heirs = rig.decodes[:n_lost], rig.decodes[n_lost:]
        n_moved = sum(len(victim.running) for victim in victims)
        budget = rig.router.desk._budget
        before = budget._credit
        await asyncio.gather(*(victim.die() for victim in victims))
        await rig.until(lambda: sum(len(heir.jobs) for heir in heirs) == N)
        assert rig.router.desk.retried == n_moved > RETRY_BURST
        assert before - budget._credit == n_lost
        events[1].set()
        answers = await asyncio.gather(*tasks)
        assert {a.status_code for a in answers} == {200}
        assert {a.json()["choices"][0]["text"] for a in answers} == {REFERENCE}
        await rig.until(rig.nothing_held)


async def test_what_a_client_is_told_when_the_budget_is_used_up(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        tasks, _ = await barren_on_two(rig)
        while rig.router.desk._budget.take():
            pass
        victim, other = rig.decodes
        n_lost = len(victim.running)
        await victim.die()
        await rig.until(lambda: sum(task.done() for task in tasks) == n_lost)
        assert len(other.jobs) == N - n_lost
        for task in (task for task in tasks if task.done()):
            answer = task.result()
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "retry_budget_spent")
            assert (error["type"], answer.headers["retry-after"]) == ("unavailable_error", "10")
            assert error["message"] == (
                f"{victim.name} was lost; it could be tried again, but the router's retry budget"
                " is used up (retry_share is 0.1 of all requests)"
            )
        ended = [r for r in rig.records() if r["finish"] == "retry_budget_spent"]
        assert [r["attempts"] for r in ended] == [1] * n_lost
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_a_share_the_error_stays_the_attempts_own(rigs: Any) -> None:
    async with rigs(decodes=2, retry_share=0.0) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(0)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await rig.until(lambda: any(decode.running for decode in rig.decodes))
        await next(decode for decode in rig.decodes if decode.running).die()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")


async def test_a_replica_that_drains_and_gives_up_costs_one(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        tasks, _ = await barren_on_two(rig)
        leaver, other = rig.decodes
        leaver.state = ReplicaState.DRAINING
        await leaver.announce()
        states = rig.router.replicas.all
        await rig.until(lambda: any(r.state is ReplicaState.DRAINING for r in states()))
        before = rig.router.desk._budget._credit
        keys = [job.request.key for job in leaver.jobs]
        for peer in leaver.server.routers():
            for key in keys:
                peer.post(JobFailed(key, "replica_lost", "it stops", True))
        await rig.until(lambda: len(other.jobs) == N)
        assert rig.router.desk.retried == len(keys) > RETRY_BURST
        assert before - rig.router.desk._budget._credit == 1.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
