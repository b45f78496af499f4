"""The same with a real process and a real SIGKILL, at ops of its files chosen evenly or all."""

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
STEP = 31
OBJECTS = 240

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]


def _points(slow: bool) -> list:
    chosen = range(1, LAST_OP + 1, STEP)
    return [n for n in range(1, LAST_OP + 1) if (n in chosen) != slow]


async def _work(client: StoreClient, things, wait_idle, process) -> None:
    """Put until the process is gone."""
    for begin in range(0, OBJECTS, 6):
        await client.put(Kind.KV, things.blocks(*range(begin, begin + 6)))
        await client.put(Kind.SWA, things.windows(begin))
        for _ in range(500):
            stat = await client.stat()
            if process.poll() is not None or (stat is not None and not stat.pending):
                break
            await asyncio.sleep(0.01)
        if process.poll() is not None:
            return


async def _kill_and_look(start_process, things, wait_idle, home, at: int) -> int:
    """How many objects the next process found, all of them exact."""
    store = start_process(die_at=at, half=at % 2 == 1, **SETTINGS)
    client = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    if store.process.poll() is None:
        await client.connect(5.0)
        await _work(client, things, wait_idle, store.process)
    await client.close()
    assert store.ended() == -signal.SIGKILL
    after = start_process(**SETTINGS)
    client = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    assert await client.connect(10.0)
    found = 0
    for number in range(OBJECTS):
        for kind, digest, payload in (
            (Kind.KV, *things.blocks(number)[0]),
            (Kind.SWA, *things.windows(number)[0]),
        ):
            (place,) = await client.open_objects(kind, [digest], None)
            if place is not None:
                dest = bytearray(place.payload_bytes)
                assert client.read_into(place, digest, dest) and bytes(dest) == payload
                found += 1
    stat = await wait_idle(client)
    assert stat.blocks + stat.windows == stat.ssd_objects == found
    await client.close()
    after.kill()
    return found


@pytest.mark.parametrize("at", _points(slow=False))
async def test_a_kill_at_some_ops(start_process, things, wait_idle, home, at):
    await _kill_and_look(start_process, things, wait_idle, home, at)


@pytest.mark.slow
@pytest.mark.parametrize("at", _points(slow=True))
async def test_a_kill_at_every_other_op(start_process, things, wait_idle, home, at):
    await _kill_and_look(start_process, things, wait_idle, home, at)


def test_the_points_are_all_ops_and_some_of_them_are_cheap():
    assert sorted(_points(False) + _points(True)) == list(range(1, LAST_OP + 1))
    assert len(_points(False)) == 5
