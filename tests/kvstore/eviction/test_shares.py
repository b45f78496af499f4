"""Shares of domains in a running store, both tiers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.core.ids import Digest
from headrace.core.states import Visibility
from headrace.kvstore import Kind
from headrace.kvstore.disks import DiskBook
from headrace.kvstore.kin import Kin
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts
from headrace.kvstore.objects import DiskPlace, Entry, Saving, object_key
from headrace.kvstore.policy import DomainShare, StorePolicy

GOLD = DomainShare("gold", 0.3)


async def stored(client, things, numbers) -> list[int]:
    found = await client.open_objects(Kind.KV, [things.digest(n) for n in numbers], None)
    return [n for n, place in zip(numbers, found, strict=True) if place is not None]


async def test_a_flood_of_others_leaves_a_guaranteed_domain_what_it_has(rig, things, when_idle):
    size = {"ssd_bytes": 6 * (64 << 10), "segment_bytes": 64 << 10, "arena_bytes": 120_000}
    await rig.start(domain_shares=(GOLD,), pin_share=0.0, **size)
    client = await rig.client()
    for number in range(20):  # of 90 slots on disk 27 are guaranteed
        await client.put(Kind.KV, things.blocks(number), domain="gold")
        await when_idle(client)
    for number in range(1000, 1300):
        await client.put(Kind.KV, things.blocks(number), domain="somebody")
        if number % 5 == 4:
            await when_idle(client)
    stat = await client.stat()
    assert stat.recycled >= 12
    assert await stored(client, things, list(range(20))) == list(range(20))
    await rig.restart()
    assert await stored(client, things, list(range(20))) == list(range(20))


async def test_without_a_guarantee_the_flood_takes_it(rig, things, when_idle):
    size = {"ssd_bytes": 6 * (64 << 10), "segment_bytes": 64 << 10, "arena_bytes": 120_000}
    await rig.start(**size)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0), domain="gold")
    for number in range(1000, 1150):
        await client.put(Kind.KV, things.blocks(number), domain="somebody")
        if number % 5 == 4:
            await when_idle(client)
    assert await stored(client, things, [0]) == []


async def test_no_domain_holds_more_of_the_arena_than_its_most(rig, things, when_idle):
    await rig.start(domain_shares=(DomainShare("gold", 0.0, 0.25),), arena_bytes=200_000)
    client = await rig.client()
    most = int((await client.stat()).arena_slots)
    for number in range(100):
        await client.put(Kind.KV, things.blocks(number), domain="gold")
        await when_idle(client)
    stat = await client.stat()
    assert 0 < stat.arena_resident <= most // 4 and stat.arena_free > most // 2
    assert stat.dropped == 0


def entry(number: int, group: int) -> Entry:
    digest = Digest(number.to_bytes(32, "big"))
    facts = ObjectFacts(Kind.KV, bytes(32), digest, NO_DIGEST, 0, bytes([group] * 16), 3000)
    key = object_key(Kind.KV, facts.namespace, digest)
    return Entry(key, facts, 0, 0, Visibility.DURABLE, Saving.SAVED)


SHARES = (DomainShare("a", 0.25), DomainShare("b", 0.125, 0.5))
SEGMENTS, SLOTS = 8, 4


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 30)), max_size=150)
)
def test_on_disk_a_group_within_its_guarantee_never_loses_anything(writes):
    """Segments reused oldest first, as a writer does; what is kept moves into the next life."""
    ssd_bytes = SEGMENTS * SLOTS * 4096
    policy = StorePolicy(pin_share=0.0, domain_shares=SHARES)
    disks = DiskBook(policy, ssd_bytes, lambda domain: domain[0])
    kin = Kin()
    age: list[int] = []
    free = list(range(SEGMENTS))
    left = 0
    alive: dict[int, Entry] = {}
    guaranteed = {1: int(0.25 * ssd_bytes), 2: int(0.125 * ssd_bytes)}
    for number, (group, touch, at) in enumerate(writes):
        if touch and alive:
            sorted(alive.items())[at % len(alive)][1].touched = True
        while not left:
            if free:
                age.append(free.pop(0))
                left = SLOTS
                continue
            for segment in age:
                used = {g: disks.used_bytes.get(g, 0) for g in guaranteed}
                made = disks.plan(segment, kin, SLOTS, SLOTS)
                if made is not None:
                    break
            else:
                raise AssertionError("guarantees of 3/8 leave some segment to be reused")
            age.remove(segment)
            age.append(segment)
            for gone in made.drop:
                disks.leave(gone)
                alive.pop(int.from_bytes(gone.facts.digest, "big"))
            for g, least in guaranteed.items():
                now = disks.used_bytes.get(g, 0)
                assert now >= min(used[g], least), (g, used[g], now)
            left = SLOTS
            for kept in made.keep:
                disks.put([(kept, DiskPlace(segment, 0, 1))])
                left -= 1
        one = entry(number, group)
        alive[number] = one
        disks.put([(one, DiskPlace(age[-1], 0, 1))])
        left -= 1
        total = sum(disks.used_bytes.values())
        assert total == 4096 * len(alive) == 4096 * disks.objects <= ssd_bytes
        assert disks.payload_bytes == 3000 * len(alive)
