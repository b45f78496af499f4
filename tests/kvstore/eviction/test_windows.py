"""Window records: which ones go to disk, and how long they stay in memory."""

from __future__ import annotations

from headrace.core.chain import window_digest
from headrace.kvstore import Kind
from headrace.kvstore.questions import Topic


def record(things, number: int) -> list:
    return [(window_digest(things.digest(number)), things.payload(number, 7000))]


async def put_record(client, things, number: int, blocks: int, **options):
    return await client.put(
        Kind.SWA,
        record(things, number),
        parent=things.digest(number),
        first_block=blocks,
        **options,
    )


async def test_a_record_dear_beside_its_blocks_is_written_on_second_use(rig, things, when_idle):
    """7,000 bytes against blocks of 3,000: at most a quarter from ten blocks on."""
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(10)))
    key = things.lease()
    await put_record(client, things, 8, 9, lease=key)
    await put_record(client, things, 9, 10)
    stat = await when_idle(client)
    assert (stat.windows, stat.ssd_objects) == (2, 11)
    # its own request is no second use
    digest = window_digest(things.digest(8))
    assert (await client.open_objects(Kind.SWA, [digest], key))[0] is not None
    assert (await when_idle(client)).ssd_objects == 11
    assert (await client.open_objects(Kind.SWA, [digest], things.lease("another")))[0] is not None
    assert (await when_idle(client)).ssd_objects == 12
    await rig.restart()
    stat = await client.stat()
    assert (stat.windows, stat.blocks) == (2, 10)
    (place,) = await client.open_objects(Kind.SWA, [digest], None)
    dest = bytearray(7000)
    assert client.read_into(place, digest, dest) and bytes(dest) == things.payload(8, 7000)


async def test_the_share_is_a_setting(rig, things, when_idle):
    await rig.start(window_cost_share=7000 / 3000)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0))
    await put_record(client, things, 0, 1)
    assert (await when_idle(client)).ssd_objects == 2
    await rig.stop()
    await rig.start(window_cost_share=0.0)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(100, 120)))
    await put_record(client, things, 119, 20)
    assert (await when_idle(client)).ssd_objects == 22


async def test_idle_records_leave_the_arena_and_blocks_stay(rig, things, when_idle, wait_until):
    await rig.start(window_ttl_s=1.0)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(10)))
    await put_record(client, things, 9, 10)  # on disk too
    await put_record(client, things, 3, 4)  # in memory only
    await put_record(client, things, 4, 5, lease=things.lease())
    stat = await when_idle(client)
    assert (stat.windows, stat.arena_resident) == (3, 13)

    async def gone() -> bool:
        return (await client.stat()).arena_resident == 11

    await wait_until(gone, "the end of two idle records")
    stat = await client.stat()
    # the leased one stays, the one on disk is still known, the other is gone for good
    assert (stat.windows, stat.blocks, stat.evicted) == (2, 10, 2)
    text = (await client.ask(Topic.METRICS))["text"]
    assert 'headrace_store_evictions_total{reason="idle"} 2.0' in text
    digest = window_digest(things.digest(9))
    assert (await client.open_objects(Kind.SWA, [digest], None))[0] is not None
