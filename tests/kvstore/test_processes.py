"""Processes that die at every step, and what the next one finds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from headrace.core.errors import ConfigError
from headrace.core.messages import Place
from headrace.kvstore import IndexReader, Kind, StoreClient, run_store
from headrace.kvstore.layout import HEADER_BYTES, SlotHeader

pytestmark = pytest.mark.fault
TOKEN = "a cluster token of tests"
PROCESS = Path(__file__).with_name("store_process.py")


@pytest_asyncio.fixture
async def client_for(home, things):
    made: list[StoreClient] = []

    async def connect(namespace=things.namespace) -> StoreClient:
        client = StoreClient(f"unix://{home}/store.sock", TOKEN, namespace)
        made.append(client)
        assert await client.connect(20.0)
        return client

    yield connect
    for client in made:
        await client.close()


def slots_on_disk(home: str) -> set[bytes]:
    """Digests of the objects whose headers on disk are whole, read with nobody's help."""
    found = set()
    for path in Path(home, "store").glob("segment-*.seg"):
        data = path.read_bytes()
        for end in range(8192, len(data) + 1, 4096):
            header = SlotHeader.unpack(data[end - HEADER_BYTES : end])
            if header is not None:
                found.add(bytes(header.facts.digest))
    return found


async def test_two_processes_share_the_arena(start_process, client_for, things, home):
    start_process()
    client = await client_for()
    told = {
        "address": f"unix://{home}/store.sock",
        "namespace": things.namespace.hex(),
        "kind": "kv",
        "lease": "request",
        "items": [[d.hex(), p.hex()] for d, p in things.blocks(1, 2, 3)],
    }
    writer = subprocess.Popen(
        [sys.executable, "-P", str(PROCESS), "put", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    line = await asyncio.to_thread(writer.stdout.readline)
    places = [Place(*values) for values in json.loads(line)]
    dest = bytearray(3000)
    for number, place in enumerate(places, 1):  # by hand-off: the place came from the other process
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    for stream in (writer.stdin, writer.stdout):
        stream.close()
    stat = await client.stat()
    assert (stat.leases, stat.leased_objects) == (1, 3)  # the lease is the request's, not its own
    assert client.read_into(places[0], things.digest(1), dest)


# point, at which hit, and how many of the 5 objects the next process finds
POINTS = [
    ("store.seal", 3, 0),
    ("store.segment_write", 3, 0),  # the five follow each other and go in one write
    ("store.before_sync", 1, 5),
    ("store.before_index", 1, 5),
    ("store.after_index", 1, 5),
]


@pytest.mark.parametrize(("point", "hit", "kept"), POINTS, ids=[p[0] for p in POINTS])
async def test_a_store_killed_at_a_step_restarts_right(
    start_process,
    client_for,
    listed_rig,
    things,
    home,
    valkey,
    wait_until,
    when_idle,
    point,
    hit,
    kept,
):
    """I2: exit as by SIGKILL at each step of a write; afterwards disk, memory and index agree."""
    first = start_process(valkey.url, f"{point}=exit@{hit}", group_s=0.3)
    client = await client_for()
    attached = client.attaches
    await client.put(Kind.KV, things.blocks(*range(5)), lease=things.lease())
    assert await asyncio.to_thread(first.ended) == 137  # the fault took effect
    assert not Path(f"/proc/{first.pid}").exists()
    await wait_until(lambda: _is(not client.connected))
    assert await client.open_prefix([things.digest(0)], None) == ()
    assert await client.put(Kind.KV, things.blocks(9)) == (None,)
    await listed_rig.start()
    await wait_until(lambda: _is(client.connected and client.attaches > attached))
    stat = await client.stat()
    assert (stat.blocks, stat.ssd_objects, stat.leases, stat.reservations) == (kept, kept, 0, 0)
    assert len(slots_on_disk(home)) == kept  # no object that the store does not know
    dest = bytearray(3000)
    places = await client.open_prefix([things.digest(n) for n in range(5)], None)
    assert len(places) == kept
    for number, place in enumerate(places):
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    # everything can be put again, and then index and disk hold the same
    assert None not in await client.put(Kind.KV, things.blocks(*range(5)), lease=things.lease())
    await when_idle(client)
    reader = IndexReader(valkey.url, deadline_s=1.0)

    async def all_listed() -> bool:
        listed = await client.stat()
        return listed.index == "ok" and listed.index_unlisted == 0

    await wait_until(all_listed, "the index")

    async def all_found() -> bool:
        digests = [things.digest(n) for n in range(6)]
        return (await reader.hit_blocks(things.namespace, digests)).blocks == 5

    await wait_until(all_found)
    await reader.close()
    plain = redis.Redis.from_url(valkey.url)
    names = list(plain.scan_iter("kv:*"))
    plain.close()
    assert len([name for name in names if not name.startswith(b"kv:store:")]) == 5
    assert slots_on_disk(home) == {bytes(things.digest(n)) for n in range(5)}


async def _is(value: bool) -> bool:
    return value


async def test_sigkill_and_restart_clients_come_back_and_old_places_miss(
    start_process, client_for, rig, things, wait_until, when_idle
):
    first = start_process()
    client = await client_for()
    items = things.blocks(*range(20))
    old = await client.put(Kind.KV, items, lease=things.lease())
    await when_idle(client)
    total = (await client.stat()).arena_slots - (await client.stat()).arena_resident
    waiting = asyncio.create_task(
        client.put(
            Kind.KV,
            [(things.digest(100 + n), b"x") for n in range(total)],
            lease=things.lease("b"),
            wait_s=60.0,
        )
    )
    while (await client.stat()).reservations == 0:
        await asyncio.sleep(0.005)
    first.kill()
    # the put under way is answered, not left hanging: what was not sealed yet is None
    assert (await asyncio.wait_for(waiting, 10))[-1] is None
    assert not client.connected
    # bytes that are mapped and verify are right, whoever died
    dest = bytearray(3000)
    assert client.read_into(old[0], things.digest(0), dest) and bytes(dest) == things.payload(0)
    # every call is a miss, at once: none of these may wait for a store that is not there
    async with asyncio.timeout(5):
        assert await client.open_prefix([things.digest(0)], None) == ()
        assert await client.open_windows([(128, things.digest(0))], None) is None
        assert await client.put(Kind.KV, items, wait_s=60.0, lease=things.lease()) == (None,) * 20
        assert await client.renew(things.lease()) is False
        assert await client.stat() is None
        await client.release(things.lease())
        await client.doom(old[0], things.digest(0))
    await rig.start()
    await wait_until(lambda: _is(client.connected))
    assert client.held == 0  # leases ended with the store that gave them
    assert not client.read_into(old[0], things.digest(0), dest)
    found = await client.open_prefix([digest for digest, _ in items], things.lease("c"))
    assert len(found) == 20
    for (digest, payload), place in zip(items, found, strict=True):
        assert client.read_into(place, digest, dest) and bytes(dest) == payload


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_stopped_store_is_noticed_and_taken_back(
    start_process, client_for, things, wait_until
):
    """SIGSTOP keeps the socket open: silence while a question is open ends the connection."""
    process = start_process()
    client = await client_for()
    await client.put(Kind.KV, things.blocks(1), lease=things.lease())
    os.kill(process.pid, signal.SIGSTOP)
    await wait_until(lambda: _is(_state(process.pid) == "T"), "the stop")
    assert await asyncio.wait_for(client.open_prefix([things.digest(1)], None), 9) == ()
    assert not client.connected
    os.kill(process.pid, signal.SIGCONT)
    await wait_until(lambda: _is(client.connected))
    assert len(await client.open_prefix([things.digest(1)], None)) == 1


async def test_a_second_owner_of_the_directory_is_refused(start_process, rig, client_for, things):
    await rig.start()
    client = await client_for()
    second = start_process()
    assert await asyncio.to_thread(second.ended) == 2
    assert f"one store process may own it, process {os.getpid()} does" in second.text()
    # ... and the first one's socket is still its own
    assert None not in await client.put(Kind.KV, things.blocks(1))
    elsewhere = replace(rig.settings, directory=f"{rig.home}/other")
    with pytest.raises(ConfigError, match="another store already serves this socket"):
        await run_store(rig.role, elsewhere)
    again = await client_for()
    assert len(await again.open_prefix([things.digest(1)], None)) == 1


async def test_sigterm_like_stop_makes_everything_durable(rig, things, home):
    """An orderly end writes what was sealed a moment ago, though the group is far from due."""
    await rig.start(group_s=30.0)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(10)))
    assert slots_on_disk(home) == set() or (await client.stat()).pending == 10
    await rig.stop()
    assert len(slots_on_disk(home)) == 10
