"""Routers side by side: own ledgers, one truth about load from the replicas."""

from __future__ import annotations

import asyncio
from typing import Any

SHORT = {"model": "scripted", "prompt": "x", "max_tokens": 64}


async def test_each_router_counts_its_own_and_learns_the_rest_from_reports(rigs: Any) -> None:
    async with rigs(decodes=2) as rig:
        await rig.start_router()
        await rig.until_routable(2, 0, router=1)
        gate = asyncio.Event()
        for decode in rig.decodes:
            decode.script.gate = lambda index: gate
        first = rig.client
        second = rig.new_client(rig.urls[1])
        tasks = [asyncio.create_task(first.post("/v1/completions", json=SHORT)) for _ in range(4)]
        await rig.until(lambda: sum(len(d.running) for d in rig.decodes) == 4)
        assert [r.ledger.open_charges for r in rig.routers] == [4, 0]
        # Rotation spread them evenly, two each.
        assert [len(d.running) for d in rig.decodes] == [2, 2]
        # decode-0 reports more than the other: the second router, which sent nothing, avoids it.
        keys = {r.name: r.key for r in rig.routers[1].replicas.all()}
        rig.decodes[0].report(running_requests=6, free_blocks=10)
        await rig.until(lambda: rig.routers[1].ledger.load(keys["decode-0"]).requests == 6)
        tasks += [asyncio.create_task(second.post("/v1/completions", json=SHORT)) for _ in range(3)]
        await rig.until(lambda: len(rig.decodes[1].running) == 5)
        assert [r.ledger.open_charges for r in rig.routers] == [4, 3]
        gate.set()
        assert [(await task).status_code for task in tasks] == [200] * 7
        await rig.until(lambda: rig.nothing_held(0) and rig.nothing_held(1))
        await second.aclose()


async def test_dispatch_numbers_are_each_routers_own(rigs: Any) -> None:
    async with rigs() as rig:
        await rig.start_router()
        await rig.until_routable(1, 0, router=1)
        second = rig.new_client(rig.urls[1])
        for client in (rig.client, second, second, rig.client):
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
        assert [job.dispatch for job in rig.decodes[0].jobs] == [1, 1, 2, 2]
        await second.aclose()


async def test_one_router_stops_and_the_other_serves_on(rigs: Any) -> None:
    async with rigs(drain_s=0.1) as rig:
        await rig.start_router()
        await rig.until_routable(1, 0, router=1)
        gate = asyncio.Event()
        rig.decodes[0].script.gate = lambda index: gate
        second = rig.new_client(rig.urls[1])
        mine = asyncio.create_task(rig.client.post("/v1/completions", json=SHORT))
        other = asyncio.create_task(second.post("/v1/completions", json=SHORT))
        await rig.until(lambda: len(rig.decodes[0].running) == 2)
        rig.stop_router(0)
        answer = await mine
        assert answer.status_code == 503
        gate.set()
        assert (await other).status_code == 200
        await rig.until(lambda: rig.nothing_held(0) and rig.nothing_held(1))
        await second.aclose()
