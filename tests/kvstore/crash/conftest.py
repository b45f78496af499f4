"""One run of a store, recorded: every change of a file and of the index, in order."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis
from headrace_tests import module
from headrace_tests_kvstore_disk import Op, Recorder
from headrace_tests_kvstore_wire import Proxy, everything

from headrace.core import faults
from headrace.kvstore import EmbeddedRedis, Kind, StoreClient, StoreSettings

Mother = module("tests/kvstore/crash/forks.py").Mother

SETTINGS = {
    "arena_bytes": 160_000,
    "ssd_bytes": 4 * (64 << 10),
    "segment_bytes": 64 << 10,
    "group_s": 0.01,
    "index_deadline_s": 5.0,  # on a busy machine 50 ms pass, and a record is then written later
}
FLIPPED = 5  # the block whose bytes are damaged on the way to disk


@dataclass(frozen=True)
class Recorded:
    settings: StoreSettings
    log: tuple[Op, ...]
    written: dict[bytes, bytes]  # payload by digest
    flipped: bytes
    recycled: int


async def work(client: StoreClient, things, wait_idle) -> dict[bytes, bytes]:
    """Groups of one and of many objects, both kinds, segments reused, a damaged slot blanked, an
    object put twice; what was put, by digest."""
    groups = [
        (Kind.KV, [0]),
        (Kind.SWA, [0, 1]),
        (Kind.KV, range(1, 9)),
        (Kind.KV, [3]),
        (Kind.KV, range(9, 26)),
        (Kind.SWA, range(2, 9)),
        (Kind.KV, range(26, 40)),
    ]
    put: dict[bytes, bytes] = {}
    for kind, numbers in groups:
        items = things.blocks(*numbers) if kind is Kind.KV else things.windows(*numbers)
        await client.put(kind, items, lease=things.lease("w"), wait_s=5.0)
        await client.release(things.lease("w"))
        put.update(items)
        stat = await wait_idle(client)
        # A second use: these are carried over when their segment is reused.
        await client.open_objects(Kind.KV, [things.digest(n) for n in (1, 7, 20)], None)
        if kind is Kind.KV and FLIPPED in numbers:
            assert faults.fired("store.segment_write") == 1
            # Push it out of the arena, and ask for it: what is read back does not verify.
            for begin in range(100, 128, 7):
                extra = things.blocks(*range(begin, begin + 7))
                put.update(extra)
                await client.put(Kind.KV, extra)
                await wait_idle(client)
            assert await client.open_prefix([things.digest(FLIPPED)], None) == ()
            stat = await wait_idle(client)
            assert stat.damaged == 1, "the damaged slot was not met"
    return put


@pytest.fixture(scope="session")
def recorded(shared_valkey: EmbeddedRedis, new_rig, wait_idle, all_things) -> Iterator[Recorded]:
    home = tempfile.mkdtemp(prefix="hc-", dir="/tmp")
    plain = redis.Redis.from_url(shared_valkey.url)
    plain.flushall()
    recorder = Recorder()

    async def run() -> Recorded:
        proxy = Proxy(shared_valkey.url.removeprefix("unix://"))
        rig = new_rig(home, await proxy.start(), **SETTINGS)
        rig.options = {"calls": recorder}
        proxy.on_answer = lambda: recorder.index(everything(plain))
        faults.arm(f"store.segment_write=flip@{FLIPPED + 3}")  # one block, two windows before
        try:
            await rig.start()
            client = await rig.client()
            put = await work(client, all_things, wait_idle)
            recycled = (await client.stat()).recycled
            await rig.stop()
        finally:
            faults.disarm()
            await rig.close()
            await proxy.close()
        flipped = all_things.digest(FLIPPED)
        return Recorded(rig.settings, tuple(recorder.log), put, flipped, recycled)

    yield asyncio.run(run())
    plain.close()
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def mother() -> Iterator[Mother]:
    """Forks stores as processes."""
    made = Mother()
    yield made
    made.close()
