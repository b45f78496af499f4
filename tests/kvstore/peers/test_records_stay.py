"""Who asks another store takes the records of what is gone out of the index, and no others: their
owner believes that they stand there, and would never write them again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from headrace.core.limits import WireLimits
from headrace.kvstore import Kind
from headrace.kvstore.connection import attach
from headrace.kvstore.peers_wire import Doubt, PeerSocket
from headrace.kvstore.records import LiveStore, digest_tail, record_key, unpack_records
from headrace.kvstore.settings import Tier

TOKEN = "a cluster token of tests"


class Index:
    """The records of blocks, as they stand in Redis."""

    def __init__(self, plain, things) -> None:
        self.plain = plain
        self.things = things

    def name(self, number: int) -> bytes:
        return record_key(Kind.KV, self.things.namespace, self.things.digest(number))

    def value(self, number: int) -> bytes:
        return self.plain.get(self.name(number)) or b""

    def forge(self, number: int, like: int) -> None:
        """The store that has `like` is said to have `number` on its disk too."""
        (record,) = (one for one in unpack_records(self.value(like)) if one.tier is Tier.SSD)
        told = replace(record, digest_tail=digest_tail(self.things.digest(number)))
        self.plain.set(self.name(number), told.pack())


@pytest.fixture
def index(valkey, things):
    with redis.Redis.from_url(valkey.url) as plain:
        yield Index(plain, things)


async def _asked(b, index, things, numbers, gone: int, wait_until) -> int:
    """How many of `numbers` host b gets, once the record of `gone` has been taken out."""
    places = await b.open_prefix([things.digest(n) for n in numbers], None)

    async def taken_out() -> bool:
        return not index.value(gone)

    await wait_until(taken_out, "the record of what is gone is taken out")
    return len(places)


async def test_what_lies_behind_a_hole_stays_listed(pair, things, index, wait_until):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(0, 1, 3, 4))
    await pair.listed(a)
    index.forge(2, like=1)
    before = {n: index.value(n) for n in (0, 1, 3, 4)}
    assert all(before.values())
    assert await _asked(b, index, things, range(5), 2, wait_until) == 2
    assert (await b.stat()).peer_failed == 3  # of what the index promised
    assert {n: index.value(n) for n in before} == before


async def test_what_has_no_room_in_its_owners_arena_stays_listed(pair, things, index, wait_until):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(*range(6)))
    await pair.listed(a)
    await pair.a.restart()  # they lie on its disk alone
    await pair.listed(a)
    slots, lease = (await a.stat()).arena_slots, things.lease()
    await a.put(Kind.KV, things.blocks(*range(100, 100 + slots)), lease=lease)
    await pair.listed(a)
    index.forge(6, like=5)
    before = {n: index.value(n) for n in range(6)}
    assert all(len(value) == 40 for value in before.values())  # disk, not arena
    assert await _asked(b, index, things, range(7), 6, wait_until) == 0
    assert {n: index.value(n) for n in before} == before
    await a.release(lease)
    assert len(await b.open_prefix([things.digest(n) for n in range(6)], None)) == 6


async def test_what_was_doubted_and_is_sound_is_listed_again(pair, things, index, wait_until):
    """Its record went before its owner was told."""
    await pair.start()
    a, _ = await pair.clients()
    await a.put(Kind.KV, things.blocks(0, 1))
    await pair.listed(a)
    await pair.a.restart()  # on disk alone, and
    await pair.listed(a)
    await a.open_prefix([things.digest(0)], None)  # the first in the arena too
    await pair.listed(a)
    before = {n: index.value(n) for n in (0, 1)}
    lives = map(LiveStore.unpack, map(index.plain.get, index.plain.keys("kv:store:*")))
    for address in {live.address for live in lives}:
        index.plain.delete(*map(index.name, before))
        told = PeerSocket.connect(address, TOKEN, WireLimits())
        for number in before:
            told.send(Doubt(Kind.KV, things.namespace, things.digest(number)))
        told.close()

    async def back() -> bool:
        return {n: index.value(n) for n in before} == before

    await wait_until(back, "the owner lists what it has")
    assert all(before.values())


async def test_damage_in_the_other_arena_is_found_here_and_told_there(pair, things, wait_until):
    await pair.start()
    a, b = await pair.clients()
    places = await a.put(Kind.KV, things.blocks(0, 1), lease=things.lease())
    await pair.listed(a)
    other = await attach(pair.a.role.listen, TOKEN, "x", things.namespace, WireLimits())
    found = other.arena.locate(places[1].offset)
    other.arena.payload(*found, 3000)[1234] ^= 4
    other.abort()
    got = await b.open_prefix([things.digest(0), things.digest(1)], None)
    assert len(got) == 1

    async def noticed() -> bool:
        return (await a.stat()).damaged == 1

    await wait_until(noticed, "the owner's own look")
    # It was durable there: its owner reads it from disk, and gives it.
    await pair.listed(a)

    async def again() -> bool:
        return len(await b.open_prefix([things.digest(0), things.digest(1)], None)) == 2

    await wait_until(again, "a sound copy")
