"""One bad request harms one request: replicas that die under it are two at most, and what fails in
the router for it fails for nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.card import Role
from headrace.core.messages import JobFailed
from headrace.core.peers import NO_JOB
from headrace.core.states import ReplicaState
from headrace.router.requests import Ticket

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
LONG = "a long prompt " * 200
BODY = {"model": "scripted", "prompt": "x", "max_tokens": 64, "stream": True}


async def die_under_it(rig: Any, alive: list[Any], n_tokens: int) -> None:
    """The replica that runs the request dies when `n_tokens` of it reached the router."""
    await rig.until(lambda: any(decode.running for decode in alive))
    victim = next(decode for decode in alive if decode.running)
    (ticket,) = rig.router.desk._live.values()
    await rig.until(lambda: len(ticket._received) == n_tokens)
    alive.remove(victim)
    await victim.die()


@pytest.mark.parametrize("n_tokens", [0, 3])
async def test_two_replicas_are_lost_and_no_third(rigs: Any, n_tokens: int) -> None:
    async with rigs(decodes=4, retry_share=1.0) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(n_tokens)
        alive = list(rig.decodes)
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        for _ in range(2):
            await die_under_it(rig, alive, n_tokens)
        answer = await task
        if n_tokens:
            text, rest = rig.texts(answer.text.splitlines())
            assert answer.status_code == 200 and text and REFERENCE.startswith(text)
            (event,) = rest  # no finish, no [DONE]
            error = event["error"]
        else:
            assert answer.status_code == 502
            error = answer.json()["error"]
        assert error["code"] == "request_quarantined"
        assert error["message"] == "2 replicas were lost in a row while they had this request"
        assert sum(len(decode.jobs) for decode in rig.decodes) == 2
        assert not any(decode.jobs for decode in alive)
        for decode in alive:
            decode.script.gate = lambda index: None
        await rig.pulse()


def slowly(pause_s: float) -> Any:
    """A gate that opens by itself, a while after each token came to it."""

    def gate(index: int) -> asyncio.Event:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(pause_s, event.set)
        return event

    return gate


def one_token_each(event: asyncio.Event) -> Any:
    """A gate that lets one token of the attempt through, then waits."""
    first: list[int] = []

    def gate(index: int) -> asyncio.Event | None:
        first.append(index)
        return event if index > first[0] else None

    return gate


async def test_a_token_between_two_losses_shows_that_it_was_not_the_request(rigs: Any) -> None:
    async with rigs(decodes=4, retry_share=1.0) as rig:
        alive, event = list(rig.decodes), asyncio.Event()
        for decode in alive:
            decode.script.gate = one_token_each(event)
        task = asyncio.create_task(rig.read_stream(BODY))
        for n_tokens in (1, 2, 3):
            await die_under_it(rig, alive, n_tokens)
        event.set()
        assert await task == (REFERENCE, ["stop", "[DONE]"])
        assert rig.records()[-1]["resumes"] == 3
        await rig.pulse()


async def ask(rig: Any, n: int, prompt: str = "x") -> list[asyncio.Task[Any]]:
    """`n` open streams, each of which a replica has."""
    before = sum(len(replica.jobs) for replica in (*rig.decodes, *rig.prefills))
    body = BODY | {"prompt": prompt}
    tasks = [asyncio.create_task(rig.client.post("/v1/completions", json=body)) for _ in range(n)]
    await rig.until(
        lambda: sum(len(replica.jobs) for replica in (*rig.decodes, *rig.prefills)) == before + n
    )
    return tasks


def outcome(rig: Any, answer: Any) -> Any:
    """The whole text, or the code of the error."""
    if answer.status_code != 200:
        return answer.json()["error"]["code"]
    text, rest = rig.texts(answer.text.splitlines())
    assert rest == ["stop", "[DONE]"]
    return text


async def test_two_lost_at_once_quarantine_nobody_who_was_not_alone(rigs: Any) -> None:
    """Five without a token are on a replica that is lost, then on the next one that is. Nobody can
    tell which of them did it, and none did: they run one after the other, beside others."""
    async with rigs(decodes=1, retry_share=1.0) as rig:
        _, rig.decodes[0].script.gate = rig.gate_at(0)
        tasks = await ask(rig, 5)
        event = None
        for n in (1, 2):
            lost, following = rig.decodes[-1], await rig.add(Role.DECODE, f"decode-{n}")
            event, following.script.gate = rig.gate_at(0)
            await rig.until_routable(2, 0)
            await lost.die()
            await rig.until(lambda: len(following.jobs) >= (5, 1)[n - 1])  # noqa: B023
        last = rig.decodes[-1]
        tasks += await ask(rig, 2)
        await rig.until(lambda: sum(t.suspicion.apart for t in rig.router.desk._live.values()) == 5)
        await rig.until(lambda: len(last.running) >= 3)
        await asyncio.sleep(0.1)
        assert len(last.running) == 3  # one of the five, and the two that nobody suspects
        event.set()
        assert [outcome(rig, await task) for task in tasks] == [REFERENCE] * 7
        assert len(last.jobs) == 7
        await rig.pulse()


@pytest.mark.parametrize("n_innocent", [1, 4])
async def test_one_of_many_is_found(rigs: Any, n_innocent: int) -> None:
    """A replica is lost with all of them; from then on whoever gets the bad one dies of it."""
    async with rigs(decodes=1, retry_share=1.0) as rig:
        _, rig.decodes[0].script.gate = rig.gate_at(0)
        good = await ask(rig, n_innocent)
        (bad,) = await ask(rig, 1, "a prompt of another length that kills")
        fatal_tokens = rig.decodes[0].jobs[-1].request.n_tokens
        for n in range(4):
            replica = await rig.add(Role.DECODE, f"decode-{n + 1}")
            replica.script.fatal_tokens = fatal_tokens
            replica.script.gate = slowly(0.02)
        await rig.until_routable(5, 0)
        await rig.decodes[0].die()
        assert outcome(rig, await bad) == "request_quarantined"
        assert [outcome(rig, await task) for task in good] == [REFERENCE] * n_innocent
        assert 1 <= sum(replica.dead for replica in rig.decodes[1:]) <= 2
        await rig.until(rig.nothing_held)


async def test_a_replica_that_was_told_to_end_is_nobodys_fault(rigs: Any) -> None:
    async with rigs(decodes=3, retry_share=1.0, retries=3) as rig:
        for decode in rig.decodes:
            _, decode.script.gate = rig.gate_at(0)
        (task,) = await ask(rig, 1)
        for _ in range(2):
            ending = next(decode for decode in rig.decodes if decode.running)
            ending.state = ReplicaState.DRAINING
            await ending.announce()
            await rig.until(
                lambda: len(rig.router.replicas.routable(Role.DECODE)) == len(rig.decodes) - 1
            )
            rig.decodes.remove(ending)
            await ending.stop()
            await rig.until(lambda: any(decode.running for decode in rig.decodes))
        rig.decodes[0].script.gate = lambda index: None
        (ticket,) = rig.router.desk._live.values()
        assert ticket.suspicion.losses == 0
        await rig.decodes[0].die()
        await rig.until(lambda: ticket.suspicion.losses == 1)
        await rig.add(Role.DECODE, "decode-9")
        assert outcome(rig, await task) == REFERENCE


async def test_who_gave_it_up_or_did_its_part_is_not_lost_for_it(rigs: Any) -> None:
    """A decode that refused it, and a prefill whose product is told, may be lost later."""
    async with rigs(decodes=3, prefills=1, local_prefill_rows=0, retry_share=1.0) as rig:
        refusing, lost, last = rig.decodes
        _, lost.script.gate = rig.gate_at(0)
        refusing.script.fail = JobFailed(NO_JOB, "overloaded", "no room", True)
        for decode in (lost, last):
            decode.n_slots = 0
            await decode.announce()
        await rig.until(lambda: 0 in {r.member.n_slots for r in rig.router.replicas.all()})
        task = asyncio.create_task(rig.client.post("/v1/completions", json=BODY | {"prompt": LONG}))
        await rig.until(lambda: lost.running or last.running)
        (ticket,) = rig.router.desk._live.values()
        await rig.until(lambda: ticket.attempt.told)
        for replica in (refusing, *rig.prefills):
            await replica.die()
        await rig.until(lambda: len(rig.router.replicas.routable(Role.DECODE)) == 2)
        await rig.until(lambda: not rig.router.replicas.routable(Role.PREFILL))
        assert ticket.suspicion.losses == 0 and ticket.suspicion.had_by
        await lost.die()
        assert outcome(rig, await task) == REFERENCE


async def test_a_dying_prefill_counts_whoever_tells_it_first(rigs: Any) -> None:
    """Decode may say that its prefill left before the router sees it."""
    async with rigs(decodes=1, prefills=3, local_prefill_rows=0, retry_share=1.0) as rig:
        for prefill in rig.prefills:
            _, prefill.script.gate = rig.gate_at(0)
        body = BODY | {"prompt": "a long prompt " * 200}
        task = asyncio.create_task(rig.client.post("/v1/completions", json=body))
        alive = list(rig.prefills)
        for _ in range(2):
            await die_under_it(rig, alive, 0)
        answer = await task
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "request_quarantined"
        assert not alive[0].jobs
        await rig.pulse()


async def test_tokens_that_fail_in_the_router_fail_one_request(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages of a replica come over one link, read by one task for all its requests."""
    async with rigs() as rig:
        (decode,) = rig.decodes
        event = asyncio.Event()
        decode.script.gate = one_token_each(event)
        good = asyncio.create_task(rig.read_stream(BODY))
        await rig.until(lambda: len(decode.running) == 1)
        decode.script.gate = lambda index: None
        take = Ticket.take

        def failing(ticket: Ticket, item: Any) -> bool:
            if len(ticket._base.token_ids) > 50:
                raise RuntimeError("a bug")
            return take(ticket, item)

        monkeypatch.setattr(Ticket, "take", failing)
        bad = await rig.client.post("/v1/completions", json=BODY | {"prompt": "bad " * 100})
        assert bad.status_code == 500
        assert bad.json()["error"]["message"] == "internal error"
        event.set()
        assert await good == (REFERENCE, ["stop", "[DONE]"])

        def deaf(self: Any, replica: Any, message: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(type(rig.router.replicas), "_hear", deaf)
        decode.report()
        await asyncio.sleep(0.1)
        monkeypatch.undo()
        assert len(decode.server.peers) == 1  # the link and its reader are the same
        await rig.pulse()
