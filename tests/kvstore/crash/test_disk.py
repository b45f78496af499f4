"""I6: a disk that is full, broken, short or forgetful costs hits and nothing else."""

from __future__ import annotations

import errno
import os

import pytest
from headrace_tests_kvstore_disk import Troubled

from headrace.core.clock import FakeClock
from headrace.core.errors import ConfigError
from headrace.kvstore import Kind

pytestmark = pytest.mark.fault
SMALL = {"arena_bytes": 160_000, "ssd_bytes": 6 * (64 << 10), "segment_bytes": 64 << 10}


async def _exact(client, things, numbers) -> list[int]:
    """Those of the blocks that are found; their bytes are compared."""
    found = []
    for number in numbers:
        (place,) = await client.open_objects(Kind.KV, [things.digest(number)], None)
        if place is not None:
            dest = bytearray(place.payload_bytes)
            assert client.read_into(place, things.digest(number), dest)
            assert bytes(dest) == things.payload(number)
            found.append(number)
    return found


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
async def test_a_slot_that_cannot_be_read_is_a_miss_and_is_counted(rig, things, when_idle, error):
    disk = Troubled()
    rig.options = {"calls": disk}
    await rig.start(**SMALL)
    client = await rig.client()
    for begin in range(0, 40, 8):  # the first ones leave the arena
        await client.put(Kind.KV, things.blocks(*range(begin, begin + 8)))
        await when_idle(client)
    disk.errors = {"preadv": error}
    assert await _exact(client, things, [0, 1]) == []
    assert disk.took_effect["preadv"] >= 2
    stat = await when_idle(client)
    assert stat.damaged == 2
    disk.errors = {}
    assert await _exact(client, things, [2, 3]) == [2, 3]  # the store lives on
    assert None not in await client.put(Kind.KV, things.blocks(0))
    await when_idle(client)
    assert await _exact(client, things, [0]) == [0]


async def test_short_writes_and_reads_change_nothing(rig, things, when_idle):
    disk = Troubled()
    rig.options = {"calls": disk}
    await rig.start(**SMALL)
    disk.short = 4096  # what O_DIRECT could still go on from
    client = await rig.client()
    items = things.windows(*range(4))  # 7,000 bytes each
    await client.put(Kind.SWA, items)
    assert (await when_idle(client)).ssd_objects == 4
    await rig.restart()
    for digest, payload in items:
        (place,) = await client.open_objects(Kind.SWA, [digest], None)
        dest = bytearray(place.payload_bytes)
        assert client.read_into(place, digest, dest) and bytes(dest) == payload
    assert disk.took_effect["short pwrite"] >= 4 and disk.took_effect["short preadv"] >= 4


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_disk_that_is_full_from_the_n_th_write_on(rig, things, when_idle, error):
    """Each object is on disk whole or not at all, and every one is served meanwhile."""
    disk, clock = Troubled(), FakeClock()
    rig.options = {"calls": disk, "clock": clock}
    await rig.start(**SMALL)
    client = await rig.client()
    disk.errors, disk.after = {"pwrite": error}, 9
    lease = things.lease()
    for number in range(12):
        await client.put(Kind.KV, things.blocks(number), lease=lease)
        await when_idle(client)
    assert disk.took_effect["pwrite"] > 0
    assert await _exact(client, things, range(12)) == list(range(12))
    stat = await when_idle(client)
    assert stat.unsaved > 0 and stat.write_errors > 0 and 0 < stat.ssd_objects < 12
    kept = stat.ssd_objects
    disk.errors = {}
    clock.advance(60)
    await client.release(lease)
    await client.put(Kind.KV, things.blocks(50))
    assert (await when_idle(client)).ssd_objects == kept + 1
    await rig.restart()
    assert len(await _exact(client, things, range(12))) == kept


@pytest.mark.parametrize("where", ["open", "allocate"])
async def test_a_disk_that_fails_at_start_is_said_at_start(rig, where):
    disk = Troubled()
    disk.errors, disk.after = {where: errno.ENOSPC}, 3
    rig.options = {"calls": disk}
    with pytest.raises(ConfigError, match="segment 3.*No space left on device|No space.*segment 3"):
        await rig.start(**SMALL)
    assert disk.took_effect[where] == 1
    left = [n for n in os.listdir(rig.settings.directory) if n.endswith(".seg")]
    assert left == []  # every file is as long as before and none is new
    rig.options = {}
    await rig.start(**SMALL)


async def test_a_disk_that_forgets_what_it_acknowledged(rig, things, when_idle):
    """Syncs that lie: after the power cut nothing wrong is served, and the store can be used."""
    disk = Troubled()
    rig.options = {"calls": disk}
    await rig.start(**SMALL)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(8)))
    await when_idle(client)
    disk.forget = True
    await client.put(Kind.KV, things.blocks(*range(8, 30)))
    stat = await when_idle(client)
    assert stat.ssd_objects == 30  # as far as anybody could know
    await rig.cut()
    assert disk.lose() > 22
    disk.forget = False
    await rig.start()
    client = await rig.client()
    assert await _exact(client, things, range(30)) == list(range(8))
    assert None not in await client.put(Kind.KV, things.blocks(9))
    stat = await when_idle(client)
    assert stat.ssd_objects == 9


class BadSector(Troubled):
    """One page of one segment cannot be read, however much is asked for at once."""

    def preadv(self, descriptor, buffers, offset):
        end = offset + sum(map(len, buffers))
        if self._paths[descriptor].name == "segment-000000.seg" and offset <= 4 * 4096 < end:
            self.took_effect["preadv"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(descriptor, buffers, offset)


async def test_a_slot_that_cannot_be_read_at_start_costs_one_object(rig, things, when_idle):
    disk = BadSector()  # slot 3, after the segment's header
    await rig.start(**SMALL)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(8)))
    await when_idle(client)
    await rig.cut()
    rig.options = {"calls": disk}
    await rig.start()
    assert disk.took_effect["preadv"] == 2  # with its neighbours, and alone
    client = await rig.client()
    assert await _exact(client, things, range(8)) == [0, 1, 2, 4, 5, 6, 7]
