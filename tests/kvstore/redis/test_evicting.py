"""An index in a Redis that evicts is said, once, and costs hits only."""

from __future__ import annotations

import logging

import pytest

from headrace.core.clock import SYSTEM_CLOCK
from headrace.kvstore import Kind
from headrace.kvstore.evicting import warn_of_eviction
from headrace.kvstore.redis_link import RedisLink

pytestmark = pytest.mark.redis


@pytest.mark.parametrize(
    ("policy", "maxmemory", "wrong"),
    [
        ("allkeys-lru", "64mb", {"allkeys-lru"}),
        ("volatile-ttl", "64mb", {"volatile-ttl"}),
        ("noeviction", "64mb", set()),
        ("allkeys-lru", "0", set()),  # without a bound nothing is evicted
    ],
)
async def test_a_policy_that_takes_records_is_named(new_server, caplog, policy, maxmemory, wrong):
    server = new_server("--maxmemory-policy", policy, "--maxmemory", maxmemory)
    link = RedisLink(server.url, 5.0, SYSTEM_CLOCK)
    with caplog.at_level(logging.WARNING):
        assert await warn_of_eviction(link) == wrong
    assert (f"maxmemory-policy {policy}" in caplog.text) == bool(wrong)
    await link.close()


async def test_of_a_cluster_every_shard_is_asked(cluster):
    for server in cluster:
        server.client.config_set("maxmemory", "64mb")
    cluster[2].client.config_set("maxmemory-policy", "allkeys-random")
    link = RedisLink("redis-cluster://" + cluster[0].address, 5.0, SYSTEM_CLOCK)
    assert await link.eviction_policies() == {"noeviction", "allkeys-random"}
    assert await warn_of_eviction(link) == {"allkeys-random"}
    await link.close()


async def test_a_store_says_it_and_serves(
    new_rig, home, new_server, things, when_idle, wait_until, caplog
):
    server = new_server("--maxmemory-policy", "allkeys-lru", "--maxmemory", "64mb")
    rig = new_rig(home, server.url)

    async def said() -> bool:
        return "Redis evicts" in caplog.text

    try:
        with caplog.at_level(logging.WARNING):
            await rig.start()
            client = await rig.client()
            await client.put(Kind.KV, things.blocks(1))
            await when_idle(client)
            await wait_until(said, "the warning")
        assert caplog.text.count("Redis evicts (maxmemory-policy allkeys-lru)") == 1
        assert len(await client.open_prefix([things.digest(1)], None)) == 1
    finally:
        await rig.close()
