"""Loads announced objects in the background and verifies them before anything is built on them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import xxhash

from headrace.core import faults
from headrace.core.chain import state_digest, window_digest
from headrace.core.clock import Clock
from headrace.core.ids import Digest, JobKey
from headrace.core.messages import BlocksReady, Place, StateReady, WindowReady
from headrace.core.rows import GRAIN, RowPlan, StartKind, plan_adopted
from headrace.decode.handoff import TERMINAL, Counts
from headrace.decode.jobs import Job, Parked
from headrace.decode.prefetch import AGAIN_S, Prefetch
from headrace.engine import BlockWriter, Engine, EngineDriver, PictureRows, spans_to_run
from headrace.kvstore import ClassStores, Kind, StoreClient, read_objects

log = logging.getLogger(__name__)
T = TypeVar("T")
_ATTACH_S = 1.5  # a client that lost its store tries again at least every 0.65 s


def read_verified(store: StoreClient, place: Place, digest: Digest, n_bytes: int) -> bytes | None:
    """The payload of `n_bytes` at `place`, or None when it is not what was announced.

    The store's reader verified what it copied; the copy is summed once more just before it is used
    (2 us a block), so that nothing between the two, such as the fault point here, can slip
    through. From any thread; no input or output but memory."""
    buffer = bytearray(n_bytes)
    good = _read_whole(store, place, digest, memoryview(buffer), faults.hit("decode.load"))
    return bytes(buffer) if good else None


def load_blocks(
    store: StoreClient,
    items: list[tuple[int, Place, Digest]],
    filling: Callable[[int], AbstractContextManager[BlockWriter | None]],
) -> list[bool]:
    """Load blocks in a thread, from the arena straight into their places: for each item whether its
    verified bytes are there.

    `filling(index)` is `Engine.filling` of one block: None when its sequence is gone."""
    done = []
    for index, place, digest in items:
        # Before the place is entered: whoever sleeps inside of one keeps the block from others.
        action = faults.hit("decode.load")
        with filling(index) as writer:
            if writer is not None:
                writer.complete = _read_whole(store, place, digest, writer.view, action)
        done.append(writer is not None and writer.complete)
    return done


def _read_whole(
    store: StoreClient, place: Place, digest: Digest, view: memoryview, action: str | None
) -> bool:
    """Whether `view` holds the verified payload at `place`, which is as long; garbage if not.
    `action` is what the fault point said."""
    if place.payload_bytes != len(view) or not store.read_into(place, digest, view):
        return False
    if action == "flip":
        view[len(view) // 2] ^= 1
    return xxhash.xxh3_64_intdigest(view) == place.checksum


class Loader:
    """Brings a job's blocks and window record into place. Used from the role's loop; what it
    starts in the background stands in `job.loads` until it is over."""

    def __init__(
        self,
        engine: Engine,
        driver: EngineDriver,
        stores: ClassStores,
        clock: Clock,
        counts: Counts,
        depth_tokens: int | None,
    ) -> None:
        """`depth_tokens`: rows of a replay where the deployment replays, else None."""
        self._prefetch = Prefetch(engine, driver, stores, depth_tokens)
        self._engine = engine
        self._stores = stores
        self._store = stores.exact  # of windows, pictures and states, which have no other class
        self._depth_tokens = depth_tokens
        self._clock = clock
        self._counts = counts
        self._card = engine.card("")  # for its sizes
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="decode-load")

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    async def open_stored(self, job: Job) -> None:
        """Load the longest stored prefix: exact blocks first, then what was written behind them."""
        exact = job.handoff.exact_digests
        places = await self._stores.exact.open_prefix(exact, job.key) if exact else ()
        done = len(places)
        self.blocks(job, BlocksReady(job.key, 0, exact[:done], places))
        rest = job.handoff.digests[done:]
        places = await self._stores.own.open_prefix(rest, job.key)
        self.blocks(job, BlocksReady(job.key, done, rest[: len(places)], places))

    def announced(self, job: Job, message: BlocksReady | WindowReady | StateReady) -> None:
        """Load what the message tells of, as far as it is news."""
        if isinstance(message, BlocksReady):
            self.blocks(job, message)
        elif isinstance(message, WindowReady):
            self.window(job, message)
        else:
            self.state(job, message)

    def blocks(self, job: Job, message: BlocksReady) -> None:
        """Load what is news; before the admission there is no place yet, and it is noted."""
        news = job.handoff.blocks(message)
        if news is None:
            self._counts.foreign += 1
            return
        self._counts.late += len(message.digests) - len(news)
        if job.waits_for_room:
            job.waiting_loads += news
            if job.ahead is not None:
                self._ahead(job, self._prefetch.told(job, news))
        else:
            self._load(job, news)

    def in_line(self, job: Job) -> None:
        """The job has to wait for room: have the store bring meanwhile what it will open. Once."""
        if job.ahead is None and job.waits_for_room:
            job.ahead = []
            if job.message.await_prefill:
                self._ahead(job, self._prefetch.told(job, tuple(job.waiting_loads)))
            else:
                self._ahead(job, self._prefetch.stored(job))

    def admitted(self, job: Job) -> None:
        """The job has its places now: load what was announced before."""
        for prefetch in job.ahead or ():
            prefetch.cancel()
        news, job.waiting_loads = job.waiting_loads, []
        self._load(job, news)

    def window(self, job: Job, message: WindowReady) -> None:
        """Load a window record if a run of this job may start from it."""
        position, digests = message.position, job.handoff.digests
        fits = position > 0 and position % GRAIN == 0 and position // GRAIN <= len(digests)
        if not fits or message.digest != window_digest(digests[position // GRAIN - 1]):
            self._counts.foreign += 1
        elif position in job.windows:
            self._counts.late += 1
        elif position <= job.request.first_decoder_row:
            self._in_background(job, self._load_window(job, message))

    def state(self, job: Job, message: StateReady) -> None:
        """Load the state of mode `state`; without it the rows are run as in `exact`."""
        size_fits = 0 < message.place.payload_bytes <= self._card.state_bytes
        maker = JobKey(job.key.request_id, message.epoch)
        known = message.epoch >= 0 and message.digest == state_digest(maker)
        if not known or not size_fits:
            self._counts.foreign += 1
        elif message.length_tokens == job.known_tokens:
            self._in_background(job, self._load_state(job, message))

    async def finish(self, job: Job) -> tuple[RowPlan, bytes | None]:
        """When all was told: wait for the loads, then the rows to run from the verified hit, and
        the window record that they start from, a delivered one or a newer one of the store. A
        damaged one is passed over."""
        await self.settled(job)
        if job.may_adopt:
            request = job.request
            return plan_adopted(request.n_tokens, request.keep_tokens, self._engine.geometry), None
        geometry, depth = self._engine.geometry, self._depth_tokens
        hit_tokens = job.handoff.verified_blocks * GRAIN
        plan, candidates = job.plan_from(hit_tokens, geometry, depth)
        while candidates:
            found = await self._store.open_windows(candidates, job.key)
            if found is None:
                break
            position, place = found
            digest = window_digest(dict(candidates)[position])
            payload = await self._read_window(job, place, digest)
            if payload is not None:
                job.windows[position] = payload
                plan, _ = job.plan_from(hit_tokens, geometry, depth)
                break
            candidates = [c for c in candidates if c[0] < position]
        window = job.windows.get(plan.window_position) if plan.kind is StartKind.WINDOW else None
        job.windows.clear()
        return plan, window

    async def settled(self, job: Job) -> None:
        """No load of the job is under way."""
        while job.loads:
            await asyncio.wait(tuple(job.loads))

    async def parked(self, job: Job, parked: Parked) -> bytes | None:
        """The private state that a job was parked with, verified; None when it is gone."""
        place = parked.place
        return await self._read(job, place, parked.digest, place.payload_bytes, self._stores.own)

    async def parked_blocks(self, job: Job, parked: Parked) -> None:
        """Load the blocks that a job gave up, where they were put, or where the store has them
        now."""
        digests = job.handoff.digests
        places = parked.blocks or ()
        self.blocks(job, BlocksReady(job.key, 0, digests[: len(places)], places))
        await self.settled(job)
        if job.handoff.verified_blocks < len(digests):
            places = await self._stores.own.open_prefix(digests, job.key)
            self.blocks(job, BlocksReady(job.key, 0, digests[: len(places)], places))
            await self.settled(job)

    async def pictures(self, job: Job, plan: RowPlan) -> PictureRows:
        """Rows of the pictures that `plan` runs through; they stay leased for the job.

        Raises `PicturesMissing` when one is gone, damaged or not what the request says."""
        spans = spans_to_run(job.request, plan)
        if not spans:
            return {}
        began_s = self._clock.now_s()
        wanted = [span.digest for span in spans]
        payloads = await read_objects(self._store, Kind.MM, wanted, job.key)
        rows = await asyncio.to_thread(self._engine.unpack_pictures, spans, payloads)
        job.stages.load_s += self._clock.now_s() - began_s
        job.stages.load_bytes += sum(map(len, payloads.values()))
        return rows

    # ---- inside ----------------------------------------------------------------------------

    def _load(self, job: Job, news: list[tuple[int, Place]]) -> None:
        """Copy announced blocks into their reserved places; resident ones stay as they are."""
        for store, exact in ((self._stores.own, False), (self._stores.exact, True)):
            items = [
                (i, place, job.handoff.digest(i))
                for i, place in news
                if i in job.fills and (i in job.handoff.exact) is exact
            ]
            if items:
                self._in_background(job, self._load_blocks(job, store, items))

    async def _load_blocks(
        self, job: Job, store: StoreClient, items: list[tuple[int, Place, Digest]]
    ) -> None:
        began_s, n_bytes = self._clock.now_s(), self._card.block_bytes
        items = await self._fetched(job, store, items)

        def filling(index: int) -> AbstractContextManager[BlockWriter | None]:
            return self._engine.filling(job.fills[index])

        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(self._threads, load_blocks, store, items, filling)
        job.stages.load_s += self._clock.now_s() - began_s
        if job.state in TERMINAL:
            return
        again: list[tuple[int, Place]] = []
        for good, (index, place, digest) in zip(done, items, strict=True):
            if good:
                job.handoff.loaded(index)
                job.stages.load_bytes += n_bytes
                self._counts.loaded_blocks += 1
                self._counts.loaded_bytes += n_bytes
            else:
                self._counts.damaged += 1
                if (other := job.handoff.lost(index)) is not None:
                    again.append((index, other))
                await store.doom(place, digest)
        self._load(job, again)

    async def _fetched(
        self, job: Job, store: StoreClient, items: list[tuple[int, Place, Digest]]
    ) -> list[tuple[int, Place, Digest]]:
        """`items` with the places that other hosts' stores told of, or this host's in an earlier
        life, replaced by those at which this host's store has brought the blocks; what it could not
        bring stays as it is, a miss."""
        await _in_time(store, [place for _, place, _ in items])
        far = [digest for _, place, digest in items if store.is_elsewhere(place)]
        past = [digest for _, place, digest in items if store.is_past(place)]
        near: dict[Digest, Place] = {}
        for digests, pauses_s in ((past, ()), (far, AGAIN_S)):
            if not digests:
                continue
            ask = functools.partial(store.open_objects, Kind.KV, digests, job.key)
            found = await _asked_again(ask, lambda places: None not in places, pauses_s)
            near |= {d: place for d, place in zip(digests, found, strict=True) if place is not None}
        fetched = len(near.keys() & set(far))
        self._counts.fetched_blocks += fetched
        self._counts.unreached_blocks += len(far) - fetched
        return [(index, near.get(digest, place), digest) for index, place, digest in items]

    async def _load_window(self, job: Job, message: WindowReady) -> None:
        """With a lease of the job's own: a resume may start from the record again, long after
        prefill let it go."""
        position, place = message.position, message.place
        block = job.handoff.digests[position // GRAIN - 1]
        await _in_time(self._store, [place])
        pauses_s = AGAIN_S if self._store.is_elsewhere(place) else ()
        found = await _asked_again(
            lambda: self._store.open_windows([(position, block)], job.key),
            lambda window: window is not None,
            pauses_s,
        )
        if found is not None:
            place = found[1]
        payload = await self._read_window(job, place, message.digest)
        if payload is not None:
            job.windows[position] = payload

    async def _load_state(self, job: Job, message: StateReady) -> None:
        place = message.place
        n_bytes = place.payload_bytes
        job.state_bytes = await self._read(job, place, message.digest, n_bytes, self._store)

    async def _read_window(self, job: Job, place: Place, digest: Digest) -> bytes | None:
        n_bytes = self._card.window_record_bytes
        return await self._read(job, place, digest, n_bytes, self._store)

    async def _read(
        self, job: Job, place: Place, digest: Digest, n_bytes: int, store: StoreClient
    ) -> bytes | None:
        began_s = self._clock.now_s()
        loop = asyncio.get_running_loop()
        payload = await loop.run_in_executor(
            self._threads, read_verified, store, place, digest, n_bytes
        )
        job.stages.load_s += self._clock.now_s() - began_s
        if payload is None:
            self._counts.damaged += 1
            await store.doom(place, digest)
        else:
            job.stages.load_bytes += n_bytes
            self._counts.loaded_bytes += n_bytes
        return payload

    def _ahead(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        assert job.ahead is not None
        job.ahead.append(self._in_background(job, work))

    def _in_background(self, job: Job, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"load {job.key}")
        job.loads.add(task)
        task.add_done_callback(job.loads.discard)
        task.add_done_callback(_log_failure)
        return task


async def _in_time(store: StoreClient, places: Sequence[Place]) -> None:
    """Places of a life of this host's store that the client does not know are news of a restart
    that it has not seen the end of: wait until it has found the store again, if that is soon."""
    if not store.connected and any(store.is_past(place) for place in places):
        await store.connect(_ATTACH_S)


async def _asked_again(
    ask: Callable[[], Awaitable[T]], whole: Callable[[T], bool], pauses_s: Sequence[float]
) -> T:
    """The first answer that is whole, or the last one."""
    answer = await ask()
    for pause_s in pauses_s:
        if whole(answer):
            break
        await asyncio.sleep(pause_s)
        answer = await ask()
    return answer


def _log_failure(task: asyncio.Task[None]) -> None:
    """A load that failed in an unforeseen way left its blocks unverified: they are computed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a load failed", exc_info=error)
