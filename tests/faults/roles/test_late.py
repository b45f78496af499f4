"""What comes late, twice, or for nobody (F5, J6), and bytes that arrive when their request is gone
and its blocks are another's (J1)."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import Any

import pytest

from headrace.core.card import Role
from headrace.core.ids import BootId, Digest, JobKey, new_request_id
from headrace.core.limits import LeaseTimes, WireLimits
from headrace.core.messages import BlocksReady, Cancel, Hello, PrefillDone
from headrace.core.peers import introduce
from headrace.kvstore import Kind
from headrace.vision import VisionReplica, VisionSettings

MODEL = "toy"
STORE = {"arena_bytes": 3 << 20}  # so that a test can fill it
DEPLOYMENT = {"leases": LeaseTimes(handoff_s=2.0, member_s=8.0)}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]


async def until(condition: Any, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def late(replica: Any) -> int:
    return int(replica.work.counts.late)


# ---- cancels -----------------------------------------------------------------------------------


async def test_cancels_of_what_is_over_are_ignored_and_counted(
    service: Any, prompt: Any, roles: Any
) -> None:
    """Twice, after the end, for an unknown id, with an old epoch: to every role that takes one."""
    cluster, ids = service.cluster, prompt(300, "cancelled")
    vision = VisionReplica(roles("vision-0"), VisionSettings())
    await vision.start()
    ended = cluster.request(ids, epoch=3)
    await (await cluster.handoff(ended)).result()
    endless = cluster.request(prompt(310, "twice"), 400)
    call = await cluster.handoff(endless)
    await until(lambda: call.token_ids)
    await cluster.to_decode[0].link.send(Cancel(endless.key, "test"))
    # Counting begins when it is gone: a step that was under way may count as late, too.
    ends = (cluster.prefill, cluster.decodes[0])
    await until(lambda: not any(replica.work.jobs for replica in ends))
    unknown = JobKey(new_request_id(), 0)
    older = JobKey(ended.request_id, 2)
    to_vision = await cluster.router.connect(vision.shell.address)
    takers = {
        cluster.to_prefill: cluster.prefill,
        cluster.to_decode[0]: cluster.decodes[0],
        to_vision: vision,
    }
    before = {peer: late(replica) for peer, replica in takers.items()}
    running = asyncio.create_task(service.check(prompt(60, "beside"), 30))
    keys = (endless.key, endless.key, ended.key, unknown, older)
    for peer in takers:
        for key in keys:
            await peer.link.send(Cancel(key, "test"))
    await until(lambda: all(late(r) == before[p] + len(keys) for p, r in takers.items()))
    assert all(not peer.link.closed for peer in takers)
    await running
    await vision.close()
    await service.pulse()


# ---- announcements -----------------------------------------------------------------------------


async def liar(service: Any, name: str = "prefill-8") -> Any:
    """A prefill replica that says what the test wants."""
    hello = Hello(Role.PREFILL, name, BootId("y"), "test", service.cluster.card)
    target, token = service.proxies["decode-0"].target, service.cluster.prefill.role.token
    return await introduce(target, hello, token, WireLimits())


async def test_an_announcement_twice_of_an_older_epoch_and_of_what_expired(
    service: Any, prompt: Any
) -> None:
    """J6. The places are real ones; what lies there when they are used decides."""
    cluster, decode, ids = service.cluster, service.cluster.decodes[0], prompt(300, "announced")
    request = cluster.request(ids)
    await (await cluster.local(request, decode=1)).result()
    await cluster.at_rest(5.0)
    await cluster.written()
    # Leased for an attempt that nobody renews: the right to them ends, and the lease is gone.
    places = await cluster.prefill.store.open_prefix(request.digests, JobKey(new_request_id(), 0))
    assert len(places) == 2
    stat = await cluster.prefill.store.stat()
    assert stat.leases == 1
    async with asyncio.timeout(10):
        while (await cluster.prefill.store.stat()).leases:
            await asyncio.sleep(0.05)
    peer = await liar(service)
    again = cluster.request(ids, epoch=5)
    call = await cluster.router.send(again, cluster.to_decode[0], prefill_name="prefill-8")
    await until(lambda: again.key in decode.work.jobs)  # before it, none would be known as late
    older = JobKey(again.request_id, 4)
    ready = BlocksReady(again.key, 0, again.digests, places)
    counted = late(decode)
    for message in (BlocksReady(older, 0, again.digests, places), ready, ready):
        await peer.link.send(message)
    # One frame of an older attempt, and two blocks that are no news.
    await until(lambda: late(decode) == counted + 3)
    await peer.link.send(PrefillDone(older, 0, 0, 0.0))
    await until(lambda: late(decode) == counted + 4)
    await peer.link.send(PrefillDone(again.key, 0, 0, 0.0))
    assert await call.result() == await service.yardstick.text(ids, 8)
    # Expired is not overwritten: what verifies is right, whoever held it.
    assert call.times.hit_tokens == 256
    await peer.link.send(ready)
    await until(lambda: late(decode) == counted + 5)
    peer.link.abort()
    await service.pulse()


# ---- late writes -------------------------------------------------------------------------------


class HeldWrites:
    """Writes into an engine's blocks wait, in the loading thread, until `go`; then they happen."""

    def __init__(self, replica: Any, monkeypatch: Any, limit: int) -> None:
        self.go = threading.Event()
        self.blocks: list[int] = []
        real = replica.engine.state.block_view

        def block_view(block: int) -> memoryview:
            if len(self.blocks) < limit:
                self.blocks.append(block)
                self.go.wait(20)
            view: memoryview = real(block)
            return view

        monkeypatch.setattr(replica.engine.state, "block_view", block_view)


async def test_blocks_under_a_late_write_are_nobodys_until_it_is_over(
    service: Any, prompt: Any, monkeypatch: Any
) -> None:
    """J1: aborted while its bytes are on their way, and another request wants every block."""
    cluster, decode = service.cluster, service.cluster.decodes[0]
    first, second = prompt(1500, "aborted"), prompt(1100, "into the same blocks")
    for ids in (first, second):  # stored, by way of the other replica
        await (await cluster.local(cluster.request(ids), decode=1)).result()
        await cluster.at_rest(5.0)
    await cluster.written()
    expected = await service.yardstick.text(second, 8)
    held = HeldWrites(decode, monkeypatch, limit=1)
    call = await cluster.local(cluster.request(first))
    await until(lambda: held.blocks)
    await cluster.router.cancel(call)
    await until(lambda: call.key not in decode.work.jobs)
    # 60 blocks in all; 4 requests of which each takes 13 or 14, and one block is pinned.
    calls = [
        await cluster.local(cluster.request(second, domain=domain, max_tokens=600))
        for domain in ("tenant-a", "b", "c", "d")
    ]
    await until(lambda: calls[0].token_ids)
    pinned = held.blocks[0]
    leased = [b for s in decode.engine.scheduler.sequences() for b in s.lease.blocks]
    assert pinned not in leased and len(leased) > 40
    held.go.set()
    for other in calls:
        await until(lambda other=other: len(other.token_ids) >= 8)
        assert tuple(other.token_ids[:8]) == expected
        await cluster.router.cancel(other)
    await cluster.at_rest(5.0)
    await service.pulse()


async def test_a_place_that_is_another_objects_now_is_a_miss(service: Any, prompt: Any) -> None:
    """The sender's side of J1: an announcement on its way, its attempt cancelled, the slots of the
    arena taken by others; then it comes, for a later attempt of the same request."""
    cluster, ids = service.cluster, prompt(300, "overwritten")
    request = cluster.request(ids)
    await (await cluster.local(request, decode=1)).result()
    await cluster.at_rest(5.0)
    await cluster.written()
    store = cluster.prefill.store
    places = await store.open_prefix(request.digests, None)
    decode, dest = cluster.decodes[0], bytearray(cluster.card.block_bytes)
    pairs = list(zip(places, request.digests, strict=True))
    # Held, so that nothing but what was opened may leave: fillers that were saved meanwhile would
    # leave before it, since two requests have used it and one has used them.
    filler, held = 0, JobKey(new_request_id(), 0)
    while any(store.read_into(place, digest, dest) for place, digest in pairs):
        digest = Digest(hashlib.sha256(b"filler %d" % filler).digest())
        await store.put(Kind.KV, [(digest, bytes(len(dest)))], lease=held)
        await store.renew(held)
        filler += 1
        assert filler < 2000
    await store.release(held)
    peer = await liar(service)
    again = cluster.request(ids, domain="tenant-a", epoch=1)
    damaged = decode.work.counts.damaged
    call = await cluster.router.send(again, cluster.to_decode[0], prefill_name="prefill-8")
    await peer.link.send(BlocksReady(again.key, 0, again.digests, places))
    await peer.link.send(PrefillDone(again.key, 0, 0, 0.0))
    assert await call.result() == await service.yardstick.text(ids, 8)
    assert decode.work.counts.damaged == damaged + 2
    assert call.times.hit_tokens == 0
    peer.link.abort()
    await service.pulse()
