"""run_prefill and run_decode: announced when they serve, withdrawn when they stop; early jobs."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.card import Role
from headrace.core.states import ReplicaState
from headrace.decode import DecodeReplica, run_decode
from headrace.engine import EngineSettings
from headrace.kvstore import MemberBoard
from headrace.prefill import run_prefill

MODEL = "toy"
pytestmark = pytest.mark.asyncio(loop_scope="module")
SMALL = EngineSettings(n_blocks=32, n_slots=2)


@pytest.mark.parametrize(("run", "kind"), [(run_prefill, Role.PREFILL), (run_decode, Role.DECODE)])
async def test_a_role_is_a_member_while_it_serves(roles, run, kind) -> None:
    """Without a store too: it serves, and everything is a miss."""
    role = roles(f"{kind}-7", tag="nowhere")
    board, stop, told = MemberBoard.of(role), asyncio.Event(), []
    up = asyncio.Event()

    def ready(member) -> None:
        told.append(member)
        up.set()

    served = asyncio.create_task(run(role, SMALL, ready=ready, stop=stop))
    async with asyncio.timeout(60):
        await up.wait()
    (member,) = told
    assert (member.role, member.state, member.n_blocks) == (kind, ReplicaState.READY, 32)
    assert member.card is not None and member.card.name == "toy"
    assert member in await board.members()
    stop.set()
    await asyncio.wait_for(served, 10)
    assert member.name not in [m.name for m in await board.members()]
    await board.close()


async def test_a_job_before_the_model_is_loaded_is_refused_as_retryable(
    cluster, prompt, roles
) -> None:
    cold = DecodeReplica(roles("decode-6"), SMALL)
    try:
        await cold.shell.listen()
        peer = await cluster.router.connect(cold.shell.address)
        assert peer.hello.card is None and cold.member().state is ReplicaState.JOINING
        call = await cluster.router.send(cluster.request(prompt(50, "early")), peer)
        failed = await call.failure()
        assert (failed.code, failed.retryable) == ("no_replica", True)
        # A prefill replica that is sent there says so too.
        call = await cluster.router.send(
            cluster.request(prompt(500, "early")),
            cluster.to_decode[0],
            cluster.to_prefill,
            decode_address=cold.shell.address,
        )
        failed = await call.failure()
        assert (failed.code, failed.retryable) == ("no_replica", True)
        await cluster.router.cancel(call)
        await cluster.at_rest()
    finally:
        await cold.close()


async def test_a_prefill_that_cannot_reach_decode_says_so(cluster, prompt) -> None:
    call = await cluster.router.send(
        cluster.request(prompt(500, "nobody there")),
        cluster.to_decode[0],
        cluster.to_prefill,
        decode_address="tcp://127.0.0.1:1",
    )
    failed = await call.failure()
    assert (failed.code, failed.retryable) == ("replica_lost", True)
    await cluster.router.cancel(call)
    await cluster.at_rest()
