"""What a prefill replica does with its jobs: find, fill, run, seal, hold until decode has it.

Each live job has one task that walks it through `jobs.JOB_TABLE`; whatever ends a job goes through
`_end`; whatever it holds (engine blocks and slot, store leases) is given back in `_close`, once.
Leases are the prefill attempt's own: no end of a decode attempt frees what the next one reads.
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
    ReplicaLost,
    Unavailable,
)
from headrace.core.ids import JobKey
from headrace.core.limits import LeaseTimes
from headrace.core.messages import BindDecode, JobFailed, PrefillDone, PrefillJob
from headrace.core.peers import Peer
from headrace.core.rows import GRAIN, RowPlan
from headrace.core.states import Over
from headrace.core.tasks import end_tasks
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
from headrace.prefill.jobs import NOT_ADMITTED, TERMINAL, Counts, Job, JobEvent, JobState
from headrace.prefill.links import DecodeLinks
from headrace.prefill.seal import SEAL_BATCH, Sealer
from headrace.prefill.tell import Teller
from headrace.prefill.underway import Underway, block_to_await, wait_bound_s

log = logging.getLogger(__name__)


class Prefiller:
    """All jobs of one replica. Mutable, owned by the role's event loop.

    `on_ended` is called after a job gave everything back; `wait_factor` as in `wait_bound_s`."""

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
        wait_factor: float = 4.0,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._stores = stores
        self._wait_factor = wait_factor
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
        self._teller = Teller(links, lambda job, error: self._end(job, JobEvent.ERROR, error))
        self.underway = Underway()
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
        waiting = sum(other.state in NOT_ADMITTED for other in self.jobs.values())
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

    def bind(self, router: Peer, message: BindDecode) -> None:
        """Hand a job's product to the decode attempt named. For one that is over the router is told
        so: it may have been lost on the way that it failed."""
        job = self.jobs.get(message.key)
        if job is None or job.state in TERMINAL:
            self.counts.late += 1
            over = ReplicaLost("the prefill attempt is over")
            router.post(JobFailed(message.key, over.code, over.message, retryable=True))
        elif not self._teller.bind(job, message):
            self.counts.late += 1

    def acknowledged(self, key: JobKey) -> None:
        """The decode attempt `key` has its first token. From one that is not bound: late."""
        job = next((j for j in self.jobs.values() if j.binding.decode_key == key), None)
        if job is None or not job.step(JobEvent.ACK):
            self.counts.late += 1
        else:
            job.acknowledged.set()

    def peer_left(self, peer: Peer) -> None:
        """Nobody waits for these any more."""
        for job in tuple(self.jobs.values()):
            if job.router is peer and job.state not in TERMINAL:
                self._end(job, JobEvent.CANCEL)

    def decode_left(self, decode: Peer) -> None:
        """The jobs bound to it go on; their routers name another, or cancel."""
        for job in tuple(self.jobs.values()):
            if job.binding.peer is decode:
                self._teller.lost(job, ReplicaLost("the decode replica left"))

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
                job.reached = job.rows_end
                job.events.put_nowait(event)
        elif isinstance(event, BlockDone | WindowDone) and job.step(JobEvent.PRODUCT):
            if isinstance(event, BlockDone):
                job.reached = (event.index + 1) * GRAIN
            job.events.put_nowait(event)
        if job.rows_left <= self._settings.max_rows_per_step:
            self._teller.near(job)

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
        except Exception:
            log.exception("prefill job %s failed", job.key)
            self._end(job, JobEvent.ERROR, HeadraceError("prefill failed"))

    async def _walk(self, job: Job) -> None:
        plan = await self._find(job)
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
            # Where a stored block was damaged these are more than before.
            self.underway.claim(job.key, job.request.digests[job.hit_blocks :])
            pictures = await self._finder.pictures(job, plan)
            job.rows_end, job.reached = plan.end, plan.start
            job.advance(JobEvent.STARTED)  # before the call: events may come before it returns
            if job.rows_left <= self._settings.max_rows_per_step:
                self._teller.near(job)
            await self._driver.call(self._engine.start, job.key, plan, window, pictures)
            await self._produce(job, plan)
        else:
            job.advance(JobEvent.ALL_STORED)
        self.underway.ended(job.key)
        self._teller.near(job)
        run_s = self._clock.now_s() - begun_s
        self.counts.encoder_rows += job.encoder_rows
        hit_tokens = job.hit_blocks * GRAIN
        job.advance(JobEvent.ALL_SEALED)
        job.product.add(PrefillDone(job.key, job.encoder_rows, hit_tokens, run_s, job.decoder_rows))
        await self._give_room(job)  # only leases are held from here on
        await job.acknowledged.wait()
        self._close_later(job)

    async def _find(self, job: Job) -> RowPlan:
        """What is stored, after waiting for blocks that another job is computing."""
        digests = job.request.digests
        while self._wait_factor and (block := block_to_await(digests, self.underway.computers)):
            bound_s = self._wait_bound_s(job)
            job.advance(JobEvent.UNDERWAY)
            self.counts.awaited += 1
            there = await self.underway.wait(block, bound_s)
            job.advance(JobEvent.LOOK_AGAIN)
            if not there:
                self.counts.wait_ended += 1
                break
        self.underway.claim(job.key, digests)
        await self._finder.open_stored(job)
        self.underway.sealed(job.key, digests[: job.hit_blocks])
        plan, _ = await self._finder.plan(job, verify=False)
        self._sealer.tell_stored(job)
        return plan

    def _wait_bound_s(self, job: Job) -> float:
        """By all rows that are before the engine, of whichever job: it runs them side by side."""
        stats = self._driver.stats
        others = (other for other in self.jobs.values() if other is not job)
        rows = sum(o.rows_to_come for o in others if o.state is not JobState.PENDING)
        rows += stats.backlog_rows
        return wait_bound_s(rows, stats.rows_per_s, self._wait_factor, self._leases.handoff_s)

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
        """Seal until the rows are done and all is sealed, or the store takes no more: then decode
        computes the rest, since blocks behind a gap are of no use to it."""
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
                    await self._give_room(job)
                return
            if blocks:
                reached = (blocks[-1].index + 1) * GRAIN
            for event in events:
                if isinstance(event, WindowDone):
                    await self._sealer.window(job, event)
            # After the records of the same rows. Who waits for the last block wants all of them,
            # and is woken when the job has nothing more to seal.
            whole = [block for block in blocks if block.index + 1 < len(job.request.digests)]
            self.underway.sealed(job.key, [block.digest for block in whole])
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
            retryable = error.may_go_elsewhere
            failed = JobFailed(job.key, error.code, error.message, retryable)
            job.router.post(failed)
            peer, key = job.binding.peer, job.binding.decode_key
            if peer is not None and key is not None:
                peer.post(replace(failed, key=key))
        self._close_later(job)

    def _close_later(self, job: Job) -> None:
        self._attempts.close(job.key)
        job.binding.stop()
        self.underway.ended(job.key)
        closing = asyncio.create_task(self._close(job), name=f"close {job.key}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, job: Job) -> None:
        """Give back what the job holds. What is sealed stays in the store, for whoever finds it."""
        await end_tasks(lambda: (job.task,))
        self.underway.ended(job.key)  # once more: the task may have claimed on its last steps
        await self._give_room(job)
        await self._stores.release(job.key)
        del self.jobs[job.key]
        self._on_ended()

    async def _give_room(self, job: Job) -> None:
        """Give back engine blocks and slot. Idempotent."""
        with contextlib.suppress(Unavailable):  # an engine that ended holds nothing
            await self._driver.call(self._engine.release, job.key)
        self._room.set()

    async def keep(self) -> None:
        """Call every third of `handoff_s`: prolongs the leases of live jobs and says that they are
        alive, as long as the engine makes steps or has none to make."""
        stats = self._driver.stats
        moving = stats.steps != self._steps_seen or stats.running == 0
        self._steps_seen = stats.steps
        for job in tuple(self.jobs.values()):
            if job.state in TERMINAL:
                continue
            await self._stores.renew(job.key)
            if job.state not in TERMINAL:
                self._teller.keep(job, moving=moving)

    async def stop(self, reason: str) -> None:
        """End every job with a retryable failure and wait until all is given back."""
        for job in tuple(self.jobs.values()):
            if job.state not in TERMINAL:
                self._end(job, JobEvent.ERROR, ReplicaLost(reason))
        while self._closing:
            await asyncio.wait(tuple(self._closing))
        self._finder.close()
