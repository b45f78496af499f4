"""Asking a running store. Everything here leaves requests that are under way alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from headrace.core.ids import Digest
from headrace.kvstore.client import StoreClient
from headrace.kvstore.questions import StoreRefused, StoreSilent, Topic
from headrace.kvstore.workshop.shipping import Progress

T = TypeVar("T")
CONNECT_S = 3.0
_STEP = 512  # blocks that are brought into the arena between two signs of progress


@dataclass(frozen=True, slots=True)
class LiveStore:
    """Where a running store answers, and the token that it asks for."""

    address: str
    token: str = field(repr=False)


def ask(store: LiveStore, topic: Topic, **values: Any) -> dict[str, Any]:
    """One question. Raises `StoreSilent` and `StoreRefused`."""
    return asyncio.run(_with_client(store, bytes(32), lambda client: client.ask(topic, **values)))


def stat(store: LiveStore) -> dict[str, Any]:
    """The store's account with sums and pins, as plain values. Raises `StoreSilent`."""

    async def collect(client: StoreClient) -> dict[str, Any]:
        found = await client.stat()
        if found is None:
            raise StoreSilent("the store does not answer")
        survey = await client.ask(Topic.CHAINS, limit=0)
        pins = await client.ask(Topic.PINS)
        return {
            "store": asdict(found),
            "sums": survey["sums"],
            "chains": survey["total"],
            "pins": pins,
        }

    return asyncio.run(_with_client(store, bytes(32), collect))


def scrub(store: LiveStore, *, drop: bool, progress: Progress) -> dict[str, int]:
    """Have every object on disk read back while serving goes on: {objects, payload_bytes, damaged}.
    With `drop` what is damaged is removed. Raises `StoreSilent`."""

    async def walk(client: StoreClient) -> dict[str, int]:
        totals = {"objects": 0, "payload_bytes": 0, "damaged": 0}
        segment, segments = 0, 1
        while segment < segments:
            found = await client.ask(Topic.SCRUB, limit_s=600.0, segment=segment, drop=drop)
            totals["objects"] += found["sound"]
            totals["payload_bytes"] += found["sound_bytes"]
            totals["damaged"] += found["damaged"]
            segments = found["segments"]
            segment += 1
            progress(segment, segments)
        return totals

    return asyncio.run(_with_client(store, bytes(32), walk))


def warm(
    store: LiveStore, namespace: bytes, tips: Sequence[bytes], progress: Progress
) -> tuple[int, int]:
    """Bring chains into the arena: (blocks there now, blocks asked for). What finds no room stays
    on disk. Raises `StoreSilent`, and `StoreRefused` for a chain that is not stored."""

    async def bring(client: StoreClient) -> tuple[int, int]:
        chains = [await _digests(client, namespace, tip) for tip in tips]
        total = sum(len(chain) for chain in chains)
        there = begun = 0
        for chain in chains:
            found = 0
            for end in range(_STEP, len(chain) + _STEP, _STEP):
                found = len(await client.open_prefix(chain[:end], None))
                progress(begun + min(end, len(chain)), total)
                if found < min(end, len(chain)):
                    break
            there += found
            begun += len(chain)
        return there, total

    return asyncio.run(_with_client(store, namespace, bring))


async def _digests(client: StoreClient, namespace: bytes, tip: bytes) -> list[Digest]:
    found = await client.ask(Topic.CHAIN, namespace=namespace.hex(), tip=tip.hex())
    joined = bytes.fromhex(found["digests"])
    if not joined:
        raise StoreRefused(f"the chain that ends in {tip.hex()[:16]} is not on disk as a whole")
    return [Digest(joined[at : at + 32]) for at in range(0, len(joined), 32)]


async def _with_client(
    store: LiveStore, namespace: bytes, work: Callable[[StoreClient], Awaitable[T]]
) -> T:
    client = StoreClient(store.address, store.token, namespace, name="headrace store")
    try:
        if not await client.connect(CONNECT_S):
            raise StoreSilent(f"no store answers at {store.address} within {CONNECT_S:g} s")
        return await work(client)
    finally:
        await client.close()
