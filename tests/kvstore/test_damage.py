"""Damage in the arena and on disk, and slots that change under a reader: a miss, never a lie."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.core import faults
from headrace.core.limits import WireLimits
from headrace.kvstore import Kind
from headrace.kvstore.connection import attach
from headrace.kvstore.files import FileCalls
from headrace.kvstore.layout import HEADER_BYTES, SEGMENT_HEADER_BYTES
from headrace.kvstore.questions import Topic

pytestmark = pytest.mark.fault
SLOT = 4096
TOKEN = "a cluster token of tests"

# Byte offsets inside a slot: every field of the header, and the ends and middle of the payload.
HEADER_AT = SLOT - HEADER_BYTES
HEADER_PARTS = [*range(0, 160, 3), 159, 160, 300, 503, *range(504, 512)]
PARTS = [0, 1, 1500, 2999, *(HEADER_AT + part for part in HEADER_PARTS)]
PADDING = [3000, 3300, HEADER_AT - 1]


@pytest_asyncio.fixture
async def arena(rig):
    """A mapping of the running store's arena, to do damage through."""
    await rig.start()
    connection = await attach(rig.role.listen, TOKEN, "damage", bytes(32), WireLimits())
    yield connection.arena
    connection.abort()


def slot_of(arena, place) -> memoryview:
    region, slot = arena.locate(place.offset)
    return arena.payload(region, slot, region.slot_bytes)


async def test_every_flipped_part_of_a_slot_in_the_arena_is_a_miss(
    rig, arena, things, when_idle, wait_until
):
    """I1. The object comes back from disk, right; what was not on disk is gone."""
    client = await rig.client()
    digest, payload = things.blocks(1)[0]
    await client.put(Kind.KV, [(digest, payload)])
    await when_idle(client)
    dest = bytearray(3000)
    for count, part in enumerate(PARTS, 1):
        (place,) = await client.open_prefix([digest], None)
        slot_of(arena, place)[part] ^= 0x10
        assert not client.read_into(place, digest, dest), part
        stat = await client.stat()  # the report went out before this question
        assert stat.damaged == count and stat.arena_resident == 0, part
    (place,) = await client.open_prefix([digest], None)
    assert client.read_into(place, digest, dest) and bytes(dest) == payload
    for part in PADDING:  # no part of any object
        slot_of(arena, place)[part] ^= 0x10
        assert client.read_into(place, digest, dest) and bytes(dest) == payload
    stat = await when_idle(client)
    assert (stat.damaged, stat.loads) == (len(PARTS), len(PARTS))


async def test_damage_before_the_write_never_gets_to_disk(rig, things, when_idle):
    """A sealed object whose bytes changed in the arena: counted, dropped, not found again."""
    faults.arm("store.seal=flip@2")
    await rig.start()
    client = await rig.client()
    places = await client.put(Kind.KV, things.blocks(1, 2, 3), lease=things.lease())
    assert None not in places and faults.fired("store.seal") == 1
    dest = bytearray(3000)
    read = [client.read_into(p, things.digest(n), dest) for n, p in enumerate(places, 1)]
    assert read == [True, False, True]
    stat = await when_idle(client)
    assert (stat.damaged, stat.blocks, stat.ssd_objects, stat.leased_objects) == (1, 2, 2, 2)
    await client.release(things.lease())
    await rig.restart()
    assert (await client.stat()).blocks == 2
    assert await client.open_prefix([things.digest(2)], None) == ()
    # and it can be put anew
    assert None not in await client.put(Kind.KV, things.blocks(2))


async def test_a_seal_that_fails_gives_the_slot_back(rig, things, when_idle):
    faults.arm("store.seal=raise@2")
    await rig.start()
    client = await rig.client()
    first, second, third = await client.put(Kind.KV, things.blocks(1, 2, 3))
    assert second is None and None not in (first, third)
    stat = await when_idle(client)
    assert stat.arena_resident == 2 and client.held == 0


def segment(rig) -> Path:
    """The one segment with blocks in it."""
    for path in sorted(Path(rig.settings.directory).glob("segment-*")):
        if path.read_bytes()[SEGMENT_HEADER_BYTES + HEADER_AT :][:4] == b"HRSL":
            return path
    raise AssertionError("no segment holds a block")


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + offset)
        file.write(data)


def cut_in_half(path: Path) -> set[int]:
    with open(path, "r+b") as file:
        file.truncate(SEGMENT_HEADER_BYTES + 2 * SLOT + 1500)
    return {2, 3, 4, 5}


def cut_to_nothing(path: Path) -> set[int]:
    path.write_bytes(b"")
    return {0, 1, 2, 3, 4, 5}


def second_half_zeroed(path: Path) -> set[int]:
    patch(path, 2 * SLOT + 1500, bytes(1500))
    return {2}


def one_bit_flipped(path: Path) -> set[int]:
    byte = path.read_bytes()[SEGMENT_HEADER_BYTES + 2 * SLOT + 700]
    patch(path, 2 * SLOT + 700, bytes([byte ^ 1]))
    return {2}


def payload_of_another_block(path: Path) -> set[int]:
    begin = SEGMENT_HEADER_BYTES + 4 * SLOT
    patch(path, 2 * SLOT, path.read_bytes()[begin : begin + 3000])
    return {2}


def slot_of_another_block(path: Path) -> set[int]:
    begin = SEGMENT_HEADER_BYTES + 4 * SLOT
    patch(path, 2 * SLOT, path.read_bytes()[begin : begin + SLOT])
    return {2}


def removed(path: Path) -> set[int]:
    path.unlink()
    return {0, 1, 2, 3, 4, 5}


def header_blanked(path: Path) -> set[int]:
    patch(path, 2 * SLOT + HEADER_AT, bytes(HEADER_BYTES))
    return {2}


DAMAGES = [
    cut_in_half,
    cut_to_nothing,
    second_half_zeroed,
    one_bit_flipped,
    payload_of_another_block,
    slot_of_another_block,
    removed,
    header_blanked,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
async def test_the_damage_table_is_all_misses(rig, things, damage, when_idle):
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(6)))
    await rig.stop()
    before = {path: path.read_bytes() for path in [segment(rig)]}
    ((path, content),) = before.items()
    lost = damage(path)
    assert not path.exists() or path.read_bytes() != content  # the damage was done
    await rig.start()
    client = await rig.client()
    dest = bytearray(3000)
    for number in range(6):
        places = await client.open_prefix([things.digest(number)], None)
        assert (places == ()) == (number in lost)
        if places:
            assert client.read_into(places[0], things.digest(number), dest)
            assert bytes(dest) == things.payload(number)
    # it is gone for good, and can be put anew
    await rig.restart()
    stat = await client.stat()
    assert stat.blocks == 6 - len(lost) and stat.damaged == 0
    places = await client.put(Kind.KV, things.blocks(*range(6)))
    assert None not in places
    for number, place in enumerate(places):
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)


async def test_every_flipped_part_of_a_slot_on_disk_is_a_miss(rig, things):
    """I1 on disk: one object a part, all damaged at once."""
    await rig.start(segment_bytes=1 << 20, ssd_bytes=2 << 20)
    client = await rig.client()
    total = len(PARTS) + len(PADDING)
    places = await client.put(Kind.KV, things.blocks(*range(total)), lease=things.lease())
    assert None not in places
    await rig.stop()
    path = segment(rig)
    content = path.read_bytes()
    for number, part in enumerate([*PARTS, *PADDING]):
        at = number * SLOT + part
        patch(path, at, bytes([content[SEGMENT_HEADER_BYTES + at] ^ 0x10]))
    await rig.start()
    client = await rig.client()
    found = [
        bool(await client.open_prefix([things.digest(number)], None)) for number in range(total)
    ]
    assert found == [False] * len(PARTS) + [True] * len(PADDING)


async def _scrubbed(client) -> tuple[int, int]:
    """Sound and damaged objects of segment 0, where the damaged ones have been dealt with."""
    told = await client.ask(Topic.SCRUB, segment=0, drop=True)
    return told["sound"], told["damaged"]


async def test_a_copy_on_disk_that_is_damaged_is_written_anew_from_memory(rig, things, when_idle):
    """No reader misses meanwhile; the damaged slot is blank, so no restart finds it."""
    await rig.start()
    client = await rig.client()
    places = await client.put(Kind.KV, things.blocks(1, 2, 3))
    await when_idle(client)
    patch(segment(rig), SLOT + 700, bytes(1))
    assert await _scrubbed(client) == (2, 1)
    assert await client.open_prefix([things.digest(2)], None) == (places[1],)
    stat = await when_idle(client)
    assert (stat.damaged, stat.blocks, stat.ssd_objects) == (1, 3, 3)
    assert await _scrubbed(client) == (3, 0)
    await rig.restart()
    assert (await client.stat()).blocks == 3
    dest = bytearray(3000)
    for number in (1, 2, 3):
        (place,) = await client.open_prefix([things.digest(number)], None)
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    assert (await client.stat()).damaged == 0


async def test_two_that_find_the_same_damage_lose_nothing(rig, things, when_idle):
    """The second finds the copy on disk given up already: the one in memory is to stay."""
    await rig.start()
    client = await rig.client()
    lease = things.lease()
    places = await client.put(Kind.KV, things.blocks(1, 2, 3), lease=lease)
    await when_idle(client)
    patch(segment(rig), SLOT + 700, bytes(1))
    told = await asyncio.gather(*[_scrubbed(client) for _ in range(3)])
    assert told.count((2, 1)) >= 2, "only one of them met the damage: no fault"
    assert (2, 0) not in told
    for number, place in zip((1, 2, 3), places, strict=True):
        dest = bytearray(3000)
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    stat = await when_idle(client)
    assert (stat.blocks, stat.ssd_objects, stat.leased_objects) == (3, 3, 3)
    await rig.restart()
    assert (await client.stat()).blocks == 3


async def test_an_object_whose_copies_are_both_damaged_is_gone(rig, arena, things, when_idle):
    client = await rig.client()
    (place,) = await client.put(Kind.KV, things.blocks(2))
    await when_idle(client)
    patch(segment(rig), 700, bytes(1))
    slot_of(arena, place)[5] ^= 1
    assert await _scrubbed(client) == (0, 1)
    stat = await when_idle(client)
    assert (stat.damaged, stat.blocks, stat.ssd_objects, stat.arena_resident) == (1, 0, 0, 0)
    assert not client.read_into(place, things.digest(2), bytearray(3000))
    assert await client.open_prefix([things.digest(2)], None) == ()
    (again,) = await client.put(Kind.KV, things.blocks(2))
    dest = bytearray(3000)
    assert client.read_into(again, things.digest(2), dest) and bytes(dest) == things.payload(2)


async def test_a_flip_on_the_way_to_disk_is_found_at_the_next_load(rig, things, when_idle):
    faults.arm("store.segment_write=flip@2")
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(1, 2, 3))
    await when_idle(client)
    assert faults.fired("store.segment_write") == 1
    await rig.restart()
    assert (await client.stat()).blocks == 3  # headers are sound
    digests = [things.digest(n) for n in (1, 2, 3)]
    assert len(await client.open_prefix(digests, None)) == 1
    stat = await when_idle(client)
    assert (stat.damaged, stat.blocks) == (1, 2)


async def test_a_reader_of_slots_that_are_given_away_misses_or_is_right(rig, things, wait_until):
    """I5: places of evicted objects, read all the time by another thread; leased ones stay."""
    await rig.start(arena_bytes=60_000)
    client = await rig.client()
    key = things.lease("held")
    places = {}

    async def put(number: int) -> None:
        (place,) = await client.put(
            Kind.KV, things.blocks(number), lease=things.lease(str(number)), wait_s=10.0
        )
        assert place is not None
        places[number] = place
        await client.release(things.lease(str(number)))

    (held,) = await client.put(Kind.KV, things.blocks(0), lease=key)
    wanted = {number: things.payload(number) for number in range(120)}
    right, missed, wrong = [0], [0], []
    stop = threading.Event()

    def read() -> None:
        dest = bytearray(3000)
        while not stop.is_set():
            for number, place in list(places.items()):
                if not client.read_into(place, things.digest(number), dest):
                    missed[0] += 1
                elif bytes(dest) == wanted[number]:
                    right[0] += 1
                else:
                    wrong.append(number)
            if not client.read_into(held, things.digest(0), dest):
                wrong.append(0)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(1, 120):
            await put(number)
            await asyncio.sleep(0)
    finally:
        stop.set()
        thread.join()
    assert not wrong and right[0] > 0 and missed[0] > 0
    stat = await client.stat()
    assert stat.evicted > 50 and stat.damaged == 0


class SlowSync(FileCalls):
    """Syncs wait while the gate is closed: what is sealed meanwhile stays in the arena."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def sync(self, descriptor: int) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(20)
        super().sync(descriptor)


async def test_objects_written_over_by_a_client_do_not_get_under_a_sound_header(
    rig, things, when_idle
):
    """Any client can scribble: readers miss, and the disk gets nothing of it."""
    gate = SlowSync()
    rig.options = {"calls": gate}
    await rig.start()
    client = await rig.client()
    connection = await attach(rig.role.listen, TOKEN, "scribbler", bytes(32), WireLimits())
    gate.gate.clear()
    await client.put(Kind.KV, things.blocks(1))
    while not gate.waiting.is_set():
        await asyncio.sleep(0.01)
    (place,) = await client.put(Kind.KV, things.blocks(2))
    slot_of(connection.arena, place)[100] ^= 1
    connection.abort()
    gate.gate.set()
    stat = await when_idle(client)
    assert (stat.damaged, stat.blocks, stat.ssd_objects) == (1, 1, 1)
    assert await client.open_prefix([things.digest(2)], None) == ()
