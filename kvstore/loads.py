"""Bringing objects from SSD back into the arena, verified, each once however many ask."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headrace.core.errors import HeadraceError
from headrace.kvstore.io_threads import in_thread
from headrace.kvstore.layout import SlotHeader, checksum
from headrace.kvstore.objects import Entry
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.slot_io import SlotMove
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
# Read in one go of an I/O thread, several under way: what one thread verifies must not keep the
# disk waiting, and a change between a thread and the loop costs as much as ten blocks.
_JOB_BYTES = 1 << 20


class Loader:
    """Single flight: a second caller of an object that is being read waits for the same read. A
    caller that leaves (cancelled, or because computing anew is sooner) stops no read: what it
    brings is there for whoever comes next."""

    def __init__(
        self,
        state: StoreState,
        files: SegmentFiles,
        threads: ThreadPoolExecutor,
        settings: StoreSettings,
    ) -> None:
        self._settings = settings
        self._state = state
        self._files = files
        self._threads = threads
        self._running: dict[bytes, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def held(self, entries: Sequence[Entry]) -> AsyncIterator[int]:
        """Have the longest possible prefix of `entries` in the arena; yields its length.

        They stay there until the block ends, so leases are taken inside it. A prefix is cut where
        the arena has no room, the bytes on disk do not verify or reading them takes longer than
        computing them anew would."""
        pinned: list[Entry] = []
        try:
            waits = self._begin(entries, pinned)
            if waits:
                _, late = await asyncio.wait(waits, timeout=self._worth_s(entries))
                if late:
                    self._state.count.slow_reads += sum(entry.slot is None for entry in pinned)
            count = 0
            for entry in pinned:
                if entry.slot is None or entry.dropped:
                    break
                count += 1
            yield count
        finally:
            for entry in pinned:
                self._state.unpin(entry)

    def _worth_s(self, entries: Sequence[Entry]) -> float | None:
        """How long these are waited for; None where nobody knows what computing them costs."""
        kind, settings = entries[0].kind, self._settings
        if kind not in (Kind.KV, Kind.SWA):
            return None
        n_read = sum(entry.slot is None for entry in entries)
        return max(settings.disk_least_s, settings.recompute_s(kind, n_read))

    def _begin(self, entries: Sequence[Entry], pinned: list[Entry]) -> set[asyncio.Task[None]]:
        """Pin from the front and begin to read what is not in the arena; what must be awaited.

        In order, because making room for one may push out a later one of the same chain."""
        residents = self._state.residents
        wanted: list[tuple[Entry, int]] = []
        waits: set[asyncio.Task[None]] = set()
        mine: set[Entry] = set()  # a caller may name one object twice
        for entry in entries:
            running = self._running.get(entry.key)
            if entry.slot is None and running is None and entry not in mine:
                fits = residents.fits(entry.kind, entry.facts.payload_bytes)  # other settings: no
                domain = entry.facts.domain
                slot = residents.take(entry.kind, domain) if fits and not entry.dropped else None
                if slot is None:
                    break
                self._state.pin(entry)  # until the read has ended, whoever waits for it
                wanted.append((entry, slot))
                mine.add(entry)
            elif running is not None:
                waits.add(running)
            self._state.pin(entry)  # for the caller
            pinned.append(entry)
        size = max((entry.facts.payload_bytes for entry, _ in wanted), default=1)
        most = max(1, _JOB_BYTES // size)
        for begin in range(0, len(wanted), most):
            batch = wanted[begin : begin + most]
            task = asyncio.create_task(self._load(batch), name="store-load")
            waits.add(task)
            self._running.update((entry.key, task) for entry, _ in batch)
        return waits

    async def _load(self, batch: Sequence[tuple[Entry, int]]) -> None:
        loop = asyncio.get_running_loop()
        sound: list[bool | None] = [None] * len(batch)  # unknown, if this fails
        try:
            began_s = loop.time()
            sound[:] = await in_thread(self._threads, partial(self._read, batch))
            self._state.count.load_s.observe(loop.time() - began_s)
        except (OSError, HeadraceError):
            # Nothing is known of what is on disk: a miss for whoever waits, and it stays there.
            self._state.count.read_errors += 1
            log.exception("a batch of %d objects was not read", len(batch))
        finally:
            for (entry, slot), good in zip(batch, sound, strict=True):
                del self._running[entry.key]
                self._state.loaded(entry, slot, sound=good)
                self._state.unpin(entry)

    def _read(self, batch: Sequence[tuple[Entry, int]]) -> list[bool]:
        # In an I/O thread; the entries are pinned, so neither their disk places nor slots move.
        residents, moves = self._state.residents, []
        for entry, slot in batch:
            region = residents.regions[entry.kind]
            disk = entry.disk
            if disk is None or self._files.slot_bytes(disk.segment) != region.slot_bytes:
                return [self._read_one(entry, slot) for entry, slot in batch]
            moves.append(SlotMove(disk, residents.arena.slot(region, slot)))
        found = zip(batch, moves, self._files.read_moves(moves), strict=True)
        return [_is_sound(entry, header, move.memory) for (entry, _), move, header in found]

    def _read_one(self, entry: Entry, slot: int) -> bool:
        """Of a segment whose slots have another size than the arena's: written under other
        settings."""
        residents, disk = self._state.residents, entry.disk
        if disk is None:
            return False
        payload = residents.arena.payload(
            residents.regions[entry.kind], slot, entry.facts.payload_bytes
        )
        return _is_sound(entry, self._files.read(disk, payload), payload)


def _is_sound(entry: Entry, header: SlotHeader | None, memory: memoryview) -> bool:
    return (
        header is not None
        and header.facts == entry.facts
        and header.checksum == entry.checksum
        and checksum(memory[: entry.facts.payload_bytes]) == entry.checksum
    )
