"""One store and its clients over the real socket and the real arena."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.core.errors import ConfigError
from headrace.core.limits import WireLimits
from headrace.kvstore import Kind, StoreClient
from headrace.kvstore.connection import attach
from headrace.kvstore.layout import NO_DIGEST
from headrace.kvstore.messages import Reserve, Reserved, Seal, Sealed, pack_pairs, pack_sizes

TOKEN = "a cluster token of tests"


def read(client, place, digest, size):
    dest = bytearray(size + 3)
    return bytes(dest[:size]) if client.read_into(place, digest, dest) else None


async def test_what_was_put_is_found_and_read(rig, things, when_idle):
    await rig.start()
    writer, reader = await rig.client(), await rig.client()
    items = things.blocks(*range(20))
    key = things.lease()
    places = await writer.put(Kind.KV, items, lease=key, wait_s=1.0, domain="a")
    assert None not in places and len({place.offset for place in places}) == 20
    found = await reader.open_prefix([things.digest(n) for n in range(25)], key)
    assert found == places
    for (digest, payload), place in zip(items, found, strict=True):
        assert read(reader, place, digest, len(payload)) == payload
    stat = await when_idle(reader)
    assert (stat.blocks, stat.ssd_objects, stat.hits, stat.misses) == (20, 20, 20, 5)
    assert stat.ssd_bytes == stat.arena_bytes == 20 * 3000
    assert (stat.leases, stat.leased_objects, writer.held, reader.held) == (1, 20, 1, 1)
    await reader.release(key)
    stat = await when_idle(reader)
    assert (stat.leases, stat.leased_objects, reader.held) == (0, 0, 0)


async def test_a_prefix_ends_at_the_first_hole(rig, things):
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1, 3))
    assert len(await client.open_prefix([things.digest(n) for n in range(4)], None)) == 2
    assert await client.open_prefix([things.digest(9), things.digest(0)], None) == ()
    assert await client.open_prefix([], None) == ()


async def test_the_newest_window_is_named_by_block_digests(rig, things):
    await rig.start()
    client = await rig.client()
    key = things.lease()
    await client.put(Kind.SWA, things.windows(3, 7), lease=key)
    candidates = [(128 * (n + 1), things.digest(n)) for n in (9, 8, 7, 3)]
    position, place = await client.open_windows(candidates, key)
    assert position == 1024
    assert read(client, place, things.window(7), 7000) == things.payload(7, 7000)
    assert read(client, place, things.digest(7), 7000) is None  # the block's digest is not its own
    assert await client.open_windows(candidates[:2], key) is None
    # a block is no window and a window is no block
    await client.put(Kind.KV, things.blocks(9))
    assert await client.open_windows(candidates[:1], key) is None
    assert await client.open_prefix([things.window(7)], None) == ()


async def test_the_first_writer_wins(rig, things):
    await rig.start()
    first, second = await rig.client(), await rig.client()
    digest = things.digest(1)
    one, two = things.payload(1), things.payload(2)
    (place,) = await first.put(Kind.KV, [(digest, one)])
    (again,) = await second.put(Kind.KV, [(digest, two)])
    assert again == place and read(second, again, digest, 3000) == one
    both = await asyncio.gather(
        *(c.put(Kind.KV, [(things.digest(5), p)]) for c, p in ((first, one), (second, two)))
    )
    assert both[0] == both[1]
    assert read(first, both[0][0], things.digest(5), 3000) in (one, two)
    twice = await first.put(Kind.KV, [(things.digest(6), one), (things.digest(6), two)])
    assert twice[0] == twice[1] and read(first, twice[0], things.digest(6), 3000) == one


async def test_another_namespace_is_a_miss(rig, things):
    """I8: other layout, model, numerics or class are other namespaces; the same digest there is
    another object, and neither sees the other."""
    await rig.start()
    ours, theirs = await rig.client(), await rig.client(things.other_namespace)
    digest = things.digest(1)
    (place,) = await ours.put(Kind.KV, [(digest, things.payload(1))])
    assert await theirs.open_prefix([digest], None) == ()
    assert read(theirs, place, digest, 3000) is None
    (own,) = await theirs.put(Kind.KV, [(digest, things.payload(2))])
    assert own.offset != place.offset
    assert read(theirs, own, digest, 3000) == things.payload(2)
    assert read(ours, place, digest, 3000) == things.payload(1)
    assert (await ours.stat()).damaged == 0


async def test_a_short_payload_has_its_own_length(rig, things):
    await rig.start()
    client = await rig.client()
    (place,) = await client.put(Kind.KV, [(things.digest(1), b"short")])
    assert place.payload_bytes == 5 and read(client, place, things.digest(1), 5) == b"short"
    refused = await client.put(
        Kind.KV, [(things.digest(2), bytes(8000)), (things.digest(3), b""), *things.blocks(4)]
    )
    assert refused[:2] == (None, None) and refused[2] is not None
    assert await client.put(Kind.MM, things.blocks(5)) == (None,)
    assert (await client.stat()).refused == 3
    with pytest.raises(ValueError, match="the destination holds 4 bytes, 5 are needed"):
        client.read_into(place, things.digest(1), bytearray(4))


async def test_a_full_arena_drops_or_waits(rig, things, when_idle, wait_until):
    """Without a lease a put is dropped and counted; with one it waits; what is leased stays."""
    await rig.start(arena_bytes=60_000)  # 11 blocks and 1 window
    client = await rig.client()
    total = (await client.stat()).arena_slots - 1
    held, waiter = things.lease("held"), things.lease("waiter")
    places = await client.put(Kind.KV, things.blocks(*range(total)), lease=held)
    assert None not in places
    await when_idle(client)
    assert await client.put(Kind.KV, things.blocks(100, 101)) == (None, None)
    assert await client.put(Kind.KV, things.blocks(100), lease=waiter, wait_s=0.05) == (None,)
    assert (await client.stat()).dropped == 3
    for number, place in enumerate(places):
        assert read(client, place, things.digest(number), 3000) == things.payload(number)
    waiting = asyncio.create_task(
        client.put(Kind.KV, things.blocks(*range(200, 204)), lease=waiter, wait_s=20.0)
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.release(held)
    assert None not in await waiting
    stat = await when_idle(client)
    assert stat.leased_objects == 4 and stat.evicted == 4
    # what left the arena is durable and comes back
    await client.release(waiter)
    again = await client.open_prefix([things.digest(n) for n in range(total)], None)
    assert len(again) == total
    assert read(client, again[0], things.digest(0), 3000) == things.payload(0)


async def test_waiting_puts_get_room_in_the_order_of_asking(rig, things):
    await rig.start(arena_bytes=60_000)
    client = await rig.client()
    total = (await client.stat()).arena_slots - 1
    held = things.lease("held")
    await client.put(Kind.KV, things.blocks(*range(total)), lease=held)
    order: list[int] = []

    async def put(number: int) -> None:
        items = things.blocks(*range(number, number + 4))
        assert None not in await client.put(Kind.KV, items, lease=things.lease("w"), wait_s=20.0)
        order.append(number)

    tasks = []
    for number in (100, 200, 300):
        tasks.append(asyncio.create_task(put(number)))
        await asyncio.sleep(0.02)
    assert await client.put(Kind.KV, things.blocks(400)) == (None,)  # nobody overtakes
    await client.release(held)
    await asyncio.wait(tasks[:2])
    assert order[:2] == [100, 200]
    await client.release(things.lease("w"))  # an owner that is over is still served
    await tasks[2]
    assert order == [100, 200, 300] and (await client.stat()).leases == 0


async def test_a_cancelled_put_gives_its_room_back(rig, things, when_idle):
    await rig.start(arena_bytes=60_000)
    client = await rig.client()
    total = (await client.stat()).arena_slots - 1
    held = things.lease("held")
    await client.put(Kind.KV, things.blocks(*range(total - 2)), lease=held)
    for pause_s in (0.0, 0.001, 0.01, 0.05):
        waiting = asyncio.create_task(
            client.put(Kind.KV, things.blocks(*range(50, 60)), lease=things.lease("x"), wait_s=20.0)
        )
        await asyncio.sleep(pause_s)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert client.held == 1
        stat = await when_idle(client)
        assert stat.arena_resident == total - 2 and stat.leases == 1


async def test_a_closed_connection_frees_its_reservations_and_keeps_its_leases(
    rig, things, when_idle
):
    await rig.start()
    other = await rig.client()
    leaving = await attach(rig.role.listen, TOKEN, "leaving", things.namespace, WireLimits())
    serving = asyncio.create_task(leaving.serve())
    digests = b"".join(things.digest(n) for n in range(7))
    asked = await leaving.ask(
        lambda call: Reserve(
            call,
            Kind.KV,
            digests,
            pack_sizes([3000] * 7),
            NO_DIGEST,
            0,
            bytes(16),
            things.lease(),
            0.0,
        ),
        Reserved,
        5.0,
    )
    grants = leaving.pairs(asked.grants)
    assert len(grants) == 7 and all(number for number, _ in grants) and not asked.places
    written = pack_pairs(
        [
            (number, leaving.fill(offset, things.payload(n)))
            for n, (number, offset) in enumerate(grants[:3])
        ]
    )
    sealed = await leaving.ask(lambda call: Seal(call, written), Sealed, 5.0)
    stat = await other.stat()
    assert (stat.reservations, stat.arena_reserved, stat.leased_objects) == (4, 4, 3)
    leaving.abort()
    await serving
    stat = await when_idle(other)
    assert (stat.reservations, stat.leases, stat.leased_objects, stat.blocks) == (0, 1, 3, 3)
    assert stat.connections == 1
    for number, place in enumerate(leaving.places(sealed.places)):
        assert read(other, place, things.digest(number), 3000) == things.payload(number)


async def test_a_client_that_closes_answers_what_was_under_way(rig, things, when_idle, wait_until):
    await rig.start(arena_bytes=60_000)
    client, other = await rig.client(), await rig.client()
    total = (await client.stat()).arena_slots - 1
    await client.put(Kind.KV, things.blocks(*range(total)), lease=things.lease("kept"))
    waiting = asyncio.create_task(
        client.put(Kind.KV, things.blocks(50, 51), lease=things.lease("x"), wait_s=20.0)
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.close()
    assert await waiting == (None, None)

    async def noticed() -> bool:
        return (await other.stat()).connections == 1

    await wait_until(noticed, "the end of the connection")
    stat = await when_idle(other)
    assert (stat.leases, stat.leased_objects) == (1, total)


async def test_a_wrong_token_and_garbage_are_refused(rig, things):
    await rig.start()
    stranger = StoreClient(rig.role.listen, "another token", things.namespace)
    assert not await stranger.connect(0.3) and stranger.attaches == 0
    await stranger.close()
    reader, writer = await asyncio.open_unix_connection(rig.role.listen.removeprefix("unix://"))
    writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    assert await reader.read() == b""
    writer.close()
    client = await rig.client()
    assert (await client.stat()).connections == 1


async def test_only_a_unix_address_and_a_whole_namespace_will_do(things):
    with pytest.raises(ConfigError, match="unix:///path"):
        StoreClient("tcp://127.0.0.1:1", "t", things.namespace)
    with pytest.raises(ConfigError, match="namespace must have 32 bytes, got 5"):
        StoreClient("unix:///s", "t", b"short")


async def test_a_restart_finds_everything_on_disk_and_old_places_miss(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    key = things.lease()
    items = things.blocks(*range(30))
    old = await client.put(Kind.KV, items, lease=key, wait_s=1.0)
    await client.put(Kind.SWA, things.windows(7, 29), lease=key)
    await rig.restart()
    assert read(client, old[0], items[0][0], 3000) is None
    stat = await client.stat()
    assert (stat.blocks, stat.windows, stat.ssd_objects, stat.arena_resident) == (30, 2, 32, 0)
    assert stat.leases == 0 and client.held == 0
    found = await client.open_prefix([digest for digest, _ in items], key)
    assert len(found) == 30 and found[0].store != old[0].store
    for (digest, payload), place in zip(items, found, strict=True):
        assert read(client, place, digest, 3000) == payload
    position, place = await client.open_windows([(3840, things.digest(29))], key)
    assert position == 3840
    assert read(client, place, things.window(29), 7000) == things.payload(29, 7000)
    stat = await when_idle(client)
    assert (stat.loads, stat.damaged, stat.writes) == (31, 0, 0)


async def test_many_ask_for_one_object_and_it_is_read_once(rig, things):
    await rig.start()
    client = await rig.client()
    items = things.blocks(*range(40))
    await client.put(Kind.KV, items, lease=things.lease(), wait_s=1.0)
    await rig.restart()
    digests = [digest for digest, _ in items]
    asked = [client.open_prefix(digests[: 10 + n], things.lease(str(n))) for n in range(12)]
    asked.append(client.put(Kind.KV, items[:5]))
    found = await asyncio.gather(*asked)
    assert [len(places) for places in found] == [*range(10, 22), 5]
    assert found[-1] == found[0][:5]
    stat = await client.stat()
    assert (stat.loads, stat.writes) == (21, 0)
    # a caller that leaves takes nothing from the others
    leaving = asyncio.create_task(client.open_prefix(digests, things.lease("gone")))
    staying = asyncio.create_task(client.open_prefix(digests, things.lease("stays")))
    await asyncio.sleep(0.002)
    leaving.cancel()
    assert len(await staying) == 40
    await asyncio.gather(leaving, return_exceptions=True)


async def test_more_on_disk_than_the_arena_holds(rig, things, when_idle):
    await rig.start(arena_bytes=60_000)
    client = await rig.client()
    total = (await client.stat()).arena_slots - 1
    for number in range(40):
        await client.put(Kind.KV, things.blocks(number), lease=things.lease(str(number)), wait_s=9)
        await client.release(things.lease(str(number)))
    await when_idle(client)
    digests = [things.digest(number) for number in range(40)]
    assert len(await client.open_prefix(digests, things.lease("a"))) == total  # cut, not failed
    assert await client.open_prefix(digests[20:], things.lease("b")) == ()
    await client.release(things.lease("a"))
    assert len(await client.open_prefix(digests[20:], things.lease("c"))) == total


async def test_of_a_chain_put_without_a_lease_the_tail_leaves_first(rig, things, when_idle):
    await rig.start(ssd_bytes=16 << 20, segment_bytes=1 << 20)
    client = await rig.client()
    places = await client.put(Kind.KV, things.blocks(*range(40)))
    await when_idle(client)
    room = client._connection.arena.region(Kind.KV).slots - 40
    for first in range(1000, 1000 + room + 10, 10):  # more than there is room for
        blocks = things.blocks(*range(first, first + 10))
        await client.put(Kind.KV, blocks, first_block=first, lease=things.lease(), wait_s=5.0)
    left = [n for n in range(40) if read(client, places[n], things.digest(n), 3000)]
    assert 0 < len(left) < 40 and left == list(range(len(left)))


async def test_of_a_chain_read_without_a_lease_the_tail_leaves_first(rig, things, when_idle):
    await rig.start(ssd_bytes=16 << 20, segment_bytes=1 << 20)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(40)))
    await when_idle(client)
    await rig.restart()
    places = await client.open_prefix([things.digest(n) for n in range(40)], None)
    assert len(places) == 40
    await when_idle(client)
    room = client._connection.arena.region(Kind.KV).slots - 40
    for first in range(1000, 1000 + room + 10, 10):  # more than there is room for
        blocks = things.blocks(*range(first, first + 10))
        await client.put(Kind.KV, blocks, first_block=first, lease=things.lease(), wait_s=5.0)
    left = [n for n in range(40) if read(client, places[n], things.digest(n), 3000)]
    assert 0 < len(left) < 40 and left == list(range(len(left)))


async def test_a_view_is_the_payload_where_it_lies_or_nothing(rig, things):
    await rig.start()
    client = await rig.client()
    places = await client.put(Kind.KV, things.blocks(1, 2), lease=things.lease())
    view = client.view(places[0], things.digest(1))
    assert view is not None and view.readonly and view == things.payload(1)
    assert client.view(places[0], things.digest(2)) is None
    stale = replace(places[0], generation=places[0].generation + 1)
    assert client.view(stale, things.digest(1)) is None
    assert client.read_misses == 2
    arena = client._mapped[1]
    arena.bytes_at(places[1])[7] ^= 1
    assert client.view(places[1], things.digest(2)) is None
    await client.stat()  # behind the report of the damage
    stat = await client.stat()
    assert (stat.damaged, stat.blocks) == (1, 1)
    await client.close()
    assert view == things.payload(1)  # whoever holds a view keeps the memory
