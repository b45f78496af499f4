"""What a prefill job finds in the store: its prefix, the window it starts from, its pictures."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from headrace.core.chain import window_digest
from headrace.core.ids import Digest
from headrace.core.messages import Place
from headrace.core.rows import GRAIN, RowPlan, plan_decode, plan_prefill
from headrace.engine import Engine, Fill, Half, PictureRows, spans_to_run
from headrace.kvstore import ClassStores, Kind, read_objects
from headrace.prefill.jobs import Counts, Job, window_candidates
from headrace.prefill.seal import Sealer


class Finder:
    """Used from the role's loop. `depth_tokens`: rows of a replay where the deployment replays,
    else None."""

    def __init__(
        self,
        engine: Engine,
        stores: ClassStores,
        sealer: Sealer,
        counts: Counts,
        depth_tokens: int | None,
    ) -> None:
        self._engine = engine
        self._stores = stores
        self._store = stores.exact  # of windows and pictures, which have no other class
        self._sealer = sealer
        self.counts = counts
        self._depth_tokens = depth_tokens
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="prefill-fill")

    def close(self) -> None:
        self._copies.shutdown(wait=True)

    async def open_stored(self, job: Job) -> None:
        """The longest stored prefix: exact blocks first, then what was written behind them."""
        exact = job.request.exact_digests(job.request.token_ids)
        places = await self._stores.exact.open_prefix(exact, job.key) if exact else ()
        job.exact_digests = exact[: len(places)]
        rest = job.request.digests[len(places) :]
        job.places = places + await self._stores.own.open_prefix(rest, job.key)
        job.hit_blocks = len(job.places)

    async def plan(self, job: Job, *, verify: bool) -> tuple[RowPlan, bytes | None]:
        """The rows to run from the usable hit, and the window record that they start from.

        The newest usable record counts; with `verify` its bytes are read, and one that is damaged
        is passed over. A record that lies at p is announced, as decode needs it."""
        request, geometry = job.request, self._engine.geometry
        # The full build (mode `state`) runs what decode would run, and makes the first token.
        make = plan_decode if self._engine.half is Half.FULL else plan_prefill
        n_tokens, keep_tokens, hit = request.n_tokens, request.keep_tokens, job.hit_blocks * GRAIN
        depth = self._depth_tokens
        if depth is not None:
            return plan_prefill(n_tokens, hit, keep_tokens, (), geometry, depth_tokens=depth), None
        candidates = window_candidates(request, hit, geometry)
        while candidates:
            found = await self._store.open_windows(candidates, job.key)
            if found is None:
                break
            position, place = found
            plan = make(n_tokens, hit, keep_tokens, (position,), geometry)
            digest = window_digest(dict(candidates)[position])
            payload = self._read_window(place, digest) if verify and plan.encoder_rows else b""
            if payload is not None:
                if (verify or not plan.encoder_rows) and plan.window_position == position:
                    self._sealer.tell_window(job, position, digest, place)
                return plan, payload or None
            candidates = [c for c in candidates if c[0] < position]
        return make(n_tokens, hit, keep_tokens, (), geometry), None

    async def pictures(self, job: Job, plan: RowPlan) -> PictureRows:
        """Rows of the pictures that `plan` runs through, leased for the job. Raises
        `PicturesMissing` when one is gone or damaged."""
        spans = spans_to_run(job.request, plan)
        wanted = [span.digest for span in spans]
        payloads = await read_objects(self._store, Kind.MM, wanted, job.key)
        return await asyncio.to_thread(self._engine.unpack_pictures, spans, payloads)

    async def fill(self, job: Job, fills: tuple[Fill, ...]) -> int:
        """Copy the stored blocks in, in a thread; returns how many leading blocks are usable."""
        loop = asyncio.get_running_loop()
        bad = await loop.run_in_executor(self._copies, self._copy_in, fills, job)
        if bad is None:
            return job.hit_blocks
        self.counts.damaged += 1
        return bad

    def _copy_in(self, fills: tuple[Fill, ...], job: Job) -> int | None:
        """In a thread, from the arena straight into the engine's blocks: the index of the first
        block whose bytes did not verify there, or None. A job that ends meanwhile does no harm: its
        fills carry a ticket that the engine no longer honours."""
        for fill in fills:
            place, exact = job.places[fill.index], fill.index < len(job.exact_digests)
            store = self._stores.exact if exact else self._stores.own
            digest = job.exact_digests[fill.index] if exact else fill.digest
            with self._engine.filling(fill) as writer:
                if writer is None:
                    continue
                if place.payload_bytes != len(writer.view):
                    return fill.index
                if not store.read_into(place, digest, writer.view):
                    return fill.index
                writer.complete = True
        return None

    def _read_window(self, place: Place, digest: Digest) -> bytes | None:
        buffer = bytearray(place.payload_bytes)
        if self._store.read_into(place, digest, buffer):
            return bytes(buffer)
        self.counts.damaged += 1
        return None
