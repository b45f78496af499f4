"""What a request is going to read comes into the arena while the request still stands in line.

It is leased for the request at once, so it is still there when the turn comes. A part at a time,
and only while no client of this host waits for a read; of all lines together at most
`prefetch_share` of a kind's slots. Reads are the ordinary ones: single flight, verified, given up
when computing anew is sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.ids import Digest, JobKey
from headrace.kvstore.messages import unpack_places
from headrace.kvstore.objects import Entry
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

PART_BYTES = 4 << 20  # of one part: so much is before a read that somebody waits for


class Opener(Protocol):
    """The store's ways to open, answered as they go over the wire; with `early` nothing is counted
    yet."""

    async def prefix(
        self, namespace: bytes, digests: Sequence[Digest], lease: JobKey | None, *, early: bool
    ) -> bytes: ...

    async def window(
        self, namespace: bytes, digests: Sequence[Digest], lease: JobKey | None, *, early: bool
    ) -> tuple[int, bytes]: ...

    async def objects(
        self,
        kind: Kind,
        namespace: bytes,
        digests: Sequence[Digest],
        lease: JobKey | None,
        *,
        early: bool,
    ) -> bytes: ...


@dataclass(slots=True)
class _Early:
    """What one lease holds in advance of its turn. `taken`: kinds that were opened since, so that
    these are held by a running request and count for no line any more."""

    held: Counter[Kind] = field(default_factory=Counter)
    read: set[Entry] = field(default_factory=set)  # brought for it, and not opened since
    running: int = 0
    taken: set[Kind] = field(default_factory=set)


class Prefetcher:
    """Used from the store's loop."""

    def __init__(self, state: StoreState, opener: Opener, share: float) -> None:
        self._state = state
        self._opener = opener
        self._share = share
        self._early: dict[JobKey, _Early] = {}
        self._waiting = 0  # clients that wait for a read
        self._news = asyncio.Event()  # set and replaced

    async def bring(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], lease: JobKey
    ) -> range:
        """Have objects in the arena, leased: the numbers of those of `digests` that are. Of window
        records that is the first one there is, of other kinds the leading ones.

        Waits while the lines hold their share, unless `lease` alone holds it."""
        region = self._state.residents.regions.get(kind)
        if region is None:
            return range(0)
        most, size = int(self._share * region.slots), max(1, PART_BYTES // region.payload_bytes)
        early = self._early.setdefault(lease, _Early())
        early.running += 1
        first = done = 0
        try:
            while done < len(digests):
                room = await self._room(kind, early, most)
                if not room or kind in early.taken:
                    break
                if kind is Kind.SWA:
                    first, count = await self._part(kind, namespace, digests, 1, lease)
                    return range(first, first + count)
                part = digests[done : done + min(room, size)]
                _, count = await self._part(kind, namespace, part, len(part), lease)
                done += count
                if count < len(part):
                    break
        finally:
            early.running -= 1
            self.look()
        return range(done)

    async def _room(self, kind: Kind, early: _Early, most: int) -> int:
        """How many more objects may be held, once no client waits for a read."""
        while True:
            lines = (one for one in self._early.values() if kind not in one.taken)
            held = sum(one.held[kind] for one in lines)
            full = held >= most and held > early.held[kind]
            if kind in early.taken or not (self._waiting or full):
                return max(0, most - held)
            await self._news.wait()

    async def _part(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], most: int, lease: JobKey
    ) -> tuple[int, int]:
        """Open up to `most` of `digests`: the number of the first one, and how many."""
        find, early, first, opened = self._state.find, self._early[lease], 0, 0
        entries = [find(kind, namespace, digest) for digest in digests]
        here = {entry for entry in entries if entry is not None and entry.slot is not None}
        early.held[kind] += most
        opener = self._opener
        try:
            if kind is Kind.SWA:
                first, told = await opener.window(namespace, digests, lease, early=True)
            elif kind is Kind.KV:
                told = await opener.prefix(namespace, digests, lease, early=True)
            else:
                told = await opener.objects(kind, namespace, digests, lease, early=True)
            opened = (*unpack_places(told, self._state.boot), None).index(None)
        finally:
            early.held[kind] += opened - most
        entries = [find(kind, namespace, digest) for digest in digests[first : first + opened]]
        early.read |= {entry for entry in entries if entry is not None} - here
        return first, opened

    # what others tell ------------------------------------------------------------------------

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """While this lasts a client waits for a read, and nothing is begun here."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._tell()

    def opened(self, entries: Sequence[Entry], lease: JobKey | None) -> list[bool]:
        """A request whose turn has come opens `entries`: which of them lay in the arena without
        having been brought for it, so that each is counted once and by the tier where it was."""
        early = None if lease is None else self._early.get(lease)
        if early is None:
            return [entry.slot is not None for entry in entries]
        early.taken.update(entry.kind for entry in entries)
        self._tell()
        read = early.read.intersection(entries)
        early.read -= read
        self._state.count.prefetched += sum(entry.slot is not None for entry in read)
        return [entry.slot is not None and entry not in read for entry in entries]

    def look(self) -> None:
        """Forget leases that have ended. Called several times a second."""
        leases = self._state.leases
        for lease, early in tuple(self._early.items()):
            if not early.running and lease not in leases:
                del self._early[lease]
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
