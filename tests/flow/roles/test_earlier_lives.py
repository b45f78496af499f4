"""Places of the own store's earlier life, and of stores that never were: what is on disk is read
from there, what is nowhere is computed at once, and nobody goes on asking for a job that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from headrace.core.card import Role
from headrace.core.ids import BootId
from headrace.core.limits import WireLimits
from headrace.core.messages import BlocksReady, Hello, Place, PrefillDone
from headrace.core.peers import introduce
from headrace.decode.handoff import DecodeState
from headrace.kvstore import StoreClient

MODEL = "toy"
N_TOKENS = 520
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(condition, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


class Restartable:
    """The store of the module, in this process."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._serving: Any = None

    async def start(self) -> None:
        self._serving = self._start()
        await self._serving.__aenter__()

    async def stop(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.__aexit__(None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_store(roles, store_settings, tag, starters) -> AsyncIterator[Restartable]:
    role, settings = roles("store"), store_settings(tag)
    store = Restartable(lambda: starters[0](role, settings))
    await store.start()
    yield store
    await store.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(own_store, roles, yardstick, router_end, starters) -> AsyncIterator[Any]:
    async with starters[1](roles, yardstick, router_end()) as all_:
        yield all_


def clients(cluster) -> list[StoreClient]:
    return [replica.store for replica in (cluster.prefill, *cluster.decodes)]


async def stored_places(cluster, digests) -> tuple[Any, ...]:
    """Where these blocks lie now that all of them are on disk."""
    store = cluster.prefill.store
    async with asyncio.timeout(60):
        while (stat := await store.stat()) is None or stat.pending:
            await asyncio.sleep(0.01)
    places = await store.open_prefix(digests, None)
    assert len(places) == len(digests)
    return places


async def restart(cluster, own_store) -> None:
    before = [client.attaches for client in clients(cluster)]
    await own_store.stop()
    await own_store.start()
    for client, attaches in zip(clients(cluster), before, strict=True):
        await until(lambda c=client, n=attaches: c.connected and c.attaches > n)


@contextlib.asynccontextmanager
async def announced(cluster, decode, ids) -> AsyncIterator[tuple[Any, Any]]:
    """(call, link of its prefill replica) of a job that waits for announcements from here."""
    hello = Hello(Role.PREFILL, "prefill-7", BootId("x"), "test", cluster.card)
    peer = await introduce(decode.shell.address, hello, cluster.prefill.role.token, WireLimits())
    to_decode = await cluster.router.connect(decode.shell.address)
    call = await cluster.router.send(cluster.request(ids), to_decode, prefill_name="prefill-7")
    await until(
        lambda: (job := decode.work.jobs.get(call.key)) and job.state is DecodeState.AWAITING
    )
    yield call, peer.link
    peer.link.abort()


def loads_of(call) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == f"load {call.key}"]


@pytest.mark.parametrize("knows_it", [True, False], ids=["met the old life", "came later"])
@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "lost"])
async def test_a_place_of_the_own_stores_earlier_life(
    cluster, own_store, yardstick, prompt, new_decode, knows_it: bool, on_disk: bool
) -> None:
    ids = prompt(N_TOKENS, f"earlier {knows_it} {on_disk}")
    first = cluster.request(ids)
    if not on_disk:  # places are those of another text, which no more will be found under these
        first = cluster.request(prompt(N_TOKENS, f"other {knows_it}"))
    await (await cluster.handoff(first)).result()
    await cluster.at_rest()
    places = await stored_places(cluster, first.digests)
    await restart(cluster, own_store)
    decode = cluster.decodes[1] if knows_it else await new_decode(f"decode-{on_disk}")
    assert all(decode.store.is_past(place) for place in places)
    counts = decode.work.counts
    before = (counts.fetched_blocks, counts.unreached_blocks, counts.damaged)
    async with announced(cluster, decode, ids) as (call, link):
        await link.send(BlocksReady(call.key, 0, call.request.digests, places))
        await link.send(PrefillDone(call.key, 0, 0, 0.0))
        assert await call.result() == await yardstick.text(ids, 8)
    after = (counts.fetched_blocks, counts.unreached_blocks, counts.damaged)
    n = len(places)
    assert call.times.hit_tokens == n * 128 * on_disk and n == 4
    assert after == (before[0], before[1], before[2] + n * (not on_disk))
    await cluster.at_rest()


async def _answers_elsewhere(
    cluster, own_store, decode, path: str, call
) -> tuple[StoreClient, Sequence[Place]]:
    """The restarted store's places of a call, from a client that has met it where `decode` does not
    look."""
    for _ in range(20):
        await own_store.stop()
        before = decode.store.attaches
        await own_store.start()
        os.rename(path, f"{path}2")  # nobody attaches there meanwhile
        elsewhere = StoreClient(
            f"unix://{path}2", decode.role.token, cluster.card.namespace().digest()
        )
        assert await elsewhere.connect(60.0)
        places = await elsewhere.open_prefix(call.request.digests, None)
        if decode.store.attaches == before and not decode.store.connected:
            return elsewhere, places
        await elsewhere.close()
        os.rename(f"{path}2", path)  # it was faster than that
    raise AssertionError("decode always met the restarted store first")


async def test_a_place_of_a_life_that_the_client_has_not_met_yet(
    cluster, own_store, yardstick, prompt, roles
) -> None:
    """Prefill has found the restarted store before decode did: decode looks again first."""
    ids, decode = prompt(N_TOKENS, "not met yet"), cluster.decodes[1]
    request = cluster.request(ids)
    await (await cluster.handoff(request)).result()
    await cluster.at_rest()
    await stored_places(cluster, request.digests)
    counts = decode.work.counts
    told = (counts.fetched_blocks, counts.unreached_blocks, counts.damaged)
    path = roles("store").listen.removeprefix("unix://")
    async with announced(cluster, decode, ids) as (call, link):
        elsewhere, places = await _answers_elsewhere(cluster, own_store, decode, path, call)
        try:
            assert len(places) == 4
            assert all(decode.store.is_past(place) for place in places)
            await link.send(BlocksReady(call.key, 0, call.request.digests, places))
            await until(lambda: loads_of(call))
        finally:
            os.rename(f"{path}2", path)
            await elsewhere.close()
        await link.send(PrefillDone(call.key, 0, 0, 0.0))
        assert await call.result() == await yardstick.text(ids, 8)
    assert call.times.hit_tokens == 512
    assert (counts.fetched_blocks, counts.unreached_blocks, counts.damaged) == told
    for client in clients(cluster):
        await until(lambda c=client: c.connected)
    await cluster.at_rest()


async def test_nobody_asks_on_for_a_job_that_has_ended(cluster, prompt) -> None:
    decode, ids = cluster.decodes[0], prompt(N_TOKENS, "ends while it asks")
    request = cluster.request(prompt(N_TOKENS, "some places"))
    await (await cluster.handoff(request)).result()
    await cluster.at_rest()
    nowhere = BootId("0123456789abcdef")
    places = tuple(
        replace(place, store=nowhere) for place in await stored_places(cluster, request.digests)
    )
    assert all(decode.store.is_elsewhere(place) for place in places)
    async with announced(cluster, decode, ids) as (call, link):
        await link.send(BlocksReady(call.key, 0, call.request.digests, places))
        await until(lambda: loads_of(call))
        await cluster.router.cancel(call)
        await until(lambda: call.key not in decode.work.jobs)
        assert loads_of(call) == []
    await cluster.at_rest()
