"""Write-behind: sealed objects become durable without anybody waiting for it.

    claim -> slot write (payload, then header) -> group sync -> index publish

A group is closed after `group_bytes` or `group_s`, and the next one is written while it is synced.
Whatever fails costs the objects concerned their persistence and nothing else: they stay in the
arena until somebody needs the room.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

from headrace.core import faults
from headrace.core.errors import HeadraceError
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.io_threads import in_thread
from headrace.kvstore.objects import Entry
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.second_chance import Moved, reuse
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.state import StoreState
from headrace.kvstore.write_jobs import Outcome, Write, cut_jobs, write_job

log = logging.getLogger(__name__)
T = TypeVar("T")
_BATCH_BYTES = 16 << 20  # claimed and written in one go
_BATCHES = 2  # written at a time
_BURST_BYTES = 128 << 20  # may wait until the first of them is written
_GATHER_S = 0.005
_QUIET_S = 0.02  # nothing new for so long closes a group early,
_QUIET_BYTES = 8 << 20  # if it has so much: a sync is not for single blocks
_SLICE = 64  # of a group's objects noted as saved in one go: about 0.2 ms
_SPARED = 1024  # objects are made durable until the collector is told to pass them over


class _Group(NamedTuple):
    """Written slots that are to be synced together."""

    writes: list[Write]
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
        self._walked = 0  # objects that the collector still walks,
        self._spared = False  # and whether there are some that it does not
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
        as one of seventy, and takes them from those who put.

        While nothing is being written and blocks come faster than a disk takes them, they go
        first: to write them needs more of the processor than to put them."""
        unsaved, most = self._state.unsaved, _BATCH_BYTES if self._writing else _BURST_BYTES
        grew = _BATCH_BYTES
        while grew >= _BATCH_BYTES and 0 < unsaved.waiting_bytes < most and not self._stopping:
            grew = -unsaved.waiting_bytes
            await asyncio.sleep(_GATHER_S)
            grew += unsaved.waiting_bytes

    async def _write(self, batch: Sequence[Entry]) -> None:
        """Begin to write a batch of objects into slots; `_written` has them in the group."""
        # A disk that fails is left alone for a while: each try may cost a segment's contents.
        claimed = await self._publisher.claim(batch) if self._disk.admits() else frozenset()
        wanted: dict[Kind, list[Entry]] = {}
        for entry in batch:
            if entry in claimed:
                wanted.setdefault(entry.facts.kind, []).append(entry)
            else:
                self._unsaved(entry)
        for kind, entries in wanted.items():
            await self._place(kind, entries)

    async def _place(self, kind: Kind, entries: Sequence[Entry]) -> None:
        """Begin to write these into the next slots, as far as there are segments for them."""
        while entries:
            places = self._files.next_places(kind, len(entries))
            await self._begin(list(map(Write, entries, places)))
            entries = entries[len(places) :]
            if entries:
                await self._written()  # a segment that is still written to must not be reused
                if not await self._recycle(kind):
                    break
        for entry in entries:
            self._unsaved(entry)

    def _unsaved(self, entry: Entry) -> None:
        self._state.count.unsaved += 1
        self._state.not_saved(entry)

    async def _begin(self, writes: Sequence[Write]) -> None:
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

    async def _write_out(self, writes: Sequence[Write]) -> None:
        failed_syncs = self._failed_syncs
        jobs = cut_jobs(writes)
        done = await asyncio.gather(*map(self._outcomes, jobs))
        failed = False
        for write, outcome in zip(writes, chain.from_iterable(done), strict=True):
            if outcome is Outcome.WRITTEN and self._failed_syncs == failed_syncs:
                self._group.writes.append(write)
                continue
            self._state.not_saved(write.entry, write.place)
            if outcome is Outcome.FAILED:
                failed = True
                self.errors += 1
            elif outcome is Outcome.DAMAGED and not write.entry.dropped:  # a reader may be faster
                self._state.count.damaged += 1
                self._state.drop(write.entry, erase=False)
        if failed:
            self._disk.failure()

    async def _outcomes(self, writes: Sequence[Write]) -> list[Outcome]:
        try:
            return await self._in_thread(partial(write_job, self._state, self._files, writes))
        except (OSError, HeadraceError):  # of some it may be on disk, of none it is believed
            log.exception("a batch of %d objects was not written", len(writes))
            return [Outcome.FAILED] * len(writes)

    async def _recycle(self, kind: Kind) -> bool:
        """Give the oldest segment that may be reused its next life; whether it has free slots."""
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
                return False
            if reused is None:
                continue
            self.recycled += used
            if failed_syncs == self._failed_syncs:
                self._group.moved.extend(reused.moved)
            else:
                self._state.disks.to_erase += [one.place for one in reused.moved]
            if self._files.left(kind):
                return True
        return False

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
        # The last first: in this order they may leave, of a chain the tail before the head.
        for end in range(len(group.writes), 0, -_SLICE):
            self._state.saved(group.writes[max(0, end - _SLICE) : end])
            await asyncio.sleep(0)  # who waits for an answer goes first
        self._spare(len(group.writes))
        for one in group.moved:
            self._state.moved(one.header, one.place)
        self._closed = _Group([], [])
        await self._listed()
        keys = [write.entry.key for write in group.writes] + [one.key for one in group.moved]
        self._listing = asyncio.create_task(self._list(keys), name="store-listing")

    def _spare(self, count: int) -> None:
        """So many objects are durable now: they stay, so the collector need not look at them again.
        It walked all there were, for 50 ms at 20,000 blocks, in whichever thread, and everything
        stood still meanwhile. Garbage in cycles is taken out before, and only then."""
        self._walked += count
        if self._walked >= _SPARED:
            gc.collect(2 if self._spared else 1)  # never through all that was loaded at start
            gc.freeze()
            self._walked, self._spared = 0, True

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
