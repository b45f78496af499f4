"""What a vision replica does with its jobs: look into the store, encode, seal, answer.

One task runs the tower, over batches bounded in patches, with pixels and tower in a thread. The
leases of what it answered are renewed here until the router withdraws the attempt or its connection
ends: prefill and decode hold the same leases from the moment they open the objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from headrace.core.attempts import Attempts, Verdict
from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, ReplicaLost, Unavailable
from headrace.core.ids import Digest, JobKey
from headrace.core.images import read_header, resized_grid
from headrace.core.messages import JobFailed, VisionDone, VisionJob
from headrace.core.peers import Peer
from headrace.kvstore import Kind, StoreClient
from headrace.model import StateError
from headrace.vision.encode import EncodedImage, ImageEncoder
from headrace.vision.jobs import TERMINAL, Counts, Job, JobEvent, JobState
from headrace.vision.preprocess import PreparedImage
from headrace.vision.settings import VisionSettings

log = logging.getLogger(__name__)

SEAL_WAIT_S = 2.0  # for room in the arena
Outcome: TypeAlias = EncodedImage | HeadraceError


class VisionWork:
    """All jobs of one replica. Mutable, owned by the role's event loop.

    `on_ended` is called after a job's end."""

    def __init__(
        self,
        encoder: ImageEncoder,
        store: StoreClient,
        settings: VisionSettings,
        clock: Clock,
        on_ended: Callable[[], None],
    ) -> None:
        self._encoder = encoder
        self._store = store
        self._settings = settings
        self._clock = clock
        self._on_ended = on_ended
        self._attempts = Attempts()
        self._queue: deque[Job] = deque()
        self._news = asyncio.Event()
        self._releasing: set[asyncio.Task[None]] = set()
        self._leased: dict[JobKey, Peer] = {}
        self._running = asyncio.create_task(self._run(), name="vision")
        self.jobs: dict[tuple[JobKey, Digest], Job] = {}
        self.counts = Counts()
        self.steps = 0
        self.patches_per_s = 0.0  # of the last step
        self.draining = False

    # ---- what arrives ----------------------------------------------------------------------

    def accept(self, router: Peer, message: VisionJob) -> None:
        """A new job, or one that is late, a duplicate, or refused."""
        key = message.key
        if self._attempts.begin(key) is Verdict.LATE:
            self.counts.late += 1
            return
        if (known := self.jobs.get((key, message.digest))) is not None:
            self.counts.late += 1
            known.step(JobEvent.AGAIN)
            return
        for job in tuple(self.jobs.values()):
            if job.key.request_id == key.request_id and job.key.epoch < key.epoch:
                self._end(job, JobEvent.CANCEL)
        try:
            patches = self._check(message)
        except HeadraceError as error:
            self.counts.failed += 1
            router.post(_failed(message, error))
            return
        self.counts.jobs += 1
        job = Job(message, router, patches, self._clock.now_s())
        self.jobs[key, message.digest] = job
        job.looking = asyncio.create_task(self._look(job), name=f"vision {key}")

    def _check(self, message: VisionJob) -> int:
        """The picture's patches, by its header alone. Raises what is wrong with the job."""
        if self.draining:
            raise Unavailable("this vision replica takes no new jobs")
        if len(self.jobs) >= self._settings.max_waiting:
            raise Overloaded(
                f"max_waiting is {self._settings.max_waiting} pictures, {len(self.jobs)} wait"
            )
        header = read_header(message.data, self._encoder.limits)
        grid = resized_grid(header.width, header.height, self._encoder.tower.geometry)
        if grid.n_tokens != message.n_tokens:
            raise StateError(
                f"picture rows: the router counted {message.n_tokens}, this is {grid.n_tokens}"
            )
        return grid.patch_rows * grid.patch_cols

    def cancel(self, key: JobKey) -> None:
        """The attempt is over for its router: nothing is held for it any more."""
        self._attempts.close(key)
        mine = [job for job in self.jobs.values() if job.key == key]
        self.counts.late += not mine and key not in self._leased
        for job in mine:
            self._end(job, JobEvent.CANCEL)
        self._release(key)

    def peer_left(self, peer: Peer) -> None:
        """Nobody waits for these any more."""
        keys = {job.key for job in self.jobs.values() if job.router is peer}
        for key in keys | {key for key, router in self._leased.items() if router is peer}:
            self.cancel(key)

    # ---- one job ---------------------------------------------------------------------------

    async def _look(self, job: Job) -> None:
        try:
            if await self._found(job):
                return
        except Exception:
            log.exception("looking for %s failed", job.key)
            self._end(job, JobEvent.ERROR, HeadraceError("vision failed"))
            return
        if job.step(JobEvent.MISSING):
            self._queue.append(job)
            self._news.set()

    async def _found(self, job: Job) -> bool:
        """Lease the object if the store has it, and say so; whether that ended the job."""
        (place,) = await self._store.open_objects(Kind.MM, [job.digest], job.key)
        if place is None:
            return False
        self.counts.found += 1
        self._done(job, JobEvent.FOUND, made=False)
        return True

    async def _run(self) -> None:
        """The tower's own task: batch after batch until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while batch := self._take():
                try:
                    await self._encode(batch)
                except Exception:
                    log.exception("a batch of %d pictures failed", len(batch))
                    for job in batch:
                        self._end(job, JobEvent.ERROR, HeadraceError("vision failed"))

    def _take(self) -> list[Job]:
        """The next jobs in order, up to the bound; a picture asked for twice is in it once."""
        batch: list[Job] = []
        patches = 0
        digests: set[Digest] = set()
        while self._queue:
            job = self._queue[0]
            full = patches + job.patches > self._settings.max_patches_per_step
            if batch and (full or job.digest in digests):
                break
            self._queue.popleft()
            if job.step(JobEvent.TAKEN):
                batch.append(job)
                digests.add(job.digest)
                patches += job.patches
        return batch

    async def _encode(self, batch: Sequence[Job]) -> None:
        wanted = [job for job in batch if not await self._found(job)]
        wanted = [job for job in wanted if job.state is JobState.ENCODING]
        if not wanted:
            return
        begun_s = self._clock.now_s()
        outcomes = await asyncio.to_thread(self._compute, [job.message.data for job in wanted])
        self.steps += 1
        self.counts.encoded += len(wanted)
        spent_s = max(1e-6, self._clock.now_s() - begun_s)
        self.patches_per_s = sum(job.patches for job in wanted) / spent_s
        for job, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, HeadraceError):
                self._end(job, JobEvent.ERROR, outcome)
            else:
                await self._seal(job, outcome)

    def _compute(self, files: Sequence[bytes]) -> list[Outcome]:
        """In a thread: pixels and tower. What is wrong with one picture ends that one alone."""
        prepared: list[PreparedImage | HeadraceError] = []
        for data in files:
            try:
                prepared.append(self._encoder.prepare(data))
            except HeadraceError as error:
                prepared.append(error)
        good = [picture for picture in prepared if isinstance(picture, PreparedImage)]
        made = iter(self._pass(good))
        return [p if isinstance(p, HeadraceError) else next(made) for p in prepared]

    def _pass(self, pictures: Sequence[PreparedImage]) -> list[Outcome]:
        try:
            return list(self._encoder.encode_prepared(pictures))
        except Exception as error:
            log.warning("a pass over %d pictures failed: %s", len(pictures), error)
            if len(pictures) == 1:
                known = isinstance(error, HeadraceError)
                return [error if known else HeadraceError("the tower failed")]  # type: ignore[list-item]
        return [outcome for picture in pictures for outcome in self._pass([picture])]

    async def _seal(self, job: Job, made: EncodedImage) -> None:
        if job.state in TERMINAL:
            return
        items = [(job.digest, made.payload)]
        (place,) = await self._store.put(Kind.MM, items, lease=job.key, wait_s=SEAL_WAIT_S)
        if place is None:
            full = Overloaded("the store takes no rows of pictures now")
            away = Unavailable("the store of this vision replica is away")
            self._end(job, JobEvent.ERROR, full if self._store.connected else away)
        else:
            self._done(job, JobEvent.SEALED, made=True)

    # ---- ends ------------------------------------------------------------------------------

    def _done(self, job: Job, event: JobEvent, *, made: bool) -> None:
        if not job.step(event):
            self._release(job.key)  # cancelled while the lease was on its way
            return
        self._leased[job.key] = job.router
        spent_s = self._clock.now_s() - job.arrived_s
        job.router.post(VisionDone(job.key, job.digest, made, spent_s))
        self._forget(job)

    def _end(self, job: Job, event: JobEvent, error: HeadraceError | None = None) -> None:
        """The one way out before the end; later causes are ignored and counted."""
        if not job.step(event):
            self.counts.late += 1
            return
        if error is not None:
            self.counts.failed += 1
            job.router.post(_failed(job.message, error))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self.jobs.pop((job.key, job.digest), None)
        self._on_ended()

    def _release(self, key: JobKey) -> None:
        self._leased.pop(key, None)
        task = asyncio.create_task(self._store.release(key), name=f"release {key}")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def keep(self) -> None:
        """Call every third of `handoff_s`: prolongs the leases of what was answered."""
        for key in tuple(self._leased):
            await self._store.renew(key)

    @property
    def queued_patches(self) -> int:
        return sum(job.patches for job in self.jobs.values())

    @property
    def held_leases(self) -> int:
        return len(self._leased)

    async def stop(self, reason: str) -> None:
        """End every job with a retryable failure. Leases of answered ones stay: their requests go
        on, and prefill and decode hold them by now or ask again."""
        self.draining = True
        for job in tuple(self.jobs.values()):
            self._end(job, JobEvent.ERROR, ReplicaLost(reason))
            if job.looking is not None:
                job.looking.cancel()
        self._running.cancel()
        await asyncio.gather(self._running, *self._releasing, return_exceptions=True)


def _failed(job: VisionJob, error: HeadraceError) -> JobFailed:
    """A bad picture stays bad; everything else may go well elsewhere."""
    retryable = not isinstance(error, InvalidRequest)
    return JobFailed(job.key, error.code, error.message, retryable, job.digest)
