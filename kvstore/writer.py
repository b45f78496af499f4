"""Write-behind: sealed objects become durable without anybody waiting for it.

    claim -> slot write (payload, then header) -> group sync -> index publish

A group is closed after `group_bytes` or `group_s`, and the next one is written while it is synced.
Whatever fails costs the objects concerned their persistence and nothing else: they stay in the
arena until somebody needs the room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

from headrace.core import faults
from headrace.core.errors import HeadraceError
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.io_threads import in_thread
from headrace.kvstore.layout import SlotHeader, checksum
from headrace.kvstore.objects import DiskPlace, Entry
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.second_chance import Moved, reuse
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.slot_io import SlotMove
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
T = TypeVar("T")
_BATCH_BYTES = 8 << 20  # claimed and written in one go
_JOB_BYTES = 4 << 20  # of one write; several are under way
_BATCHES = 2  # written at a time
_GATHER_S = 0.005
_QUIET_S = 0.02  # nothing new for so long closes a group early,
_QUIET_BYTES = 8 << 20  # if it has so much: a sync is not for single blocks
_SLICE = 32  # of a group's objects noted as saved in one go: about 0.1 ms


class _Outcome(StrEnum):
    WRITTEN = "written"
    FAILED = "failed"
    DAMAGED = "damaged"  # in the arena, before anything was written


class _Write(NamedTuple):
    entry: Entry
    place: DiskPlace


class _Group(NamedTuple):
    """Written slots that are to be synced together."""

    writes: list[_Write]
    moved: list[Moved]  # kept from segments that were reused

    @property
    def segments(self) -> set[int]:
        written = {write.place.segment for write in self.writes}
        return written | {one.place.segment for one in self.moved}


class Writer:
    """The one writer of a store's segments. `run` is its task; I/O is in `threads`: several writes
    of one batch at once, everything else one after another."""

    def __init__(
        self,
        state: StoreState,
        files: SegmentFiles,
        publisher: Publisher,
        settings: StoreSettings,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._state = state
        self._files = files
        self._publisher = publisher
        self._settings = settings
        self._threads = threads
        self._wake = asyncio.Event()
        self._stopping = False
        self._group = _Group([], [])  # written, not yet synced
        self._syncing: asyncio.Task[None] | None = None  # the group before it
        self._closed = _Group([], [])  # what that task syncs
        self._failed_syncs = 0
        self._was_full = False  # the group before, of which something may still be written
        self._writing: set[asyncio.Task[None]] = set()  # batches on their way into the group
        self._listing: asyncio.Task[None] | None = None  # the last group's records
        self._disk = Breaker(state.clock, failures=3, rest_s=5.0)
        self.recycled = 0
        self.errors = 0
        state.on_unsaved = self._wake.set

    async def run(self) -> None:
        """Write until `stop`; then write what is left, and return."""
        try:
            while True:
                if not self._stopping and not self._state.disks.to_erase:
                    await self._wake.wait()
                self._wake.clear()
                await self._erase()
                taken = await self._collect()
                await self._commit()
                if self._stopping and not taken:
                    await self._synced()
                    if not self._state.disks.to_erase:
                        await self._listed()
                        return
        finally:
            for task in (*self._writing, self._syncing, self._listing):
                if task is not None:
                    task.cancel()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def _collect(self) -> int:
        """Write objects as they are sealed, until the group is large or old enough; how many
        objects were taken up. What a full group is still writing belongs to the next one."""
        loop = asyncio.get_running_loop()
        closes_s = loop.time() + self._settings.group_s
        taken = total = 0
        follows, self._was_full = self._was_full, False
        while total < self._settings.group_bytes:
            await self._gather()
            batch = self._state.take_unsaved(_BATCH_BYTES)
            if batch:
                await self._write(batch)
                taken += len(batch)
                total += sum(entry.facts.payload_bytes for entry in batch)
                continue
            left_s = closes_s - loop.time()
            if left_s <= 0 or self._stopping or not (self._group.writes or self._writing):
                break
            quiet_s = _QUIET_S if follows or total >= _QUIET_BYTES else left_s
            try:
                async with asyncio.timeout(min(left_s, quiet_s)):
                    await self._wake.wait()
            except TimeoutError:
                break
            self._wake.clear()
        else:
            self._wake.set()  # a full group leaves objects waiting that nobody tells of again
            self._was_full = True
            return taken
        await self._written()
        return taken

    async def _gather(self) -> None:
        """Give a batch that has begun a moment to fill: one of sixteen blocks costs as many calls
        as one of seventy, and takes them from those who put."""
        if 0 < self._state.unsaved.waiting_bytes < _BATCH_BYTES and not self._stopping:
            await asyncio.sleep(_GATHER_S)

    async def _write(self, batch: Sequence[Entry]) -> None:
        """Begin to write a batch of objects into slots; `_written` has them in the group."""
        # A disk that fails is left alone for a while: each try may cost a segment's contents.
        claimed = await self._publisher.claim(batch) if self._disk.admits() else frozenset()
        writes: list[_Write] = []
        full: set[Kind] = set()  # no segment may be reused for them now: asked once a batch
        for entry in batch:
            place = self._files.next_place(entry.kind) if entry in claimed else None
            if place is None and entry in claimed and entry.kind not in full:
                await self._begin(writes)
                await self._written()  # a segment that is still written to must not be reused
                writes = []
                place = await self._recycle(entry.kind)
                if place is None:
                    full.add(entry.kind)
            if place is None:
                self._state.count.unsaved += 1
                self._state.not_saved(entry)
            else:
                writes.append(_Write(entry, place))
        await self._begin(writes)

    async def _begin(self, writes: Sequence[_Write]) -> None:
        """Have them written, while the caller asks for and looks through the next batch."""
        while len(self._writing) >= _BATCHES:
            await self._one_written(asyncio.FIRST_COMPLETED)
        if writes:
            self._writing.add(asyncio.create_task(self._write_out(writes), name="store-write"))

    async def _written(self) -> None:
        """Nothing is being written any more."""
        while self._writing:
            await self._one_written(asyncio.ALL_COMPLETED)

    async def _one_written(self, when: str) -> None:
        done, self._writing = await asyncio.wait(self._writing, return_when=when)
        for task in done:
            task.result()

    async def _write_out(self, writes: Sequence[_Write]) -> None:
        failed_syncs = self._failed_syncs
        jobs = _jobs(writes)
        done = await asyncio.gather(*map(self._outcomes, jobs))
        failed = False
        for write, outcome in zip(writes, chain.from_iterable(done), strict=True):
            if outcome is _Outcome.WRITTEN and self._failed_syncs == failed_syncs:
                self._group.writes.append(write)
                continue
            self._state.not_saved(write.entry, write.place)
            if outcome is _Outcome.FAILED:
                failed = True
                self.errors += 1
            elif outcome is _Outcome.DAMAGED and not write.entry.dropped:  # a reader may be faster
                self._state.count.damaged += 1
                self._state.drop(write.entry, erase=False)
        if failed:
            self._disk.failure()

    async def _outcomes(self, writes: Sequence[_Write]) -> list[_Outcome]:
        try:
            return await self._in_thread(partial(self._write_job, writes))
        except (OSError, HeadraceError):  # of some it may be on disk, of none it is believed
            log.exception("a batch of %d objects was not written", len(writes))
            return [_Outcome.FAILED] * len(writes)

    def _write_job(self, writes: Sequence[_Write]) -> list[_Outcome]:
        # In an I/O thread. The entries are pinned, so their slots stay; a client that wrote over
        # one nevertheless must not get its bytes to disk under a checksum that they have.
        out = [_Outcome.DAMAGED] * len(writes)
        moves, headers, numbers = [], [], []
        arena = self._state.residents.arena
        for number, write in enumerate(writes):
            entry, place = write.entry, write.place
            region = self._state.residents.regions[entry.kind]
            if entry.slot is None:
                out[number] = _Outcome.FAILED
                continue
            memory = arena.slot(region, entry.slot)
            if checksum(memory[: entry.facts.payload_bytes]) != entry.checksum:
                continue
            at = self._state.place(entry)
            if at is not None and not arena.shows(at, entry.facts.namespace, entry.facts.digest):
                # Its client wrote another than it told: nobody could read it, nor put it anew.
                self._state.residents.show(entry, entry.slot)
            header = SlotHeader(entry.facts, entry.checksum, 0, 0, 0, entry.written_at_s)
            moves.append(SlotMove(place, memory))
            headers.append(header)
            numbers.append(number)
        for number, error in zip(numbers, self._files.write_moves(moves, headers), strict=True):
            out[number] = _Outcome.WRITTEN if error is None else _Outcome.FAILED
            if error is not None:
                log.warning("an object was not written: %s", type(error).__name__)
        return out

    async def _recycle(self, kind: Kind) -> DiskPlace | None:
        """The first free slot of the oldest segment that may be reused, in its next life."""
        for segment in self._files.candidates(kind):
            if segment.number in self._unsynced():
                await self._commit()
                await self._synced()  # what it holds is not known to the state before that
            used, failed_syncs = segment.header.kind is not None, self._failed_syncs
            try:
                reused = await reuse(
                    self._state,
                    self._files,
                    segment,
                    kind,
                    self._in_thread,
                    self._publisher.publish,
                )
            except (OSError, HeadraceError) as error:
                log.warning("segment %d cannot be reused: %s", segment.number, error)
                self._failed()
                return None
            if reused is None:
                continue
            self.recycled += used
            if failed_syncs == self._failed_syncs:
                self._group.moved.extend(reused.moved)
            else:
                self._state.disks.to_erase += [one.place for one in reused.moved]
            place = self._files.next_place(kind)
            if place is not None:
                return place
        return None

    def _unsynced(self) -> set[int]:
        """Segments that hold written slots which the state does not know yet."""
        return self._group.segments | self._closed.segments

    async def _commit(self) -> None:
        """Close the group and begin to sync it; the one before is finished then."""
        await self._synced()
        group, self._group = self._group, _Group([], [])
        if group.segments:
            self._closed = group
            self._syncing = asyncio.create_task(self._sync(group), name="store-sync")
            self._syncing.add_done_callback(lambda done: self._wake.set())

    async def _synced(self) -> None:
        """No group is being synced any more. Raises what ended that."""
        if self._syncing is not None:
            await self._syncing
            self._syncing = None

    async def _sync(self, group: _Group) -> None:
        """Sync a group, tell the state, publish."""
        numbers = group.segments

        def sync() -> None:
            faults.hit("store.before_sync")
            self._files.sync(numbers)

        try:
            with self._state.count.sync_s.time():
                await self._in_thread(sync)
        except (OSError, HeadraceError) as error:
            self._disbelieve(group, error)
            return
        self._disk.success()
        for number, write in enumerate(group.writes):
            self._state.saved(write.entry, write.place)
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # who waits for an answer goes first
        for one in group.moved:
            self._state.moved(one.header, one.place)
        self._closed = _Group([], [])
        await self._listed()
        keys = [write.entry.key for write in group.writes] + [one.key for one in group.moved]
        self._listing = asyncio.create_task(self._list(keys), name="store-listing")

    def _disbelieve(self, group: _Group, error: Exception) -> None:
        """After a failed sync the kernel may have dropped dirty data: nothing may be believed to be
        on disk that was written before, of this group or of the next, and nothing of what is being
        written."""
        self._failed()
        self._failed_syncs += 1
        log.warning("a group of %d objects was not synced: %s", len(group.writes), error)
        doubted, self._group, self._closed = self._group, _Group([], []), _Group([], [])
        for write in (*group.writes, *doubted.writes):
            self._state.not_saved(write.entry, write.place)
        self._state.disks.to_erase += [one.place for one in (*group.moved, *doubted.moved)]

    async def _list(self, keys: Sequence[bytes]) -> None:
        try:
            faults.hit("store.before_index")
            await self._publisher.publish_changed(keys)
            faults.hit("store.after_index")
        except HeadraceError:
            log.warning("publishing was interrupted; the records follow later")

    async def _listed(self) -> None:
        """The records of the group before are written: one group waits for its listing at most."""
        if self._listing is not None:
            await self._listing

    async def _erase(self) -> None:
        places, self._state.disks.to_erase = self._state.disks.to_erase, []
        for place in places:
            try:
                await self._in_thread(partial(self._files.erase, place))
            except (OSError, HeadraceError) as error:
                self._failed()
                log.warning("a damaged slot could not be blanked: %s", error)

    def _failed(self) -> None:
        self.errors += 1
        self._disk.failure()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await in_thread(self._threads, work)


def _jobs(writes: Sequence[_Write]) -> list[list[_Write]]:
    """Cut a batch, in order, into what one thread writes."""
    jobs: list[list[_Write]] = [[]]
    total = 0
    for write in writes:
        if total >= _JOB_BYTES:
            jobs.append([])
            total = 0
        jobs[-1].append(write)
        total += write.entry.facts.payload_bytes
    return jobs
