"""A folder that two hosts have mounted: one store owns it, the other reads it."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from headrace.core.errors import ConfigError
from headrace.kvstore import IndexReader, Kind, StoreClient
from headrace.kvstore.files import FileCalls
from headrace.kvstore.layout import SEGMENT_HEADER_BYTES, SegmentHeader
from headrace.kvstore.records import TIER_CODES, IndexRecord, record_key, unpack_records
from headrace.kvstore.settings import Tier
from headrace.kvstore.shared import SharedFolder

TOKEN = "a cluster token of tests"
pytestmark = pytest.mark.fault


async def _shared(pair, things, when_idle, numbers=range(12)):
    """Store a owns the folder and has its objects on disk only; b has it mounted. No TCP."""
    await pair.a.start(peer_listen="", shared=True, index_deadline_s=3.0)
    a = await pair.a.client()
    await a.put(Kind.KV, things.blocks(*numbers))
    await when_idle(a)
    await pair.a.restart()  # its arena is empty
    await pair.listed(a)
    folder = pair.a.settings.directory
    await pair.b.start(
        peer_listen="",
        shared_directories=(folder,),
        absent_s=0.0,
        recompute_tokens_per_s=50.0,
        index_deadline_s=3.0,
    )
    return a, await pair.b.client()


async def _read(client, things, numbers) -> list[int]:
    found = []
    for number in numbers:
        for place in await client.open_prefix([things.digest(number)], None):
            dest = bytearray(place.payload_bytes)
            assert client.read_into(place, things.digest(number), dest)
            assert bytes(dest) == things.payload(number)
            found.append(number)
    return found


async def _hits(router, namespace, digests):
    """A look-up that Redis answered in time."""
    for _ in range(100):
        hits = await router.hit_blocks(namespace, digests)
        if router.healthy:
            return hits
        await asyncio.sleep(0.1)
    raise AssertionError("Redis did not answer")


def _records(pair, things, number) -> tuple[IndexRecord, ...]:
    client = redis.Redis.from_url(pair.a.role.redis_url)
    value = client.get(record_key(Kind.KV, things.namespace, things.digest(number)))
    client.close()
    return unpack_records(value or b"")


async def test_another_host_reads_what_the_owner_wrote(pair, things, when_idle):
    a, b = await _shared(pair, things, when_idle)
    tiers = {record.tier for record in _records(pair, things, 0)}
    assert tiers == {Tier.SSD, Tier.SHARED}
    folder = Path(pair.a.settings.directory)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    places = await b.open_prefix([things.digest(n) for n in range(12)], things.lease())
    assert len(places) == 12
    assert await _read(b, things, range(12)) == list(range(12))
    stat = await when_idle(b)
    assert (stat.peer_fetched, stat.peer_failed, stat.leased_objects) == (12, 0, 12)
    assert (await a.stat()).loads == 0  # nobody asked it
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


async def test_the_owner_is_dead_and_its_objects_are_read(
    pair, things, home, start_process, valkey, when_idle
):
    owner = start_process(valkey.url, shared=True)
    a = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    assert await a.connect(10.0)
    await a.put(Kind.KV, things.blocks(*range(12)))
    await when_idle(a)
    await pair.listed(a)
    await a.close()
    owner.kill()
    plain = redis.Redis.from_url(valkey.url)
    plain.delete(*plain.keys("kv:store:*"))  # as when its lease has run out
    plain.close()
    digests = [things.digest(n) for n in range(12)]
    router = IndexReader(valkey.url)
    assert (await _hits(router, things.namespace, digests)).blocks == 0  # nobody reads it
    await pair.b.start(
        peer_listen="",
        shared_directories=(f"{home}/store",),
        recompute_tokens_per_s=50.0,
        index_deadline_s=3.0,
    )
    b = await pair.b.client()
    hits = await _hits(router, things.namespace, digests)
    assert (hits.blocks, dict(hits.by_tier)) == (12, {Tier.SHARED: 12})
    assert await _read(b, things, range(12)) == list(range(12))
    assert (await b.stat()).peer_fetched == 12

    async def nearer() -> bool:  # b's own copies are not listed: they are another's objects
        return (await _hits(router, things.namespace, digests)).by_tier == {Tier.SHARED: 12}

    assert await nearer()
    await router.close()


async def test_a_reused_segment_is_a_miss_and_costs_the_record(pair, things, when_idle, wait_until):
    """The record names an older use than what lies there now."""
    await _shared(pair, things, when_idle)
    b = pair.b.clients[0]
    await pair.a.cut()  # nobody mends the index
    segment = _records(pair, things, 0)[0].segment
    path = Path(pair.a.settings.directory) / f"segment-{segment:06d}.seg"
    data = bytearray(path.read_bytes())
    header = SegmentHeader.unpack(bytes(data[:SEGMENT_HEADER_BYTES]))
    newer = replace(header, generation=header.generation + 1)
    data[:SEGMENT_HEADER_BYTES] = newer.pack()
    path.write_bytes(data)
    assert await _read(b, things, [0]) == []

    async def gone() -> bool:
        return Tier.SHARED not in {record.tier for record in _records(pair, things, 0)}

    await wait_until(gone, "the record leaving the index")


async def test_damage_in_the_folder_is_a_miss_and_costs_the_record(
    pair, things, when_idle, wait_until
):
    await _shared(pair, things, when_idle)
    b = pair.b.clients[0]
    record = _records(pair, things, 3)[0]
    path = Path(pair.a.settings.directory) / f"segment-{record.segment:06d}.seg"
    with open(path, "r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + record.slot * 4096 + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte[0] ^ 1,)))
    await pair.a.cut()
    assert await _read(b, things, [2, 3, 4]) == [2, 4]

    async def gone() -> bool:
        return Tier.SHARED not in {record.tier for record in _records(pair, things, 3)}

    await wait_until(gone, "the record leaving the index")


async def test_a_segment_that_is_reused_under_the_read_does_not_count(pair, things, when_idle):
    await _shared(pair, things, when_idle)
    record = next(r for r in _records(pair, things, 0) if r.tier is Tier.SHARED)
    path = Path(pair.a.settings.directory) / f"segment-{record.segment:06d}.seg"

    class Reusing(FileCalls):
        """The owner raises the generation right after the payload was read."""

        armed = False
        fired = 0

        def preadv(self, descriptor, buffers, offset):
            got = super().preadv(descriptor, buffers, offset)
            if self.armed and offset >= SEGMENT_HEADER_BYTES and not self.fired:
                self.fired += 1
                data = path.read_bytes()[:SEGMENT_HEADER_BYTES]
                header = SegmentHeader.unpack(data)
                with open(path, "r+b") as file:
                    file.write(replace(header, generation=header.generation + 1).pack())
            return got

    calls = Reusing()
    folder = SharedFolder(pair.a.settings.directory, calls)
    assert len(folder.look()) == 8
    dest = memoryview(bytearray(3000))
    assert folder.read(record, dest) == record.checksum  # the control
    calls.armed = True
    assert folder.read(record, dest) == -1 and calls.fired == 1


async def test_what_is_not_mounted_is_not_read(pair, things, when_idle, home):
    """A record of a folder that this host does not have is nobody's."""
    await _shared(pair, things, when_idle)
    await pair.a.cut()
    os.makedirs(f"{home}/empty")
    await pair.b.restart(shared_directories=(f"{home}/empty",))
    assert await _read(pair.b.clients[0], things, range(3)) == []


async def test_a_folder_that_is_none_is_said_at_start(pair, home):
    with pytest.raises(ConfigError, match="shared_directories: .* is no directory"):
        await pair.b.start(shared_directories=(f"{home}/nowhere",), peer_listen="")
    pair.b.task = None


def test_a_second_owner_is_refused(start_process):
    """Two processes pointed at one directory."""
    first = start_process(shared=True)
    second = start_process(shared=True)
    assert second.ended() == 2
    assert f"one store process may own it, process {first.pid} does" in second.text()
    os.kill(first.pid, signal.SIGCONT)  # and the first is still there
    assert first.process.poll() is None


def test_the_code_of_the_tier_is_fixed():
    assert TIER_CODES[Tier.SHARED] == 3 and struct.calcsize("<HBBIIIIIQII") == 40


# attacks on a reader ------------------------------------------------------------------------------


class Delayed(FileCalls):
    """A network file system that shows some pages as they were at the last `snapshot`, others as
    they are: by the seed, anew for every call."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._old: dict[str, bytes] = {}
        self._paths: dict[int, Path] = {}
        self.stale = 0  # pages that were shown as they had been

    def snapshot(self) -> None:
        self._old = {path.name: path.read_bytes() for path in self._folder.glob("*.seg")}

    def open(self, path: Path, **options) -> int:
        descriptor = super().open(path, **options)
        self._paths[descriptor] = path
        return descriptor

    def preadv(self, descriptor, buffers, offset):
        got = super().preadv(descriptor, buffers, offset)
        old = self._old.get(self._paths[descriptor].name)
        if old is None:
            return got
        (dest,) = buffers
        share = self._draw.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        begin = offset
        while begin < offset + got:
            end = min(begin - begin % 4096 + 4096, offset + got)
            if (
                self._draw.random() < share
                and dest[begin - offset : end - offset] != old[begin:end]
            ):
                dest[begin - offset : end - offset] = old[begin:end]
                self.stale += 1
            begin = end
        return got


async def _all_shared(pair) -> list[tuple[bytes, IndexRecord]]:
    """Every record of tier shared, with the 16 bytes of its digest."""
    client = redis.Redis.from_url(pair.a.role.redis_url)
    found = [
        (key[-16:], record)
        for key in client.keys("kv:*")
        if not key.startswith(b"kv:store:")
        for record in unpack_records(client.get(key) or b"")
        if record.tier is Tier.SHARED
    ]
    client.close()
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_what_comes_late_is_a_miss_and_never_wrong(pair, things, when_idle, seed):
    """The owner reuses its segments; a reader sees any mixture of what is and what was."""
    await pair.a.start(
        peer_listen="", shared=True, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10,
        arena_bytes=120_000, index_deadline_s=3.0,
    )  # fmt: skip
    a = await pair.a.client()
    folder = Path(pair.a.settings.directory)
    calls = Delayed(folder, seed)
    by_digest = {things.digest(n)[:16]: things.payload(n) for n in range(200)}
    right = wrong = missed = 0
    known: list[tuple[bytes, IndexRecord]] = []
    for begin in range(0, 100, 10):
        await a.put(Kind.KV, things.blocks(*range(begin, begin + 10)))
        await when_idle(a)
        await pair.listed(a)
        known += await _all_shared(pair)  # old ones too: a reader may have asked long ago
        reader = SharedFolder(str(folder), calls)
        reader.look()
        for digest, record in known:
            header = reader.header(record)
            dest = memoryview(bytearray(record.payload_bytes))
            if (
                header is None
                or header.facts.digest[:16] != digest
                or reader.read(record, dest) != header.checksum
            ):
                missed += 1
            elif bytes(dest) == by_digest[digest]:
                right += 1
            else:
                wrong += 1
        calls.snapshot()
    assert wrong == 0 and right > 20 and missed > 20 and calls.stale > 20


async def test_two_readers_while_the_owner_reuses_its_segments(
    pair, things, when_idle, wait_until, new_rig, home, valkey
):
    """Two hosts read what they can while every segment gets a new life again and again."""
    await pair.a.start(
        peer_listen="", shared=True, ssd_bytes=3 * (64 << 10), segment_bytes=64 << 10,
        arena_bytes=120_000, index_deadline_s=3.0,
    )  # fmt: skip
    a = await pair.a.client()
    os.makedirs(f"{home}/c")
    readers = [pair.b, new_rig(f"{home}/c", valkey.url)]
    try:
        clients = []
        for reader in readers:
            await reader.start(
                peer_listen="",
                shared_directories=(pair.a.settings.directory,),
                absent_s=0.0,
                arena_bytes=60_000,
                recompute_tokens_per_s=50.0,
                index_deadline_s=3.0,
            )
            clients.append(await reader.client())
        await a.put(Kind.KV, things.blocks(*range(8)))
        for client in clients:  # they hear of the owner with one of their beats
            await wait_until(functools.partial(_read, client, things, range(8)), "a first block")
        found = 0
        for begin in range(8, 168, 8):
            putting = asyncio.create_task(a.put(Kind.KV, things.blocks(*range(begin, begin + 8))))
            wanted = range(max(0, begin - 30), begin)
            for read in await asyncio.gather(*(_read(c, things, wanted) for c in clients)):
                found += len(read)  # `_read` compares every byte
            await putting
            await when_idle(a)  # all is on disk and listed before the next round reads it
        stats = [await when_idle(client) for client in clients]
        assert (await when_idle(a)).recycled >= 6
        assert found > 40 and all(stat.peer_fetched > 0 for stat in stats)
    finally:
        await readers[1].close()


@pytest.mark.parametrize("fault", ["store.segment_write", "store.before_sync"])
async def test_the_owner_dies_in_the_middle_of_a_write(
    pair, things, home, start_process, valkey, wait_until, fault
):
    """What it had listed before is read; of what it was writing nothing is seen, or it is right."""
    owner = start_process(valkey.url, fault=f"{fault}=exit@3", shared=True)
    a = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    assert await a.connect(10.0)
    for number in range(6):
        await a.put(Kind.KV, things.blocks(number))
        await asyncio.sleep(0.1)

    async def gone() -> bool:
        return owner.process.poll() is not None

    await wait_until(gone, "the owner's end", 30.0)
    assert owner.process.returncode == 137  # the fault took effect
    await a.close()
    await pair.b.start(
        peer_listen="",
        shared_directories=(f"{home}/store",),
        absent_s=0.0,
        recompute_tokens_per_s=50.0,
        index_deadline_s=3.0,
    )
    b = await pair.b.client()
    listed = [n for n in range(6) if Tier.SHARED in {r.tier for r in _records(pair, things, n)}]
    found = await _read(b, things, range(6))
    assert set(found) >= set(listed) and len(found) < 6
