"""Bringing objects from SSD back into the arena, verified, each once however many ask."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby

from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import HeadraceError
from headrace.kvstore.damage import damaged_on_disk
from headrace.kvstore.io_threads import guarded
from headrace.kvstore.layout import (
    HEADER_BYTES,
    checksum,
    header_elsewhere,
    header_tells,
    pack_slot_header,
)
from headrace.kvstore.objects import DiskPlace, Entry
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.slot_io import SlotMove
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
# Read in one go of an I/O thread, several under way: what one thread verifies must not keep the
# disk waiting, and a change between a thread and the loop costs as much as ten blocks.
_JOB_BYTES = 1 << 20


class _Flight:
    """Objects of one kind that are read in one go, each with the slot reserved for it."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.batch: list[tuple[Entry, int]] = []
        self._bytes = 0
        self.waiters: set[Callable[[], None]] = set()  # called on the loop when it has landed

    def add(self, entry: Entry, slot: int) -> None:
        """Pinned, until it has landed: nothing of one that lies on disk alone has to be settled."""
        entry.pins += 1
        self.batch.append((entry, slot))
        self._bytes += entry.facts.payload_bytes

    @property
    def full(self) -> bool:
        """Whether one more as large as the last would be too much for one go."""
        return self._bytes + self.batch[-1][0].facts.payload_bytes > _JOB_BYTES


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
        self._running: dict[bytes, _Flight] = {}

    @contextlib.asynccontextmanager
    async def held(self, entries: Sequence[Entry]) -> AsyncIterator[int]:
        """Have the longest possible prefix of `entries`, of one kind, in the arena; yields its
        length.

        They stay there until the block ends, so leases are taken inside it. A prefix is cut where
        the arena has no room, the bytes on disk do not verify or reading them takes longer than
        computing them anew would."""
        pinned: list[Entry] = []
        try:
            flights = self._begin(entries, pinned)
            if flights and not await _all_landed(flights, self._worth_s(entries)):
                self._state.count.slow_reads += sum(entry.slot is None for entry in pinned)
            count = 0
            for entry in pinned:
                if entry.slot is None or entry.dropped:
                    break
                count += 1
            yield count
        finally:
            self._state.unpin_all(pinned)

    def _worth_s(self, entries: Sequence[Entry]) -> float | None:
        """How long these are waited for; None where nobody knows what computing them costs."""
        kind, settings = entries[0].kind, self._settings
        if kind not in (Kind.KV, Kind.SWA):
            return None
        n_read = sum(entry.slot is None for entry in entries)
        return max(settings.disk_least_s, settings.recompute_s(kind, n_read))

    def _begin(self, entries: Sequence[Entry], pinned: list[Entry]) -> set[_Flight]:
        """Pin from the front and begin to read what is not in the arena; what must be awaited.

        In order, because making room for one may push out a later one of the same chain. A read is
        under way before room is made for the next."""
        flights: set[_Flight] = set()
        new: _Flight | None = None
        try:
            for entry in entries:
                if entry.slot is None:
                    flight = self._running.get(entry.key)
                    if flight is None:
                        slot = self._room(entry)
                        if slot is None:
                            break
                        flight = new = new or _Flight(SYSTEM_CLOCK.now_s())
                        new.add(entry, slot)
                        self._running[entry.key] = new
                        if new.full:
                            self._start(new)
                            new = None
                    flights.add(flight)
                self._state.pin(entry)  # for the caller
                pinned.append(entry)
        finally:
            if new is not None:
                self._start(new)
        return flights

    def _room(self, entry: Entry) -> int | None:
        residents, facts = self._state.residents, entry.facts
        if entry.dropped or not residents.fits(facts.kind, facts.payload_bytes):
            return None  # the latter: written under other settings
        return residents.take(facts.kind, facts.domain)

    def _start(self, flight: _Flight) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._threads.submit(self._fetch, flight, loop)
        except RuntimeError as error:  # the threads have been ended
            loop.call_soon(self._land, flight, error)

    def _fetch(self, flight: _Flight, loop: asyncio.AbstractEventLoop) -> None:
        # In an I/O thread. One hand-over a flight: each wakes the loop.
        found: list[bool] | Exception
        try:
            found = guarded(partial(self._read, flight.batch))()
        except (OSError, HeadraceError) as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(self._land, flight, found)

    def _land(self, flight: _Flight, found: list[bool] | Exception) -> None:
        state, batch = self._state, flight.batch
        sound: Sequence[bool | None]
        if isinstance(found, Exception):
            # Nothing is known of what is on disk: a miss for whoever waits, and it stays there.
            sound = [None] * len(batch)
            state.count.read_errors += 1
            log.error("a batch of %d objects was not read", len(batch), exc_info=found)
        else:
            sound = found
            state.count.load_s.observe(SYSTEM_CLOCK.now_s() - flight.began_s)
        try:
            end_load(state, batch, sound)
        finally:
            for entry, _ in batch:
                del self._running[entry.key]
            state.unpin_all([entry for entry, _ in batch])
            for tell in tuple(flight.waiters):
                tell()

    def _read(self, batch: Sequence[tuple[Entry, int]]) -> list[bool]:
        """Read and verify; under a header of the arena lies what is sound, and nothing else. In an
        I/O thread; the entries are pinned, so neither their disk places nor slots move."""
        residents, kind = self._state.residents, batch[0][0].kind
        region, generation = residents.regions[kind], residents.pools[kind].generation
        moves: list[SlotMove] = []
        for entry, slot in batch:
            disk = entry.disk
            if disk is None or self._files.slot_bytes(disk.segment) != region.slot_bytes:
                return [self._read_one(entry, slot) for entry, slot in batch]
            moves.append(SlotMove(disk, residents.arena.slot(region, slot)))
        out: list[bool] = []
        found = zip(batch, moves, self._files.read_moves(moves), strict=True)
        for (entry, slot), (disk, memory), header in found:
            good = header is not None and _is_sound(entry, disk, header, memory)
            if header is not None and good:
                at = (ARENA_SEGMENT, slot, generation(slot))
                memory[-HEADER_BYTES:] = header_elsewhere(header, *at)
            else:
                residents.blank(kind, slot)
            out.append(good)
        return out

    def _read_one(self, entry: Entry, slot: int) -> bool:
        """Of a segment whose slots have another size than the arena's: written under other
        settings."""
        residents, disk, facts = self._state.residents, entry.disk, entry.facts
        if disk is None:
            return False
        region = residents.regions[facts.kind]
        payload = residents.arena.payload(region, slot, facts.payload_bytes)
        header = self._files.read(disk, payload)
        if header is None or (header.facts, header.checksum) != (facts, entry.checksum):
            return False
        if checksum(payload) != entry.checksum:
            return False
        at = (ARENA_SEGMENT, slot, residents.pools[facts.kind].generation(slot))
        residents.arena.header(region, slot)[:] = pack_slot_header(
            facts, entry.checksum, *at, entry.written_at_s
        )
        return True


def end_load(
    state: StoreState, batch: Sequence[tuple[Entry, int]], sound: Sequence[bool | None]
) -> None:
    """Loads of pinned entries of one kind into reserved slots ended; where sound, the header is
    written. Of unsound ones the state is told; None (nothing is known) only gives the slot back."""
    residents = state.residents
    came: list[tuple[Entry, int]] = []
    for (entry, slot), good in zip(batch, sound, strict=True):
        if good and entry.slot is None and not entry.dropped:
            came.append((entry, slot))
            continue
        residents.blank(entry.kind, slot)
        residents.give(entry.kind, slot, entry.facts.domain)
        if good is False:
            damaged_on_disk(state, entry)
    for _, run in groupby(came, key=lambda one: one[0].facts.domain):
        entries, slots = zip(*run, strict=True)
        residents.enter_written(entries, slots)
    state.count.loads += len(came)
    for entry, _ in came:
        state.mark(entry, soon=False)


def _is_sound(entry: Entry, disk: DiskPlace, header: bytes, memory: memoryview) -> bool:
    return (
        header_tells(header, entry.facts, entry.checksum, disk)
        and checksum(memory[: entry.facts.payload_bytes]) == entry.checksum
    )


async def _all_landed(flights: set[_Flight], limit_s: float | None) -> bool:
    """Wait for the end of all; False when that took longer than `limit_s`."""
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[bool] = loop.create_future()
    left = len(flights)

    def end(*, good: bool) -> None:
        if not landed.done():
            landed.set_result(good)

    def tell() -> None:
        nonlocal left
        left -= 1
        if not left:
            end(good=True)

    for flight in flights:
        flight.waiters.add(tell)
    timer = None if limit_s is None else loop.call_later(limit_s, partial(end, good=False))
    try:
        return await landed
    finally:
        if timer is not None:
            timer.cancel()
        for flight in flights:
            flight.waiters.discard(tell)
