"""The same with a real process and a real SIGKILL, before every op on its files or in its midst."""

from __future__ import annotations

import asyncio
import signal

import pytest

from headrace.kvstore import Kind, StoreClient

TOKEN = "a cluster token of tests"
SETTINGS = {
    "arena_bytes": 160_000,
    "ssd_bytes": 4 * (64 << 10),
    "segment_bytes": 64 << 10,
    "group_s": 0.01,
}
LAST_OP = 150  # below what the work below takes: each kill must take effect
NONE_BEFORE = 10  # until then files are made; then it depends on how puts meet
SOME_FROM = 20
OBJECTS = 240
BATCH = 6

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]


async def _work(client: StoreClient, things, store) -> int:
    """Put until the process is gone; how many blocks were offered."""
    for begin in range(0, OBJECTS, BATCH):
        await client.put(Kind.KV, things.blocks(*range(begin, begin + BATCH)))
        await client.put(Kind.SWA, things.windows(begin))
        while store.status is None:
            stat = await client.stat()
            if stat is not None and not stat.pending:
                break
            await asyncio.sleep(0.002)
        if store.status is not None:
            return begin + BATCH
    raise AssertionError("the work ended before the op at which the process was to die")


async def _found(client: StoreClient, things, offered: int) -> int:
    """How many of the objects that were offered are there, all of them exact."""
    found = 0
    for begin in range(0, offered, BATCH):
        numbers = range(begin, begin + BATCH)
        for kind, items in (
            (Kind.KV, things.blocks(*numbers)),
            (Kind.SWA, things.windows(*numbers)),
        ):
            places = await client.open_objects(kind, [digest for digest, _ in items], None)
            for (digest, payload), place in zip(items, places, strict=True):
                if place is not None:
                    dest = bytearray(place.payload_bytes)
                    assert client.read_into(place, digest, dest) and bytes(dest) == payload
                    found += 1
    return found


@pytest.fixture
async def kill_and_look(mother, settings_for, things, wait_idle, home):
    async def run(at: int, half: bool) -> None:
        await _kill_and_look(mother, settings_for(**SETTINGS), things, wait_idle, home, at, half)

    return run


@pytest.mark.parametrize("at", range(1, LAST_OP + 1))
async def test_a_kill_at_every_op(kill_and_look, at):
    await kill_and_look(at, half=at % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(1, LAST_OP + 1))
async def test_a_kill_at_every_op_the_other_way(kill_and_look, at):
    await kill_and_look(at, half=at % 2 == 0)


async def _kill_and_look(mother, settings, things, wait_idle, home, at: int, half: bool) -> None:
    store = mother.fork(home, settings, die_at=at, half=half)
    client = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    offered = 0
    if store.status is None:
        await client.connect(10.0)
        offered = await _work(client, things, store)
    await client.close()
    assert store.ended() == -signal.SIGKILL
    after = mother.fork(home, settings)
    assert after.status is None, after.log.read_text()
    client = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    assert await client.connect(10.0)
    found = await _found(client, things, offered)
    stat = await wait_idle(client)
    # Nothing orphaned and nothing that was never offered.
    assert stat.blocks + stat.windows == stat.ssd_objects == found
    assert found == 0 if at < NONE_BEFORE else found > 0 or at < SOME_FROM
    # And it goes on.
    assert None not in await client.put(Kind.KV, things.blocks(*range(1000, 1006)))
    assert (await wait_idle(client)).unsaved == 0
    await client.close()
    after.kill()
