"""I3: Redis flushed, frozen, slow, full, read-only, or back with older data. Right bytes or a miss
each time, in time; and the index is true again when Redis is well."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from headrace.core.deployment import Deployment
from headrace.core.limits import LeaseTimes
from headrace.kvstore import IndexReader, Kind

pytestmark = [pytest.mark.redis, pytest.mark.fault]
LONG = LeaseTimes(member_s=600.0)  # a store that cannot write its record is not gone for that
PATIENCE_S = 30.0  # against hangs: a Redis that stands still would be awaited for ever


@pytest_asyncio.fixture
async def bench(new_rig, home, wait_until, things):
    """`await bench(url)`: a store, its client and a reader, and what is asked of them below."""
    made: list[Bench] = []

    async def start(url: str, leases: LeaseTimes | None = None, **changes) -> Bench:
        rig = new_rig(home, url, **changes)
        rig.role = replace(rig.role, deployment=Deployment(leases=leases or LeaseTimes()))
        await rig.start()
        reader = IndexReader(url, deadline_s=1.0)
        made.append(Bench(rig, await rig.client(), reader, things, wait_until))
        return made[-1]

    yield start
    for one in made:
        await one.reader.close()
        await one.rig.close()


class Bench:
    def __init__(self, rig, client, reader, things, wait_until) -> None:
        self.rig, self.client, self.reader = rig, client, reader
        self.things, self.wait_until = things, wait_until

    async def put(self, *numbers: int) -> None:
        """What is put is served at once and made durable, whatever Redis does."""
        async with asyncio.timeout(PATIENCE_S):
            assert None not in await self.client.put(Kind.KV, self.things.blocks(*numbers))

    async def durable(self, count: int) -> None:
        async def there() -> bool:
            stat = await self.client.stat()
            return stat.ssd_objects == count and not stat.pending

        await self.wait_until(there, f"{count} objects on disk")

    async def exact(self, *numbers: int) -> None:
        for number in numbers:
            (place,) = await self.client.open_prefix([self.things.digest(number)], None)
            dest = bytearray(place.payload_bytes)
            assert self.client.read_into(place, self.things.digest(number), dest)
            assert bytes(dest) == self.things.payload(number)

    async def hits(self, *numbers: int) -> int:
        """What a router is told, within its deadline."""
        digests = [self.things.digest(n) for n in numbers]
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.hit_blocks(self.things.namespace, digests)).blocks

    async def well(self, *numbers: int) -> None:
        """The index holds these and no others of ours."""

        async def true() -> bool:
            stat = await self.client.stat()
            told = stat.index == "ok" and not stat.index_unlisted
            return told and await self.hits(*numbers) == len(numbers)

        await self.wait_until(true, "a true index")


async def test_flushed(bench, new_server):
    server = new_server()
    one = await bench(server.url)
    await one.put(*range(20))
    await one.well(*range(20))
    server.client.flushall()
    assert len([key for key in server.client.keys("kv:*") if b"store" not in key]) < 20
    await one.exact(*range(20))
    await one.well(*range(20))


async def test_frozen(bench, new_server):
    server = new_server()
    one = await bench(server.url)
    await one.put(*range(10))
    await one.well(*range(10))
    os.kill(server.process.pid, signal.SIGSTOP)
    try:

        async def stopped() -> bool:
            stat = Path(f"/proc/{server.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"

        await one.wait_until(stopped, "state T")
        assert await one.hits(*range(10)) == 0 and not one.reader.healthy
        await one.put(*range(10, 20))
        await one.durable(20)
        await one.exact(*range(20))
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    await one.well(*range(20))


async def test_slow(bench, new_server, proxy_of):
    server = new_server()
    proxy, url = await proxy_of(server)
    one = await bench(url)
    await one.put(*range(10))
    await one.well(*range(10))
    proxy.delay_s = 1.5  # longer than any deadline here
    for _ in range(5):
        assert await one.hits(*range(10)) == 0
    assert proxy.delayed > 0
    await one.put(*range(10, 20))
    await one.durable(20)
    await one.exact(*range(20))
    proxy.delay_s = 0.0
    await one.well(*range(20))


async def test_cut_in_the_middle(bench, new_server, proxy_of):
    """Connections that end again and again, and answers that never come."""
    server = new_server()
    proxy, url = await proxy_of(server)
    one = await bench(url)
    for number in range(10):
        if number % 2:
            proxy.moving.clear()
        await one.put(number)
        await asyncio.sleep(0.02)
        proxy.cut()
        proxy.moving.set()
    assert proxy.held > 0
    await one.exact(*range(10))
    await one.well(*range(10))


async def test_full(bench, new_server):
    server = new_server("--maxmemory-policy", "noeviction")
    one = await bench(server.url, LONG)
    await one.put(*range(10))
    await one.well(*range(10))
    server.client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        server.client.set("x", "y")
    await one.put(*range(10, 20))
    await one.durable(20)
    await one.exact(*range(20))
    assert await one.hits(*range(20)) == 10  # what it knew before is still read

    async def noticed() -> bool:
        return (await one.client.stat()).index_errors > 0

    await one.wait_until(noticed, "an error of the index")
    server.client.config_set("maxmemory", 0)
    await one.well(*range(20))


async def test_read_only(bench, new_server):
    """The server becomes a replica of nobody that answers: reads go on, writes are refused."""
    server = new_server("--replica-serve-stale-data", "yes")
    one = await bench(server.url, LONG)
    await one.put(*range(10))
    await one.well(*range(10))
    server.client.replicaof("127.0.0.1", "1")
    with pytest.raises(redis.exceptions.ReadOnlyError):
        server.client.set("x", "y")
    await one.put(*range(10, 20))
    await one.durable(20)
    await one.exact(*range(20))
    assert await one.hits(*range(20)) == 10
    server.client.replicaof("NO", "ONE")
    await one.well(*range(20))


async def test_back_with_older_data(bench, new_server):
    """A snapshot of before: records of objects that a reused segment has long lost."""
    server = new_server("--dbfilename", "old.rdb")
    small = {"arena_bytes": 60_000, "ssd_bytes": 3 * (64 << 10), "segment_bytes": 64 << 10}
    one = await bench(server.url, **small)
    await one.put(0, 1, 2)
    await one.durable(3)
    await one.well(0, 1, 2)
    server.client.save()
    for begin in range(100, 200, 4):  # until the first ones are gone
        await one.client.put(Kind.KV, one.things.blocks(*range(begin, begin + 4)))
        await asyncio.sleep(0.03)

    async def lost() -> bool:
        return await one.client.open_prefix([one.things.digest(0)], None) == ()

    await one.wait_until(lost, "the loss of the first objects")
    server.kill()
    server.start()
    old = [key for key in server.client.keys("kv:*") if b"store" not in key]
    assert len(old) >= 3, "the older data did not come back"
    # The index may promise them until the store has noticed; the store does not.
    assert await one.hits(0, 1, 2) in (0, 3)
    assert await one.client.open_prefix([one.things.digest(n) for n in range(3)], None) == ()

    async def true() -> bool:
        stat = await one.client.stat()
        told = stat.index == "ok" and not stat.index_unlisted
        return told and await one.hits(0, 1, 2) == 0 and one.reader.healthy

    await one.wait_until(true, "a true index")
    await one.put(500)
    await one.well(500)


async def test_loading(bench, new_server):
    """It is up, takes connections, and answers -LOADING while it reads its snapshot."""
    server = new_server("--dbfilename", "slow.rdb")
    one = await bench(server.url, LONG)
    await one.put(*range(10))
    await one.well(*range(10))
    with server.client.pipeline(transaction=False) as pipe:
        for number in range(3000):
            pipe.set(f"other:{number}", os.urandom(1000))
        pipe.execute()
    server.client.save()
    server.kill()
    slow = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
    server.options = (*server.options, *slow)
    starting = asyncio.create_task(asyncio.to_thread(server.start))

    def loads() -> bool:
        try:
            server.client.get("x")
            return False
        except redis.exceptions.BusyLoadingError:
            return True
        except redis.RedisError:
            return False

    async def loading() -> bool:
        return await asyncio.to_thread(loads)

    await one.wait_until(loading, "-LOADING")
    assert await one.hits(*range(10)) == 0
    await one.put(*range(10, 20))
    await one.durable(20)
    await one.exact(*range(20))
    assert (await one.client.stat()).index == "away"
    assert loads() and not starting.done(), "it had loaded by then"
    server.client.config_set("key-load-delay", 0)
    await starting
    await one.well(*range(20))


async def test_killed_and_restarted_empty(bench, new_server):
    server = new_server()
    one = await bench(server.url)
    await one.put(*range(10))
    await one.well(*range(10))
    server.kill()
    assert server.process.returncode == -signal.SIGKILL
    assert await one.hits(*range(10)) == 0
    await one.put(*range(10, 20))
    await one.durable(20)
    await one.exact(*range(20))
    server.start()
    assert server.client.dbsize() < 20
    await one.well(*range(20))
