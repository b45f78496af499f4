"""A sweep of the index goes on for a while, and slots are filled meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import redis

from headrace.core.limits import LeaseTimes
from headrace.kvstore import StoreSettings
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.records import record_name

pytestmark = pytest.mark.redis
_OTHERS = 30_000  # keys that a sweep looks through: about a hundred calls
_OBJECTS = 200


async def test_what_is_put_during_a_sweep_stays_listed(make_world, valkey, wait_until):
    world = make_world(_OBJECTS)
    settings = StoreSettings(
        directory="/nowhere",
        arena_bytes=1 << 20,
        ssd_bytes=1 << 20,
        segment_bytes=1 << 18,
        block_bytes=100,
        window_bytes=100,
        index_deadline_s=3.0,
    )
    publisher = Publisher(
        world.state, settings, LeaseTimes(), world.clock, valkey.url, b"sweeping", 7
    )
    with redis.Redis.from_url(valkey.url) as plain:
        plain.mset({b"kv:strange:%d" % number: b"" for number in range(_OTHERS)})
        running = asyncio.create_task(publisher.run())
        try:
            await wait_until(lambda: _is(publisher.condition == "ok" and publisher.sweeping))
            entries = [world.put(number) for number in range(_OBJECTS)]
            keys = [entry.key for entry in entries]
            assert await publisher.publish(keys) and publisher.sweeping
            listed = plain.mget(list(map(record_name, keys)))
            assert all(len(value) == 40 for value in listed)
            await wait_until(lambda: _is(not publisher.sweeping))
            assert plain.mget(list(map(record_name, keys))) == listed
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await publisher.close()


async def _is(value: bool) -> bool:
    return value
