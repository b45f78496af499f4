"""Write-behind: what decode completes goes to the store when there is time, or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from headrace.core.chain import window_digest
from headrace.core.ids import Digest
from headrace.core.rows import GRAIN
from headrace.decode.handoff import Counts
from headrace.decode.jobs import Job
from headrace.kvstore import Kind, StoreClient

BATCH = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """One object to be stored; `payload` is a copy of its own. `block` is the number of the block
    it is, or that follows it for a window record; `parent` as in `StoreClient.put`."""

    kind: Kind
    digest: Digest
    payload: bytes
    parent: Digest | None
    block: int
    domain: str


class Committer:
    """A queue bounded in bytes before a store that may be slow, full or away. No request waits for
    it: what finds no room is dropped and counted. `run` works until it is cancelled."""

    def __init__(self, store: StoreClient, counts: Counts, max_bytes: int = 64 << 20) -> None:
        self._store = store
        self._counts = counts
        self._max_bytes = max_bytes
        self._queue: deque[Commit] = deque()
        self._bytes = 0
        self._writing = 0
        self._news = asyncio.Event()

    @property
    def idle(self) -> bool:
        return not self._queue and not self._writing

    def offer(self, commit: Commit) -> bool:
        """Queue it; False when it was dropped."""
        if self._bytes + len(commit.payload) > self._max_bytes:
            self._counts.commits_dropped += 1
            return False
        self._queue.append(commit)
        self._bytes += len(commit.payload)
        self._news.set()
        return True

    def block(self, job: Job, index: int, digest: Digest, payload: bytes) -> None:
        """Offer block `index` of a job, completed here; its digest joins the job's chain.

        Behind a block that is stored in the exact class it hangs on nothing: that block is not in
        the class of this one."""
        if index == len(job.digests):
            job.digests.append(digest)
        parent: Digest | None = job.digests[index - 1] if index else job.request.chain_root
        if index - 1 in job.handoff.exact_stored:
            parent = None
        commit = Commit(Kind.KV, digest, payload, parent, index, job.request.domain)
        job.stages.committed_blocks += self.offer(commit)

    def window(self, job: Job, position: int, payload: bytes) -> None:
        """Offer the window record at `position`, whose block the job knows."""
        block = job.digests[position // GRAIN - 1]
        digest, domain = window_digest(block), job.request.domain
        self.offer(Commit(Kind.SWA, digest, payload, block, position // GRAIN, domain))

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._queue:
                batch = self._take()
                self._writing = len(batch)
                try:
                    await self._write(batch)
                finally:
                    self._writing = 0

    def _take(self) -> list[Commit]:
        """The next commits that one put can carry: one kind, one domain, blocks in a row."""
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < BATCH and _follows(batch[-1], self._queue[0]):
            batch.append(self._queue.popleft())
        self._bytes -= sum(len(commit.payload) for commit in batch)
        return batch

    async def _write(self, batch: list[Commit]) -> None:
        first = batch[0]
        places = await self._store.put(
            first.kind,
            [(commit.digest, commit.payload) for commit in batch],
            parent=first.parent,
            first_block=first.block,
            domain=first.domain,
        )
        taken = sum(place is not None for place in places)
        self._counts.commits_dropped += len(batch) - taken
        if first.kind is Kind.KV:
            self._counts.committed_blocks += taken

    async def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is queued, at most `deadline_s`; whether that was reached."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self.idle:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True


def _follows(before: Commit, after: Commit) -> bool:
    return (
        before.kind is Kind.KV
        and after.kind is Kind.KV
        and after.parent == before.digest
        and after.block == before.block + 1
        and after.domain == before.domain
    )
