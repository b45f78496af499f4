"""What one host's store has, a client of another host's store can open."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import replace

import pytest
import redis

from headrace.core.errors import ConfigError
from headrace.kvstore import Kind
from headrace.kvstore.records import record_key


async def read(client, things, places, numbers, size=3000) -> list[int]:
    """The numbers that were read; their bytes are compared."""
    out = []
    for number, place in zip(numbers, places, strict=False):
        if place is None:
            continue
        dest = bytearray(place.payload_bytes)
        if client.read_into(place, things.digest(number), dest):
            assert bytes(dest) == things.payload(number)
            out.append(number)
    return out


async def test_a_chain_that_the_other_host_has(pair, things, when_idle):
    await pair.start()
    a, b = await pair.clients()
    numbers = list(range(40))
    await a.put(Kind.KV, things.blocks(*numbers))
    await pair.listed(a)
    lease = things.lease()
    places = await b.open_prefix([things.digest(n) for n in [*numbers, 99]], lease)
    assert await read(b, things, places, numbers) == numbers
    stat = await when_idle(b)
    assert (stat.peer_fetched, stat.peer_failed, stat.leased_objects) == (40, 0, 40)
    assert stat.ssd_objects == 0  # the owner keeps it
    assert (await when_idle(a)).peer_sent == 40
    # Again: from here, nobody is asked.
    again = await b.open_prefix([things.digest(n) for n in numbers], None)
    assert again == places and (await b.stat()).peer_fetched == 40


async def test_connections_kept_from_the_others_last_life_cost_nothing(pair, things):
    """The other store ended in order and serves at the same address again: what was kept is found
    closed, and a new connection is made at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    pair.a.settings = replace(pair.a.settings, peer_listen=address)
    room = {"arena_bytes": 80 << 20, "ssd_bytes": 80 << 20, "segment_bytes": 8 << 20}
    await pair.start(block_bytes=200_000, **room)
    a, b = await pair.clients()
    for begin in (1, 1001):
        items = [(things.digest(n), things.payload(n, 200_000)) for n in range(begin, begin + 90)]
        await a.put(Kind.KV, items)
        await pair.listed(a)
        if begin > 1:
            await pair.a.restart()
            await pair.listed(a)
        places = await b.open_prefix([digest for digest, _ in items], None)
        stat = await b.stat()
        assert (len(places), stat.peer_fetched % 90, stat.peer_failed) == (90, 0, 0)


async def test_what_lies_on_the_other_hosts_disk_only(pair, things, when_idle):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(*range(20)))
    await a.put(Kind.SWA, things.windows(3))
    await when_idle(a)
    await pair.a.restart()  # the arena is empty now
    assert (await a.stat()).arena_resident == 0
    await pair.listed(a)
    places = await b.open_prefix([things.digest(n) for n in range(20)], None)
    assert await read(b, things, places, range(20)) == list(range(20))
    position, place = await b.open_windows([(9, things.digest(9)), (3, things.digest(3))], None)
    dest = bytearray(7000)
    assert position == 3 and b.read_into(place, things.window(3), dest)
    assert bytes(dest) == things.payload(3, 7000)
    assert (await b.stat()).peer_fetched == 21


async def test_a_chain_that_begins_here_and_goes_on_there(pair, things):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(*range(4, 12)))
    await b.put(Kind.KV, things.blocks(0, 1, 2, 3, 6))
    await pair.listed(a)
    places = await b.open_prefix([things.digest(n) for n in range(14)], None)
    assert await read(b, things, places, range(14)) == list(range(12))
    assert (await b.stat()).peer_fetched == 7  # all but the one in the middle that was here


async def test_what_lies_behind_a_hole_is_not_brought(pair, things):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(0, 1, 3, 4))
    await pair.listed(a)
    assert len(await b.open_prefix([things.digest(n) for n in range(5)], None)) == 2
    assert (await b.stat()).peer_fetched == 2


async def test_a_long_chain_is_looked_up_and_brought_in_parts(pair, things, valkey, when_idle):
    """More than the first two look-ups name. A value with one record of a tier that nobody knows is
    believed in no part, one with the wrong tail of a digest neither; the chain ends there."""
    room = {"arena_bytes": 8 << 20, "ssd_bytes": 16 << 20, "segment_bytes": 1 << 20}
    await pair.start(**room)
    a, b = await pair.clients()
    numbers = list(range(700))
    await a.put(Kind.KV, things.blocks(*numbers))
    await pair.listed(a)
    keys = [record_key(Kind.KV, things.namespace, things.digest(n)) for n in numbers]
    with redis.Redis.from_url(valkey.url) as plain:
        values = plain.mget(keys)
        strange = values[650] + values[650][:2] + b"\x09" + values[650][3:40]
        plain.mset({keys[650]: strange, keys[680]: values[680][:36] + b"\0" * 4})
        places = await b.open_prefix([things.digest(n) for n in numbers], None)
        assert await read(b, things, places, numbers) == numbers[:650]
        assert (await when_idle(b)).peer_fetched == 650
        plain.set(keys[650], values[650])
        places = await b.open_prefix([things.digest(n) for n in numbers], None)
        assert await read(b, things, places, numbers) == numbers[:680]
        plain.set(keys[680], values[680])
    places = await b.open_prefix([things.digest(n) for n in [*numbers, 999]], None)
    assert await read(b, things, places, numbers) == numbers
    stat = await when_idle(b)
    assert (stat.peer_fetched, stat.peer_failed) == (700, 0)


async def test_another_namespace_is_another_object(pair, things):
    await pair.start()
    a, _ = await pair.clients()
    other = await pair.b.client(namespace=things.other_namespace)
    await a.put(Kind.KV, things.blocks(0))
    await pair.listed(a)
    assert await other.open_prefix([things.digest(0)], None) == ()
    assert (await other.stat()).peer_fetched == 0


async def test_many_ask_and_one_transfer_serves_them(pair, things, when_idle):
    await pair.start()
    a, b = await pair.clients()
    numbers = list(range(12))
    await a.put(Kind.KV, things.blocks(*numbers))
    await pair.listed(a)
    digests = [things.digest(n) for n in numbers]
    asked = await asyncio.gather(*(b.open_prefix(digests, things.lease(str(n))) for n in range(8)))
    assert all(places == asked[0] and len(places) == 12 for places in asked)
    stat = await when_idle(b)
    assert (stat.peer_fetched, stat.leased_objects) == (12, 12)
    assert (await when_idle(a)).peer_sent == 12


async def test_one_who_gives_up_leaves_the_transfer_to_the_others(pair, things, when_idle):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(*range(12)))
    await pair.listed(a)
    digests = [things.digest(n) for n in range(12)]
    for pause_s in (0.0, 0.0005, 0.002, 0.01):
        first = asyncio.create_task(b.open_prefix(digests, things.lease("first")))
        await asyncio.sleep(pause_s)
        second = asyncio.create_task(b.open_prefix(digests, things.lease("second")))
        await asyncio.sleep(0)
        first.cancel()
        assert len(await second) == 12
        await b.release(things.lease("first"))
        await b.release(things.lease("second"))
    stat = await when_idle(b)
    assert stat.leased_objects == 0 and stat.reservations == 0


async def test_a_state_is_nobody_elses(pair, things):
    await pair.start(state_bytes=4000)
    a, b = await pair.clients()
    digest = things.digest(0)
    lease = things.lease()
    (place,) = await a.put(Kind.STATE, [(digest, things.payload(0, 4000))], lease=lease)
    assert place is not None
    await pair.listed(a)
    assert await b.open_objects(Kind.STATE, [digest], None) == (None,)


async def test_a_full_arena_takes_what_it_can(pair, things, when_idle):
    await pair.start()
    await pair.b.restart(arena_bytes=60_000)
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(*range(30)))
    await pair.listed(a)
    room = (await b.stat()).arena_slots - 1
    held = things.lease()
    places = ()
    while not places:  # on a busy machine the index may be silent for its 50 ms
        places = await b.open_prefix([things.digest(n) for n in range(30)], held)
    assert await read(b, things, places, range(30)) == list(range(room))
    await b.release(held)
    stat = await when_idle(b)
    assert stat.arena_free + stat.arena_resident == stat.arena_slots


async def test_serving_others_keeps_the_loop_of_the_store_free(pair, things):
    """A peer that takes nothing holds a thread and some pins, and nobody else."""
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(*range(40)))
    await pair.listed(a)
    stop = threading.Event()
    slowest_s = 0.0
    work = asyncio.gather(
        *(b.open_prefix([things.digest(n) for n in range(40)], None) for _ in range(4))
    )
    while not work.done():
        began_s = time.monotonic()
        await a.stat()
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        await asyncio.sleep(0)
    stop.set()
    assert slowest_s < 5.0


async def test_an_address_that_no_other_host_can_reach_is_refused(pair):
    with pytest.raises(
        ConfigError, match="peer_listen must name an address .* got tcp://0.0.0.0:0"
    ):
        await pair.a.start(peer_listen="tcp://0.0.0.0:0")
    pair.a.task = None
