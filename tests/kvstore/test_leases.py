"""Leases over the real socket: they end by release or by time, and a client knows what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headrace.core.deployment import Deployment
from headrace.core.limits import LeaseTimes
from headrace.kvstore import Kind


async def test_leases_end_unless_renewed_and_either_side_renews(home, rig, things, wait_until):
    rig.role = replace(rig.role, deployment=Deployment(leases=LeaseTimes(handoff_s=3.0)))
    await rig.start()
    prefill, decode = await rig.client(), await rig.client()
    kept, lost = things.lease("kept"), things.lease("lost")
    await prefill.put(Kind.KV, things.blocks(1), lease=kept)
    await prefill.put(Kind.KV, things.blocks(2), lease=lost)

    async def one_left() -> bool:
        assert await decode.renew(kept)
        return (await decode.stat()).leases == 1

    await wait_until(one_left, "the end of the other lease")
    assert not await decode.renew(lost) and await decode.renew(kept)
    assert (prefill.held, decode.held) == (0, 1)  # prefill renewed nothing
    assert (prefill.lapsed, decode.lapsed, (await decode.stat()).lapsed) == (2, 0, 1)


async def test_release_of_one_kind_leaves_the_other(rig, things):
    await rig.start()
    client = await rig.client()
    key = things.lease()
    await client.put(Kind.KV, things.blocks(1, 2), lease=key)
    await client.put(Kind.SWA, things.windows(2), lease=key)
    await client.release(key, Kind.KV)
    stat = await client.stat()
    assert (stat.leases, stat.leased_objects) == (1, 1)
    await client.put(Kind.KV, things.blocks(3), lease=key)  # not over: still leased
    assert (await client.stat()).leased_objects == 2
    await client.release(key)
    await client.put(Kind.KV, things.blocks(4), lease=key)  # over: stored, not leased
    stat = await client.stat()
    assert (stat.leases, stat.leased_objects, stat.blocks, stat.refused) == (0, 0, 4, 1)
    await client.release(key)


async def test_an_answer_that_comes_after_the_release_holds_nothing(rig, things):
    """What was asked before a release and is answered after it: the store has let go by then."""
    await rig.start()
    client, writer = await rig.client(), await rig.client()
    await writer.put(Kind.KV, things.blocks(1, 2))
    await writer.put(Kind.SWA, things.windows(2))
    block = things.digest(1)
    asks = {
        "prefix": lambda key: client.open_prefix([block], key),
        "window": lambda key: client.open_windows([(384, things.digest(2))], key),
        "objects": lambda key: client.open_objects(Kind.KV, [block], key),
        "renewal": lambda key: client.renew(key),
        "put": lambda key: client.put(Kind.KV, things.blocks(7), lease=key, wait_s=1.0),
    }
    for name, ask in asks.items():
        key = things.lease(name)
        if name == "renewal":
            await client.open_prefix([block], key)
        answer, _ = await asyncio.gather(ask(key), client.release(key))
        assert answer, name
        stat = await client.stat()
        assert (stat.leases, stat.reservations, client.held) == (0, 0, 0), name
