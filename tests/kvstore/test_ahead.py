"""Slots that a client holds in advance: who reads what when, and that none of them is lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.core.errors import ConfigError
from headrace.core.limits import WireLimits
from headrace.core.messages import Place
from headrace.kvstore import Kind, ahead
from headrace.kvstore.connection import attach
from headrace.kvstore.layout import (
    NO_DIGEST,
    ObjectFacts,
    checksum,
    domain_tag,
    pack_slot_header,
)
from headrace.kvstore.messages import (
    Ahead,
    Commit,
    Done,
    GiveBack,
    Granted,
    Ping,
    pack_pairs,
    pack_sizes,
    unpack_slots,
)
from headrace.kvstore.records import ARENA_SEGMENT

TOKEN = "a cluster token of tests"
DOMAIN = domain_tag("")
SIZE = 3000


def read(client, place, digest):
    dest = bytearray(SIZE)
    return bytes(dest) if client.read_into(place, digest, dest) else None


@asynccontextmanager
async def attached(rig, things, name="plain"):
    made = await attach(rig.role.listen, TOKEN, name, things.namespace, WireLimits())
    serving = asyncio.create_task(made.serve())
    try:
        yield made
    finally:
        made.abort()
        await serving


async def granted(connection, count, domain=DOMAIN):
    """Number, offset and generation of each."""
    answer = await connection.ask(lambda call: Ahead(call, domain, count, 0), Granted, 5.0)
    offset = connection.arena.region(Kind.KV).offset
    return tuple(
        (number, offset(slot), generation)
        for number, (slot, generation) in enumerate(unpack_slots(answer.slots), answer.first)
    )


def fill(connection, things, slot, number, payload=None, *, header=True):
    """Write one block into a granted slot as `Stock.put` does; its place, as others are told."""
    payload = things.payload(number) if payload is None else payload
    _, offset, generation = slot
    region, index = connection.arena.locate(offset)
    total = checksum(payload)
    facts = ObjectFacts(
        Kind.KV, things.namespace, things.digest(number), NO_DIGEST, number, DOMAIN, len(payload)
    )
    connection.arena.payload(region, index, len(payload))[:] = payload
    if header:
        packed = pack_slot_header(facts, total, ARENA_SEGMENT, index, generation, 1)
        connection.arena.header(region, index)[:] = packed
    return Place(connection.boot, offset, len(payload), generation, total)


def commit(call, things, number, pairs, *, lease=None, **changes):
    values: dict = {
        "kind": Kind.KV,
        "digests": things.digest(number),
        "sizes": pack_sizes([SIZE]),
        "parent": NO_DIGEST,
        "first_block": number,
        "domain": DOMAIN,
        "lease": lease,
        "written": pack_pairs(pairs),
    }
    return Commit(call, **{**values, **changes})


async def committed(connection, things, number, slot, total, lease=None):
    answer = await connection.ask(
        lambda call: commit(call, things, number, [(slot[0], total)], lease=lease), Done, 5.0
    )
    return answer.good


async def test_a_stream_of_puts_is_read_by_others_and_gives_its_slots_back(rig, things, when_idle):
    await rig.start(ahead_slots=24)
    writer, reader = await rig.client(), await rig.client()
    key, places, most = things.lease(), [], 0
    for begin in range(0, 160, 8):
        part = await writer.put(
            Kind.KV,
            things.blocks(*range(begin, begin + 8)),
            lease=key,
            wait_s=5.0,
            parent=things.digest(begin - 1) if begin else None,
            first_block=begin,
        )
        for number, place in enumerate(part, begin):
            assert read(reader, place, things.digest(number)) == things.payload(number)
        places += part
        most = max(most, (await reader.stat()).granted)
    stat = await when_idle(reader)
    assert 0 < most <= stat.arena_slots // 16 < 24  # of all clients; its own bound is 24
    assert (stat.granted, stat.blocks, stat.leased_objects, stat.ssd_objects) == (0, 160, 160, 160)
    assert (stat.refused, stat.damaged, stat.dropped, writer.held) == (0, 0, 0, 1)
    assert await reader.open_prefix([things.digest(n) for n in range(160)], None) == tuple(places)
    await writer.release(key)
    await rig.restart()
    found = await reader.open_prefix([things.digest(n) for n in range(160)], things.lease("b"))
    assert len(found) == 160
    for number, place in enumerate(found):
        assert read(reader, place, things.digest(number)) == things.payload(number)


async def test_a_place_is_good_before_the_store_has_heard_of_it(rig, things, when_idle):
    await rig.start()
    reader = await rig.client()
    async with attached(rig, things) as writer:
        (slot,) = await granted(writer, 1)
        place = fill(writer, things, slot, 3)
        assert read(reader, place, things.digest(3)) == things.payload(3)
        assert await reader.open_prefix([things.digest(3)], None) == ()
        assert await committed(writer, things, 3, slot, place.checksum, things.lease())
        assert await reader.open_prefix([things.digest(3)], None) == (place,)
    stat = await when_idle(reader)  # the lease stays: it belongs to a request
    assert (stat.blocks, stat.leased_objects, stat.granted) == (1, 1, 0)
    assert read(reader, place, things.digest(3)) == things.payload(3)


@pytest.mark.fault
async def test_what_a_client_did_not_commit_ends_with_it(rig, things, wait_until):
    await rig.start()
    reader = await rig.client()
    free = (await reader.stat()).arena_free
    async with attached(rig, things) as writer:
        slots = await granted(writer, 5)
        stat = await reader.stat()
        assert (stat.granted, stat.arena_reserved, stat.arena_free) == (5, 5, free - 5)
        place = fill(writer, things, slots[0], 3)
        assert read(reader, place, things.digest(3)) == things.payload(3)

    async def freed() -> bool:
        return (await reader.stat()).granted == 0

    await wait_until(freed, "the slots of a client that ended")
    assert read(reader, place, things.digest(3)) is None
    stat = await reader.stat()
    assert (stat.arena_free, stat.blocks, stat.damaged) == (free, 0, 0)


async def test_a_leased_second_copy_stays_as_long_as_its_lease(rig, things, when_idle):
    """Both writers have told others of their places; by digest all find the first one's bytes."""
    await rig.start()
    client = await rig.client()
    one, two = things.payload(1), things.payload(2)
    async with attached(rig, things) as first, attached(rig, things) as second:
        slots = (await granted(first, 1)) + (await granted(second, 2))
        a = fill(first, things, slots[0], 7, one)
        b = fill(second, things, slots[1], 7, two)
        c = fill(second, things, slots[2], 7, two)
        assert await committed(first, things, 7, slots[0], a.checksum, things.lease("a"))
        assert not await committed(second, things, 7, slots[1], b.checksum, things.lease("b"))
        assert not await committed(second, things, 7, slots[2], c.checksum)
        assert await client.open_prefix([things.digest(7)], None) == (a,)
        assert [read(client, place, things.digest(7)) for place in (a, b, c)] == [one, two, None]
        assert (await client.stat()).leased_objects == 1
        await client.release(things.lease("b"))
        assert [read(client, place, things.digest(7)) for place in (a, b)] == [one, None]
    stat = await when_idle(client)
    assert (stat.blocks, stat.damaged, stat.arena_resident, stat.leases) == (1, 0, 1, 1)


async def test_a_second_copy_without_a_living_lease_is_freed_at_once(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(7))
    await client.release(things.lease("over"))
    async with attached(rig, things) as writer:
        (slot,) = await granted(writer, 1)
        place = fill(writer, things, slot, 7)
        assert not await committed(writer, things, 7, slot, place.checksum, things.lease("over"))
        assert read(client, place, things.digest(7)) is None
        stat = await when_idle(client)
        assert (stat.blocks, stat.arena_resident, stat.refused) == (1, 1, 1)  # one late lease


async def test_a_block_on_disk_alone_takes_the_second_copy_for_its_own(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(7))
    await when_idle(client)
    await rig.restart()  # in no arena now
    assert (await client.stat()).arena_resident == 0
    async with attached(rig, things) as writer:
        slots = await granted(writer, 2)
        wrong = fill(writer, things, slots[0], 7, things.payload(8))
        assert not await committed(writer, things, 7, slots[0], wrong.checksum)
        assert (await client.stat()).arena_resident == 0  # other bytes: the first writer's stay
        place = fill(writer, things, slots[1], 7)
        assert not await committed(writer, things, 7, slots[1], place.checksum)
        assert await client.open_prefix([things.digest(7)], None) == (place,)
    stat = await when_idle(client)
    assert (stat.loads, stat.arena_resident, stat.blocks) == (0, 1, 1)


async def test_nobody_gets_more_than_the_bounds(rig, things):
    await rig.start(ahead_slots=4)
    client = await rig.client()
    total = (await client.stat()).arena_slots
    async with attached(rig, things) as a, attached(rig, things) as b, attached(rig, things) as c:
        assert len(await granted(a, 3)) == 3
        assert len(await granted(a, 1 << 40)) == 1
        assert (
            await granted(a, 1) == () and await granted(b, -1) == () and await granted(b, 0) == ()
        )
        got = [len(await granted(each, 100)) for each in (b, c)]
        assert sum(got) + 4 <= total // 16 and got[0] == 4
        assert (await client.stat()).granted == sum(got) + 4
        a.post(GiveBack((1, 2, 999, -1)))
        assert len(await granted(a, 100)) == 2


async def test_no_slots_in_advance_when_it_is_turned_off(rig, things):
    await rig.start(ahead_slots=0)
    client = await rig.client()
    for begin in range(0, 160, 8):
        items = things.blocks(*range(begin, begin + 8))
        assert None not in await client.put(Kind.KV, items, wait_s=5.0, lease=things.lease())
        assert (await client.stat()).granted == 0


@pytest.mark.parametrize("value", [-1, 65_537, True, 1.5])
def test_the_bound_has_bounds(settings_for, value):
    with pytest.raises(ConfigError, match="ahead_slots.*got"):
        settings_for(ahead_slots=value)


async def test_grants_of_others_or_of_another_domain_are_refused(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    async with attached(rig, things) as a, attached(rig, things) as b:
        mine, other = (await granted(a, 1))[0], (await granted(a, 1, domain_tag("x")))[0]
        for connection, slot in ((b, mine), (a, other), (a, (999, 0, 0))):
            assert not await committed(connection, things, 1, slot, 5)
        stat = await client.stat()
        assert (stat.blocks, stat.refused, stat.granted) == (0, 3, 2)
        good = fill(a, things, mine, 1)
        assert await committed(a, things, 1, mine, good.checksum)
        assert not await committed(a, things, 2, mine, good.checksum)  # a grant is good once
        answer = await a.ask(
            lambda call: commit(call, things, 3, [(other[0], 1)], sizes=pack_sizes([1 << 20])),
            Done,
            5.0,
        )
        assert not answer.good
    stat = await when_idle(client)
    assert (stat.blocks, stat.reservations, stat.granted) == (1, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": Kind.SWA},
        {"written": b""},
        {"written": bytes(17)},
        {"first_block": 1 << 32},
        {"domain": b"x"},
    ],
)
async def test_a_commit_against_the_protocol_ends_its_connection_alone(
    rig, things, when_idle, changes
):
    await rig.start()
    client = await rig.client()
    rude = await attach(rig.role.listen, TOKEN, "rude", things.namespace, WireLimits())
    serving = asyncio.create_task(rude.serve())
    (slot,) = await granted(rude, 1)
    rude.post(commit(77, things, 1, [(slot[0], 1)], **changes))
    await asyncio.wait_for(serving, 10)
    assert not rude.open
    stat = await when_idle(client)
    assert (stat.connections, stat.blocks, stat.granted) == (1, 0, 0)


@pytest.mark.fault
async def test_a_writer_that_comes_too_late_costs_a_miss_that_the_store_hears_of(
    rig, things, when_idle
):
    """Its slot has become another's: it writes payload and header over it."""
    await rig.start()
    client = await rig.client()
    async with attached(rig, things) as late:
        (slot,) = await granted(late, 1)
        late.post(GiveBack((slot[0],)))
        assert (await late.ask(Ping, Done, 5.0)).good
        places = []
        while slot[1] not in [place.offset for place in places]:  # until its slot's turn comes
            number = len(places)
            places += await client.put(Kind.KV, things.blocks(number), lease=things.lease())
        number = len(places) - 1
        assert read(client, places[number], things.digest(number)) == things.payload(number)
        await when_idle(client)
        fill(late, things, slot, 500)
    assert read(client, places[number], things.digest(number)) is None
    stat = await when_idle(client)
    assert stat.damaged == 1
    (again,) = await client.open_prefix([things.digest(number)], None)  # from disk
    assert read(client, again, things.digest(number)) == things.payload(number)


@pytest.mark.fault
async def test_bytes_under_another_checksum_are_not_written_to_disk(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    async with attached(rig, things) as writer:
        slots = await granted(writer, 2)
        fill(writer, things, slots[0], 1)
        assert await committed(writer, things, 1, slots[0], 12345)
        place = fill(writer, things, slots[1], 2, header=False)
        assert await committed(writer, things, 2, slots[1], place.checksum)
        assert read(client, place, things.digest(2)) is None  # no header: nobody believes it
    stat = await when_idle(client)
    assert (stat.damaged, stat.writes, stat.ssd_objects) == (1, 1, 1)
    assert await client.open_prefix([things.digest(1)], None) == ()


@pytest.mark.fault
@pytest.mark.parametrize("wrong", ["blank", "another's", "an older generation"])
async def test_a_header_that_its_client_got_wrong_is_written_anew(rig, things, when_idle, wrong):
    await rig.start()
    client = await rig.client()
    async with attached(rig, things) as writer:
        (slot,) = await granted(writer, 1)
        number, generation = (8 if wrong == "another's" else 7), slot[2] - (wrong[:3] == "an ")
        at = (slot[0], slot[1], generation)
        fill(writer, things, at, number, things.payload(7), header=wrong != "blank")
        assert await committed(writer, things, 7, slot, checksum(things.payload(7)))
        await when_idle(client)  # on disk
        (place,) = await client.put(Kind.KV, things.blocks(7))
        assert read(client, place, things.digest(7)) == things.payload(7)
    stat = await when_idle(client)
    assert (stat.damaged, stat.blocks, stat.ssd_objects) == (0, 1, 1)
    await rig.restart()
    (place,) = await client.open_prefix([things.digest(7)], None)
    assert read(client, place, things.digest(7)) == things.payload(7)


async def test_a_question_with_no_domain_ends_its_connection_alone(rig, things):
    await rig.start()
    client = await rig.client()
    rude = await attach(rig.role.listen, TOKEN, "rude", things.namespace, WireLimits())
    serving = asyncio.create_task(rude.serve())
    rude.post(Ahead(7, b"x", 4, 0))
    await asyncio.wait_for(serving, 10)
    stat = await client.stat()
    assert (rude.open, stat.connections, stat.granted) == (False, 1, 0)


async def test_what_is_known_already_is_not_copied_again(rig, things, monkeypatch):
    """A client whose blocks are all there asks before it copies, and gets the old places."""
    monkeypatch.setattr(ahead, "IN_A_ROW", 0)
    await rig.start()
    client = await rig.client()
    blocks = [things.blocks(*range(begin, begin + 8)) for begin in range(0, 80, 8)]
    first = [await client.put(Kind.KV, items, lease=things.lease("a")) for items in blocks]
    again = [await client.put(Kind.KV, items, lease=things.lease("b")) for items in blocks]
    assert (await client.stat()).blocks == 80
    assert [a == b for a, b in zip(first, again, strict=True)].count(False) <= 2
    for places, items in zip(again, blocks, strict=True):
        for place, (digest, payload) in zip(places, items, strict=True):
            assert read(client, place, digest) == payload
