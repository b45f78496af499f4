"""Records of several stores, of earlier lives and of dropped objects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.kvstore import Hits, Kind, Tier
from headrace.kvstore.records import record_key, store_key, unpack_records

pytestmark = pytest.mark.redis


async def test_two_stores_of_one_index_keep_each_others_records(
    listed_rig, home, valkey, things, reader_for, wait_until, plain, listed, answer, chain
):
    """Claims gate persistence and nothing else; records of both places stand in one value."""
    first = listed_rig
    await first.start(index_deadline_s=3.0)  # a claim that is late is as good as won
    second = type(first)(
        home,
        replace(first.role, name="store-1", listen=f"unix://{home}/other.sock"),
        replace(first.settings, directory=f"{home}/other"),
    )
    try:
        await second.start()
        one, two = await first.client(), await second.client()
        await one.put(Kind.KV, things.blocks(0))
        await listed(one, wait_until)
        (place,) = await two.put(Kind.KV, things.blocks(0), lease=things.lease())
        assert place is not None
        await listed(two, wait_until)
        assert (await one.stat()).ssd_objects == 1
        stat = await two.stat()
        assert (stat.ssd_objects, stat.unsaved, stat.arena_resident) == (0, 1, 1)
        assert len(list(plain.scan_iter("kv:store:*"))) == 2
        key = record_key(Kind.KV, things.namespace, things.digest(0))
        assert len(unpack_records(plain.get(key))) == 3  # host and ssd there, host here
        await one.close()
        await first.stop()
        reader = reader_for(valkey.url)
        hits = await answer(reader, things.namespace, chain(things, 1))
        assert hits == Hits(1, {Tier.HOST: 1}, ())
        dest = bytearray(3000)
        assert two.read_into(place, things.digest(0), dest) and bytes(dest) == things.payload(0)
    finally:
        await second.close()


async def test_records_of_earlier_lives_are_swept(
    listed_rig, things, valkey, wait_until, plain, listed
):
    await listed_rig.start()
    client = await listed_rig.client()
    await client.put(Kind.KV, things.blocks(0, 1))
    await listed(client, wait_until)
    (name,) = plain.scan_iter("kv:store:*")
    number = int(name.rpartition(b":")[2])
    key = record_key(Kind.KV, things.namespace, things.digest(1))
    orphan = record_key(Kind.KV, things.namespace, things.digest(99))
    foreign = replace(unpack_records(plain.get(key))[0], store=(number + 1) & 0xFFFF)
    plain.set(orphan, plain.get(key) + foreign.pack())
    await listed_rig.restart()

    async def swept() -> bool:
        return unpack_records(plain.get(orphan)) == (foreign,)

    await wait_until(swept)
    assert len(unpack_records(plain.get(key))) == 1
    assert plain.exists(store_key(number))


async def test_a_dropped_object_leaves_the_index(
    listed_rig, things, valkey, reader_for, wait_until, plain, listed, answer
):
    """Recycling: records of a reused segment go, those of the rest stay."""
    await listed_rig.start(arena_bytes=60_000, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10)
    client, reader = await listed_rig.client(), reader_for(valkey.url)
    for number in range(60):  # 15 slots a segment
        key = things.lease(str(number))
        assert None not in await client.put(Kind.KV, things.blocks(number), lease=key, wait_s=9)
        await client.release(key)
    await listed(client, wait_until)
    stat = await client.stat()
    assert stat.recycled >= 2 and stat.blocks < 60
    for number in range(60):
        found = len(await client.open_prefix([things.digest(number)], None))
        await listed(client, wait_until)
        hits = await answer(reader, things.namespace, [things.digest(number)])
        assert hits.blocks == found, number
    stat = await client.stat()
    assert len(list(plain.scan_iter("kv:*"))) - 1 == stat.blocks


async def test_a_change_of_an_object_is_written_once(
    listed_rig, things, valkey, wait_until, plain, listed
):
    """Counted at the server: a block's claim, and a record when it is sealed and when it is synced;
    never one more for the publisher's loop and the writer both knowing of it."""
    blocks = 1500  # more than one call to Redis lists
    room = {"arena_bytes": 16 << 20, "ssd_bytes": 32 << 20, "segment_bytes": 16 << 20}
    listed_rig.settings = replace(listed_rig.settings, **room)
    await listed_rig.start()
    client = await listed_rig.client()
    await client.put(Kind.KV, things.blocks(blocks))
    await listed(client, wait_until)
    plain.config_resetstat()
    places = await client.put(Kind.KV, things.blocks(*range(blocks)))
    assert None not in places
    await listed(client, wait_until)
    sets = plain.info("commandstats")["cmdstat_set"]["calls"]
    beats = 40  # more than there are until then
    late = 256 * (await client.stat()).index_errors  # what a call that was late may have done
    assert blocks <= sets <= 3 * blocks + beats + late
    keys = [record_key(Kind.KV, things.namespace, things.digest(n)) for n in range(blocks)]
    assert all(len(unpack_records(plain.get(key))) == 2 for key in keys)


async def test_a_change_of_tier_is_told_without_haste(
    listed_rig, things, valkey, wait_until, plain, listed
):
    """What is brought back from disk is listed as lying in the arena too."""
    blocks = 300
    room = {"arena_bytes": 4 << 20, "ssd_bytes": 8 << 20, "segment_bytes": 4 << 20}
    listed_rig.settings = replace(listed_rig.settings, **room)
    await listed_rig.start()
    client = await listed_rig.client()
    await client.put(Kind.KV, things.blocks(*range(blocks)))
    await listed(client, wait_until)
    await listed_rig.restart()
    client = await listed_rig.client()
    await listed(client, wait_until)
    keys = [record_key(Kind.KV, things.namespace, things.digest(n)) for n in range(blocks)]
    tiers = [[record.tier for record in unpack_records(plain.get(key))] for key in keys]
    assert tiers == [[Tier.SSD]] * blocks
    assert len(await client.open_prefix([things.digest(n) for n in range(blocks)], None)) == blocks

    async def told() -> bool:
        values = map(plain.get, keys)
        return all([r.tier for r in unpack_records(v)] == [Tier.HOST, Tier.SSD] for v in values)

    await wait_until(told)
    await listed(client, wait_until)
