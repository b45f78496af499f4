"""The index against a real Valkey that is killed, stopped, emptied, read-only, full, lied to."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from headrace.core.clock import FakeClock
from headrace.kvstore import Hits, Kind, Tier, embedded_valkey
from headrace.kvstore.objects import object_key
from headrace.kvstore.records import (
    IndexRecord,
    LiveStore,
    claim_name,
    digest_tail,
    record_key,
    unpack_records,
)

pytestmark = pytest.mark.redis


async def test_hits_tiers_and_windows(
    listed_rig, things, valkey, reader_for, wait_until, plain, listed, answer, chain
):
    await listed_rig.start()
    client, reader = await listed_rig.client(), reader_for(valkey.url)
    await client.put(Kind.KV, things.blocks(0, 1, 2, 4))
    for number in (0, 2, 4):
        await client.put(Kind.SWA, things.windows(number), parent=things.digest(number))
    await listed(client, wait_until)
    hits = await answer(reader, things.namespace, chain(things, 6))
    assert hits == Hits(3, {Tier.HOST: 3}, (128, 384))
    assert await answer(reader, things.namespace, [things.digest(9)]) == Hits()
    assert await answer(reader, things.namespace, []) == Hits()
    # I8: the same digests in another namespace
    assert await answer(reader, things.other_namespace, chain(things, 6)) == Hits()
    # both tiers stand in one value, 40 bytes each
    value = plain.get(record_key(Kind.KV, things.namespace, things.digest(0)))
    assert {r.tier for r in unpack_records(value)} == {Tier.HOST, Tier.SSD} and len(value) == 80
    # after a restart everything is on SSD, under a new boot epoch
    old = unpack_records(value)[0].epoch
    await listed_rig.restart()
    await listed(client, wait_until)
    hits = await answer(reader, things.namespace, chain(things, 6))
    assert hits == Hits(3, {Tier.SSD: 3}, (128, 384))
    value = plain.get(record_key(Kind.KV, things.namespace, things.digest(0)))
    (record,) = unpack_records(value)
    assert record.epoch != old
    # what a load brings back counts as host again
    await client.open_prefix(chain(things, 2), None)
    await listed(client, wait_until)
    hits = await answer(reader, things.namespace, chain(things, 6))
    assert hits.by_tier == {Tier.HOST: 2, Tier.SSD: 1}


async def test_host_is_listed_at_the_seal_and_ssd_after_the_sync(
    listed_rig, things, valkey, reader_for, wait_until, plain, answer, chain
):
    await listed_rig.start(group_s=20.0)
    client, reader = await listed_rig.client(), reader_for(valkey.url)
    await client.put(Kind.KV, things.blocks(0))

    async def seen() -> bool:
        hits = await reader.hit_blocks(things.namespace, chain(things, 1))
        return hits.by_tier == {Tier.HOST: 1}

    await wait_until(seen)
    assert (await client.stat()).pending == 1
    (record,) = unpack_records(plain.get(record_key(Kind.KV, things.namespace, things.digest(0))))
    assert record.tier is Tier.HOST
    # no store lives there any more: its records count no longer, at once
    await listed_rig.stop()
    assert await answer(reader, things.namespace, chain(things, 1)) == Hits()


async def test_a_long_chain_is_one_look_up(
    listed_rig, things, valkey, reader_for, wait_until, listed, answer, chain
):
    await listed_rig.start(arena_bytes=8 << 20, ssd_bytes=12 << 20)
    client, reader = await listed_rig.client(), reader_for(valkey.url)
    items = [(things.digest(number), b"%d" % number) for number in range(1200)]
    assert None not in await client.put(Kind.KV, items, lease=things.lease(), wait_s=5.0)
    await listed(client, wait_until)
    assert (await answer(reader, things.namespace, chain(things, 1300))).blocks == 1200


async def test_a_killed_redis_costs_nothing_but_hits(
    listed_rig, home, own_valkey, things, reader_for, wait_until, when_idle, listed, answer, chain
):
    listed_rig.role = replace(listed_rig.role, redis_url=own_valkey.url)
    await listed_rig.start()
    client, reader = await listed_rig.client(), reader_for(own_valkey.url)
    await client.put(Kind.KV, things.blocks(0, 1))
    await listed(client, wait_until)
    assert (await answer(reader, things.namespace, chain(things, 2))).blocks == 2
    own_valkey.process.kill()
    own_valkey.process.wait(10)
    assert not Path(f"/proc/{own_valkey.process.pid}").exists()
    for _ in range(20):
        assert await reader.hit_blocks(things.namespace, chain(things, 2)) == Hits()
    assert not reader.healthy and 3 <= reader.errors <= 5  # the breaker asks no more
    # the store serves and persists as before
    assert None not in await client.put(Kind.KV, things.blocks(2, 3), lease=things.lease())
    assert len(await client.open_prefix(chain(things, 4), None)) == 4
    stat = await when_idle(client)
    assert stat.ssd_objects == 4

    async def away() -> bool:
        return (await client.stat()).index == "away"

    await wait_until(away)
    # an empty one comes up at the same address: everything is written again
    server = embedded_valkey(home)
    try:
        await listed(client, wait_until)

        async def again() -> bool:
            return (await reader.hit_blocks(things.namespace, chain(things, 5))).blocks == 4

        await wait_until(again)
        assert reader.healthy
    finally:
        server.stop()


async def test_a_stopped_redis_is_not_waited_for(
    listed_rig, own_valkey, things, reader_for, wait_until, when_idle, listed, chain
):
    listed_rig.role = replace(listed_rig.role, redis_url=own_valkey.url)
    await listed_rig.start()
    clock = FakeClock()  # the breaker's, which rests for as long as the test does
    client, reader = await listed_rig.client(), reader_for(own_valkey.url, clock=clock)
    await client.put(Kind.KV, things.blocks(0))
    await listed(client, wait_until)
    os.kill(own_valkey.process.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):  # without a deadline the first one would not end
            for _ in range(50):
                assert await reader.hit_blocks(things.namespace, chain(things, 1)) == Hits()
        assert reader.errors == 3  # of 50: each ended by its deadline, then the breaker rests
        assert None not in await client.put(Kind.KV, things.blocks(1), lease=things.lease())
        assert (await when_idle(client)).ssd_objects == 2
        # a store that starts now serves too
        await listed_rig.restart()
        assert len(await client.open_prefix(chain(things, 2), None)) == 2
    finally:
        os.kill(own_valkey.process.pid, signal.SIGCONT)
    await listed(client, wait_until)

    async def again() -> bool:
        clock.advance(1.0)
        return (await reader.hit_blocks(things.namespace, chain(things, 2))).blocks == 2

    await wait_until(again)


async def test_an_index_that_was_emptied_or_went_back_in_time_is_written_again(
    listed_rig, things, valkey, reader_for, wait_until, plain, listed, answer, chain
):
    await listed_rig.start()
    client, reader = await listed_rig.client(), reader_for(valkey.url)
    await client.put(Kind.KV, things.blocks(0, 1))
    await listed(client, wait_until)

    async def both() -> bool:
        return (await reader.hit_blocks(things.namespace, chain(things, 2))).blocks == 2

    plain.flushall()
    assert await answer(reader, things.namespace, chain(things, 2)) == Hits()
    await wait_until(both)
    # an older copy of the data: the live record of some beats ago, and a record missing
    (name,) = plain.scan_iter("kv:store:*")
    earlier = plain.get(name)
    await asyncio.sleep(1.2)
    assert plain.get(name) != earlier
    plain.delete(record_key(Kind.KV, things.namespace, things.digest(1)))
    plain.set(name, earlier)
    await wait_until(both)


async def test_keys_of_another_type_are_replaced_and_read_as_nothing(
    listed_rig, things, valkey, reader_for, wait_until, plain, listed, answer, chain
):
    reader = reader_for(valkey.url)
    for number in range(2):
        plain.rpush(record_key(Kind.KV, things.namespace, things.digest(number)), "x")
        plain.rpush(claim_name(object_key(Kind.KV, things.namespace, things.digest(number))), "x")
    assert await answer(reader, things.namespace, chain(things, 2)) == Hits()
    await listed_rig.start()
    client = await listed_rig.client()
    await client.put(Kind.KV, things.blocks(0, 1))
    await listed(client, wait_until)
    assert (await answer(reader, things.namespace, chain(things, 2))).blocks == 2
    assert (await client.stat()).ssd_objects == 2
    (name,) = plain.scan_iter("kv:store:*")
    plain.delete(name)
    plain.rpush(name, "x")

    async def both() -> bool:
        return (await reader.hit_blocks(things.namespace, chain(things, 2))).blocks == 2

    await wait_until(both)


@pytest.mark.parametrize("state", ["password", "readonly", "full"])
async def test_a_redis_that_refuses_is_as_good_as_none(
    listed_rig, own_valkey, things, reader_for, when_idle, wait_until, state, listed, chain
):
    url = own_valkey.url
    plain = redis.Redis.from_url(url)
    if state == "password":
        plain.config_set("requirepass", "secret")
    elif state == "readonly":
        plain.execute_command("REPLICAOF", "127.0.0.1", "1")
    else:
        plain.config_set("maxmemory", "1")
    listed_rig.role = replace(listed_rig.role, redis_url=url)
    await listed_rig.start()
    client, reader = await listed_rig.client(), reader_for(url)
    assert None not in await client.put(Kind.KV, things.blocks(0, 1), lease=things.lease())
    stat = await when_idle(client)
    assert (stat.ssd_objects, stat.index) == (2, "away") and stat.index_errors > 0
    assert await reader.hit_blocks(things.namespace, chain(things, 2)) == Hits()
    if state == "password":
        plain = redis.Redis.from_url(f"unix://:secret@{url.removeprefix('unix://')}")
        plain.config_set("requirepass", "")
    elif state == "readonly":
        plain.execute_command("REPLICAOF", "NO", "ONE")
    else:
        plain.config_set("maxmemory", "0")
    plain.close()
    await listed(client, wait_until)

    async def both() -> bool:
        return (await reader.hit_blocks(things.namespace, chain(things, 2))).blocks == 2

    await wait_until(both)


async def test_a_record_is_a_hint_and_the_store_decides(
    listed_rig, things, valkey, reader_for, wait_until, plain, listed, answer, chain
):
    """I4: records that point at nothing, at a shorter object, at another one; damaged values."""
    await listed_rig.start()
    client, reader = await listed_rig.client(), reader_for(valkey.url)
    await client.put(Kind.KV, things.blocks(0, 1))
    await listed(client, wait_until)
    (name,) = plain.scan_iter("kv:store:*")
    number = int(name.rpartition(b":")[2])
    live = LiveStore.unpack(plain.get(name))
    lie = IndexRecord(
        store=number,
        tier=Tier.SSD,
        kind=Kind.KV,
        epoch=live.epoch,
        segment=0,
        slot=0,
        generation=1,
        payload_bytes=10,
        checksum=1,
        written_at_s=1,
        digest_tail=digest_tail(things.digest(2)),
    )
    key = record_key(Kind.KV, things.namespace, things.digest(2))
    plain.set(key, lie.pack())
    assert (await answer(reader, things.namespace, chain(things, 3))).blocks == 3  # believed ...
    places = await client.open_prefix(chain(things, 3), None)  # ... and not served
    assert len(places) == 2
    dest = bytearray(3000)
    for block, place in enumerate(places):
        assert client.read_into(place, things.digest(block), dest)
        assert bytes(dest) == things.payload(block)
    # a record that cannot be one of this object is not believed either
    good = plain.get(record_key(Kind.KV, things.namespace, things.digest(1)))
    for value in (good, good[:39], good + b"x", b"", b"\xff" * 40, replace(lie, store=7).pack()):
        plain.set(key, value)
        assert (await answer(reader, things.namespace, chain(things, 3))).blocks == 2
