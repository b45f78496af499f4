"""Asking a running store. Everything here leaves requests that are under way alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.ids import Digest, JobKey, new_request_id
from headrace.kvstore.client import StoreClient
from headrace.kvstore.layout import ObjectFacts, SlotHeader, checksum
from headrace.kvstore.questions import StoreRefused, StoreSilent, Topic
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind
from headrace.kvstore.workshop.garbage import Wishes
from headrace.kvstore.workshop.shipping import (
    FileRefused,
    PrefixFile,
    Progress,
    check_target,
    mark_of,
    write_file,
)

T = TypeVar("T")
CONNECT_S = 3.0
_LOOK_S = 0.02
_STILL_S = 5.0  # without a record written: Redis is away
_EXPORT_STEP = 16  # objects that an export holds in the arena at a time
_STEP = 512  # blocks that are brought into the arena between two signs of progress


@dataclass(frozen=True, slots=True)
class LiveStore:
    """Where a running store answers, and the token that it asks for."""

    address: str
    token: str = field(repr=False)


def ask(store: LiveStore, topic: Topic, **values: Any) -> dict[str, Any]:
    """One question. Raises `StoreSilent` and `StoreRefused`."""
    return asyncio.run(with_client(store, bytes(32), lambda client: client.ask(topic, **values)))


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

    return asyncio.run(with_client(store, bytes(32), collect))


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

    return asyncio.run(with_client(store, bytes(32), walk))


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

    return asyncio.run(with_client(store, namespace, bring))


def clean(store: LiveStore, wishes: Wishes, *, dry_run: bool) -> dict[str, Any]:
    """Have a running store remove what nobody can reach or what is wished away, in the words of a
    directory's findings. Raises `StoreSilent`."""
    found = ask(
        store,
        Topic.CLEAN,
        before_s=wishes.written_before_s,
        namespaces=[one.hex() for one in wishes.namespaces],
        domains=[one.hex() for one in wishes.domains],
        dry_run=dry_run,
    )
    nothing = {"damaged": False, "damaged_segments": [], "short_segments": [], "places": []}
    return nothing | found


def rebuild_index(store: LiveStore, progress: Progress) -> dict[str, int]:
    """Have all records written to Redis anew while serving goes on, and wait for it: {objects,
    waiting}. `waiting` is above 0 when Redis was away, or nothing moved, for `_STILL_S`; the store
    goes on trying. Raises `StoreSilent`, and `StoreRefused` without Redis."""

    async def work(client: StoreClient) -> dict[str, int]:
        objects = (await client.ask(Topic.REPUBLISH))["objects"]
        least, moved_s = objects + 1, time.monotonic()
        while True:
            stat = await client.stat()
            if stat is None:
                raise StoreSilent("the store does not answer")
            waiting = stat.index_unlisted
            if waiting < least:
                least, moved_s = waiting, time.monotonic()
            progress(objects - min(objects, waiting), objects)
            if not waiting or time.monotonic() - moved_s > _STILL_S:
                return {"objects": objects, "waiting": waiting}
            await asyncio.sleep(_LOOK_S)

    return asyncio.run(with_client(store, bytes(32), work))


def sweep(store: LiveStore) -> dict[str, Any]:
    """Have a running store remove the records of stores that are gone from the index: {stores,
    records}. Raises `StoreSilent`, and `StoreRefused` without Redis."""
    return ask(store, Topic.SWEEP, limit_s=3600.0)


def export_chains(
    store: LiveStore,
    directory: Path,
    namespace: bytes,
    tips: Sequence[bytes],
    path: Path,
    progress: Progress,
    *,
    force: bool = False,
) -> PrefixFile:
    """As `carry.export_chains`, out of a running store. `directory` is the store's, for the mark of
    its salt. Raises `StoreSilent`, `StoreRefused` and `FileRefused`."""
    check_target(path, force=force)
    mark = mark_of(directory)

    async def write(client: StoreClient) -> PrefixFile:
        rows = await _contents(client, namespace, tips)
        headers = [_header(namespace, row) for row in rows]
        total = sum(header.facts.payload_bytes for header in headers)
        about = PrefixFile(len(headers), total, int(time.time()), namespace, mark)
        loop = asyncio.get_running_loop()

        def objects() -> Iterator[tuple[SlotHeader, bytes]]:
            for begin in range(0, len(headers), _EXPORT_STEP):
                part = headers[begin : begin + _EXPORT_STEP]
                reading = _payloads(client, part, begin)
                yield from zip(
                    part, asyncio.run_coroutine_threadsafe(reading, loop).result(), strict=True
                )

        await asyncio.to_thread(write_file, path, objects(), about, progress, force=force)
        return about

    return asyncio.run(with_client(store, namespace, write))


async def _contents(
    client: StoreClient, namespace: bytes, tips: Sequence[bytes]
) -> list[list[Any]]:
    rows: list[list[Any]] = []
    total = 1
    while len(rows) < total:
        found = await client.ask(
            Topic.CONTENTS,
            namespace=namespace.hex(),
            tips=[tip.hex() for tip in tips],
            offset=len(rows),
        )
        total = found["total"]
        if not found["rows"]:
            raise StoreRefused("the chains changed while they were listed; export again")
        rows += found["rows"]
    return rows


def _header(namespace: bytes, row: list[Any]) -> SlotHeader:
    kind, digest, parent, block, domain, size, total, written_at_s = row
    facts = ObjectFacts(
        Kind(kind),
        namespace,
        Digest(bytes.fromhex(digest)),
        Digest(bytes.fromhex(parent)),
        block,
        bytes.fromhex(domain),
        size,
    )
    return SlotHeader(facts, total, ARENA_SEGMENT, 0, 0, written_at_s)


async def _payloads(client: StoreClient, headers: Sequence[SlotHeader], number: int) -> list[bytes]:
    """Verified payloads, in order. Raises `FileRefused` for one that is not there any more."""
    lease = JobKey(new_request_id(), number)
    out: list[bytes] = []
    try:
        for kind in dict.fromkeys(header.facts.kind for header in headers):
            digests = [h.facts.digest for h in headers if h.facts.kind is kind]
            places = await client.open_objects(kind, digests, lease)
            for digest, place in zip(digests, places, strict=True):
                dest = bytearray(place.payload_bytes if place else 0)
                if place is None or not client.read_into(place, digest, dest):
                    raise FileRefused(
                        "an object left the store, found no room in its memory or did not verify:"
                        " export again, or `headrace store scrub` first"
                    )
                out.append(bytes(dest))
    finally:
        await client.release(lease)
    for header, payload in zip(headers, out, strict=True):
        if checksum(payload) != header.checksum or len(payload) != header.facts.payload_bytes:
            raise FileRefused("an object was put anew while it was exported; export again")
    return out


async def _digests(client: StoreClient, namespace: bytes, tip: bytes) -> list[Digest]:
    found = await client.ask(Topic.CHAIN, namespace=namespace.hex(), tip=tip.hex())
    joined = bytes.fromhex(found["digests"])
    if not joined:
        raise StoreRefused(f"the chain that ends in {tip.hex()[:16]} is not on disk as a whole")
    return [Digest(joined[at : at + 32]) for at in range(0, len(joined), 32)]


async def with_client(
    store: LiveStore, namespace: bytes, work: Callable[[StoreClient], Awaitable[T]]
) -> T:
    """What `work` gives with a client of a running store. Raises `StoreSilent`."""
    client = StoreClient(store.address, store.token, namespace, name="headrace store")
    try:
        if not await client.connect(CONNECT_S):
            raise StoreSilent(f"no store answers at {store.address} within {CONNECT_S:g} s")
        return await work(client)
    finally:
        await client.close()
