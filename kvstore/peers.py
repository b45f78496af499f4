"""Objects of other stores: found in the index, received straight into this arena, verified.

    index -> runs at one store -> batches -> Offer -> slots -> payloads -> verify -> known

Single flight: whoever asks for an object that is on its way waits for the same transfer. A transfer
has as long as computing its tokens anew would take; what is not here by then is a miss. Whatever
does not verify costs its record in the index and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from headrace.core.ids import Digest
from headrace.core.limits import WireLimits
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.copies import find_all, pin_all
from headrace.kvstore.elsewhere import MOST_KEYS, Elsewhere, Run
from headrace.kvstore.objects import Entry, object_key
from headrace.kvstore.peers_transfer import (
    Batch,
    Desk,
    Peer,
    PeerCounters,
    SharedTransfer,
    Transfer,
)
from headrace.kvstore.peers_wire import MOST_OBJECTS
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_BATCH_BYTES = 8 << 20
_FIRST_KEYS = 128  # of a chain's first look-up; each further one is four times as long
_THREADS = 6  # two stores' transfers: of one that hangs, and of another
_HUNG_S = 2.0  # after the deadline: time to give slots back, as far as they can be
_PEERS = 256  # addresses remembered: every restart of a store may bring a new one


class Peers:
    """Brings what other stores have. Used from one event loop; transfers run in threads."""

    def __init__(
        self,
        state: StoreState,
        settings: StoreSettings,
        elsewhere: Elsewhere,
        token: str,
        limits: WireLimits | None = None,
    ) -> None:
        self._state = state
        self._settings = settings
        self._elsewhere = elsewhere
        self._threads = ThreadPoolExecutor(_THREADS, "store-fetch")
        self._desk = Desk(state, token, limits or WireLimits(), self._threads, self.forget)
        self._peers: dict[str, Peer] = {}
        self._running: dict[bytes, asyncio.Task[None]] = {}  # by object key
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def count(self) -> PeerCounters:
        return self._desk.count

    def may_have(self, kind: Kind, namespace: bytes, digest: Digest) -> bool:
        """Whether asking the index for this object could help; touches nothing."""
        return kind is not Kind.STATE and self._elsewhere.may_have(kind, namespace, digest)

    @contextlib.asynccontextmanager
    async def held(
        self,
        kind: Kind,
        namespace: bytes,
        digests: Sequence[Digest],
        *,
        run: bool,
        most: int = 1 << 20,
    ) -> AsyncIterator[None]:
        """Bring those of `digests` that other stores have; what came stays in the arena until the
        block ends. With `run` only the leading ones are brought: digests are a run of one chain,
        and what lies behind a hole is of no use. Of what is found elsewhere the first `most` are
        brought."""
        mine: list[Batch] = []
        others: list[Digest] = []  # on their way, for somebody else
        pinned: list[Entry] = []
        began_s, n_found = asyncio.get_running_loop().time(), 0
        try:
            waits: set[asyncio.Task[None]] = set()
            parts = self._found(kind, namespace, digests, run, most)
            async with contextlib.aclosing(parts):
                async for found in parts:
                    n_found += len(found.digests)
                    until_s = began_s + self.deadline_s(kind, n_found)
                    late, found = self._split(kind, namespace, found, waits)
                    others += late
                    for batch in self._cut(kind, namespace, found):
                        mine.append(batch)
                        waits.add(self._begin(batch, until_s))
            if waits:  # a thread that a hung mount holds is not waited for
                limit_s = self.deadline_s(kind, n_found) + _HUNG_S
                await asyncio.wait(waits, timeout=limit_s)
            # At this moment it is pinned by its batch, or by us, or it is gone.
            pinned = [e for e in find_all(self._state, kind, namespace, others) if e is not None]
            pin_all(self._state, pinned)
            yield
        finally:
            self._state.unpin_all(pinned)
            for batch in reversed(mine):
                batch.let_go(self._state)

    async def _found(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], run: bool, most: int
    ) -> AsyncGenerator[Run]:
        """What other stores have, a part at a time, so that the first transfers are under way while
        the rest of a long chain is looked up."""
        at, size, before = 0, _FIRST_KEYS, ""
        while at < len(digests):
            part = digests[at : at + size]
            runs = await self._elsewhere.find(
                kind, namespace, part, run=run, most=most, before=before
            )
            for found in runs:
                before = found.address
                most -= len(found.digests)
                yield found
            if not most or (run and sum(len(found.digests) for found in runs) < len(part)):
                return
            at, size = at + size, min(size * 4, MOST_KEYS)

    # batches ---------------------------------------------------------------------------------

    def _split(
        self, kind: Kind, namespace: bytes, found: Run, waits: set[asyncio.Task[None]]
    ) -> tuple[list[Digest], Run]:
        """Digests that are on their way already, whose tasks are added to `waits`; and the rest."""
        before, running = object_key(kind, namespace, b""), self._running
        if running.keys().isdisjoint([before + digest for digest in found.digests]):
            return [], found
        late: list[Digest] = []
        new = Run(found.address, found.folder, [], [])
        for digest, packed in zip(found.digests, found.packed, strict=True):
            task = running.get(before + digest)
            if task is None:
                new.digests.append(digest)
                new.packed.append(packed)
            else:
                late.append(digest)
                waits.add(task)
        return late, new

    def _cut(self, kind: Kind, namespace: bytes, found: Run) -> list[Batch]:
        region = self._state.residents.regions.get(kind)
        if region is None:
            return []  # this store has no room for any
        size = min(MOST_OBJECTS, max(1, _BATCH_BYTES // region.slot_bytes))
        return [
            Batch(
                kind,
                namespace,
                Run(
                    found.address,
                    found.folder,
                    found.digests[at : at + size],
                    found.packed[at : at + size],
                ),
            )
            for at in range(0, len(found.digests), size)
        ]

    def _begin(self, batch: Batch, until_s: float) -> asyncio.Task[None]:
        task = self._start(self._bring(batch, until_s))
        before = object_key(batch.kind, batch.namespace, b"")
        keys = [before + digest for digest in batch.run.digests]
        self._running.update(dict.fromkeys(keys, task))
        task.add_done_callback(partial(self._ended, keys))
        return task

    def _ended(self, keys: Sequence[bytes], task: asyncio.Task[None]) -> None:
        for key in keys:
            if self._running.get(key) is task:
                del self._running[key]

    def deadline_s(self, kind: Kind, n_objects: int) -> float:
        """How long computing so many objects anew would take: more is not waited for."""
        settings = self._settings
        return max(settings.peer_least_s, settings.recompute_s(kind, n_objects))

    async def _bring(self, batch: Batch, until_s: float) -> None:
        """One batch from one store. Never raises for what that store does."""
        peer = self._peer(batch.run.address)
        if not peer.breaker.admits():
            self.count.away += 1
            return
        made = Transfer if batch.run.folder is None else SharedTransfer
        transfer = made(self._desk, peer, batch)
        work = self._start(self._in_turn(peer, transfer))
        _, late = await asyncio.wait({work}, timeout=until_s - asyncio.get_running_loop().time())
        if late:
            self.count.late += len(batch.run.digests) - batch.n_arrived
            transfer.abort()
            if not transfer.has_slots:
                peer.breaker.failure()
                return  # its thread may wait for a connection, which nothing can hurry
            # Not cancelled: its thread may be writing into our slots, which are given back when
            # that has ended, and not before.
            await asyncio.wait({work})
        if not work.cancelled() and work.exception() is not None:
            self.count.away += 1
            log.error("a transfer failed", exc_info=work.exception())

    async def _in_turn(self, peer: Peer, transfer: Transfer) -> None:
        async with peer.turns:
            await transfer.run()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="store-fetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= _PEERS:
                for sock in self._peers.pop(next(iter(self._peers))).idle:
                    sock.close()
            peer = self._peers[address] = Peer(address, Breaker(self._state.clock))
        return peer

    def forget(self, batch: Batch, indexes: Sequence[int]) -> asyncio.Task[None]:
        """Take the records that led astray out of the index, if they still stand there."""
        run = batch.run
        stale = [(run.digests[index], run.packed[index]) for index in indexes]
        return self._start(self._elsewhere.forget(batch.kind, batch.namespace, stale))

    async def close(self) -> None:
        """End all transfers. Idempotent."""
        while self._tasks:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.wait(tuple(self._tasks))
        for peer in self._peers.values():
            for sock in peer.idle:
                sock.close()
            peer.idle.clear()
        self._threads.shutdown(wait=False)
        await self._elsewhere.close()
