"""I6: 100,000 tiny objects, each counted: put, listed, found after a restart, removed by `gc`."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
import redis

from headrace.core.ids import Digest
from headrace.kvstore import Kind
from headrace.kvstore.layout import domain_tag
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.repair import erase, find_garbage

pytestmark = [pytest.mark.slow, pytest.mark.redis]
CHAINS, BLOCKS = 1000, 100
MANY = CHAINS * BLOCKS
SIZE = 48
INDEX_BYTES = 130  # of one object in Redis, at most
# A slot takes 4 KiB however small its object: of 100,000 the arena holds a part.
STORE = {
    "arena_bytes": 32 << 20,
    "ssd_bytes": 27 * (16 << 20),
    "segment_bytes": 16 << 20,
    "block_bytes": SIZE,
    "window_bytes": SIZE,
    "window_share": 0.02,
    "group_s": 0.2,
}
DOMAINS = ("even", "odd")


def chain(number: int) -> list[tuple[Digest, bytes]]:
    digests = [hashlib.sha256(b"%d/%d" % (number, block)).digest() for block in range(BLOCKS)]
    return [(Digest(digest), digest[:16] * 3) for digest in digests]


async def _whole(client, number: int) -> bool:
    """Whether a chain is there with all its bytes; else nothing of it is."""
    items = chain(number)
    places = await client.open_prefix([digest for digest, _ in items], None)
    for (digest, payload), place in zip(items, places, strict=False):
        dest = bytearray(SIZE)
        assert client.read_into(place, digest, dest) and bytes(dest) == payload
    assert len(places) in (0, BLOCKS)
    return bool(places)


async def _listed(server: redis.Redis, count: int, wait_until) -> None:
    async def there() -> bool:
        return (
            sum(1 for key in server.scan_iter("kv:*", count=10_000) if b"store" not in key) == count
        )

    await wait_until(there, f"{count} records", limit_s=60.0)


async def test_a_hundred_thousand(home, new_rig, own_valkey, things, wait_until, when_idle):
    server = redis.Redis.from_url(own_valkey.url)
    empty_bytes = server.info("memory")["used_memory"]
    rig = new_rig(home, own_valkey.url, **STORE)
    try:
        await rig.start()
        client = await rig.client()
        for number in range(CHAINS):
            lease, domain = things.lease(f"{number}"), DOMAINS[number % 2]
            places = await client.put(
                Kind.KV, chain(number), lease=lease, wait_s=30.0, domain=domain
            )
            assert None not in places
            await client.release(lease)
        await _durable(client, wait_until)
        stat = await when_idle(client)
        assert (stat.blocks, stat.ssd_objects, stat.writes) == (MANY, MANY, MANY)
        assert (stat.dropped, stat.unsaved, stat.damaged, stat.leases) == (0, 0, 0, 0)
        assert stat.arena_resident < MANY
        await _listed(server, MANY, wait_until)
        await wait_until(lambda: _small(server, empty_bytes), f"{INDEX_BYTES} B a record")
        await rig.restart()
        assert (await client.stat()).blocks == MANY
        for number in range(0, CHAINS, 37):
            assert await _whole(client, number)
        assert (await client.stat()).damaged == 0
        await rig.stop()
        with StoreDirectory(Path(rig.settings.directory)) as files:
            wishes = Wishes(domains=frozenset({domain_tag("odd")}))
            found = find_garbage(files, wishes, lambda done, total: None)
            assert (found.read, found.objects, len(found.flaws)) == (MANY, MANY // 2, MANY // 2)
            erase(files, found)
        await rig.start()
        await wait_until(lambda: asyncio.sleep(0, client.connected))
        assert (await client.stat()).blocks == MANY // 2
        there = [await _whole(client, number) for number in range(1, CHAINS, 36)]
        assert there == [number % 2 == 0 for number in range(1, CHAINS, 36)]
        await _listed(server, MANY // 2, wait_until)
    finally:
        await rig.close()
        server.close()


async def _small(server: redis.Redis, empty_bytes: int) -> bool:
    """Buffers of what was written last are given back a little later."""
    return server.info("memory")["used_memory"] - empty_bytes <= MANY * INDEX_BYTES


async def _durable(client, wait_until) -> None:
    async def done() -> bool:
        return not (await client.stat()).pending

    await wait_until(done, "all on disk", limit_s=60.0)
