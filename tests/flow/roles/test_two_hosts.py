"""Prefill on one host, decode on another: each has a store of its own, and they share a Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from headrace.core.role import RoleSettings
from headrace.core.rows import StartKind, floor_grain, plan_decode, record_position
from headrace.decode import DecodeReplica

MODEL = "t1"
pytestmark = pytest.mark.asyncio(loop_scope="module")
# A busy machine is slower than a lost fetch may be.
PATIENT = {"index_deadline_s": 3.0, "recompute_tokens_per_s": 50.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    roles: Callable[..., RoleSettings],
    store_settings: Callable[..., Any],
    yardstick: Any,
    router_end: Any,
    tag: str,
    starters: tuple[Any, Any],
) -> AsyncIterator[Any]:
    """decode-1 lives on the other host."""
    start_store, start_replicas = starters
    far = f"{tag}-far"
    peers = {"peer_listen": "tcp://127.0.0.1:0", **PATIENT}

    def placed(name: str) -> RoleSettings:
        return roles(name, tag=far) if name == "decode-1" else roles(name)

    here = start_store(roles("store"), store_settings(tag, **peers))
    there = start_store(roles("store", tag=far), store_settings(far, **peers))
    async with here, there, start_replicas(placed, yardstick, router_end()) as all_:
        yield all_


@pytest.mark.parametrize("n_tokens", [384, 640])
async def test_blocks_of_another_host_are_fetched_and_no_row_runs_for_them(
    cluster: Any, yardstick: Any, prompt: Any, n_tokens: int
) -> None:
    ids, keep = prompt(n_tokens, f"two hosts {n_tokens}"), cluster.keep_tokens
    counts = cluster.decodes[1].work.counts
    before = (counts.fetched_blocks, counts.unreached_blocks, counts.damaged)
    call = await cluster.handoff(cluster.request(ids), decode=1)
    assert await call.result() == await yardstick.text(ids, 8)
    await cluster.at_rest(5.0)
    hit, p = floor_grain(n_tokens), record_position(n_tokens, keep)
    after = (counts.fetched_blocks, counts.unreached_blocks, counts.damaged)
    assert after == (before[0] + hit // 128, before[1], before[2])
    plan = plan_decode(n_tokens, hit, keep, (p,), yardstick.geometry)
    assert (call.times.encoder_rows, call.times.hit_tokens) == (plan.encoder_rows, hit)
    assert (call.times.start_kind, call.times.window_position) == (StartKind.WINDOW, p)
    stat = await cluster.decodes[1].store.stat()
    assert stat.peer_fetched >= hit // 128 + 1 and stat.peer_failed == 0
    assert (stat.leases, stat.leased_objects) == (0, 0)


async def test_on_the_same_host_nobody_else_is_asked(
    cluster: Any, yardstick: Any, prompt: Any
) -> None:
    ids = prompt(500, "one host")
    call = await cluster.handoff(cluster.request(ids), decode=0)
    assert await call.result() == await yardstick.text(ids, 8)
    counts = cluster.decodes[0].work.counts
    assert (counts.fetched_blocks, counts.unreached_blocks) == (0, 0)
    await cluster.at_rest(5.0)


async def test_a_job_in_line_has_the_blocks_of_another_host_brought(
    cluster: Any, yardstick: Any, prompt: Any, new_decode: Any, tag: str
) -> None:
    """And every row of a hand-off is there when its turn comes."""
    one_slot = replace(cluster.decodes[0].settings, n_slots=1, park_after_tokens=0)
    decode = await new_decode("decode-8", one_slot, tag=f"{tag}-far")
    to, router = await cluster.router.connect(decode.shell.address), cluster.router
    running = await router.send(cluster.request(prompt(5, "running"), 1000), to)
    await running.begun.wait()
    before = await decode.store.stat()
    ids = prompt(640, "two hosts in line")
    address = decode.shell.address
    call = await router.send(
        cluster.request(ids), to, router.to["prefill-0"], decode_address=address
    )
    async with asyncio.timeout(30.0):
        while (await decode.store.stat()).peer_fetched < before.peer_fetched + 6:
            await asyncio.sleep(0.01)  # five blocks, and the window record at once
    assert decode.work.jobs[call.key].waits_for_room
    held = await decode.store.stat()
    assert held.prefetched == before.prefetched
    await router.cancel(running)
    assert await call.result() == await yardstick.text(ids, 8)
    assert call.times.hit_tokens == 640
    after = await decode.store.stat()
    assert after.prefetched == before.prefetched + 5
    assert after.peer_fetched == held.peer_fetched
    await cluster.at_rest(5.0)


async def test_what_cannot_be_fetched_is_computed_and_counted(
    cluster: Any,
    yardstick: Any,
    prompt: Any,
    roles: Callable[..., RoleSettings],
    store_settings: Callable[..., Any],
    tag: str,
    starters: tuple[Any, Any],
) -> None:
    """A host whose store asks no other: more rows, the same text."""
    ids, alone = prompt(520, "alone"), f"{tag}-alone"
    async with starters[0](roles("store", tag=alone), store_settings(alone)):
        decode = DecodeReplica(roles("decode-9", tag=alone), cluster.decodes[0].settings)
        await decode.start()
        try:
            await cluster.router.connect(decode.shell.address)
            call = await cluster.router.send(
                cluster.request(ids),
                cluster.router.to["decode-9"],
                cluster.router.to["prefill-0"],
                decode_address=decode.shell.address,
            )
            assert await call.result() == await yardstick.text(ids, 8)
            counts = decode.work.counts
            assert (counts.fetched_blocks, counts.unreached_blocks) == (0, 4)
            assert call.times.hit_tokens == 0
        finally:
            await decode.close()
    await cluster.at_rest(5.0)
