"""One client process of a history: random things to a store, and what it got, written down.

Each line of its log begins with a word: got (kind, number, hash of the bytes), miss, put, gave_up,
left, scribbled, ahead (a put that left slots in advance)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
import time
from typing import Any

from headrace.core.chain import window_digest
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.limits import WireLimits
from headrace.kvstore import Kind, StoreClient, ahead
from headrace.kvstore.connection import attach

TOKEN = "a cluster token of tests"
NAMESPACE = hashlib.sha256(b"namespace").digest()
SIZES = {Kind.KV: 3000, Kind.SWA: 7000}
NUMBERS = {Kind.KV: 400, Kind.SWA: 60}  # keys that there are


def digest_of(kind: Kind, number: int) -> Digest:
    block = Digest(hashlib.sha256(b"block %d" % number).digest())
    return block if kind is Kind.KV else window_digest(block)


def payload_of(kind: Kind, number: int) -> bytes:
    return random.Random(f"{kind}/{number}").randbytes(SIZES[kind])


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Worker:
    """Does random things to one store and writes down what it got."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.draw = random.Random(told["seed"])
        self.client = StoreClient(told["address"], TOKEN, NAMESPACE, name="history")
        self.out = open(told["log"], "a", encoding="ascii")  # noqa: SIM115  # lives as long as this
        self.gets = 0
        self.seen: list[Any] = []  # places that were good a moment ago

    def say(self, *words: Any) -> None:
        self.out.write(" ".join(map(str, words)) + "\n")
        self.out.flush()  # a kill must not take it along

    async def run(self) -> None:
        until_s = time.monotonic() + self.told["seconds"]
        await self.client.connect(10.0)
        while time.monotonic() < until_s:
            deed = self.draw.choices(
                (self.get, self.prefix, self.put, self.scribble, self.leave, self.wait),
                (30, 10, 45, 4, 3, 8),
            )[0]
            await deed()
        await self.client.close()

    def some(self) -> tuple[Kind, list[int]]:
        kind = self.draw.choices((Kind.KV, Kind.SWA), (4, 1))[0]
        first = int(NUMBERS[kind] * self.draw.random() ** 2)  # some keys are asked for often
        return kind, [(first + step) % NUMBERS[kind] for step in range(self.draw.randrange(1, 9))]

    def lease(self) -> JobKey | None:
        name = f"{self.told['name']}-{self.draw.randrange(4)}"
        return JobKey(RequestId(name), 0) if self.draw.random() < 0.3 else None

    def read(self, kind: Kind, number: int, place: Any) -> None:
        dest = bytearray(place.payload_bytes)
        if self.client.read_into(place, digest_of(kind, number), dest):
            self.gets += 1
            lie = self.told.get("lie") and self.gets % 20 == 0
            self.say("got", kind.value, number, hash_of(bytes(dest[::-1] if lie else dest)))
            self.seen = [*self.seen[-7:], place]
        else:
            self.say("miss", kind.value, number)

    async def get(self) -> None:
        kind, numbers = self.some()
        digests = [digest_of(kind, number) for number in numbers]
        places = await self.client.open_objects(kind, digests, self.lease())
        for number, place in zip(numbers, places, strict=True):
            if place is None:
                self.say("miss", kind.value, number)
            else:
                self.read(kind, number, place)

    async def prefix(self) -> None:
        first = int(NUMBERS[Kind.KV] * self.draw.random() ** 2)
        numbers = [(first + step) % NUMBERS[Kind.KV] for step in range(6)]
        places = await self.client.open_prefix([digest_of(Kind.KV, n) for n in numbers], None)
        if self.draw.random() < 0.3:
            await asyncio.sleep(self.draw.random() / 20)  # they may be gone by then
        for number, place in zip(numbers, places, strict=False):
            self.read(Kind.KV, number, place)

    async def put(self) -> None:
        kind, numbers = self.some()
        items = [(digest_of(kind, n), payload_of(kind, n)) for n in numbers]
        lease = self.lease()
        work = self.client.put(kind, items, lease=lease, wait_s=0.2 if lease else 0.0)
        if self.draw.random() < 0.05:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.draw.random() / 500):
                    await work
            self.say("gave_up")
            return
        places = await work
        self.say("put", kind.value, sum(place is not None for place in places))
        connection = self.client._connection
        if connection is not None and len(connection.ahead):
            self.say("ahead")
        if lease is not None and self.draw.random() < 0.8:
            await self.client.release(lease)

    async def scribble(self) -> None:
        """Write into memory that is somebody's object."""
        if not self.seen:
            return
        place = self.draw.choice(self.seen)
        try:
            other = await attach(self.told["address"], TOKEN, "x", NAMESPACE, WireLimits())
        except ConnectionError:
            return
        found = other.arena.locate(place.offset)
        if other.boot == place.store and found is not None:
            payload = other.arena.payload(*found, place.payload_bytes)
            payload[self.draw.randrange(place.payload_bytes)] ^= 1 << self.draw.randrange(8)
            self.say("scribbled")
        other.abort()

    async def leave(self) -> None:
        """Go away in the middle of something, and come back."""
        kind, numbers = self.some()
        items = [(digest_of(kind, n), payload_of(kind, n)) for n in numbers]
        task = asyncio.create_task(self.client.put(kind, items))
        await asyncio.sleep(0)
        await self.client.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.client = StoreClient(self.told["address"], TOKEN, NAMESPACE, name="history")
        await self.client.connect(2.0)
        self.say("left")

    async def wait(self) -> None:
        await asyncio.sleep(self.draw.random() / 50)


if __name__ == "__main__":
    if random.Random(json.loads(sys.argv[1])["seed"] + "ahead").random() < 0.5:
        ahead.IN_A_ROW = 0  # takes slots in advance from its second put on
    asyncio.run(Worker(json.loads(sys.argv[1])).run())
