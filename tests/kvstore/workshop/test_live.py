"""Tools on a store that runs in a process of its own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from headrace.kvstore import Kind, StoreClient
from headrace.kvstore.questions import StoreRefused, StoreSilent, Topic
from headrace.kvstore.workshop import live

TOKEN = "a cluster token of tests"


@pytest.fixture
def store(home) -> live.LiveStore:
    return live.LiveStore(f"unix://{home}/store.sock", TOKEN)


def put(store, things, *numbers: int, **options) -> None:
    async def work() -> None:
        client = StoreClient(store.address, store.token, things.namespace)
        assert await client.connect(10.0)
        await client.put(Kind.KV, things.blocks(*numbers), domain="gold", **options)
        while (await client.stat()).pending:
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(work())


def test_stat_ls_and_warm_of_a_running_store(start_process, store, things, no_progress):
    process = start_process()
    put(store, things, 0, 1, 2, 3)
    put(store, things, 10, 11, parent=things.digest(1), first_block=2)
    values = live.stat(store)
    assert (values["store"]["blocks"], values["chains"]) == (6, 2)
    assert values["sums"][0]["payload_bytes"] == 18_000 and values["sums"][0]["host_objects"] == 6
    rows = live.ask(store, Topic.CHAINS, limit=1)
    assert rows["total"] == 2 and len(rows["chains"]) == 1
    process.process.terminate()
    process.ended()
    start_process()
    assert live.stat(store)["sums"][0]["host_objects"] == 0
    there = live.warm(store, things.namespace, [things.digest(3)], no_progress)
    assert there == (4, 4) and live.stat(store)["sums"][0]["host_objects"] == 4
    with pytest.raises(StoreRefused, match="is not on disk as a whole"):
        live.warm(store, things.namespace, [things.digest(99)], no_progress)


def test_a_pin_outlives_every_reuse_of_segments_and_a_restart(start_process, store, things, home):
    small = {"ssd_bytes": 4 * (64 << 10), "segment_bytes": 64 << 10, "arena_bytes": 200_000}
    process = start_process(**small)
    put(store, things, 0, 1, 2, 3)
    tip, namespace = things.digest(3).hex(), things.namespace.hex()
    pinned = {"name": "greeting", "namespace": namespace, "tip": tip}
    assert live.ask(store, Topic.PIN, ttl_s=3600, **pinned)["held_bytes"] == 12_000

    def others(begin: int) -> None:
        for first in range(begin, begin + 120, 5):  # twice the disk, in chains of five
            put(store, things, *range(first, first + 5))

    others(1000)
    assert live.stat(store)["store"]["recycled"] >= 4
    assert live.ask(store, Topic.CHAIN, namespace=namespace, tip=tip)["blocks"] == 4
    process.process.terminate()
    process.ended()
    start_process(**small)
    pins = live.ask(store, Topic.PINS)
    assert [pin["name"] for pin in pins["pins"]] == ["greeting"] and pins["held_bytes"] == 12_000
    assert pins["quota_bytes"] == 64 << 10
    assert live.ask(store, Topic.UNPIN, name="greeting") == {"ended": True}
    assert live.ask(store, Topic.UNPIN, name="greeting") == {"ended": False}
    others(2000)
    assert live.ask(store, Topic.CHAIN, namespace=namespace, tip=tip)["blocks"] == 0


def test_pins_that_cannot_be(start_process, store, things):
    start_process(ssd_bytes=4 * (64 << 10), segment_bytes=64 << 10, pin_share=0.05)
    put(store, things, *range(6))
    pinned = {"namespace": things.namespace.hex(), "ttl_s": 60.0}
    with pytest.raises(StoreRefused, match="is not stored on disk as a whole"):
        live.ask(store, Topic.PIN, name="a", tip=things.digest(77).hex(), **pinned)
    with pytest.raises(
        StoreRefused, match="pins may hold 13107 bytes, with a they would hold 18000"
    ):
        live.ask(store, Topic.PIN, name="a", tip=things.digest(5).hex(), **pinned)
    live.ask(store, Topic.PIN, name="a", tip=things.digest(3).hex(), **pinned)
    with pytest.raises(StoreRefused, match="18000"):
        live.ask(store, Topic.PIN, name="a", tip=things.digest(5).hex(), **pinned)
    assert live.ask(store, Topic.PINS)["held_bytes"] == 12_000  # as before
    for wrong, words in (
        ({"name": "../x"}, "a pin's name has 1 to 64"),
        ({"ttl_s": -1.0}, "ttl_s must be above 0"),
        ({"ttl_s": "x"}, "ttl_s must be of type float"),
        ({"tip": "12"}, "64 hex digits"),
    ):
        asked = {"name": "b", "tip": things.digest(0).hex(), **pinned, **wrong}
        with pytest.raises(StoreRefused, match=words):
            live.ask(store, Topic.PIN, **asked)
    assert len(live.ask(store, Topic.PINS)["pins"]) == 1


def test_a_pin_ends_by_its_time(start_process, store, things, home):
    start_process()
    put(store, things, 0)
    live.ask(
        store,
        Topic.PIN,
        name="short",
        namespace=things.namespace.hex(),
        tip=things.digest(0).hex(),
        ttl_s=3.0,  # it must still be there when the file is read
    )
    assert '"short"' in Path(home, "store", "pins.json").read_text()
    deadline_s = time.monotonic() + 15
    while live.ask(store, Topic.PINS)["pins"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert '"short"' not in Path(home, "store", "pins.json").read_text()


def test_the_index_is_written_anew_while_serving(start_process, store, things, valkey):
    import redis

    start_process(redis_url=valkey.url)
    put(store, things, 0, 1, 2)
    client = redis.Redis.from_url(valkey.url)

    def listed() -> int:
        return len(client.keys("kv:*")) - len(client.keys("kv:store:*"))

    def wait_for(n: int) -> None:
        deadline_s = time.monotonic() + 15
        while listed() != n:
            assert time.monotonic() < deadline_s, listed()
            time.sleep(0.02)

    wait_for(3)
    keys = [key for key in client.keys("kv:*") if not key.startswith(b"kv:store:")]
    deadline_s = time.monotonic() + 15
    while {len(client.get(key)) for key in keys} != {80}:  # what is synced is written once more
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    client.delete(*keys)  # the live record stays, so the store notices nothing
    time.sleep(0.3)
    assert listed() == 0
    steps: list[tuple[int, int]] = []
    found = live.rebuild_index(store, lambda *at: steps.append(at))
    assert found == {"objects": 3, "waiting": 0} and steps[-1] == (3, 3)
    assert listed() == 3  # when it has ended
    client.close()


def test_without_an_index_none_is_said_to_be_written(start_process, store, things, no_progress):
    start_process()
    put(store, things, 0)
    with pytest.raises(StoreRefused, match="has no index to write"):
        live.rebuild_index(store, no_progress)


def test_records_that_wait_for_redis_are_said(
    start_process, store, things, own_valkey, no_progress
):
    start_process(redis_url=own_valkey.url)
    put(store, things, 0, 1, 2)
    deadline_s = time.monotonic() + 15
    while live.stat(store)["store"]["index_unlisted"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    own_valkey.stop()
    assert live.rebuild_index(store, no_progress) == {"objects": 3, "waiting": 3}
    assert live.stat(store)["store"]["index"] == "away"


def test_a_running_store_reads_itself_back(start_process, store, things, home, flip, no_progress):
    start_process()
    put(store, things, *range(20))
    flip(Path(home, "store", "segment-000000.seg"), 4096 + 3 * 4096 + 5)  # under its feet

    def scrub(drop: bool) -> tuple[int, ...]:
        return tuple(live.scrub(store, drop=drop, progress=no_progress).values())

    assert scrub(False) == (19, 57_000, 1)
    assert live.stat(store)["store"]["damaged"] == 0  # it was only said
    assert scrub(True) == (19, 57_000, 1)
    deadline_s = time.monotonic() + 15
    while live.stat(store)["store"]["pending"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    values = live.stat(store)["store"]
    assert (values["damaged"], values["blocks"]) == (1, 20)  # the arena's copy is written anew
    assert scrub(True) == (20, 60_000, 0)


def test_nobody_there_is_said(store):
    with pytest.raises(StoreSilent, match="no store answers at unix://"):
        live.stat(store)
