"""A read from disk is waited for as long as computing its tokens anew would take, and no longer."""

from __future__ import annotations

import asyncio

import pytest
from headrace_tests_kvstore_disk import HANGS_S

from headrace.kvstore import Kind
from headrace.kvstore.questions import StoreSilent, Topic

pytestmark = pytest.mark.fault
SMALL = {"arena_bytes": 160_000, "ssd_bytes": 6 * (64 << 10), "segment_bytes": 64 << 10}
NUMBERS = tuple(range(6))


async def _stored(rig, things, when_idle, kind=Kind.KV, **settings):
    """A client of a store whose arena is empty and whose disk holds blocks 0 to 5 as `kind`."""
    await rig.start(**SMALL, **settings)
    client = await rig.client()
    await client.put(kind, things.blocks(*NUMBERS))
    await when_idle(client)
    await rig.restart()
    return client


async def _metric(client, name: str) -> float:
    text = (await client.ask(Topic.METRICS))["text"]
    (line,) = [row for row in text.splitlines() if row.startswith(f"headrace_store_{name} ")]
    return float(line.split()[1])


def _read(client, things, number: int, place) -> bytes:
    dest = bytearray(place.payload_bytes)
    assert client.read_into(place, things.digest(number), dest)
    return bytes(dest)


async def test_a_disk_that_hangs_costs_a_miss(rig, things, when_idle, disk):
    client = await _stored(rig, things, when_idle, disk_least_s=0.2, recompute_tokens_per_s=1e9)
    chain = [things.digest(number) for number in NUMBERS]
    disk.armed = True
    async with asyncio.timeout(HANGS_S / 2):
        assert await client.open_prefix(chain, things.lease()) == ()
    assert disk.stood > 0 and not disk.go.is_set()
    assert await _metric(client, "slow_reads_total") == 6
    lost = 'promised_not_delivered_tokens_total{tenant="common",tier="ssd"}'
    assert await _metric(client, lost) == 6 * 128
    disk.go.set()
    await when_idle(client)
    places = await client.open_prefix(chain, things.lease("later"))
    assert [_read(client, things, n, p) for n, p in zip(NUMBERS, places, strict=True)] == [
        things.payload(number) for number in NUMBERS
    ]
    assert await _metric(client, "slow_reads_total") == 6
    await client.release(things.lease("later"))
    stat = await when_idle(client)
    assert (stat.damaged, stat.ssd_objects, stat.leased_objects) == (0, 6, 0)


async def test_what_costs_more_to_compute_is_waited_for(rig, things, when_idle, wait_until, disk):
    # Six blocks are 768 tokens: 77 s at this rate.
    client = await _stored(rig, things, when_idle, disk_least_s=0.001, recompute_tokens_per_s=10)
    chain = [things.digest(number) for number in NUMBERS]
    disk.armed = True
    asked = asyncio.create_task(client.open_prefix(chain, None))
    await wait_until(disk.standing)
    await asyncio.sleep(0.3)
    assert not asked.done()
    disk.go.set()
    assert len(await asked) == 6
    assert await _metric(client, "slow_reads_total") == 0


async def test_a_question_that_outlasts_its_limit_is_given_up_and_the_connection_stays(
    rig, things, when_idle, wait_until, disk
):
    client = await _stored(rig, things, when_idle)
    attaches, disk.armed = client.attaches, True
    async with asyncio.timeout(HANGS_S / 2):
        with pytest.raises(StoreSilent):
            await client.ask(Topic.SCRUB, limit_s=0.1, segment=0, drop=True)
    assert disk.stood > 0 and not disk.go.is_set()
    assert (await client.stat()).ssd_objects == 6  # others are answered
    disk.go.set()
    stat = await when_idle(client)
    assert (stat.damaged, client.attaches, client.connected) == (0, attaches, True)


async def test_a_picture_is_waited_for(rig, things, when_idle, wait_until, disk):
    """What its rows cost to compute, the store does not know."""
    client = await _stored(
        rig,
        things,
        when_idle,
        Kind.MM,
        picture_bytes=3000,
        disk_least_s=0.001,
        recompute_tokens_per_s=1e9,
    )
    disk.armed = True
    asked = asyncio.create_task(client.open_objects(Kind.MM, [things.digest(2)], None))
    await wait_until(disk.standing)
    await asyncio.sleep(0.3)
    assert not asked.done()
    disk.go.set()
    (place,) = await asked
    assert _read(client, things, 2, place) == things.payload(2)
