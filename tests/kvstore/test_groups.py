"""Groups of written slots: when they are synced, and what a failed sync costs."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading

import pytest

from headrace.kvstore import Kind, writer
from headrace.kvstore.files import FileCalls


class SlowBadSync(FileCalls):
    """The next sync ends when it is told to, and badly. `writes` counts calls, which end when
    `go_on` is set."""

    def __init__(self) -> None:
        self.armed, self.writes = False, 0
        self.entered, self.end, self.go_on = (threading.Event() for _ in range(3))
        self.go_on.set()

    def pwritev(self, descriptor, buffers, offset):
        written = super().pwritev(descriptor, buffers, offset)
        self.writes += 1
        assert self.go_on.wait(20)
        return written

    def sync(self, descriptor):
        if self.armed:
            self.armed = False
            self.entered.set()
            assert self.end.wait(20)
            raise OSError(errno.EIO, "lost")
        super().sync(descriptor)


@pytest.mark.fault
@pytest.mark.parametrize("over", [True, False], ids=["written", "being written"])
async def test_a_failed_sync_costs_what_was_written_meanwhile_too(
    rig, things, when_idle, wait_until, over
):
    """The next group is written while one is synced: when that fails, the kernel may have dropped
    data of both, and neither is believed to be on disk. In memory all of it stays."""
    disk = SlowBadSync()
    rig.options = {"calls": disk}
    await rig.start()
    client, key = await rig.client(), things.lease()
    await client.put(Kind.KV, things.blocks(0), lease=key)
    assert (await when_idle(client)).ssd_objects == 1
    disk.armed = True
    await client.put(Kind.KV, things.blocks(1), lease=key)
    assert await asyncio.to_thread(disk.entered.wait, 20)
    before = disk.writes
    if not over:
        disk.go_on.clear()
    await client.put(Kind.KV, things.blocks(2), lease=key)

    async def written() -> bool:
        return disk.writes > before

    async def failed() -> bool:
        return (await client.stat()).write_errors == 1

    await wait_until(written, "a write beside the sync")
    disk.end.set()
    await wait_until(failed, "a failed sync")
    disk.go_on.set()
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.write_errors, stat.blocks, stat.damaged) == (1, 1, 3, 0)
    await client.put(Kind.KV, things.blocks(3), lease=key)
    assert (await when_idle(client)).ssd_objects == 2
    dest = bytearray(3000)
    for number in range(4):
        (place,) = await client.open_prefix([things.digest(number)], key)
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    await rig.restart()
    found = [bool(await client.open_prefix([things.digest(n)], None)) for n in range(4)]
    assert found == [True, False, False, True]


async def test_a_large_group_is_synced_when_nothing_follows_and_a_small_one_waits(
    rig, things, when_idle
):
    size = 1 << 20
    await rig.start(
        group_s=60.0,
        block_bytes=size,
        arena_bytes=48 * size,
        ssd_bytes=64 * size,
        segment_bytes=16 * size,
    )
    client = await rig.client()
    await client.put(Kind.KV, [(things.digest(n), things.payload(n, size)) for n in range(12)])
    assert (await when_idle(client)).ssd_objects == 12
    await client.put(Kind.KV, [(things.digest(20), things.payload(20, size))])
    await asyncio.sleep(0.2)
    assert (await client.stat()).pending == 1


async def test_what_is_durable_is_passed_over_by_the_collector(rig, things, when_idle, monkeypatch):
    monkeypatch.setattr(writer, "_SPARED", 64)
    await rig.start()
    client = await rig.client()
    before = gc.get_freeze_count()
    try:
        await client.put(Kind.KV, things.blocks(*range(100)), wait_s=5.0)
        assert (await when_idle(client)).ssd_objects == 100
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
