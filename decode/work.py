"""What a decode replica does with its jobs: reserve, load, verify, replay, step, commit.

Frames move a job through `handoff.DECODE_TABLE`; a task per job walks it from the queue to its
first row; the engine's events do the rest. Whatever ends a job before its last token goes through
`_end`; whatever it holds (engine blocks and slot, store leases) is given back in `_close`, once.
All of it runs on one event loop; only copies out of the arena happen in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from headrace.core import faults
from headrace.core.attempts import Attempts, Verdict
from headrace.core.clock import Clock
from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    Overloaded,
    ReplicaLost,
    Unavailable,
    from_code,
)
from headrace.core.ids import JobKey
from headrace.core.limits import LeaseTimes
from headrace.core.messages import (
    BlocksReady,
    DecodeJob,
    JobFailed,
    PrefillDone,
    StateReady,
    TokenBatch,
    TokenItem,
    WindowReady,
)
from headrace.core.peers import Peer
from headrace.core.rows import StartKind
from headrace.core.states import Over
from headrace.core.tasks import end_tasks
from headrace.decode.commit import Committer
from headrace.decode.handoff import (
    TERMINAL,
    Announcement,
    Counts,
    DecodeEvent,
    DecodeState,
    EarlyFrames,
)
from headrace.decode.jobs import Job, Stages
from headrace.decode.load import Loader
from headrace.decode.parking import JobWork, Line
from headrace.engine import (
    BlockDone,
    Engine,
    EngineDriver,
    EngineSettings,
    Event,
    SequenceFailed,
    TokenSampled,
    WindowDone,
)
from headrace.kvstore import ClassStores, Kind

log = logging.getLogger(__name__)

FLUSH_S = 2.0  # at stop, for what is queued for the store


class Decoder:
    """All jobs of one replica. Mutable, owned by the role's event loop.

    `find_prefill(name)` is the connected prefill replica of that name, if there is one;
    `on_ended` is called after a job gave everything back; `depth_tokens` is the replay's depth
    where the deployment replays, else None."""

    def __init__(
        self,
        engine: Engine,
        driver: EngineDriver,
        stores: ClassStores,
        settings: EngineSettings,
        leases: LeaseTimes,
        clock: Clock,
        find_prefill: Callable[[str], Peer | None],
        on_ended: Callable[[], None],
        depth_tokens: int | None = None,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._stores = stores
        self._settings = settings
        self._leases = leases
        self._clock = clock
        self._find_prefill = find_prefill
        self._on_ended = on_ended
        self._attempts = Attempts()
        self._closing: set[asyncio.Task[None]] = set()
        self.early = EarlyFrames(leases.handoff_s)
        self.jobs: dict[JobKey, Job] = {}
        self.counts = Counts()
        self._loader = Loader(engine, driver, stores, clock, self.counts, depth_tokens)
        after, spawn = settings.park_after_tokens, self._spawn
        self._line = Line(
            engine, driver, stores, self._loader, self.jobs, self.counts, after, spawn
        )
        self.committer = Committer(stores.own, self.counts)
        self._committing = asyncio.create_task(self.committer.run(), name="commit")
        self.draining = False

    # ---- jobs and their end, from routers ----------------------------------------------------

    def accept(self, router: Peer, message: DecodeJob) -> None:
        """A new job, or one that is late, a duplicate, or refused."""
        key = message.request.key
        if self._attempts.begin(key) is not Verdict.NEW:
            self.counts.late += 1
            if key in self.jobs:
                self.jobs[key].step(DecodeEvent.AGAIN)
            return
        for other in tuple(self.jobs.values()):
            if other.key.request_id == key.request_id:
                self._end(other, DecodeEvent.CANCEL)
        problem = self._refusal()
        if problem is not None:
            self._attempts.close(key)
            self.early.take(key)
            may_retry = problem.may_go_elsewhere
            router.post(JobFailed(key, problem.code, problem.message, may_retry))
            return
        self.counts.jobs += 1
        job = Job(message, router, Stages(self._clock.now_s()))
        self.jobs[key] = job
        job.task = self._spawn(job, self._walk)
        job.deadline = asyncio.get_running_loop().call_later(
            message.request.deadline_s, self._expired, job
        )
        self._take_early(job)

    def _refusal(self) -> HeadraceError | None:
        try:
            faults.hit("decode.accept")
        except HeadraceError as error:
            return error
        waiting = sum(job.waits_for_room or job.is_parked for job in self.jobs.values())
        if self.draining:
            return Unavailable("this decode replica takes no new jobs")
        if waiting >= self._settings.max_waiting:
            return Overloaded(
                f"max_waiting is {self._settings.max_waiting} jobs, {waiting} are waiting"
            )
        return None

    def cancel(self, key: JobKey) -> None:
        """Give a job up because its router says so. Unknown, ended and older keys are counted;
        announcements that come later for such a key are late."""
        job = self.jobs.get(key)
        self._attempts.close(key)
        self.early.take(key)
        if job is None:
            self.counts.late += 1
        else:
            self._end(job, DecodeEvent.CANCEL)

    def peer_left(self, peer: Peer) -> None:
        """Nobody waits for the jobs of a router that left; a hand-off whose prefill replica left
        before all was told will not be completed."""
        for job in tuple(self.jobs.values()):
            if job.state in TERMINAL:
                continue
            if job.router is peer:
                self._end(job, DecodeEvent.CANCEL)
            elif job.source is peer and not job.told.is_set():
                gone = ReplicaLost("the prefill replica left during the hand-off")
                self._end(job, DecodeEvent.PREFILL_GONE, gone)

    def _expired(self, job: Job) -> None:
        if job.state not in TERMINAL:
            late = DeadlineExceeded("the request's time ran out in decode")
            self._end(job, DecodeEvent.ERROR, late)

    # ---- the hand-off, from prefill ------------------------------------------------------------

    def announced(self, peer: Peer, message: Announcement) -> None:
        """A frame of a hand-off. Those that come before their job are held for a while."""
        job = self.jobs.get(message.key)
        if job is not None:
            job.source = peer
            self._on_announcement(job, message)
        elif self._attempts.look(message.key) is not Verdict.NEW:
            self.counts.late += 1
        elif not self.early.hold(message, self._clock.now_s()):
            self.counts.early_dropped += 1

    def _take_early(self, job: Job) -> None:
        messages = self.early.take(job.key)
        if not messages:
            return
        job.source = self._find_prefill(job.message.prefill_name)
        for message in messages:
            self._on_announcement(job, message)
        if job.source is None and not job.told.is_set() and job.state not in TERMINAL:
            gone = ReplicaLost("the prefill replica left during the hand-off")
            self._end(job, DecodeEvent.PREFILL_GONE, gone)

    def _on_announcement(self, job: Job, message: Announcement) -> None:
        if isinstance(message, JobFailed):
            failed = from_code(message.code, message.message)
            self._end(job, DecodeEvent.PREFILL_FAILED, failed, retryable=message.retryable)
            return
        event = {
            BlocksReady: DecodeEvent.BLOCKS,
            WindowReady: DecodeEvent.WINDOW,
            StateReady: DecodeEvent.STATE,
            PrefillDone: DecodeEvent.PREFILL_DONE,
        }[type(message)]
        if not job.step(event):
            self.counts.late += 1
            if event is DecodeEvent.PREFILL_DONE and job.state is DecodeState.STREAMING:
                job.acknowledge()  # told again, so the first word was lost
            return
        job.progress_s = self._clock.now_s()
        if isinstance(message, PrefillDone):
            job.told.set()
        else:
            self._loader.announced(job, message)

    # ---- from the queue to the first row ---------------------------------------------------------

    def _spawn(self, job: Job, work: JobWork) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(job, work), name=f"decode {job.key}")

    async def _run(self, job: Job, work: JobWork) -> None:
        try:
            await work(job)
        except Over:
            pass
        except HeadraceError as error:
            self._end(job, DecodeEvent.ERROR, error)
        except Exception:
            log.exception("decode job %s failed", job.key)
            self._end(job, DecodeEvent.ERROR, HeadraceError("decode failed"))

    async def _walk(self, job: Job) -> None:
        await self._line.admit(job)
        if not job.message.await_prefill and job.fills:
            await self._loader.open_stored(job)
        await job.told.wait()
        plan, window = await self._loader.finish(job)
        job.planned(plan)
        pictures = await self._loader.pictures(job, plan)
        job.stages.started_s = self._clock.now_s()
        job.advance(DecodeEvent.STARTED)  # before the call: events may come before it returns
        if plan.kind is StartKind.STATE and job.state_bytes is not None:
            await self._driver.call(self._engine.adopt, job.key, job.state_bytes)
            job.state_bytes = None
        else:
            await self._driver.call(self._engine.start, job.key, plan, window, pictures)
        await self._stores.release(job.key, Kind.KV)

    # ---- what the engine did -------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """One step's events: all tokens for one router leave in one frame."""
        items: dict[Peer, list[TokenItem]] = {}
        for event in events:
            job = self.jobs.get(event.key)
            if job is None or job.state in TERMINAL:
                self.counts.late += 1
                continue
            try:
                item = self._on_event(job, event)
            except HeadraceError as error:
                self._end(job, DecodeEvent.ERROR, error)
            except Exception:  # a bug here must not take the other sequences of the step along
                log.exception("decode job %s failed", job.key)
                self._end(job, DecodeEvent.ERROR, HeadraceError("decode failed"))
            else:
                if item is not None:
                    items.setdefault(job.router, []).append(item)
        for router, batch in items.items():
            router.post(TokenBatch(tuple(batch)))

    def _on_event(self, job: Job, event: Event) -> TokenItem | None:
        if isinstance(event, TokenSampled):
            return self._on_token(job, event)
        if isinstance(event, BlockDone):
            # A copy: the block may be handed out again as soon as the sequence is released.
            payload = bytes(self._engine.block_view(event.block))
            self.committer.block(job, event.index, event.digest, payload)
        elif isinstance(event, WindowDone):
            if event.position <= job.known_tokens:
                self.committer.window(job, event.position, event.payload)
            else:
                job.held_windows.append((event.position, event.payload))
        elif isinstance(event, SequenceFailed):
            raise event.error
        return None

    def _on_token(self, job: Job, event: TokenSampled) -> TokenItem:
        first = job.state is DecodeState.REPLAYING
        faults.hit("decode.first_token" if first else "decode.token")
        item = job.token(event, self._clock.now_s())
        self._line.ran(job)
        if event.finish is not None:
            self._close_later(job)
        return item

    # ---- ends ----------------------------------------------------------------------------------

    def _end(
        self,
        job: Job,
        event: DecodeEvent,
        error: HeadraceError | None = None,
        *,
        retryable: bool | None = None,
    ) -> None:
        """The one way out before the end; the second and later causes are ignored and counted."""
        streaming = job.state in (DecodeState.STREAMING, DecodeState.PARKED)
        if not job.step(event):
            self.counts.late += 1
            return
        if error is not None:
            if retryable is None:
                retryable = error.may_go_elsewhere
            job.router.post(JobFailed(job.key, error.code, error.message, retryable))
        self._close_later(job, keep_windows=streaming and event is DecodeEvent.CANCEL)

    def _close_later(self, job: Job, *, keep_windows: bool = True) -> None:
        """`keep_windows`: the text so far may be the beginning of a next turn, also when a router
        cancels because it saw a stop string."""
        self._attempts.close(job.key)
        if keep_windows:
            for position, payload in job.windows_to_commit(job.length_tokens):
                self.committer.window(job, position, payload)
        job.held_windows.clear()
        closing = asyncio.create_task(self._close(job), name=f"close {job.key}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, job: Job) -> None:
        """Give back what the job holds. Loads are ended first, so that none leases anything later;
        their threads are not waited for: the tickets of their fills are closed by the release."""
        if job.deadline is not None:
            job.deadline.cancel()
        await end_tasks(lambda: (job.leaving, job.task, *job.loads))
        with contextlib.suppress(Unavailable):  # an engine that ended holds nothing
            await self._driver.call(self._engine.release, job.key)
        self._line.news()
        await self._stores.release(job.key)
        del self.jobs[job.key]
        self._on_ended()

    async def keep(self) -> None:
        """Call every third of `handoff_s`: prolongs the leases of live jobs."""
        for job in tuple(self.jobs.values()):
            if job.state not in TERMINAL:
                await self._stores.renew(job.key)

    async def watch(self) -> None:
        """Call a few times a second: ends hand-offs without progress, forgets early frames."""
        now_s, limit_s = self._clock.now_s(), self._leases.handoff_s
        self.counts.early_dropped += self.early.expire(now_s)
        for job in tuple(self.jobs.values()):
            silent = not job.told.is_set() and now_s - job.progress_s > limit_s
            if silent and job.state not in TERMINAL:
                stalled = ReplicaLost(f"no progress of the hand-off for {limit_s} s")
                self._end(job, DecodeEvent.STALLED, stalled)

    async def stop(self, reason: str) -> None:
        """End every job with a retryable failure, wait until all is given back, and write what is
        queued for the store for at most `FLUSH_S`."""
        for job in tuple(self.jobs.values()):
            if job.state not in TERMINAL:
                self._end(job, DecodeEvent.ERROR, ReplicaLost(reason))
        while self._closing:
            await asyncio.wait(self._closing)
        await self.committer.flush(FLUSH_S)
        self._committing.cancel()
        self._loader.close()
