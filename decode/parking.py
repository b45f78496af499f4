"""The line before the engine, and how its jobs leave room for each other.

New jobs and parked ones stand in one line; the first asks the engine, and what it lacks others
give up by `engine.give_way`. Who gives way is held between two steps, its private state goes to the
arena under its own lease, and its slot to the first in line. Where blocks lack, its complete blocks
are sealed there too and the engine forgets it. What finds no room in the arena is not parked and
goes on. When a parked job is the first in line and has room it goes on from these bytes and runs no
row again; where they are gone or damaged it runs the rows of "resume at M": the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from headrace.core.chain import parked_digest
from headrace.core.ids import Digest, JobKey
from headrace.core.messages import Place
from headrace.core.rows import GRAIN
from headrace.decode.handoff import Counts, DecodeEvent
from headrace.decode.jobs import Job, Parked
from headrace.decode.load import Loader
from headrace.engine import Admission, Engine, EngineDamaged, EngineDriver, Room, give_way
from headrace.engine import Job as EngineJob
from headrace.kvstore import ClassStores, Kind

KEEP_S = 2.0  # a stream that is asked to give way stands still for so long at most

JobWork: TypeAlias = Callable[[Job], Coroutine[Any, Any, None]]
# Runs work of a job as a task; whatever it raises ends the job.
Spawn: TypeAlias = Callable[[Job, JobWork], asyncio.Task[None]]


class Line:
    """Used from the role's loop. What it does for a job happens in tasks of that job, `job.task`
    and `job.leaving`, so that the job's end ends it too; leases are the job's."""

    def __init__(
        self,
        engine: Engine,
        driver: EngineDriver,
        stores: ClassStores,
        loader: Loader,
        jobs: Mapping[JobKey, Job],
        counts: Counts,
        park_after_tokens: int,
        spawn: Spawn,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._stores = stores
        self._loader = loader
        self._jobs = jobs
        self._counts = counts
        self._after = park_after_tokens
        self._spawn = spawn
        self._turn = asyncio.Lock()  # first come, first served: asyncio wakes in this order
        self._news = asyncio.Event()

    def news(self) -> None:
        """Something was given back to the engine: the first in line looks again."""
        self._news.set()

    def ran(self, job: Job) -> None:
        """One more token of a job; from `park_after_tokens` on it may be asked to give way."""
        job.since_tokens += 1
        if job.since_tokens == self._after:
            self._news.set()

    async def admit(self, job: Job) -> None:
        """Wait for room behind all who came earlier, then reserve for every block that may come.

        Raises `InvalidRequest` if it never fits."""
        if self._turn.locked():
            self._loader.in_line(job)
        async with self._turn:
            admission = await self._admit(job)
        job.stages.resident_tokens = job.admitted(admission) * GRAIN
        job.advance(DecodeEvent.ADMITTED)
        self._loader.admitted(job)

    async def _admit(self, job: Job) -> Admission:
        n_blocks = len(job.handoff.digests)
        wanted = EngineJob(job.request, job.message.generated_ids, n_blocks)
        while True:
            self._news.clear()
            admission = await self._driver.call(self._engine.admit, wanted)
            if admission is not None:
                return admission
            self._loader.in_line(job)
            await self._make_room(job, await self._room(job, wanted))

    async def _room(self, first: Job, wanted: EngineJob | None) -> Room:
        may = {
            job.key: job.since_tokens
            for job in self._jobs.values()
            if job is not first and job.may_give_way
        }
        return await self._driver.call(self._engine.parking.room, wanted, may)

    async def _make_room(self, first: Job, room: Room) -> None:
        """Let others give way, or wait until something has changed."""
        if room.suffices:
            return
        leaving = []
        for way in give_way(room, self._after):
            job = self._jobs.get(way.key)
            if job is not None and job is not first and job.may_give_way:
                leave = self._leave if way.gives_blocks else self._leave_slot
                job.leaving = self._spawn(job, leave)
                # For whoever is the first by then: this one may be cancelled while it waits.
                job.leaving.add_done_callback(lambda _: self._news.set())
                leaving.append(job.leaving)
        if leaving:
            await asyncio.wait(leaving)
        else:
            await self._news.wait()

    # ---- giving way ----------------------------------------------------------------------------

    async def _leave_slot(self, job: Job) -> None:
        await self._park(job, gives_blocks=False)

    async def _leave(self, job: Job) -> None:
        """Give up blocks, and the slot if it still has one."""
        if job.parked is None:
            await self._park(job, gives_blocks=True)
        else:
            blocks = await self._seal_blocks(job)
            if blocks is None:
                self._counts.parkings_refused += 1
                job.parked = replace(job.parked, clings=True)
                await self._stores.own.release(job.key, Kind.KV)
            else:
                await self._driver.call(self._engine.release, job.key)
                job.parked = replace(job.parked, blocks=blocks)

    async def _park(self, job: Job, gives_blocks: bool) -> None:
        if job.task is not None and not job.task.done():
            await asyncio.wait([job.task])  # it is about to end the lease of loaded blocks
        payload = await self._driver.call(self._engine.parking.hold, job.key)
        if payload is None:
            return  # it ended meanwhile
        length_tokens = job.length_tokens - 1  # the newest token has no row
        digest = parked_digest(job.key, length_tokens)
        place = blocks = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_S):
                place = await self._put_state(job, digest, payload)
                blocks = await self._seal_blocks(job) if place and gives_blocks else None
        if place is None or (gives_blocks and blocks is None):
            self._counts.parkings_refused += 1
            job.since_tokens = 0  # it is asked again after as many tokens
            await self._driver.call(self._engine.parking.unhold, job.key)
            for kind in (Kind.STATE, Kind.KV):
                await self._stores.own.release(job.key, kind)
            return
        job.advance(DecodeEvent.PARK)
        job.parked = Parked(digest, place, length_tokens, blocks)
        if gives_blocks:
            await self._driver.call(self._engine.release, job.key)
        else:
            await self._driver.call(self._engine.parking.park, job.key)
        self._counts.parkings += 1
        job.task = self._spawn(job, self._go_on)

    async def _put_state(self, job: Job, digest: Digest, payload: bytes) -> Place | None:
        store, domain = self._stores.own, job.request.domain
        (place,) = await store.put(Kind.STATE, [(digest, payload)], lease=job.key, domain=domain)
        return place

    async def _seal_blocks(self, job: Job) -> tuple[Place, ...] | None:
        """Put all complete blocks under the job's lease; most are there already. None: no room."""
        blocks = await self._driver.call(self._engine.parking.complete_blocks, job.key)
        root, domain = job.request.chain_root, job.request.domain
        places = await self._stores.own.put(
            Kind.KV, blocks, lease=job.key, parent=root, domain=domain
        )
        sealed = tuple(place for place in places if place is not None)
        return sealed if len(sealed) == len(places) else None

    # ---- going on ------------------------------------------------------------------------------

    async def _go_on(self, job: Job) -> None:
        async with self._turn:
            if job.leaving is not None:
                await asyncio.wait([job.leaving])  # it may be giving up its blocks
            parked = job.parked
            assert parked is not None
            lost = parked.blocks is None and not await self._unpark(job, parked)
            again = lost or parked.blocks is not None
            if again:
                # Nobody else can take meanwhile what one without its state gives back here.
                await self._driver.call(self._engine.release, job.key)
                job.rewind(parked.length_tokens)
                job.admitted(await self._admit(job))
        if again:
            await self._restart(job, parked, lost)
        await self._stores.release(job.key, Kind.KV)
        await self._stores.release(job.key, Kind.STATE)

    async def _unpark(self, job: Job, parked: Parked) -> bool:
        """Wait for a slot and go on in it; False when the state is gone."""
        while True:
            self._news.clear()
            room = await self._room(job, None)
            if room.suffices:
                break
            await self._make_room(job, room)
        payload = await self._loader.parked(job, parked)
        if payload is None:
            return False
        self._unparks(job)
        if not await self._driver.call(self._engine.parking.unpark, job.key, payload):
            raise EngineDamaged(f"{job.key}: a slot that was free is gone")
        return True

    async def _restart(self, job: Job, parked: Parked, lost: bool) -> None:
        """Go on in a new place: blocks from the engine or the store, and the state unless it is
        lost, or rows."""
        await self._loader.parked_blocks(job, parked)
        whole = job.handoff.verified_blocks == parked.length_tokens // GRAIN
        payload = await self._loader.parked(job, parked) if whole and not lost else None
        if payload is not None:
            self._unparks(job)
            await self._driver.call(self._engine.adopt, job.key, payload, job.ran)
            return
        self._counts.parkings_lost += 1
        plan, window = await self._loader.finish(job)
        job.planned(plan)
        pictures = await self._loader.pictures(job, plan)
        self._unparks(job)
        await self._driver.call(self._engine.start, job.key, plan, window, pictures)

    def _unparks(self, job: Job) -> None:
        """Before the engine is told: a token may come before its answer does."""
        job.since_tokens = 0
        job.parked = None
        job.advance(DecodeEvent.UNPARK)
