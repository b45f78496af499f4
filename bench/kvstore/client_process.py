"""One client of `bench_store.py`: takes orders as JSON lines, answers with what it measured.

Baselines and store calls run in the same process on the same payloads, so that a ratio compares
what differs and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
import random
import resource
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.core.chain import BLOCK_TOKENS, block_digests
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.loops import new_event_loop
from headrace.core.messages import Place
from headrace.kvstore import IndexReader, Kind, StoreClient
from headrace.kvstore.layout import checksum, slot_bytes
from headrace.kvstore.records import record_key

TOKEN = "bench"
BATCH = 16
CHAIN = 1000
NAMESPACE = hashlib.sha256(b"bench").digest()
SOURCES = 64  # different payloads, so many buffers are written from and read into


def digest(client: int, round_: int, number: int) -> Digest:
    return Digest(hashlib.sha256(b"%d/%d/%d" % (client, round_, number)).digest())


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Measured:
    """When a block of code began and ended (comparable between processes), and its own CPU."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def __enter__(self) -> Measured:
        time.sleep(max(0.0, self._at_s - time.monotonic()))
        self.cpu_s, self.begin_s = -cpu_s(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_s = time.monotonic()
        self.cpu_s += cpu_s()

    def told(self) -> dict[str, float]:
        return {"begin_s": self.begin_s, "end_s": self.end_s, "cpu_s": self.cpu_s}


class Client:
    def __init__(self, number: int, home: str, redis_url: str, block_bytes: int, count: int):
        self.number, self.home, self.redis_url = number, home, redis_url
        self.size, self.slot, self.count = block_bytes, slot_bytes(block_bytes), count
        source = random.Random(number)
        self.payloads = [source.randbytes(block_bytes) for _ in range(SOURCES)]
        self.area = mmap.mmap(-1, self.slot * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self.area)
        self.view[:: mmap.PAGESIZE] = bytes(len(range(0, len(self.view), mmap.PAGESIZE)))
        self.dest = [memoryview(bytearray(block_bytes)) for _ in range(SOURCES)]
        self.store: StoreClient | None = None
        self.places: dict[int, list[Place]] = {}

    def _path(self) -> Path:
        return Path(self.home, f"bare-{self.number}")

    # baselines -------------------------------------------------------------------------------

    def memcpy_in(self, at_s: float) -> dict[str, float]:
        """From the payloads into memory as large as the run: what a put cannot avoid."""
        view, slot, size, payloads = self.view, self.slot, self.size, self.payloads
        with Measured(at_s) as measured:
            for number in range(self.count):
                begin = number * slot
                view[begin : begin + size] = payloads[number % SOURCES]
        return measured.told()

    def memcpy_out(self, at_s: float) -> dict[str, float]:
        """From memory as large as the run into the buffers that are read into."""
        view, slot, size, dest = self.view, self.slot, self.size, self.dest
        with Measured(at_s) as measured:
            for number in range(self.count):
                begin = number * slot
                dest[number % SOURCES][:] = view[begin : begin + size]
        return measured.told()

    def ceiling_in(self, at_s: float) -> dict[str, float]:
        """As `memcpy_in`, with the checksum of each payload: no put can do without."""
        view, slot, size, payloads = self.view, self.slot, self.size, self.payloads
        with Measured(at_s) as measured:
            for number in range(self.count):
                begin = number * slot
                view[begin : begin + size] = payloads[number % SOURCES]
                checksum(payloads[number % SOURCES])
        return measured.told()

    def ceiling_out(self, at_s: float) -> dict[str, float]:
        """As `memcpy_out`, with the checksum of each copy: no verified get can do without."""
        view, slot, size, dest = self.view, self.slot, self.size, self.dest
        with Measured(at_s) as measured:
            for number in range(self.count):
                begin = number * slot
                dest[number % SOURCES][:] = view[begin : begin + size]
                checksum(dest[number % SOURCES])
        return measured.told()

    def bare_make(self, count: int) -> dict[str, float]:
        self._path().unlink(missing_ok=True)
        descriptor = os.open(self._path(), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(descriptor, 0, self.slot * count)
        os.close(descriptor)
        return {}

    def bare_put(self, at_s: float, count: int) -> dict[str, float]:
        """Whole slots into the preallocated O_DIRECT file, one write each, one sync."""
        descriptor = os.open(self._path(), os.O_RDWR | os.O_DIRECT)
        source = self.view[: self.slot * min(SOURCES, self.count)]
        with Measured(at_s) as measured:
            for number in range(count):
                begin = number % SOURCES * self.slot
                os.pwrite(descriptor, source[begin : begin + self.slot], number * self.slot)
            os.fdatasync(descriptor)
        os.close(descriptor)
        return measured.told()

    def bare_get(self, at_s: float, count: int) -> dict[str, float]:
        descriptor = os.open(self._path(), os.O_RDWR | os.O_DIRECT)
        target = self.view[: self.slot]
        with Measured(at_s) as measured:
            for number in range(count):
                os.preadv(descriptor, [target], number * self.slot)
        os.close(descriptor)
        return measured.told()

    # the store -------------------------------------------------------------------------------

    async def connect(self) -> dict[str, float]:
        if self.store is not None:
            await self.store.close()
        self.store = StoreClient(f"unix://{self.home}/store.sock", TOKEN, NAMESPACE)
        if not await self.store.connect(30.0):
            raise SystemExit("no store answered")
        return {}

    async def disconnect(self) -> dict[str, float]:
        if self.store is not None:
            await self.store.close()
        self.store = None
        self.places.clear()
        return {}

    def _keys(self, round_: int, count: int = 0) -> list[Digest]:
        return [digest(self.number, round_, n) for n in range(count or self.count)]

    async def put(self, at_s: float, round_: int, count: int, in_flight: int) -> dict[str, float]:
        """All blocks in batches of 16, `in_flight` batches at a time; every batch leased."""
        store, lease = self._store(), self._lease(round_)
        keys = self._keys(round_, count)
        items = [(key, self.payloads[n % SOURCES]) for n, key in enumerate(keys)]
        places: list[Place | None] = [None] * count

        async def one(begin: int) -> None:
            places[begin : begin + BATCH] = await store.put(
                Kind.KV, items[begin : begin + BATCH], lease=lease, wait_s=30.0
            )

        with Measured(at_s) as measured:
            await _at_most(in_flight, one, range(0, count, BATCH))
        await store.stat()  # answered behind everything that was put
        known_s = time.monotonic()
        got = [place for place in places if place is not None]
        if len(got) != count:
            raise SystemExit("a put was dropped: the arena is too small for this run")
        self.places[round_] = got
        return measured.told() | {"known_s": known_s}

    async def questions(self, at_s: float, count: int) -> dict[str, float]:
        """So many questions that cost the store nothing, one after another."""
        store, nobody = self._store(), JobKey(RequestId("nobody"), 0)
        with Measured(at_s) as measured:
            for _ in range(count):
                await store.renew(nobody)
        return measured.told()

    async def durable(self) -> dict[str, float]:
        """When everything that was put is synced."""
        store = self._store()
        while (stat := await store.stat()) is None or stat.pending:
            await asyncio.sleep(0.004)
        return {"end_s": time.monotonic()}

    async def listed(self) -> dict[str, float]:
        store = self._store()
        while (stat := await store.stat()) is None or stat.index_unlisted or stat.pending:
            await asyncio.sleep(0.02)
        return {}

    async def get(self, at_s: float, round_: int, copy: bool) -> dict[str, float]:
        """All blocks out of the arena, every check on: copied, or verified where they lie."""
        store, places = self._store(), self.places[round_][: self.count]
        keys = self._keys(round_)
        dest, good = self.dest, 0
        with Measured(at_s) as measured:
            if copy:
                for n, (place, key) in enumerate(zip(places, keys, strict=True)):
                    good += store.read_into(place, key, dest[n % SOURCES])
            else:
                for place, key in zip(places, keys, strict=True):
                    good += store.view(place, key) is not None
        if good != self.count:
            raise SystemExit(f"{self.count - good} reads missed")
        return measured.told()

    async def release(self) -> dict[str, float]:
        for round_ in self.places:
            await self._store().release(self._lease(round_))
        return {}

    async def cold(
        self,
        at_s: float,
        round_: int,
        count: int,
        in_flight: int,
        first: int = 0,
        batch: int = BATCH,
        copy: bool = True,
    ) -> dict[str, float]:
        """Blocks `first` to `count` from SSD into the arena; copied out, or verified in place."""
        store, keys = self._store(), self._keys(round_, count)
        lease = JobKey(RequestId("cold"), 0)

        async def one(begin: int) -> None:
            wanted = keys[begin : begin + batch]
            places = await store.open_prefix(wanted, lease)
            if len(places) != len(wanted):
                raise SystemExit(f"{len(wanted) - len(places)} blocks were not found on disk")
            for n, (place, key) in enumerate(zip(places, wanted, strict=True)):
                if copy:
                    good = store.read_into(place, key, self.dest[(begin + n) % SOURCES])
                else:
                    good = store.view(place, key) is not None
                if not good:
                    raise SystemExit("a read missed")

        with Measured(at_s) as measured:
            await _at_most(in_flight, one, range(first, count, batch))
        return measured.told()

    async def wrong(self, round_: int) -> dict[str, float]:
        """How many of the first blocks are not what was put (compared byte for byte)."""
        store, lease, wrong = self._store(), JobKey(RequestId("check"), 0), 0
        keys = self._keys(round_)[:SOURCES]
        places = await store.open_prefix(keys, lease)
        for n, (place, key) in enumerate(zip(places, keys, strict=False)):
            read = store.read_into(place, key, self.dest[n])
            wrong += not read or self.dest[n] != self.payloads[n]
        await store.release(lease)
        return {"wrong": wrong + len(keys) - len(places)}

    # index and chain -------------------------------------------------------------------------

    async def look_up(self, round_: int, tries: int) -> dict[str, float]:
        """A chain of 1,000 blocks that are all stored: ours, and a bare MGET of its keys."""
        import redis

        reader, plain = IndexReader(self.redis_url), redis.Redis.from_url(self.redis_url)
        chain = self._keys(round_)[:CHAIN]
        keys = [record_key(Kind.KV, NAMESPACE, key) for key in chain]
        ours, bare, cpu = [], [], []
        for _ in range(tries):
            began, used = time.perf_counter(), cpu_s()
            hits = await reader.hit_blocks(NAMESPACE, chain)
            if hits.blocks == CHAIN:
                ours.append(time.perf_counter() - began)
                cpu.append(cpu_s() - used)
            began = time.perf_counter()
            plain.mget(keys)
            bare.append(time.perf_counter() - began)
        await reader.close()
        plain.close()
        if not ours:
            raise SystemExit("the index does not hold the whole chain")
        ours.sort()
        return {
            "look_up_ms": ours[0] * 1e3,
            "look_up_p50_ms": ours[len(ours) // 2] * 1e3,
            "look_up_cpu_us": min(cpu) * 1e6,
            "mget_ms": min(bare) * 1e3,
        }

    def hash_chain(self) -> dict[str, float]:
        """Blocks a second: the framed chain, and a bare hash of each block's 512 bytes."""
        blocks = 20_000
        ids = array("I", range(BLOCK_TOKENS * blocks))
        view = memoryview(ids).cast("B")
        best = {"chain": 0.0, "sha256": 0.0}
        for _ in range(5):
            began = time.perf_counter()
            block_digests(NAMESPACE, ids)
            best["chain"] = max(best["chain"], blocks / (time.perf_counter() - began))
            began = time.perf_counter()
            for number in range(blocks):
                hashlib.sha256(view[number * 512 : number * 512 + 512]).digest()
            best["sha256"] = max(best["sha256"], blocks / (time.perf_counter() - began))
        return best

    def _store(self) -> StoreClient:
        assert self.store is not None, "connect first"
        return self.store

    def _lease(self, round_: int) -> JobKey:
        return JobKey(RequestId(f"client-{self.number}-{round_}"), 0)


async def _at_most(width: int, work: Callable[[int], Any], items: range) -> None:
    """Run `work(item)` for all items in order, at most `width` at a time."""
    rest = iter(items)

    async def lane() -> None:
        for item in rest:
            await work(item)

    await asyncio.gather(*(lane() for _ in range(width)))


async def main() -> None:
    client = Client(**json.loads(sys.argv[1]))
    loop = asyncio.get_running_loop()
    print(json.dumps({}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        answer = getattr(client, order.pop("do"))(**order)
        print(json.dumps(await answer if asyncio.iscoroutine(answer) else answer), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
