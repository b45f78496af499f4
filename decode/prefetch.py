"""What a job in line will open is brought into the arena meanwhile, by the store of this host."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.core.chain import window_digest
from headrace.core.messages import Place
from headrace.core.rows import GRAIN
from headrace.decode.jobs import Job
from headrace.engine import Engine, EngineDriver, spans_to_run
from headrace.kvstore import ClassStores, Kind

# Another host's store lists what was sealed a moment later, and ours believes for `absent_s` (half
# a second) that what it asked for is nowhere: so it is asked again after these pauses.
AGAIN_S = (0.1, 0.7, 1.4)


class Prefetch:
    """Used from the role's loop. Everything is leased for the job, as what it opens later; nothing
    is noted of it in the job: at its turn the job opens what is there then."""

    def __init__(
        self,
        engine: Engine,
        driver: EngineDriver,
        stores: ClassStores,
        depth_tokens: int | None,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._stores = stores
        self._depth_tokens = depth_tokens
        self._turn = asyncio.Lock()  # the first in line first: asyncio wakes in this order

    async def stored(self, job: Job) -> None:
        """What a job without a prefill replica opens when it is admitted, and before its start."""
        digests, stores = job.handoff.digests, self._stores
        exact = job.handoff.exact_digests
        async with self._turn:
            resident = await self._driver.call(self._engine.resident_blocks, digests)
            if resident < len(digests):
                found = len(await stores.exact.prefetch(Kind.KV, exact, job.key)) if exact else 0
                rest = digests[found:]
                found += len(await stores.own.prefetch(Kind.KV, rest, job.key))
                resident = max(resident, found)
            await self._beside(job, resident * GRAIN)

    async def told(self, job: Job, news: Sequence[tuple[int, Place]]) -> None:
        """Blocks that a job was told of and that are not in this arena: another host's, or of an
        earlier life of this host's store."""
        for store, exact in ((self._stores.own, False), (self._stores.exact, True)):
            far = [
                job.handoff.digest(index)
                for index, place in news
                if (index in job.handoff.exact) is exact
                and (store.is_elsewhere(place) or store.is_past(place))
            ]
            for pause_s in (0.0, *AGAIN_S):
                if not far:
                    break
                await asyncio.sleep(pause_s)
                async with self._turn:
                    far = far[len(await store.prefetch(Kind.KV, far, job.key)) :]

    async def _beside(self, job: Job, hit_tokens: int) -> None:
        """The window record and the pictures that a run behind such a hit begins with."""
        geometry, depth, store = self._engine.geometry, self._depth_tokens, self._stores.exact
        plan, candidates = job.plan_from(hit_tokens, geometry, depth)
        records = [window_digest(block) for _, block in candidates]
        if records and (there := await store.prefetch(Kind.SWA, records, job.key)):
            plan, _ = job.plan_from(hit_tokens, geometry, depth, candidates[there[0]][0])
        if pictures := [span.digest for span in spans_to_run(job.request, plan)]:
            await store.prefetch(Kind.MM, pictures, job.key)
