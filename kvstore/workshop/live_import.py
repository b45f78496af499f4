"""A prefix file into a store that goes on serving."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.core.ids import JobKey, new_request_id
from headrace.core.messages import Place
from headrace.kvstore.client import StoreClient
from headrace.kvstore.importing import ABSENT, IN_MEMORY, ON_DISK, ON_ITS_WAY
from headrace.kvstore.layout import SlotHeader, checksum
from headrace.kvstore.questions import StoreSilent, Topic
from headrace.kvstore.settings import Kind
from headrace.kvstore.workshop.carry import Imported, check_fits, check_sizes
from headrace.kvstore.workshop.live import LiveStore, with_client
from headrace.kvstore.workshop.shipping import (
    FileRefused,
    PrefixFile,
    Progress,
    mark_of,
    read_header,
    read_objects,
    sizes_of,
    verify_file,
)

_MOST_STEP = 256  # objects that are on disk before the next are read,
_PART = 8  # and of the blocks that memory holds, at most one in so many
_TOGETHER = 8  # objects that wait for room in memory at a time
_ROOM_S = 5.0  # longest wait for room in the arena
_DISK_S = 60.0  # longest wait for a step to be written
_LOOK_S = 0.01
Item = tuple[SlotHeader, bytes]


def import_file(
    store: LiveStore, directory: Path, path: Path, progress: Progress, *, force: bool = False
) -> Imported:
    """As `carry.import_file`, into a running store. `directory` is the store's, for the mark of its
    salt. An import that was interrupted goes on where it stopped when it is begun again.

    Raises `FileRefused` before anything is written, and `StoreSilent` when the store goes away."""
    about = read_header(path)

    async def work(client: StoreClient) -> Imported:
        layout = await client.ask(Topic.LAYOUT, namespace=about.namespace.hex())
        namespaces = {bytes.fromhex(one) for one in layout["namespaces"]}
        check_fits(about, mark_of(directory), namespaces, force=force)
        await asyncio.to_thread(
            verify_file, path, lambda done, total: progress(done, 2 * about.objects)
        )
        _check_sizes(layout, await asyncio.to_thread(sizes_of, path))
        step = max(_TOGETHER, min(_MOST_STEP, layout["slots"] // _PART))
        return await _Import(client, about, step).run(path, progress)

    return asyncio.run(with_client(store, about.namespace, work))


def _check_sizes(layout: dict[str, Any], sizes: dict[Kind, int]) -> None:
    most = {kind: layout["most_bytes"].get(kind.value, 0) for kind in sizes}
    known = {kind: set(layout["sizes"].get(kind.value, ())) for kind in sizes}
    check_sizes(sizes, most, known, "in a slot of this store, which is made for another model")


class _Import:
    """One import under way, `step` objects at a time. What finds no free slot, and what hangs on
    that, is counted only."""

    def __init__(self, client: StoreClient, about: PrefixFile, step: int) -> None:
        self._client = client
        self._about = about
        self._step = step
        self._lost: set[bytes] = set()
        self._done = Imported()

    async def run(self, path: Path, progress: Progress) -> Imported:
        objects = read_objects(path)
        total = self._about.objects
        done = 0
        while step := await asyncio.to_thread(lambda: list(itertools.islice(objects, self._step))):
            for kind in (Kind.KV, Kind.SWA):
                items = [item for item in step if item[0].facts.kind is kind]
                if items:
                    await self._put(kind, items)
            done += len(step)
            progress(total + done, 2 * total)
        return self._done

    async def _put(self, kind: Kind, items: Sequence[Item]) -> None:
        """Put what is missing of objects of one kind, and wait until it is on disk."""
        states, free = await self._room(kind, items)
        missing: list[Item] = []
        for state, (header, payload) in zip(states, items, strict=True):
            facts = header.facts
            if checksum(payload) != header.checksum or facts.namespace != self._about.namespace:
                raise FileRefused("the file changed while it was imported; what came before is in")
            if state != ABSENT:
                self._done.known += 1
            elif facts.parent in self._lost or len(missing) >= free:
                self._lose(header)
            else:
                missing.append((header, payload))
        put: list[Item] = []
        for run in runs(missing):
            if run[0][0].facts.parent in self._lost:
                places: list[Place | None] = [None] * len(run)
            else:
                places = await self._put_run(kind, run)
            for place, item in zip(places, run, strict=True):
                if place is None or item[0].facts.parent in self._lost:
                    self._lose(item[0])
                else:
                    put.append(item)
        if put:
            await self._written(kind, put)

    async def _put_run(self, kind: Kind, run: Sequence[Item]) -> list[Place | None]:
        """Where the objects of a run are; what found no room in memory, when all before it had been
        written, is tried once more."""
        places: list[Place | None] = []
        while len(places) < len(run):
            places += await self._put_some(kind, run[len(places) : len(places) + _TOGETHER])
            if None in places:
                del places[places.index(None) :]
                await self._settled(kind, run[: len(places)])
                number = len(places)
                places += await self._put_some(kind, run[number : number + 1])
                if places[-1] is None:
                    places += [None] * (len(run) - len(places))
        return places

    async def _put_some(self, kind: Kind, items: Sequence[Item]) -> Sequence[Place | None]:
        """One put. Its lease is given back at once: what is not on disk yet stays without one, and
        a domain whose share is smaller than a step goes on."""
        first, lease = items[0][0].facts, JobKey(new_request_id(), 0)
        try:
            places = await self._client.put(
                kind,
                [(header.facts.digest, payload) for header, payload in items],
                lease=lease,
                wait_s=_ROOM_S,
                parent=first.parent,
                first_block=first.block,
                domain=first.domain,
            )
        finally:
            await self._client.release(lease)
        if not self._client.connected:
            raise StoreSilent("the store went away; import again, and it goes on where it stopped")
        return places

    async def _settled(self, kind: Kind, items: Sequence[Item]) -> str:
        """Wait until none of these is on its way to disk; their letters then."""
        if kind is Kind.SWA:  # a second use: else a record of a short chain would be held back
            await self._client.open_objects(kind, [h.facts.digest for h, _ in items], None)
        end_s = time.monotonic() + _DISK_S
        while ON_ITS_WAY in (states := (await self._room(kind, items))[0]):
            if time.monotonic() > end_s:
                raise StoreSilent(f"the store has not written {len(items)} objects in {_DISK_S} s")
            await asyncio.sleep(_LOOK_S)
        return states

    async def _written(self, kind: Kind, items: Sequence[Item]) -> None:
        states = await self._settled(kind, items)
        for state, (header, payload) in zip(states, items, strict=True):
            if state == ON_DISK:
                self._done.written += 1
                self._done.payload_bytes += len(payload)
            else:
                self._done.unsaved += state == IN_MEMORY
                self._done.no_room += state == ABSENT
                self._lost.add(header.facts.digest)

    async def _room(self, kind: Kind, items: Sequence[Item]) -> tuple[str, int]:
        found = await self._client.ask(
            Topic.ROOM,
            kind=kind.value,
            namespace=self._about.namespace.hex(),
            digests="".join(header.facts.digest.hex() for header, _ in items),
        )
        return found["states"], found["free_slots"]

    def _lose(self, header: SlotHeader) -> None:
        self._lost.add(header.facts.digest)
        self._done.no_room += 1


def runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Cut objects of one kind into what one put can carry: blocks in a row, else one each."""
    run: list[Item] = []
    for item in items:
        if run and not _follows(run[-1][0], item[0]):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(before: SlotHeader, after: SlotHeader) -> bool:
    return (
        after.facts.kind is Kind.KV
        and after.facts.parent == before.facts.digest
        and after.facts.block == before.facts.block + 1
        and after.facts.domain == before.facts.domain
    )
