"""Seals what the engine made, under the job's lease, and adds it to the job's product."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.core import faults
from headrace.core.chain import state_digest, window_digest
from headrace.core.clock import Clock
from headrace.core.ids import Digest
from headrace.core.limits import LeaseTimes
from headrace.core.messages import BlocksReady, Place, StateReady, WindowReady
from headrace.core.request import HandoffMode
from headrace.core.rows import GRAIN, record_position
from headrace.engine import BlockDone, Engine, WindowDone
from headrace.kvstore import Kind, StoreClient
from headrace.prefill.jobs import Counts, Job

SEAL_BATCH = 16  # blocks put in one round trip
SEAL_WAIT_S = 0.25  # one wait for room; between two, a cancel is noticed


class Sealer:
    """Used from the role's loop."""

    def __init__(
        self,
        engine: Engine,
        store: StoreClient,
        leases: LeaseTimes,
        clock: Clock,
        counts: Counts,
    ) -> None:
        self._engine = engine
        self._store = store
        self._leases = leases
        self._clock = clock
        self._counts = counts

    async def blocks(self, job: Job, blocks: list[BlockDone]) -> bool:
        """Seal blocks that follow each other. A full arena is backpressure: while the
        store is there this waits for room, and gives up when none came for a third of
        `handoff_s`. False when not all were taken."""
        if faults.hit("prefill.seal") == "drop":
            return False
        request, done = job.request, 0
        room_s = self._clock.now_s()
        while done < len(blocks):
            first = blocks[done].index
            answers = await self._store.put(
                Kind.KV,
                [(event.digest, self._engine.block_view(event.block)) for event in blocks[done:]],
                lease=job.key,
                wait_s=SEAL_WAIT_S,
                parent=job.parent_of(first),
                first_block=first,
                domain=request.domain,
            )
            places = _leading(answers)
            self.tell_blocks(job, first, places)
            done += len(places)
            self._counts.sealed_blocks += len(places)
            now_s = self._clock.now_s()
            if places:
                room_s = now_s
            elif not self._store.connected or now_s - room_s > self._leases.handoff_s / 3:
                break
            else:
                await asyncio.sleep(SEAL_WAIT_S / 5)
        return done == len(blocks)

    async def window(self, job: Job, event: WindowDone) -> None:
        """The record at p belongs to the hand-off; others are for later turns and may be dropped.
        A missing one costs decode rows, never the text, so nobody waits for it."""
        request = job.request
        block = request.digests[event.position // GRAIN - 1]
        digest = window_digest(block)
        wanted = self._is_awaited(job, event.position)
        (place,) = await self._store.put(
            Kind.SWA,
            [(digest, event.payload)],
            lease=job.key if wanted else None,
            wait_s=SEAL_WAIT_S if wanted else 0.0,
            parent=block,
            first_block=event.position // GRAIN,
            domain=request.domain,
        )
        if wanted and place is not None:
            self.tell_window(job, event.position, digest, place)

    async def state(self, job: Job, payload: bytes, first_token_id: int) -> None:
        """Mode `state`: what decode goes on from. Where there is no room for it decode runs the
        rows itself, so nobody waits long."""
        request, digest = job.request, state_digest(job.key)
        (place,) = await self._store.put(
            Kind.STATE,
            [(digest, payload)],
            lease=job.key,
            wait_s=SEAL_WAIT_S,
            domain=request.domain,
        )
        if place is not None:
            n_tokens, epoch = request.n_tokens, job.key.epoch
            ready = StateReady(job.key, n_tokens, digest, place, first_token_id, epoch)
            job.product.add(ready)

    def tell_stored(self, job: Job) -> None:
        """Announce the stored prefix: the exact blocks of it under their own keys."""
        exact = job.exact_digests
        if exact:
            job.product.add(BlocksReady(job.key, 0, exact, job.places[: len(exact)]))
        self.tell_blocks(job, len(exact), job.places[len(exact) :])

    def tell_blocks(self, job: Job, first: int, places: tuple[Place, ...]) -> None:
        if places:
            digests = job.request.digests[first : first + len(places)]
            job.product.add(BlocksReady(job.key, first, digests, places))

    def tell_window(self, job: Job, position: int, digest: Digest, place: Place) -> None:
        if self._is_awaited(job, position):
            job.product.add(WindowReady(job.key, position, digest, place))

    @staticmethod
    def _is_awaited(job: Job, position: int) -> bool:
        """Whether decode needs the record there; in mode `state` it needs none."""
        request = job.request
        p = record_position(request.n_tokens, request.keep_tokens)
        return position == p and request.mode is not HandoffMode.STATE


def _leading(answers: Sequence[Place | None]) -> tuple[Place, ...]:
    """The places before the first None."""
    places: list[Place] = []
    for place in answers:
        if place is None:
            break
        places.append(place)
    return tuple(places)
