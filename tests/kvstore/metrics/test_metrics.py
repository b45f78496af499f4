"""What a scrape of a running store says, in numbers."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.errors import ConfigError
from headrace.kvstore import Kind
from headrace.kvstore.policy import DomainShare
from headrace.kvstore.questions import Topic


def values(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names ...) of every sample."""
    return {
        (s.name.removeprefix("headrace_store_"), *(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def scrape(client) -> dict[tuple[str, ...], float]:
    return values((await client.ask(Topic.METRICS))["text"])


async def test_hits_and_misses_by_tier_and_tenant(rig, things, when_idle):
    await rig.start(domain_shares=(DomainShare("gold", 0.25),))
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1), domain="gold")
    await client.put(Kind.KV, things.blocks(10, 11, 12), domain="somebody")
    chain = [things.digest(n) for n in (0, 1, 2, 3)]
    assert len(await client.open_prefix(chain, None)) == 2
    assert len(await client.open_prefix([things.digest(n) for n in (10, 11, 12)], None)) == 3
    assert await client.open_prefix([things.digest(n) for n in (90, 91)], None) == ()
    await when_idle(client)
    seen = await scrape(client)
    assert seen["hit_tokens_total", "gold", "host"] == 256
    assert seen["missed_tokens_total", "gold"] == 256
    assert seen["hit_tokens_total", "common", "host"] == 384
    assert seen["missed_tokens_total", "unknown"] == 256
    assert seen["bytes", "host"] == seen["bytes", "ssd"] == 5 * 3000
    await rig.restart()
    assert len(await client.open_prefix(chain, None)) == 2
    seen = await scrape(client)
    assert seen["hit_tokens_total", "gold", "ssd"] == 256
    assert seen["hit_tokens_total", "gold", "host"] == 0
    assert seen["load_seconds_count",] == 1 and seen["loaded_total",] == 2


async def test_tokens_that_were_known_and_not_delivered(rig, things, when_idle):
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1, 2))
    await when_idle(client)
    await rig.stop()
    with open(f"{rig.home}/store/segment-000000.seg", "r+b") as file:
        file.seek(4096 + 4096 + 7)  # the second slot's payload
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))
    await rig.start()
    client = await rig.client()
    digests = [things.digest(n) for n in range(3)]
    assert len(await client.open_prefix(digests, None)) == 1
    seen = await scrape(client)
    assert seen["hit_tokens_total", "common", "ssd"] == 128
    assert seen["promised_not_delivered_tokens_total", "common", "ssd"] == 256
    assert seen["missed_tokens_total", "common"] == 0
    assert seen["damaged_total",] == 1


async def test_labels_do_not_grow_with_tenants(rig, things):
    await rig.start(domain_shares=(DomainShare("gold"),))
    client = await rig.client()
    for number in range(40):
        await client.put(Kind.KV, things.blocks(number), domain=f"tenant {number}")
        await client.open_prefix([things.digest(number)], None)
    names = {at[1] for at in await scrape(client) if at[0] == "hit_tokens_total"}
    assert names == {"common"}


async def test_why_objects_left(rig, things, when_idle):
    await rig.start(arena_bytes=60_000, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10)
    client = await rig.client()
    total = (await client.stat()).arena_slots
    for number in range(60):
        await client.put(Kind.KV, things.blocks(number))
        await when_idle(client)
    seen = await scrape(client)
    stat = await client.stat()
    left = {at[1]: value for at, value in seen.items() if at[0] == "evictions_total"}
    assert stat.recycled == 2 and left["recycled"] == 30
    assert left["room"] == stat.evicted > 60 - 30 - total
    assert left["orphaned"] == left["idle"] == left["mislaid"] == 0


async def test_the_port_answers_a_scrape_and_is_free_afterwards(rig, things):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    await rig.start(metrics_port=port)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(1, 2))

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()

    seen = values(await asyncio.to_thread(get))
    assert seen["objects", "host"] == 2 and seen["index_lag_seconds",] == 0
    await rig.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"metrics_port: port {port} of 127.0.0.1 cannot"):
            await rig.start(metrics_port=port)
    rig.task = None  # it has ended with that error


async def test_the_index_lags_while_redis_is_away(home, role_for, settings_for, own_valkey, things):
    from headrace.kvstore import StoreClient, run_store

    serving, halt = asyncio.Event(), asyncio.Event()
    role = role_for(redis_url=own_valkey.url)
    task = asyncio.create_task(
        run_store(role, settings_for(), ready=lambda member: serving.set(), stop=halt)
    )
    await serving.wait()
    client = StoreClient(role.listen, role.token, things.namespace)
    try:
        assert await client.connect(10.0)
        await client.put(Kind.KV, things.blocks(1))
        async with asyncio.timeout(15):
            while (await scrape(client))["unlisted_objects",]:
                await asyncio.sleep(0.02)
        assert (await scrape(client))["index_lag_seconds",] == 0
        own_valkey.stop()
        await client.put(Kind.KV, things.blocks(2, 3))
        await asyncio.sleep(0.3)
        seen = await scrape(client)
        assert seen["unlisted_objects",] >= 2 and seen["index_lag_seconds",] >= 0.3
    finally:
        await client.close()
        halt.set()
        await task


async def test_what_is_held_is_what_the_store_says_of_itself(rig, things, when_idle):
    await rig.start(arena_bytes=60_000)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1, 2))
    await when_idle(client)
    await client.ask(
        Topic.PIN, name="p", namespace=things.namespace.hex(), tip=things.digest(1).hex(),
        ttl_s=60.0,
    )  # fmt: skip
    slots = (await client.stat()).arena_slots
    lease = things.lease()
    await client.put(Kind.KV, things.blocks(*range(10, 10 + slots)), lease=lease)  # all of them
    stat = await when_idle(client)
    assert None in await client.put(Kind.KV, things.blocks(900))  # no room, and nobody waits
    seen, stat = await scrape(client), await client.stat()
    assert (seen["pins",], seen["pinned_bytes",]) == (1, 6000)
    assert seen["leased_objects",] == stat.leased_objects > 0
    assert seen["dropped_total",] == stat.dropped > 0
    assert seen["free_slots",] == stat.arena_free < slots
    assert seen["written_total",] == stat.writes == stat.ssd_objects == seen["objects", "ssd"]
    assert seen["pending_objects",] == stat.pending == 0
    assert seen["sync_seconds_count",] > 0 and seen["write_errors_total",] == 0
    assert seen["objects", "host"] == stat.arena_resident


async def test_the_document_names_every_metric_and_no_other(rig):
    await rig.start()
    text = (await (await rig.client()).ask(Topic.METRICS))["text"]
    told = {
        line.split()[2].removeprefix("headrace_store_")
        for line in text.splitlines()
        if line.startswith("# TYPE headrace_store_")
    }
    told = {name for name in told if not name.endswith("_created")}
    document = (Path(__file__).parents[3] / "docs/store.md").read_text()
    rows = document.split("| metric `headrace_store_...` | says |")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in rows.splitlines()[1:] if row.startswith("| `")]
    named = {re.sub(r"\{.*", "", name) for cell in cells for name in re.findall("`([^`]+)`", cell)}
    assert named == told and len(told) > 20
