"""What a prefill replica does with its jobs: find, fill, run, seal, announce.

Each live job has one task that walks it through `jobs.JOB_TABLE`; whatever ends a job goes through
`_end`; whatever it holds (engine blocks and slot, store leases) is given back in `_close`, once.
All of it runs on one event loop; only copies into engine blocks happen in a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.core import faults
from headrace.core.attempts import Attempts, Verdict
from headrace.core.chain import as_token_ids
from headrace.core.clock import Clock
from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    Overloaded,
    PicturesMissing,
    ReplicaLost,
    Unavailable,
)
from headrace.core.ids import JobKey
from headrace.core.limits import LeaseTimes
from headrace.core.messages import (
    BlocksReady,
    JobFailed,
    PrefillDone,
    PrefillJob,
)
from headrace.core.peers import Peer
from headrace.core.rows import GRAIN, RowPlan
from headrace.engine import (
    Admission,
    BlockDone,
    Engine,
    EngineDriver,
    EngineSettings,
    Event,
    Half,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
)
from headrace.engine import Job as EngineJob
from headrace.kvstore import ClassStores
from headrace.prefill.find import Finder
from headrace.prefill.jobs import (
    TERMINAL,
    Counts,
    Job,
    JobEvent,
    JobState,
    Over,
)
from headrace.prefill.links import DecodeLinks
from headrace.prefill.seal import SEAL_BATCH, Sealer

log = logging.getLogger(__name__)

_RETRYABLE = (ReplicaLost, Overloaded, PicturesMissing, faults.InjectedFault)


class Prefiller:
    """All jobs of one replica. Mutable, owned by the role's event loop.

    `on_ended` is called after a job gave everything back."""

    def __init__(
        self,
        engine: Engine,
        driver: EngineDriver,
        stores: ClassStores,
        links: DecodeLinks,
        settings: EngineSettings,
        leases: LeaseTimes,
        clock: Clock,
        on_ended: Callable[[], None],
        depth_tokens: int | None = None,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._stores = stores
        self._links = links
        self._settings = settings
        self._leases = leases
        self._clock = clock
        self._on_ended = on_ended
        self.counts = Counts()
        self._attempts = Attempts()
        self._in_line = asyncio.Lock()  # first come, first served: asyncio wakes in this order
        self._room = asyncio.Event()  # something was given back to the engine
        self._closing: set[asyncio.Task[None]] = set()
        self._sealer = Sealer(engine, stores.own, leases, clock, self.counts)
        self._finder = Finder(engine, stores, self._sealer, self.counts, depth_tokens)
        self._steps_seen = 0
        self.jobs: dict[JobKey, Job] = {}
        self.draining = False

    # ---- what arrives ----------------------------------------------------------------------

    def accept(self, router: Peer, message: PrefillJob) -> None:
        """A new job, or one that is late, a duplicate, or refused."""
        key = message.request.key
        if self._attempts.begin(key) is not Verdict.NEW:
            self.counts.late += 1
            if key in self.jobs:
                self.jobs[key].step(JobEvent.AGAIN)
            return
        for job in tuple(self.jobs.values()):
            if job.key.request_id == key.request_id:
                self._end(job, JobEvent.CANCEL)
        waiting = sum(j.state in (JobState.FINDING, JobState.WAITING) for j in self.jobs.values())
        problem: HeadraceError | None = None
        if self.draining:
            problem = Unavailable("this prefill replica takes no new jobs")
        elif waiting >= self._settings.max_waiting:
            problem = Overloaded(
                f"max_waiting is {self._settings.max_waiting} jobs, {waiting} are waiting"
            )
        if problem is not None:
            self._attempts.close(key)
            router.post(JobFailed(key, problem.code, problem.message, retryable=True))
            return
        self.counts.jobs += 1
        job = Job(message, router, self._clock.now_s())
        self.jobs[key] = job
        job.task = asyncio.create_task(self._run(job), name=f"prefill {key}")

    def cancel(self, key: JobKey) -> None:
        """Give a job up because its router says so. Unknown, ended and older keys are counted."""
        job = self.jobs.get(key)
        self._attempts.close(key)
        if job is None:
            self.counts.late += 1
        else:
            self._end(job, JobEvent.CANCEL)

    def acknowledged(self, key: JobKey) -> None:
        """Decode copied everything. The leases are its own by now; nothing is left to do here."""
        job = self.jobs.get(key)
        if job is not None and not job.step(JobEvent.ACK):
            self.counts.late += 1

    def router_left(self, router: Peer) -> None:
        """Nobody waits for these any more."""
        for job in tuple(self.jobs.values()):
            if job.router is router and job.state not in TERMINAL:
                self._end(job, JobEvent.CANCEL)

    def decode_left(self, decode: Peer) -> None:
        """What is sealed stays in the store for the next attempt; this one is over."""
        for job in tuple(self.jobs.values()):
            if job.decode is decode and job.state not in TERMINAL:
                self._end(job, JobEvent.DECODE_GONE, ReplicaLost("the decode replica left"))

    def on_events(self, events: Sequence[Event]) -> None:
        """What the engine did in one step."""
        for event in events:
            job = self.jobs.get(event.key)
            if job is None:
                self.counts.late += 1
                continue
            try:
                self._on_event(job, event)
            except HeadraceError as error:
                self._end(job, JobEvent.ERROR, error)
            except Exception:  # a bug here must not take the other sequences of the step along
                log.exception("prefill job %s failed", job.key)
                self._end(job, JobEvent.ERROR, HeadraceError("prefill failed"))

    def _on_event(self, job: Job, event: Event) -> None:
        if isinstance(event, SequenceFailed):
            raise event.error
        if isinstance(event, RowsDone | TokenSampled):
            if job.step(JobEvent.ROWS_DONE):
                job.encoder_rows = event.encoder_rows
                job.decoder_rows = event.decoder_rows
                if isinstance(event, TokenSampled):
                    job.first_token_id = event.token_id
                job.events.put_nowait(event)
        elif isinstance(event, BlockDone | WindowDone) and job.step(JobEvent.PRODUCT):
            job.events.put_nowait(event)

    # ---- one job ---------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        try:
            async with asyncio.timeout(job.request.deadline_s):
                await self._walk(job)
        except Over:
            pass
        except TimeoutError:
            limit = DeadlineExceeded("the request's time ran out in prefill")
            self._end(job, JobEvent.ERROR, limit)
        except HeadraceError as error:
            self._end(job, JobEvent.ERROR, error)
        except ConnectionError as error:
            gone = ReplicaLost(f"the decode replica was lost: {error}")
            self._end(job, JobEvent.ERROR, gone)
        except Exception:
            log.exception("prefill job %s failed", job.key)
            self._end(job, JobEvent.ERROR, HeadraceError("prefill failed"))

    async def _walk(self, job: Job) -> None:
        job.decode = await self._links.get(job.message.decode_address)
        await self._finder.open_stored(job)
        await self._sealer.tell_stored(job)
        plan, window = await self._finder.plan(job, verify=False)
        begun_s = self._clock.now_s()
        if plan.encoder_rows:
            job.advance(JobEvent.FOUND)
            admission = await self._admit(job)
            job.advance(JobEvent.ADMITTED)
            begun_s = self._clock.now_s()
            # Blocks at or above the last row are not read here; decode verifies them itself.
            fills = tuple(f for f in admission.fills if f.index < plan.end // GRAIN)
            job.hit_blocks = await self._finder.fill(job, fills)
            plan, window = await self._finder.plan(job, verify=True)
        self.counts.hit_blocks += job.hit_blocks
        if plan.encoder_rows:
            pictures = await self._finder.pictures(job, plan)
            job.advance(JobEvent.STARTED)  # before the call: events may come before it returns
            await self._driver.call(self._engine.start, job.key, plan, window, pictures)
            await self._produce(job, plan)
        else:
            job.advance(JobEvent.ALL_STORED)
        run_s = self._clock.now_s() - begun_s
        self.counts.encoder_rows += job.encoder_rows
        hit_tokens = job.hit_blocks * GRAIN
        done = PrefillDone(job.key, job.encoder_rows, hit_tokens, run_s, job.decoder_rows)
        await job.decode.link.send(done)
        job.advance(JobEvent.ALL_TOLD)
        job.router.post(done)
        self._close_later(job)

    async def _admit(self, job: Job) -> Admission:
        """Wait for room behind all who came earlier. Raises `InvalidRequest` if it never fits."""
        request = job.request
        if self._engine.half is Half.FULL:
            request = replace(request, max_tokens=1)  # the first token, and blocks for no more
        wanted = EngineJob(request, as_token_ids(()), job.hit_blocks)
        async with self._in_line:
            while True:
                self._room.clear()
                admission = await self._driver.call(self._engine.admit, wanted)
                if admission is not None:
                    return admission
                await self._room.wait()

    # ---- products --------------------------------------------------------------------------

    async def _produce(self, job: Job, plan: RowPlan) -> None:
        """Seal and announce until the rows are done and all is told, or the store takes no more:
        then decode computes the rest, since blocks behind a gap are of no use to it."""
        reached = plan.start
        while True:
            events = [await job.events.get()]
            while not job.events.empty() and len(events) < SEAL_BATCH:
                events.append(job.events.get_nowait())
            faults.hit("prefill.chunk")
            blocks = [event for event in events if isinstance(event, BlockDone)]
            if blocks and not await self._sealer.blocks(job, blocks):
                self.counts.cut_short += 1
                if job.step(JobEvent.CUT_SHORT):
                    job.encoder_rows = reached - plan.start
                    await self._driver.call(self._engine.release, job.key)
                    self._room.set()
                return
            if blocks:
                reached = (blocks[-1].index + 1) * GRAIN
            for event in events:
                if isinstance(event, WindowDone):
                    await self._sealer.window(job, event)
            if any(isinstance(event, RowsDone | TokenSampled) for event in events):
                break
        if job.first_token_id is not None:
            payload = await self._driver.call(self._engine.export_state, job.key)
            await self._sealer.state(job, payload, job.first_token_id)

    # ---- ends ------------------------------------------------------------------------------

    def _end(self, job: Job, event: JobEvent, error: HeadraceError | None = None) -> None:
        """The one way out before the end; the second and later causes are ignored and counted."""
        if not job.step(event):
            self.counts.late += 1
            return
        self._attempts.close(job.key)
        if error is not None:
            retryable = isinstance(error, _RETRYABLE)
            failed = JobFailed(job.key, error.code, error.message, retryable)
            job.router.post(failed)
            if job.decode is not None:
                job.decode.post(failed)
        self._close_later(job)

    def _close_later(self, job: Job) -> None:
        self._attempts.close(job.key)
        closing = asyncio.create_task(self._close(job), name=f"close {job.key}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, job: Job) -> None:
        """Give back what the job holds. The leases of a finished hand-off are decode's to end."""
        assert job.task is not None
        while not job.task.done():
            # Again, because a cancellation can be lost on the way (seen: wait_for of Python 3.11).
            job.task.cancel()
            await asyncio.wait([job.task], timeout=0.05)
        with contextlib.suppress(Unavailable):  # an engine that ended holds nothing
            await self._driver.call(self._engine.release, job.key)
        self._room.set()
        if job.state is not JobState.DONE:
            await self._stores.release(job.key)
        del self.jobs[job.key]
        self._on_ended()

    async def keep(self) -> None:
        """Call every third of `handoff_s`: prolongs the leases of live jobs and tells decode that
        they are alive, as long as the engine makes steps or has none to make."""
        stats = self._driver.stats
        moving = stats.steps != self._steps_seen or stats.running == 0
        self._steps_seen = stats.steps
        for job in tuple(self.jobs.values()):
            if job.state in TERMINAL:
                continue
            await self._stores.renew(job.key)
            if moving and job.decode is not None and job.state not in TERMINAL:
                job.decode.post(BlocksReady(job.key, 0, (), ()))

    async def stop(self, reason: str) -> None:
        """End every job with a retryable failure and wait until all is given back."""
        for job in tuple(self.jobs.values()):
            if job.state not in TERMINAL:
                self._end(job, JobEvent.ERROR, ReplicaLost(reason))
        while self._closing:
            await asyncio.wait(tuple(self._closing))
        self._finder.close()
