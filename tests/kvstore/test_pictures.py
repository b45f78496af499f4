"""Objects of pictures: a slot class of their own, opened by digest, listed for routers."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.kvstore import IndexReader, Kind, read_objects
from headrace.kvstore.arena import plan_regions

PICTURE_BYTES = 20_000


def pictures(things, *numbers):
    """Rows of pictures differ in number: no two of these have the same length."""
    return [(things.digest(n), things.payload(n, PICTURE_BYTES - 100 * n)) for n in numbers]


async def test_each_is_opened_by_itself_and_read_whole(rig, things, when_idle):
    await rig.start(picture_bytes=PICTURE_BYTES)
    client, key = await rig.client(), things.lease()
    items = pictures(things, 0, 1, 5)
    assert None not in await client.put(Kind.MM, items, lease=key)
    wanted = [things.digest(n) for n in (5, 7, 0)]
    places = await client.open_objects(Kind.MM, wanted, key)
    assert [place is not None for place in places] == [True, False, True]
    assert await client.open_objects(Kind.KV, wanted, None) == (None, None, None)
    assert await client.open_objects(Kind.MM, [], None) == ()
    found = await read_objects(client, Kind.MM, [*wanted, wanted[0]], key)
    assert found == {digest: payload for digest, payload in items if digest in wanted}
    stat = await when_idle(client)
    assert (stat.pictures, stat.blocks, stat.windows, stat.leased_objects) == (3, 0, 0, 3)
    await client.release(key, Kind.KV)  # the blocks' part: pictures stay
    assert (await client.stat()).leased_objects == 3
    await client.release(key)
    assert (await client.stat()).leased_objects == 0


async def test_a_restart_brings_them_back_from_disk(rig, things, when_idle):
    await rig.start(picture_bytes=PICTURE_BYTES)
    client = await rig.client()
    items = pictures(things, 0, 1)
    await client.put(Kind.MM, items)
    await when_idle(client)
    await rig.restart()
    assert (await client.stat()).arena_resident == 0
    assert await read_objects(client, Kind.MM, [things.digest(1)], None) == dict(items[1:])
    # Without slots for them the objects are not known; blocks go on.
    await rig.restart(picture_bytes=0)
    assert await client.open_objects(Kind.MM, [things.digest(0)], None) == (None,)
    assert (await client.stat()).pictures == 0
    assert await client.put(Kind.MM, items) == (None, None)
    assert None not in await client.put(Kind.KV, things.blocks(0))
    await when_idle(client)


async def test_a_larger_one_than_the_slot_is_refused(rig, things, when_idle):
    await rig.start(picture_bytes=PICTURE_BYTES)
    client = await rig.client()
    # A slot is rounded up to whole 4 KiB.
    item = (things.digest(0), bytes(PICTURE_BYTES + 4096))
    assert await client.put(Kind.MM, [item], lease=things.lease(), wait_s=0.2) == (None,)
    stat = await when_idle(client)
    assert (stat.pictures, stat.refused) == (0, 1)


async def test_damaged_and_away_are_missing(rig, things):
    await rig.start(picture_bytes=PICTURE_BYTES)
    client = await rig.client()
    items = pictures(things, 0, 1)
    (place, _) = await client.put(Kind.MM, items)
    _, arena = client._mapped
    region, slot = arena.locate(place.offset)
    arena.payload(region, slot, place.payload_bytes)[50] ^= 1
    wanted = [digest for digest, _ in items]
    assert await read_objects(client, Kind.MM, wanted, None) == dict(items[1:])
    await rig.stop()
    assert await read_objects(client, Kind.MM, wanted, None) == {}


@pytest.mark.redis
async def test_the_index_says_which_are_there(listed_rig, things, when_idle, wait_until):
    await listed_rig.start(picture_bytes=PICTURE_BYTES)
    client = await listed_rig.client()
    await client.put(Kind.MM, pictures(things, 0, 1))
    await client.put(Kind.KV, things.blocks(2))
    await when_idle(client)
    index = IndexReader(listed_rig.role.redis_url, deadline_s=1.0)
    asked = [things.digest(n) for n in range(4)]

    async def listed():
        return len(await index.present(things.namespace, Kind.MM, asked)) == 2

    await wait_until(listed)
    assert await index.present(things.namespace, Kind.MM, asked) == frozenset(asked[:2])
    await wait_until(lambda: index.present(things.namespace, Kind.KV, asked))
    assert await index.present(things.namespace, Kind.KV, asked) == {asked[2]}
    assert await index.present(things.other_namespace, Kind.MM, asked) == frozenset()
    assert await index.present(things.namespace, Kind.MM, []) == frozenset()
    await listed_rig.stop()  # a store that lives no more holds nothing
    assert await index.present(things.namespace, Kind.MM, asked) == frozenset()
    await index.close()


def test_regions_are_cut_by_share(settings_for):
    settings = settings_for(picture_bytes=PICTURE_BYTES, picture_share=0.5, window_share=0.25)
    regions = {region.kind: region for region in plan_regions(settings)}
    assert list(regions) == [Kind.KV, Kind.SWA, Kind.MM]
    half = settings.arena_bytes // 2
    picture = regions[Kind.MM]
    assert picture.slots == half // picture.slot_bytes
    assert picture.payload_bytes >= PICTURE_BYTES
    ends = [(region.start, region.end) for region in regions.values()]
    assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))
    assert ends[-1][1] <= settings.arena_bytes
    with pytest.raises(ConfigError, match="room for blocks"):
        plan_regions(settings_for(picture_bytes=1, picture_share=0.5, window_share=0.5))
    with pytest.raises(ConfigError, match="arena_bytes must be at least"):
        plan_regions(settings_for(picture_bytes=1 << 20))
    with pytest.raises(ConfigError, match="picture_bytes must be an integer of at least 0, got -1"):
        settings_for(picture_bytes=-1)
