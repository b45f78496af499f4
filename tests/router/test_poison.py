"""One bad request harms one request: replicas that die under it are two at most, and what fails in
the router for it fails for nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.router.requests import Ticket

REFERENCE = "The river runs to the mill, and the mill grinds.\n"
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
