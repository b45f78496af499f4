"""Who is routable: membership in a real Valkey, liveness by socket."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.card import Role
from headrace.core.ids import new_boot_id
from headrace.core.states import ReplicaState
from headrace.kvstore import embedded_valkey

SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 64}


async def test_a_replica_gets_work_when_it_is_warm_and_none_when_it_has_withdrawn(
    rigs: Any,
) -> None:
    async with rigs() as rig:
        (ready,) = rig.decodes
        cold = type(ready)(rig, Role.DECODE, "cold")
        cold.state = ReplicaState.JOINING
        rig.decodes.append(await cold.start())
        replicas = rig.router.replicas
        await rig.until(lambda: any(r.name == "cold" for r in replicas.all()))
        await asyncio.sleep(0.2)  # ten polls
        for _ in range(4):
            await rig.client.post("/v1/completions", json=SHORT)
        assert (len(ready.jobs), len(cold.jobs)) == (4, 0)
        cold.state = ReplicaState.READY
        await cold.announce()
        await rig.until_routable(2, 0)
        for _ in range(4):
            await rig.client.post("/v1/completions", json=SHORT)
        assert (len(ready.jobs), len(cold.jobs)) == (6, 2)
        await cold.stop()
        await rig.until(lambda: [r.name for r in replicas.all()] == ["decode-0"])
        await rig.pulse()


async def test_a_killed_replica_is_out_at_once_long_before_its_lease(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        before = asyncio.get_running_loop().time()
        await rig.decodes[0].die()
        await rig.until_routable(1, 0)
        assert asyncio.get_running_loop().time() - before < 4  # the lease lives 5 s
        states = {r.name: r.state for r in rig.router.replicas.all()}
        assert states["decode-0"] is ReplicaState.SUSPECT
        for _ in range(4):
            assert (await rig.client.post("/v1/completions", json=SHORT)).status_code == 200
        assert len(rig.decodes[1].jobs) == 4


async def test_a_restart_is_another_life(rigs: Any) -> None:
    async with rigs() as rig:
        old = rig.decodes[0]
        await rig.pulse()
        key = next(iter(rig.router.replicas.all())).key
        await old.die()
        again = await rig.add(Role.DECODE, old.name)
        await rig.until(lambda: any(r.linked for r in rig.router.replicas.all()))
        await rig.until_routable(1, 0)
        (replica,) = rig.router.replicas.all()
        assert replica.key != key and replica.member.boot_id == again.boot
        await rig.pulse()
        assert len(again.jobs) == 1


async def test_a_socket_of_another_life_is_not_taken_for_the_announced_one(rigs: Any) -> None:
    async with rigs() as rig:
        liar = await rig.add(Role.DECODE, "liar")
        await rig.until_routable(2, 0)
        liar.says = new_boot_id()
        for peer in liar.server.routers():
            peer.link.abort()
        await rig.until_routable(1, 0)
        await asyncio.sleep(0.3)  # several attempts to connect
        assert [r.name for r in rig.router.replicas.routable(Role.DECODE)] == ["decode-0"]
        liar.says = None
        await rig.until_routable(2, 0)


async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        gate = asyncio.Event()
        for decode in rig.decodes:
            decode.script.gate = lambda index: gate
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        busy = next(d for d in rig.decodes if d.running)
        busy.state = ReplicaState.DRAINING
        await busy.announce()
        await rig.until_routable(1, 0)
        gate.set()
        assert (await task).status_code == 200
        for _ in range(3):
            await rig.client.post("/v1/completions", json=SHORT)
        assert len(busy.jobs) == 1


async def test_a_replica_of_another_model_gets_nothing(rigs: Any, caplog: Any) -> None:
    async with rigs() as rig:
        card = rig.decodes[0].card
        for name, other in (
            ("layout", replace(card, layout_id=b"M" * 32)),
            ("numerics", replace(card, numerics="fast-fp32")),
            ("small", replace(card, vocab_size=1024)),
        ):
            await rig.add(Role.DECODE, f"a-{name}", other)  # sorts before the first one
        refusals = lambda: [m for m in caplog.messages if "gets no work" in m]  # noqa: E731
        await rig.until(lambda: len(rig.router.replicas.all()) == 4 and len(refusals()) >= 2)
        await asyncio.sleep(0.3)  # several polls: neither is said twice
        assert [r.name for r in rig.router.replicas.routable(Role.DECODE)] == ["decode-0"]
        assert rig.router.replicas.card == card
        said = refusals()
        layout = f"a-layout gets no work: its layout id is {'4d' * 8}, served is {'4c' * 8}"
        assert said.count(layout) == 1 and len(said) == 2
        assert any(s.startswith("a-numerics gets no work: its namespace is ") for s in said)
        # When the last of the old model is gone, the new one is served.
        await rig.decodes[0].stop()
        await rig.until(lambda: rig.router.replicas.card not in (card, None))


@pytest.mark.redis
async def test_redis_frozen_and_restarted_empty_change_nothing(
    tmp_path: Path, vocabulary: Any, make_rig: Any
) -> None:
    run = tmp_path / "vk"
    server = embedded_valkey(str(run))
    options = {"decodes": 1, "prefills": 1, "member_s": 0.5}
    async with make_rig(server.url, tmp_path, vocabulary, **options) as rig:
        await rig.pulse()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            await rig.until(lambda: not rig.board.healthy or rig.board.stale)
            for _ in range(8):  # longer than three leases of a member
                await asyncio.sleep(0.2)
                for replica in (*rig.decodes, *rig.prefills):
                    replica.report()  # they speak: that is what counts
            await rig.until_routable(1, 1)
            await rig.pulse()
            body = {"model": "scripted", "prompt": [300] * 700, "max_tokens": 8}
            answer = await rig.client.post("/v1/completions", json=body)
            assert answer.status_code == 200  # the look-up missed, the request did not
            assert len(rig.prefills[0].jobs) == 1
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        server.stop()
        await rig.pulse()
        again = embedded_valkey(str(run))
        try:
            await rig.until(lambda: rig.routers[0].replicas.routable(Role.DECODE))
            await asyncio.sleep(0.3)
            await rig.until_routable(1, 1)
            await rig.pulse()
        finally:
            again.stop()


async def test_a_replica_that_says_nothing_and_has_no_record_is_given_up(rigs: Any) -> None:
    """A frozen process: its socket stays open, its lease ends, no report comes."""
    async with rigs(decodes=2, member_s=1.0) as rig:
        gate = asyncio.Event()
        for decode in rig.decodes:
            decode.script.gate = lambda index: gate
        task = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        await rig.until(lambda: any(d.running for d in rig.decodes))
        frozen = next(d for d in rig.decodes if d.running)
        other = next(d for d in rig.decodes if d is not frozen)
        await frozen.fall_silent()
        await rig.until(lambda: other.jobs)  # given to the other one under a new epoch
        gate.set()
        assert (await task).status_code == 200
        assert other.jobs[0].request.epoch == 1
