"""Objects of other stores: found in the index, received straight into this arena, verified.

    index -> one store each -> batches -> Offer (headers) -> slots -> payloads -> verify -> known

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
from headrace.kvstore.elsewhere import MOST_KEYS, Elsewhere, Where
from headrace.kvstore.objects import Entry, object_key
from headrace.kvstore.peers_transfer import Desk, Item, Peer, PeerCounters, SharedTransfer, Transfer
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_BATCH_BYTES = 8 << 20
_BATCH = 128
_FIRST_KEYS = 128  # of a chain's first look-up; each further one is four times as long
_THREADS = 4
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
    ) -> AsyncIterator[tuple[Entry | None, ...]]:
        """Bring those of `digests` that other stores have; yields an entry in the arena, or None,
        for each. They stay there until the block ends. With `run` only the leading ones are
        brought: digests are a run of one chain, and what lies behind a hole is of no use. Of what
        is found elsewhere the first `most` are brought."""
        items: list[Item] = []
        pinned: list[Entry] = []  # once for each time it stands here
        began_s = asyncio.get_running_loop().time()
        try:
            waits: set[asyncio.Task[None]] = set()
            async with contextlib.aclosing(self._found(kind, namespace, digests, run)) as parts:
                async for found in parts:
                    new = [Item(where) for where in found[: most - len(items)]]
                    items += new
                    waits |= self._begin(kind, namespace, new, len(items), began_s)
                    if len(items) == most:
                        break
            if waits:  # a thread that a hung mount holds is not waited for
                limit_s = self.deadline_s(kind, len(items)) + _HUNG_S
                await asyncio.wait(waits, timeout=limit_s)
            here: dict[Digest, Entry] = {}
            for item in items:
                # At this moment it is pinned by its batch or it is gone; nothing is awaited.
                digest = item.where.digest
                entry, item.entry, item.wanted = item.entry, None, False
                if entry is None:  # another's batch brought it
                    entry = self._state.find(kind, namespace, digest)
                    if entry is not None:
                        self._state.pin(entry)
                if entry is not None:
                    pinned.append(entry)
                if entry is not None and entry.slot is not None and not entry.dropped:
                    here[digest] = entry
                elif run:
                    break
            yield tuple(here.get(digest) for digest in digests)
        finally:
            for item in items:
                self._let_go(item)
            for entry in pinned:
                self._state.unpin(entry)

    async def _found(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], run: bool
    ) -> AsyncGenerator[list[Where]]:
        """What other stores have, a part at a time, so that the first transfers are under way while
        the rest of a long chain is looked up."""
        at, size, before = 0, _FIRST_KEYS, ""
        while at < len(digests):
            part = digests[at : at + size]
            found = await self._elsewhere.find(kind, namespace, part, run=run, before=before)
            if found:
                before = found[-1].address
                yield found
            if run and len(found) < len(part):
                return
            at, size = at + size, min(size * 4, MOST_KEYS)

    def _let_go(self, item: Item) -> None:
        item.wanted = False
        if item.entry is not None:
            self._state.unpin(item.entry)
            item.entry = None

    # batches ---------------------------------------------------------------------------------

    def _begin(
        self, kind: Kind, namespace: bytes, items: Sequence[Item], n_so_far: int, began_s: float
    ) -> set[asyncio.Task[None]]:
        """Begin what nobody has begun; what must be awaited. These are the last of `n_so_far`
        objects that are waited for since `began_s`."""
        waits: set[asyncio.Task[None]] = set()
        batches: list[list[Item]] = []
        total_bytes = 0  # of the last one
        for item in items:
            key = object_key(kind, namespace, item.where.digest)
            running = self._running.get(key)
            if running is not None:
                waits.add(running)
                continue
            last = batches[-1] if batches else []
            if (
                not last
                or last[0].where.address != item.where.address
                or len(last) >= _BATCH
                or total_bytes >= _BATCH_BYTES
            ):
                batches.append([])
                total_bytes = 0
            batches[-1].append(item)
            total_bytes += item.where.payload_bytes
        until_s = began_s + self.deadline_s(kind, n_so_far)
        for batch in batches:
            task = self._start(self._bring(kind, namespace, batch, until_s))
            waits.add(task)
            keys = [object_key(kind, namespace, item.where.digest) for item in batch]
            self._running.update(dict.fromkeys(keys, task))
            task.add_done_callback(partial(self._ended, keys))
        return waits

    def _ended(self, keys: Sequence[bytes], task: asyncio.Task[None]) -> None:
        for key in keys:
            if self._running.get(key) is task:
                del self._running[key]

    def deadline_s(self, kind: Kind, n_objects: int) -> float:
        """How long computing so many objects anew would take: more is not waited for."""
        settings = self._settings
        return max(settings.peer_least_s, settings.recompute_s(kind, n_objects))

    async def _bring(
        self, kind: Kind, namespace: bytes, batch: Sequence[Item], until_s: float
    ) -> None:
        """One batch from one store. Never raises for what that store does."""
        peer = self._peer(batch[0].where.address)
        if not peer.breaker.admits():
            self.count.away += 1
            return
        made = SharedTransfer if batch[0].where.folder is not None else Transfer
        transfer = made(self._desk, peer, kind, namespace, batch)
        work = self._start(self._in_turn(peer, transfer))
        _, late = await asyncio.wait({work}, timeout=until_s - asyncio.get_running_loop().time())
        if late:
            self.count.late += sum(item.entry is None for item in batch)
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
        async with peer.turns:  # more at a time only fill the sockets' buffers
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

    def forget(self, where: Where) -> None:
        """Take the record that led astray out of the index, if it still stands there."""
        self._start(self._elsewhere.forget(where))

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
