"""A disk that fails or is full, arenas held by leases, clients that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from dataclasses import replace

import pytest

from headrace.core.clock import FakeClock
from headrace.core.frames import FrameCodec
from headrace.core.limits import WireLimits
from headrace.core.messages import Place
from headrace.kvstore import Kind
from headrace.kvstore.connection import attach
from headrace.kvstore.files import FileCalls
from headrace.kvstore.layout import NO_DIGEST
from headrace.kvstore.messages import (
    STORE_MESSAGES,
    Abandon,
    Attach,
    Cancel,
    Done,
    Doom,
    OpenPrefix,
    Ping,
    Reserve,
    Seal,
    pack_pairs,
    pack_sizes,
)

TOKEN = "a cluster token of tests"


class BadDisk(FileCalls):
    """Fails what it is told to, and counts."""

    def __init__(self) -> None:
        self.write_error = self.sync_error = self.read_error = 0
        self.failed = 0

    def _fail(self, error: int) -> None:
        if error:
            self.failed += 1
            raise OSError(error, os.strerror(error))

    def pwritev(self, descriptor, buffers, offset):
        self._fail(self.write_error)
        return super().pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor, buffers, offset):
        self._fail(self.read_error)
        return super().preadv(descriptor, buffers, offset)

    def sync(self, descriptor):
        self._fail(self.sync_error)
        super().sync(descriptor)


@pytest.mark.fault
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("where", ["write_error", "sync_error"])
async def test_a_disk_that_fails_costs_persistence_only(rig, things, when_idle, where, error):
    """I6. The objects stay readable; after the disk is well again new ones are persisted."""
    disk, clock = BadDisk(), FakeClock()
    rig.options = {"calls": disk, "clock": clock}
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0))
    await when_idle(client)
    setattr(disk, where, error)
    dest = bytearray(3000)
    for number in range(1, 12):
        (place,) = await client.put(Kind.KV, things.blocks(number), lease=things.lease())
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
        await when_idle(client)
    stat = await when_idle(client)
    assert stat.ssd_objects == 1 and disk.failed > 0 and stat.write_errors >= 3
    assert stat.unsaved > 0  # after three failures the disk is left alone for a while
    failed = disk.failed
    await client.put(Kind.KV, things.blocks(20), lease=things.lease())
    await when_idle(client)
    assert disk.failed <= failed + 1
    setattr(disk, where, 0)
    clock.advance(6.0)
    await client.put(Kind.KV, things.blocks(30), lease=things.lease())
    stat = await when_idle(client)
    assert stat.ssd_objects == 2
    await rig.restart()
    digests = [things.digest(n) for n in (0, 30)]
    assert [len(await client.open_prefix([d], None)) for d in digests] == [1, 1]
    assert await client.open_prefix([things.digest(1)], None) == ()


@pytest.mark.fault
async def test_a_disk_that_cannot_be_read_is_a_miss(rig, things):
    disk = BadDisk()
    rig.options = {"calls": disk}
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1))
    await rig.restart()
    disk.read_error = errno.EIO
    assert await client.open_prefix([things.digest(0)], things.lease()) == ()
    assert disk.failed == 1
    disk.read_error = 0
    stat = await client.stat()
    assert (stat.damaged, stat.blocks, stat.leases, stat.arena_reserved) == (1, 1, 0, 0)
    assert len(await client.open_prefix([things.digest(1)], things.lease())) == 1
    assert None not in await client.put(Kind.KV, things.blocks(0))  # and it can be put again


async def test_segments_that_are_held_are_not_reused(rig, things, when_idle):
    """Everything on disk is leased: nothing new is persisted, nothing held is lost. Then a segment
    is reused: half of it may be kept, the heads of the chain that was used, and with the rest goes
    what hung on it in the other segment, for good."""
    await rig.start(arena_bytes=1 << 20, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10)
    client = await rig.client()
    held = things.lease("held")
    await client.put(Kind.KV, things.blocks(*range(30)), lease=held)  # 15 slots a segment
    assert (await when_idle(client)).ssd_objects == 30
    await client.put(Kind.KV, things.blocks(*range(100, 105)), lease=things.lease("new"))
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.unsaved, stat.recycled) == (30, 5, 0)
    assert len(await client.open_prefix([things.digest(n) for n in range(30)], None)) == 30
    await client.release(held)
    await client.put(Kind.KV, things.blocks(*range(200, 205)), lease=things.lease("new"))
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.recycled) == (7 + 5, 1)
    await rig.restart()
    kept = [
        n
        for n in (*range(30), *range(100, 105), *range(200, 205))
        if await client.open_prefix([things.digest(n)], None)
    ]
    assert kept == [*range(7), *range(200, 205)]


async def test_a_batch_larger_than_the_arena_is_taken_as_far_as_it_goes(rig, things, when_idle):
    await rig.start(arena_bytes=60_000)
    client = await rig.client()
    total = (await client.stat()).arena_slots - 1
    places = await client.put(
        Kind.KV, things.blocks(*range(total + 6)), lease=things.lease(), wait_s=0.1
    )
    assert None not in places[:total] and set(places[total:]) == {None}
    assert (await when_idle(client)).leased_objects == total


async def test_a_thousand_healthy_reads_and_no_false_alarm(rig, things, when_idle):
    """J5's other half."""
    await rig.start()
    client = await rig.client()
    items = things.blocks(*range(100))
    places = await client.put(Kind.KV, items, lease=things.lease(), wait_s=5.0)
    dest = bytearray(3000)
    for _ in range(10):
        for (digest, payload), place in zip(items, places, strict=True):
            assert client.read_into(place, digest, dest) and bytes(dest) == payload
    stat = await when_idle(client)
    assert (stat.damaged, stat.refused, client.read_misses) == (0, 0, 0)


async def test_made_up_places_are_misses(rig, things):
    """H5: a reader copies only from a slot that carries what it asked for, wherever it is sent."""
    await rig.start()
    client = await rig.client()
    (place,) = await client.put(Kind.KV, things.blocks(1))
    dest = bytearray(1 << 16)
    source = random.Random(3)
    changes = [{"offset": o} for o in (-4096, -1, 1, 4096, 1 << 20, 1 << 40, place.offset + 8)]
    changes += [{"payload_bytes": n} for n in (-1, 0, 1, 2999, 3001, 3584, 3585, 1 << 30)]
    changes += [{"generation": g} for g in (-1, 0, place.generation + 1)]
    changes += [{"checksum": place.checksum ^ 1 << source.randrange(64)} for _ in range(8)]
    for change in changes:
        wrong: Place = replace(place, **change)
        assert not client.read_into(wrong, things.digest(1), dest), change
        await client.doom(wrong, things.digest(1))
    assert not client.read_into(place, things.digest(2), dest)
    assert client.read_into(place, things.digest(1), dest)
    assert (await client.stat()).damaged == 0


def reserve(
    call: int = 1,
    kind: Kind = Kind.KV,
    digests: bytes = NO_DIGEST,
    sizes: bytes = pack_sizes([10]),
    parent: bytes = NO_DIGEST,
    first_block: int = 0,
    domain: bytes = bytes(16),
    wait_s: float = 0.0,
) -> Reserve:
    return Reserve(call, kind, digests, sizes, parent, first_block, domain, None, wait_s)


BAD = [
    Attach("twice", bytes(32)),
    Done(1, True),  # what only a store says
    reserve(first_block=-1),
    reserve(first_block=1 << 32),
    reserve(first_block=(1 << 32) - 1),  # its last block has number 2 ** 32
    reserve(digests=b"short"),
    reserve(parent=b"short"),
    reserve(sizes=b""),
    reserve(sizes=bytes(7)),
    reserve(domain=bytes(3)),
    reserve(digests=bytes(32 * 65_537), sizes=bytes(4 * 65_537)),
    OpenPrefix(1, b"x" * 33, None),
    Seal(1, bytes(17)),
]


@pytest.mark.parametrize("message", BAD, ids=lambda m: type(m).__name__)
async def test_a_client_against_the_protocol_is_cut_off_alone(
    rig, things, message, wait_until, when_idle
):
    await rig.start()
    client = await rig.client()
    rude = await attach(rig.role.listen, TOKEN, "rude", things.namespace, WireLimits())
    serving = asyncio.create_task(rude.serve())
    rude.post(message)
    await asyncio.wait_for(serving, 10)
    assert not rude.open
    assert None not in await client.put(Kind.KV, things.blocks(1))
    stat = await when_idle(client)
    assert stat.connections == 1


async def test_strange_but_harmless_messages_change_nothing(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    odd = await attach(rig.role.listen, TOKEN, "odd", things.namespace, WireLimits())
    serving = asyncio.create_task(odd.serve())
    for message in (
        Abandon((1, 2, -3, 1 << 60)),
        Cancel(77),
        Ping(0),
        Doom(0, Place("b", -5, -5, -5, -5), things.digest(1)),
        Seal(5, pack_pairs([(9, 1), (0, 0), ((1 << 64) - 1, (1 << 64) - 1)])),
        OpenPrefix(6, things.digest(1) + b"x" * 32, None),
        reserve(7, sizes=pack_sizes([0]), wait_s=-1.0),
        reserve(7, sizes=pack_sizes([0xFFFF_FFFF]), wait_s=-1.0),
        reserve(8, Kind.MM, wait_s=1e300),
        reserve(9, digests=b"", sizes=b"", wait_s=1e308),
    ):
        odd.post(message)
    answer = await odd.ask(Ping, Done, 5.0)
    assert answer.good and odd.open
    stat = await when_idle(client)
    assert (stat.blocks, stat.reservations, stat.damaged) == (0, 0, 0)
    odd.abort()
    await serving


async def test_frames_of_noise_end_their_connection_and_nothing_else(rig, things):
    """H3, on this socket."""
    await rig.start()
    source = random.Random(7)
    codec = FrameCodec(TOKEN, 1 << 20)
    whole = STORE_MESSAGES.encode(OpenPrefix(1, things.digest(1), things.lease()))
    for _ in range(300):
        noise = bytearray(whole)
        for _ in range(source.randrange(1, 4)):
            noise[source.randrange(len(noise))] = source.randrange(256)
        payload = bytes(noise[: source.choice((len(noise), source.randrange(len(noise))))])
        reader, writer = await asyncio.open_unix_connection(rig.role.listen[len("unix://") :])
        hello = STORE_MESSAGES.encode(Attach("noise", things.namespace))
        writer.write(codec.encode(hello) + codec.encode(payload))
        writer.close()
        await writer.wait_closed()
    client = await rig.client()
    assert None not in await client.put(Kind.KV, things.blocks(1))


async def test_one_group_larger_than_the_disk_reuses_nothing_that_is_not_yet_synced(
    rig, things, when_idle
):
    """40 first blocks in one group, and one segment of 15 slots to write them to."""
    await rig.start(
        arena_bytes=1 << 20, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10, group_s=0.3
    )
    client = await rig.client()
    await client.put(Kind.SWA, things.windows(0))  # the other segment is the windows'
    await when_idle(client)
    for number in range(40):
        await client.put(Kind.KV, things.blocks(number))
    stat = await when_idle(client)
    assert (stat.writes, stat.recycled, stat.damaged) == (41, 2, 0)
    assert (stat.ssd_objects, stat.blocks, stat.windows) == (11, 10, 1)
    await rig.restart()
    stat = await client.stat()
    assert (stat.ssd_objects, stat.blocks, stat.windows) == (11, 10, 1)
    dest = bytearray(3000)
    for number in range(30, 40):
        (place,) = await client.open_prefix([things.digest(number)], None)
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    assert (await client.stat()).damaged == 0


async def test_of_a_chain_longer_than_the_disk_the_head_stays(rig, things, when_idle):
    await rig.start(
        arena_bytes=1 << 20, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10, group_s=0.3
    )
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(40)))
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.recycled, stat.unsaved) == (30, 0, 10)
    await rig.restart()
    assert len(await client.open_prefix([things.digest(n) for n in range(40)], None)) == 30


async def test_more_than_a_group_at_once_is_written_without_another_word(rig, things, when_idle):
    size = 1 << 20
    await rig.start(
        group_bytes=size,  # and what the writer takes up at once is 8 MiB
        block_bytes=size,
        arena_bytes=48 * size,
        ssd_bytes=64 * size,
        segment_bytes=16 * size,
    )
    client = await rig.client()
    await client.put(Kind.KV, [(things.digest(n), things.payload(n, size)) for n in range(28)])
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.writes, stat.pending) == (28, 28, 0)
