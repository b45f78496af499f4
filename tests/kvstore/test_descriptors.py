"""Descriptors of a store and of its clients do not grow with what they go through."""

from __future__ import annotations

import errno
import gc
import os

import pytest
from headrace_tests_kvstore_disk import Troubled

from headrace.core.clock import FakeClock
from headrace.core.errors import ConfigError
from headrace.kvstore import Kind, StoreClient

TOKEN = "a cluster token of tests"


def count() -> int:
    gc.collect()  # a mapping has a descriptor of its own, which goes with the last object of it
    return len(os.listdir("/proc/self/fd"))


async def settled(wait_until, most: int) -> None:
    async def there() -> bool:
        return count() <= most

    await wait_until(there, f"at most {most} descriptors, not {count()}")


@pytest.mark.fault
async def test_connections_reads_reuses_and_failures_leave_none(rig, things, when_idle, wait_until):
    disk, clock = Troubled(), FakeClock()
    rig.options = {"calls": disk, "clock": clock}
    await rig.start(arena_bytes=60_000, ssd_bytes=3 * (64 << 10), segment_bytes=64 << 10)
    first = await rig.client()
    await first.put(Kind.KV, things.blocks(0))
    await when_idle(first)
    before = count()
    for round_ in range(25):
        client = StoreClient(rig.role.listen, TOKEN, things.namespace)
        assert await client.connect(10.0)
        assert count() > before  # its socket, and the store's end of it
        begin = 10 * round_
        await client.put(Kind.KV, things.blocks(*range(begin, begin + 10)))
        await client.open_objects(Kind.KV, [things.digest(n) for n in range(begin)], None)
        if round_ % 5 == 4:
            disk.errors, disk.once = {"preadv" if round_ % 2 else "sync": errno.EIO}, True
            await client.open_prefix([things.digest(begin - 30)], None)
        if round_ % 2:
            client._connection.abort()  # as by a client that is killed
        await client.close()
        clock.advance(60.0)  # a disk that failed is tried again
    stat = await when_idle(first)
    assert stat.recycled > 0 and stat.loads > 10 and sum(disk.took_effect.values()) >= 2
    await settled(wait_until, before)


async def test_lives_and_starts_that_fail_leave_none(rig, things, when_idle, wait_until):
    before = 0
    for round_ in range(5):
        disk = Troubled()
        disk.errors, disk.after = {"allocate": errno.ENOSPC}, 1
        rig.options = {"calls": disk}
        with pytest.raises(ConfigError, match="No space left"):
            await rig.start(directory=f"{rig.home}/never")
        assert disk.took_effect["allocate"] == 1
        rig.options = {}
        await rig.start(directory=f"{rig.home}/store")
        client = await rig.client()
        await client.put(Kind.KV, things.blocks(round_))
        await when_idle(client)
        await client.close()
        rig.clients.clear()
        await (rig.stop() if round_ % 2 else rig.cut())
        # uvloop keeps one of its own from the first server on, and the arena of a life that was cut
        # off until the next one begins.
        before = before or count()
    await settled(wait_until, before)


async def test_a_client_that_goes_lets_go_of_the_arena_uncollected(rig, things, wait_until):
    """A store that is started anew has another arena: clients must not keep those before it."""
    await rig.start()
    before, mapped = gc.get_threshold(), mappings()
    gc.set_threshold(0)
    try:
        client = StoreClient(rig.role.listen, TOKEN, things.namespace)
        assert await client.connect(10.0)
        assert mappings() == mapped + 1
        for begin in range(0, 96, 8):  # a row: slots are held in advance
            await client.put(Kind.KV, things.blocks(*range(begin, begin + 8)))
        assert len(client._connection.ahead) > 0
        await client.close()
        del client

        async def gone() -> bool:
            return mappings() == mapped

        await wait_until(gone, "the arena stays mapped")
    finally:
        gc.set_threshold(*before)


def mappings() -> int:
    """How many arenas this process has mapped."""
    with open("/proc/self/maps", encoding="ascii") as lines:
        return sum("headrace" in line and "(deleted)" in line for line in lines)
