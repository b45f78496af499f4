"""Seals what the engine made and announces it to decode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.core import faults
from headrace.core.chain import window_digest
from headrace.core.clock import Clock
from headrace.core.ids import Digest
from headrace.core.limits import LeaseTimes
from headrace.core.messages import BlocksReady, Place, WindowReady
from headrace.core.rows import GRAIN, record_position
from headrace.engine import BlockDone, Engine, WindowDone
from headrace.kvstore import Kind, StoreClient
from headrace.prefill.jobs import Counts, Job

SEAL_BATCH = 16  # blocks put in one round trip
SEAL_WAIT_S = 0.25  # one wait for room; between two, a cancel is noticed


class Sealer:
    """Used from the role's loop. Raises `ConnectionError` when decode is gone."""

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
        """Blocks of one batch follow each other. False when the store did not take them all."""
        items = [(event.digest, self._engine.block_view(event.block)) for event in blocks]
        first = blocks[0].index
        places = await self._seal(job, items, first)
        await self.tell_blocks(job, first, places)
        self._counts.sealed_blocks += len(places)
        return len(places) == len(items)

    async def _seal(
        self, job: Job, items: list[tuple[Digest, memoryview]], first: int
    ) -> tuple[Place, ...]:
        """Put blocks, waiting for room while the store is there: a full arena is backpressure.
        Returns the places of the leading ones that it took."""
        if faults.hit("prefill.seal") == "drop":
            return ()
        request, done = job.request, list[Place]()
        give_up_s = self._clock.now_s() + self._leases.handoff_s
        while len(done) < len(items):
            index = first + len(done)
            answers = await self._store.put(
                Kind.KV,
                items[len(done) :],
                lease=job.key,
                wait_s=SEAL_WAIT_S,
                parent=request.digests[index - 1] if index else request.chain_root,
                first_block=index,
                domain=request.domain,
            )
            taken = [place for place in answers[: _leading(answers)] if place is not None]
            done += taken
            if len(done) == len(items) or not self._store.connected:
                break
            if self._clock.now_s() >= give_up_s:
                break
            if not taken:
                await asyncio.sleep(SEAL_WAIT_S / 5)
        return tuple(done)

    async def window(self, job: Job, event: WindowDone) -> None:
        """The record at p belongs to the hand-off; others are for later turns and may be dropped.
        A missing one costs decode rows, never the text, so nobody waits for it."""
        request = job.request
        block = request.digests[event.position // GRAIN - 1]
        digest = window_digest(block)
        wanted = event.position == record_position(request.n_tokens, request.keep_tokens)
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
            await self.tell_window(job, event.position, digest, place)

    async def tell_blocks(self, job: Job, first: int, places: Sequence[Place]) -> None:
        if places:
            digests = job.request.digests[first : first + len(places)]
            await self._tell(job, BlocksReady(job.key, first, digests, tuple(places)))

    async def tell_window(self, job: Job, position: int, digest: Digest, place: Place) -> None:
        request = job.request
        if position == record_position(request.n_tokens, request.keep_tokens):
            await self._tell(job, WindowReady(job.key, position, digest, place))

    async def _tell(self, job: Job, message: BlocksReady | WindowReady) -> None:
        assert job.decode is not None
        action = faults.hit("prefill.announce")
        if action == "drop":
            return
        await job.decode.link.send(message)
        if action == "duplicate":
            await job.decode.link.send(message)


def _leading(answers: Sequence[Place | None]) -> int:
    """How many leading answers are places."""
    return next((i for i, place in enumerate(answers) if place is None), len(answers))
