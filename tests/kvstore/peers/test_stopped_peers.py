"""A serving store that is killed or stopped while a run is on its way: at each step, told by the
bytes that a gate between the two stores has let pass. A miss in bounded time, and nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from headrace.core.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from headrace.kvstore import Kind, StoreClient
from headrace.kvstore.arena import plan_regions
from headrace.kvstore.peers_wire import FACTS
from headrace.kvstore.records import IndexRecord, LiveStore, digest_tail, record_key, store_key
from headrace.kvstore.settings import Tier

TOKEN = "a cluster token of tests"
BLOCKS, BLOCK_BYTES = 4, 3000
pytestmark = pytest.mark.fault


class Gate:
    """Lets `up` bytes of the question and `down` of the answer pass (None: all), then holds the
    rest; `shut` is set when something is held. The end of the store behind it ends all."""

    def __init__(self, behind: str) -> None:
        self._behind = behind.removeprefix("tcp://").rpartition(":")
        self.up: int | None = None
        self.down: int | None = None
        self.passed = {"up": 0, "down": 0}
        self.shut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"tcp://{host}:{port}"

    async def _joined(self, asking: asyncio.StreamReader, told: asyncio.StreamWriter) -> None:
        answering, asked = await asyncio.open_connection(self._behind[0], int(self._behind[2]))
        for way in (("up", asking, asked), ("down", answering, told)):
            self._tasks.add(asyncio.create_task(self._pass(*way)))

    async def _pass(
        self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                limit = getattr(self, way)
                left = data if limit is None else data[: max(0, limit - self.passed[way])]
                self.passed[way] += len(left)
                sink.write(left)
                await sink.drain()
                if limit is not None and self.passed[way] >= limit:
                    self.shut.set()
        sink.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Serving:
    """A store process with blocks that the index lists behind a gate only."""

    def __init__(self, start_process, valkey, home: str, things, listed) -> None:
        self._start, self._valkey, self._home = start_process, valkey, home
        self._things, self._listed = things, listed

    async def start(self) -> None:
        self.other = self._start(self._valkey.url, peer_listen="tcp://127.0.0.1:0")
        self.client = StoreClient(f"unix://{self._home}/store.sock", TOKEN, self._things.namespace)
        assert await self.client.connect(10)
        await self.client.put(Kind.KV, self._things.blocks(*range(BLOCKS)))
        await self._listed(self.client)
        with redis.Redis.from_url(self._valkey.url) as plain:
            lives = [LiveStore.unpack(plain.get(key)) for key in plain.keys("kv:store:*")]
            boot = (await self.client.stat()).boot
            (own,) = [live for live in lives if live.epoch == int(boot[:8], 16)]
            self.gate = Gate(own.address)
            live = LiveStore(4242, 1, b"fakefake", await self.gate.start()).pack()
            plain.set(store_key(777), live, px=60_000)
            for digest in map(self._things.digest, range(BLOCKS)):
                record = IndexRecord(
                    777, Tier.HOST, Kind.KV, 4242, 0, 0, 1, BLOCK_BYTES, 5, 6, digest_tail(digest)
                )
                key = record_key(Kind.KV, self._things.namespace, digest)
                plain.set(key, record.pack())

    async def close(self) -> None:
        await self.client.close()
        await self.gate.close()


@pytest_asyncio.fixture
async def serving(pair, start_process, valkey, home, things) -> AsyncIterator[Serving]:
    made = Serving(start_process, valkey, home, things, pair.listed)
    await made.start()
    yield made
    await made.close()


async def nothing_is_held(client, things, settings, wait_s=20.0) -> bool:
    """Whether every slot for blocks can be had at one moment: nothing is pinned, leased or lost."""
    slots = plan_regions(settings)[0].slots
    blocks = things.blocks(*range(1000, 1000 + slots))
    lease = things.lease("all")
    places = await client.put(Kind.KV, blocks, lease=lease, wait_s=wait_s)
    await client.release(lease)
    assert len(places) == slots
    return None not in places


async def bytes_that(client, things, places) -> int:
    """How many of `places` hold what they should; others would be a lie."""
    for number, place in enumerate(places):
        dest = bytearray(BLOCK_BYTES)
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    return len(places)


# Where it stands still: bytes of the question or of the answer; None: all before the payloads.
STEPS = {
    "before the question": ("up", 0, 0),
    "in the head of the question": ("up", 10, 0),
    "in the question": ("up", FRAME_HEADER_BYTES + 40, 0),
    "before the answer": ("down", 0, 0),
    "in the head of the answer": ("down", 10, 0),
    "in the facts": ("down", FRAME_HEADER_BYTES + 2 * FACTS.size, 0),
    "after the facts": ("down", None, 0),
    "in a block": ("down", None, BLOCK_BYTES // 2),
    "after a block": ("down", None, BLOCK_BYTES),
    "in a later block": ("down", None, BLOCK_BYTES * 5 // 2),
    "before the last byte": ("down", None, BLOCK_BYTES * BLOCKS - 1),
}


# Each starts a process, 2 s: by default at a few of the steps, all of them with -m slow.
SOON = {"in the question", "before the answer", "after the facts", "in a block", "in a later block"}
CASES = [
    pytest.param(step, how, marks=[] if step in SOON else [pytest.mark.slow])
    for how in (signal.SIGKILL, signal.SIGSTOP)
    for step in STEPS
]


@pytest.mark.parametrize(("step", "how"), CASES)
async def test_a_store_that_ends_or_stops_in_the_middle(
    pair, things, serving, wait_until, when_idle, step, how
):
    await pair.b.start(absent_s=0.0, index_deadline_s=3.0, recompute_tokens_per_s=200.0)
    b = await pair.b.client()
    digests = [things.digest(number) for number in range(BLOCKS)]
    gate, other = serving.gate, serving.other
    way, count, beyond = STEPS[step]
    if count is None:  # the facts' end lies so far before that of the answer
        assert len(await b.open_prefix(digests, None)) == BLOCKS
        count = gate.passed["down"] - BLOCK_BYTES * BLOCKS
        assert count > BLOCKS * FACTS.size
        await pair.b.restart()
        gate.passed = {"up": 0, "down": 0}
    setattr(gate, way, count + beyond)
    asked = asyncio.create_task(b.open_prefix(digests, things.lease("asked")))
    await asyncio.wait_for(gate.shut.wait(), 20)
    assert gate.passed[way] == count + beyond and not asked.done()  # the fault takes effect here
    os.kill(other.pid, how)
    if how is signal.SIGKILL:
        await asyncio.to_thread(other.process.wait, 10)
    else:

        async def stopped() -> bool:
            stat = Path(f"/proc/{other.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"

        await wait_until(stopped, "state T")
    # Four blocks at 200 tokens a second are 2.6 s: no more is waited for.
    places = await asyncio.wait_for(asked, 15)
    assert await bytes_that(b, things, places) == beyond // BLOCK_BYTES  # whole ones are kept
    assert (await b.stat()).peer_failed >= 1
    await b.release(things.lease("asked"))
    await when_idle(b)
    assert await nothing_is_held(b, things, pair.b.settings)
    if how is signal.SIGSTOP:
        os.kill(other.pid, signal.SIGCONT)
        assert await nothing_is_held(serving.client, things, pair.b.settings)


async def test_a_gate_that_holds_nothing_changes_nothing(pair, things, serving):
    """The control of the test above, and that its last check sees what is held."""
    await pair.b.start(absent_s=0.0, index_deadline_s=3.0, recompute_tokens_per_s=50.0)
    b = await pair.b.client()
    places = await b.open_prefix([things.digest(n) for n in range(BLOCKS)], things.lease("x"))
    assert await bytes_that(b, things, places) == BLOCKS
    assert not await nothing_is_held(b, things, pair.b.settings, wait_s=0.5)
    await b.release(things.lease("x"))
    assert await nothing_is_held(b, things, pair.b.settings)
    assert await nothing_is_held(serving.client, things, pair.b.settings)
