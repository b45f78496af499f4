"""I2: whatever step of writing and reusing was the last, what is found again is exact or absent.

The steps are enumerated, not guessed at: a run of the store is recorded, and the disk is built anew
as it was before every single op, for a process that was killed (nothing is lost), for a power cut
(all that was not synced is lost), for sectors lost at random, and for a write that half arrived.
"""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from headrace_tests_kvstore_disk import Image, images
from headrace_tests_kvstore_wire import everything

from headrace.core.clock import FakeClock
from headrace.core.ids import BootId
from headrace.core.limits import LeaseTimes
from headrace.kvstore.arena import create_arena, plan_regions
from headrace.kvstore.layout import checksum
from headrace.kvstore.objects import DiskPlace, object_key
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

pytestmark = pytest.mark.fault
KIND_BY_CODE = {1: Kind.KV, 2: Kind.SWA}


def by_format(files: dict[str, bytes]) -> dict[tuple[int, bytes], list[tuple[int, int, int]]]:
    """Sound slot headers by (kind, digest), read as docs/kv-format.md says and with no code of the
    store: places as (segment, slot, generation)."""
    found: dict[tuple[int, bytes], list[tuple[int, int, int]]] = {}
    for name, data in files.items():
        if not name.startswith("segment-") or data[:4] != b"HRSG":
            continue
        if struct.unpack_from("<Q", data, 4088)[0] != checksum(data[:4088]) or not data[6]:
            continue
        slot_bytes, slots, number, generation = struct.unpack_from("<IIII", data, 8)
        for slot in range(slots):
            end = 4096 + (slot + 1) * slot_bytes
            head = data[end - 512 : end]
            if head[:4] != b"HRSL" or struct.unpack_from("<Q", head, 504)[0] != checksum(
                head[:504]
            ):
                continue
            if struct.unpack_from("<III", head, 16) == (number, slot, generation):
                found.setdefault((head[6], head[80:112]), []).append((number, slot, generation))
    return found


@dataclass
class Tomb:
    """A directory of one image, opened by a store that comes after."""

    folder: Path
    settings: object
    arena: object
    files: SegmentFiles | None = None
    state: StoreState | None = None

    def open(self) -> None:
        self.files = SegmentFiles(self.settings)
        self.files.open()
        self.state = StoreState(
            self.arena, BootId("f" * 16), FakeClock(), lease_s=30.0, reserve_s=30.0
        )
        for header, place in self.files.scan():
            self.state.adopt(header, place)
        self.state.check()

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def now(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


@pytest.fixture(scope="session")
def arena_of(recorded):
    descriptor, arena = create_arena(plan_regions(recorded.settings))
    yield arena
    import os

    os.close(descriptor)


@pytest.fixture
def bury(recorded, arena_of, tmp_path):
    """`bury(files)`: a `Tomb` of these files, opened; only the last one is open."""
    made: list[Tomb] = []

    def lay(files: dict[str, bytes]) -> Tomb:
        for tomb in made:
            tomb.close()
        made.clear()
        folder = tmp_path / "store"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in files.items():
            if name.startswith("segment-"):
                (folder / name).write_bytes(data)
        tomb = Tomb(folder, replace(recorded.settings, directory=str(folder)), arena_of)
        made.append(tomb)
        tomb.open()
        return tomb

    yield lay
    for tomb in made:
        tomb.close()


def judge(tomb: Tomb, recorded, *, nothing_lost: bool) -> tuple[set[bytes], int]:
    """Read back all that is found, blank what does not verify, and account for every slot: the
    digests that are there, and how many were found that did not verify."""
    state, files = tomb.state, tomb.files
    sound: set[bytes] = set()
    unsound: list[DiskPlace] = []
    for entry in tuple(state.objects.values()):
        digest = bytes(entry.facts.digest)
        dest = bytearray(entry.facts.payload_bytes)
        header = files.read(entry.disk, memoryview(dest))
        if header is not None and header.facts == entry.facts and checksum(dest) == header.checksum:
            assert bytes(dest) == recorded.written[digest]
            sound.add(digest)
        else:
            assert not nothing_lost or digest == recorded.flipped
            unsound.append(entry.disk)
            state.drop(entry, erase=False)
    for place in unsound:
        files.erase(place)
    state.check()
    tomb.close()
    # Nothing orphaned: what the page finds on disk is what the table has, and the other way round.
    found = by_format(tomb.now())
    assert {digest for _, digest in found} == sound
    tomb.open()
    assert {bytes(e.facts.digest) for e in tomb.state.objects.values()} == sound
    for entry in tomb.state.objects.values():
        place = (entry.disk.segment, entry.disk.slot, entry.disk.generation)
        assert place in found[1 if entry.kind is Kind.KV else 2, bytes(entry.facts.digest)]
    # Space: each slot of each segment holds one object, a superseded copy of one, or is free.
    held = Counter(place for places in found.values() for place in places)
    assert not held or max(held.values()) == 1
    for segment in tomb.files.segments:
        slots = [slot for number, slot, _ in held if number == segment.number]
        assert segment.used == max(slots, default=-1) + 1 <= segment.header.slots
    return sound, len(unsound)


def listed_on_disk(index: dict[bytes, bytes]) -> dict[bytes, tuple[int, int]]:
    """(segment, generation) of the records of tier ssd, by `{kind}:` and 16 bytes of the digest."""
    out = {}
    for key, value in index.items():
        kind, _, rest = key.partition(b":")
        if kind not in (b"kv", b"swa") or key.startswith(b"kv:store:"):
            continue
        for at in range(0, len(value), 40):
            if value[at + 2] == 2:
                segment, _, generation = struct.unpack_from("<III", value, at + 8)
                out[kind + b":" + rest[9:]] = (segment, generation)
    return out


def owed(image: Image, files: dict[str, bytes], recorded) -> set[bytes]:
    """What the index promised as durable at this moment and no reuse has taken back since: one
    whose header is being written has been forgotten already."""
    generations = {
        int(name[8:14]): struct.unpack_from("<I", data, 20)[0]
        for name, data in files.items()
        if name.startswith("segment-") and data and not image.dirty[name] & set(range(8))
    }
    promised = listed_on_disk(image.index)
    names = {b"kv:" + d[:16]: d for d in recorded.written} | {
        b"swa:" + d[:16]: d for d in recorded.written
    }
    return {
        names[key]
        for key, (segment, generation) in promised.items()
        if generations.get(segment) == generation and names[key] != recorded.flipped
    }


def test_every_step_leaves_objects_exact_or_absent(recorded, bury):
    kinds = Counter(op.name for op in recorded.log)
    print("ops:", dict(kinds), "segments reused:", recorded.recycled)
    assert kinds["write"] > 20 and kinds["sync"] > 4 and kinds["index"] > 10
    assert recorded.recycled >= 2
    points = states = 0
    seen, refused, fewer = Counter[str](), Counter[str](), Counter[str]()
    for image, op in images(recorded.log):
        points += 1
        modes = [("kill", 0), ("power", 0), ("torn", image.n), ("torn", -image.n)]
        for mode, seed in modes:
            files = image.after(mode, seed)
            sound, unsound = judge(bury(files), recorded, nothing_lost=mode == "kill")
            assert owed(image, files, recorded) <= sound
            states += 1
            seen[mode] += len(sound)
            refused[mode] += unsound
            if mode == "kill":
                whole = sound
            fewer[mode] += len(whole - sound) > 0
        if op is not None and op.name == "write":
            half = Image(
                files={name: bytearray(data) for name, data in image.files.items()},
                durable=image.durable,
                dirty={name: set(held) for name, held in image.dirty.items()},
            )
            half.apply(op, share=0.5)
            judge(bury(half.after("kill")), recorded, nothing_lost=False)
            states += 1
    print(f"{points} points, {states} states of the disk, objects found: {dict(seen)},")
    print(f"found and refused: {dict(refused)}, points at which some were lost: {dict(fewer)}")
    assert points == len(recorded.log) + 1 > 60 and states > 4 * points
    # The harness does lose something, and some of it looked whole until it was read.
    assert seen["kill"] > seen["power"] > 0 and fewer["kill"] == 0
    assert fewer["power"] > 20 and fewer["torn"] > 20 and refused["torn"] > 20


def test_a_segment_is_reused_in_the_order_of_the_format(recorded):
    """Generation on disk, sync, records gone, and only then the first slot."""
    reuses = 0
    begun: dict[str, str] = {}  # by file: header | synced, while no slot has been written
    index: dict[bytes, bytes] = {}
    for op in recorded.log:
        if op.name == "index":
            index = op.index
        elif op.name == "write" and op.file.startswith("segment-") and op.offset == 0:
            begun[op.file] = "header"
            new = struct.unpack_from("<I", op.data, 20)[0]
            reuses += new > 1
        elif op.name == "sync" and begun.get(op.file) == "header":
            begun[op.file] = "synced"
        elif op.name == "write" and op.file in begun:
            assert begun.pop(op.file) == "synced"
            number = int(op.file[8:14])
            of_it = {place for place in listed_on_disk(index).values() if place[0] == number}
            assert {generation for _, generation in of_it} <= {new}, "records of its earlier use"
    assert reuses >= 2 and not begun


async def test_the_index_is_what_the_segments_hold_whatever_it_held_before(
    recorded, bury, shared_valkey
):
    """At every point: Redis as it was then, a power cut, a new store; afterwards its records are
    those of its objects, and no record of the earlier life is left."""
    client = redis.Redis.from_url(shared_valkey.url)
    points = stale = 0
    for image, _ in images(recorded.log):
        if image.index and not points % 3:
            tomb = bury(image.after("power"))
            sound, _ = judge(tomb, recorded, nothing_lost=False)
            client.flushall()
            client.mset(image.index)
            stale += len(listed_on_disk(image.index)) > len(sound)
            await told(tomb, shared_valkey.url)
            expected = {
                b"%s:%s:%s" % (e.kind.value.encode(), e.facts.namespace[:8], e.facts.digest[:16]): (
                    e.disk.segment,
                    e.disk.slot,
                    e.disk.generation,
                    e.checksum,
                )
                for e in tomb.state.objects.values()
            }
            records = {
                key: value
                for key, value in everything(client).items()
                if key[:3] in (b"kv:", b"swa") and not key.startswith(b"kv:store:")
            }
            if tomb.files.segments[0].header.uid or sound:  # else another store, of another number
                assert {
                    key: (
                        *struct.unpack_from("<III", value, 8),
                        *struct.unpack_from("<Q", value, 24),
                    )
                    for key, value in records.items()
                } == expected
        points += bool(image.index)
    print(f"{points} states of the index, {stale} of them with records of objects since lost")
    assert points > 20
    client.close()


async def told(tomb: Tomb, url: str) -> None:
    """Run the publisher of a reopened store until the index is told everything."""
    publisher = Publisher(
        tomb.state,
        tomb.settings,
        LeaseTimes(member_beat_s=0.05),
        FakeClock(),
        url,
        tomb.files.uid,
        0xABCDEF,
    )
    tomb.state.dirty.update(dict.fromkeys(tomb.state.objects))
    running = asyncio.create_task(publisher.run())
    try:
        async with asyncio.timeout(20):
            while tomb.state.dirty or publisher.sweeping or publisher.condition != "ok":
                await asyncio.sleep(0.002)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await publisher.close()


def test_object_keys_are_told_apart_by_kind():
    assert object_key(Kind.KV, bytes(32), bytes(32)) != object_key(Kind.SWA, bytes(32), bytes(32))
