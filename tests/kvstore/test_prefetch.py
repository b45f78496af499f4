"""What requests in line will open is brought meanwhile: leased, bounded, behind what others wait
for, once for all who want it, and counted at their turn."""

from __future__ import annotations

import asyncio

import pytest
from headrace_tests_kvstore_disk import HANGS_S

from headrace.kvstore import Kind
from headrace.kvstore.questions import Topic

pytestmark = pytest.mark.fault
# Room for some 30 blocks and a few window records.
SMALL = {"arena_bytes": 160_000, "ssd_bytes": 6 * (64 << 10), "segment_bytes": 64 << 10}
NUMBERS = tuple(range(6))


@pytest.fixture
async def stored(rig, things, when_idle, disk):
    """`await stored(**settings)`: a client of a store whose arena is empty and whose disk holds
    two chains, blocks 0 to 5 and 10 to 15, and window records on blocks 1 and 3."""

    async def start(**settings):
        await rig.start(**SMALL, window_cost_share=1.0, **settings)
        client = await rig.client()
        await client.put(Kind.KV, things.blocks(*NUMBERS))
        await client.put(Kind.KV, things.blocks(*range(10, 16)))
        for number in (1, 3):
            parent = things.digest(number)
            await client.put(
                Kind.SWA, things.windows(number), parent=parent, first_block=number + 1
            )
        await when_idle(client)
        await rig.restart()
        assert (await client.stat()).arena_resident == 0
        disk.reads = 0
        return client

    return start


def chain(things, *numbers):
    return [things.digest(number) for number in numbers or NUMBERS]


async def _text(client) -> str:
    return (await client.ask(Topic.METRICS))["text"]


async def test_at_its_turn_nothing_is_read_and_all_is_counted_once(stored, things, disk):
    client = await stored(prefetch_share=0.9)
    lease = things.lease()
    assert await client.prefetch(Kind.KV, chain(things), lease) == range(6)
    windows = [things.window(n) for n in (4, 3, 1)]
    assert await client.prefetch(Kind.SWA, windows, lease) == range(1, 2)
    stat, reads = await client.stat(), disk.reads
    assert (stat.loads, stat.leased_objects, stat.prefetched) == (7, 7, 0)
    assert (stat.hits, stat.misses) == (0, 0)
    assert reads > 0
    places = await client.open_prefix([*chain(things), things.digest(99)], lease)
    found = await client.open_windows([(640, things.digest(4)), (512, things.digest(3))], lease)
    assert found is not None and found[0] == 512
    assert disk.reads == reads
    for number, place in zip(NUMBERS, places, strict=True):
        assert client.read_into(place, things.digest(number), bytearray(place.payload_bytes))
    stat = await client.stat()
    assert (stat.loads, stat.prefetched, stat.hits, stat.misses) == (7, 7, 7, 1)
    # By the tier where they lay before, once.
    text = await _text(client)
    assert f'hit_tokens_total{{tenant="common",tier="ssd"}} {6 * 128}.0' in text
    assert 'hit_tokens_total{tenant="common",tier="host"} 0.0' in text
    assert 'missed_tokens_total{tenant="common"} 128.0' in text
    assert "headrace_store_prefetched_total 7.0" in text
    await client.open_prefix(chain(things), lease)
    assert (await client.stat()).prefetched == 7


async def test_what_is_held_does_not_leave_the_arena(stored, things, rig, when_idle):
    client = await stored()
    await client.prefetch(Kind.KV, chain(things), things.lease())
    slots = (await client.stat()).arena_slots
    for number in range(100, 100 + 2 * slots):
        await client.put(Kind.KV, things.blocks(number))
    loads = (await client.stat()).loads
    assert len(await client.open_prefix(chain(things), things.lease())) == 6
    assert (await client.stat()).loads == loads == 6


async def test_the_lines_hold_their_share_and_no_more(stored, things):
    client = await stored(prefetch_share=0.13)
    slots = (await client.ask(Topic.LAYOUT, namespace=things.namespace.hex()))["slots"]
    most = int(0.13 * slots)
    assert 0 < most < 6
    first, second = things.lease("first"), things.lease("second")
    # One that is longer than the share has the beginning of it, and waits for nobody.
    assert await client.prefetch(Kind.KV, chain(things), first) == range(most)
    waiting = asyncio.create_task(client.prefetch(Kind.KV, chain(things, *range(10, 16)), second))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert (await client.stat()).leased_objects == most
    # The turn of the first one has come: what it holds is a running request's.
    assert len(await client.open_prefix(chain(things), first)) == 6
    assert await waiting == range(most)
    assert (await client.stat()).leased_objects == 6 + most
    third = asyncio.create_task(client.prefetch(Kind.KV, chain(things), things.lease("third")))
    await asyncio.sleep(0.3)
    assert not third.done()
    await client.release(second)  # it was cancelled in line
    assert await third == range(most)
    assert (await client.stat()).leased_objects == 6


async def test_a_share_of_nothing_brings_nothing(stored, things, disk):
    client = await stored(prefetch_share=0.0)
    for kind in (Kind.KV, Kind.SWA, Kind.MM):
        assert len(await client.prefetch(kind, chain(things), things.lease())) == 0
    assert disk.reads == 0 and (await client.stat()).leases == 0


async def test_nothing_is_begun_while_somebody_waits_for_a_read(stored, things, disk, wait_until):
    client = await stored(disk_least_s=HANGS_S)
    disk.armed = True
    running = asyncio.create_task(client.open_prefix(chain(things), things.lease("running")))
    await wait_until(disk.standing)
    stood = disk.stood
    line = asyncio.create_task(
        client.prefetch(Kind.KV, chain(things, *range(10, 16)), things.lease("line"))
    )
    await asyncio.sleep(0.4)
    assert disk.stood == stood and not line.done() and not running.done()
    disk.go.set()
    assert len(await running) == 6
    assert await line == range(6)
    assert (await client.stat()).prefetched == 0


async def test_a_read_for_the_line_serves_whoever_comes(stored, things, disk, wait_until):
    client = await stored(disk_least_s=HANGS_S)
    disk.armed = True
    line = asyncio.create_task(client.prefetch(Kind.KV, chain(things), things.lease("line")))
    await wait_until(disk.standing)
    running = asyncio.create_task(client.open_prefix(chain(things), things.lease("running")))
    await asyncio.sleep(0.2)
    assert not running.done()
    disk.go.set()
    assert len(await running) == 6 and await line == range(6)
    assert (await client.stat()).loads == 6


async def test_who_is_cancelled_in_line_holds_nothing(stored, things, disk, wait_until, when_idle):
    client = await stored(disk_least_s=HANGS_S)
    disk.armed = True
    lease = things.lease()
    line = asyncio.create_task(client.prefetch(Kind.KV, chain(things), lease))
    await wait_until(disk.standing)
    line.cancel()
    await client.release(lease)
    disk.go.set()
    stat = await when_idle(client)
    assert (stat.leases, stat.leased_objects, stat.prefetched) == (0, 0, 0)
    # The read that was under way ended and is of use to the next one.
    assert (stat.loads, stat.damaged) == (6, 0)


async def test_a_disk_that_hangs_ends_it(stored, things, disk):
    """It waits as long as computing the tokens would take, as any read does."""
    client = await stored(disk_least_s=0.2, recompute_tokens_per_s=1e9)
    disk.armed = True
    async with asyncio.timeout(HANGS_S / 2):
        assert await client.prefetch(Kind.KV, chain(things), things.lease()) == range(0)
    assert disk.stood > 0
    assert (await client.stat()).leased_objects == 0


async def test_a_store_that_restarts_has_brought_nothing(stored, things, rig, when_idle):
    client = await stored()
    assert await client.prefetch(Kind.KV, chain(things), things.lease()) == range(6)
    await rig.restart()
    stat = await client.stat()
    assert (stat.leases, stat.arena_resident) == (0, 0)
    assert len(await client.open_prefix(chain(things), things.lease())) == 6
    stat = await client.stat()
    assert (stat.loads, stat.prefetched, stat.leased_objects) == (6, 0, 6)
