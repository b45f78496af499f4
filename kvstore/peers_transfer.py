"""One batch of objects on its way from one store to another: asked for, received, verified."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from headrace.core.errors import HeadraceError, WireError
from headrace.core.ids import Digest
from headrace.core.limits import WireLimits
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.copies import Told, enter_copies, offered_copies, take_slots
from headrace.kvstore.elsewhere import Run
from headrace.kvstore.io_threads import guarded
from headrace.kvstore.layout import SlotHeader, checksum
from headrace.kvstore.objects import Entry
from headrace.kvstore.peers_wire import (
    STAYS,
    Doubt,
    Fetch,
    Offer,
    PeerGone,
    PeerSocket,
    read_offer,
)
from headrace.kvstore.records import unpack_records
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_IDLE_SOCKETS = 4  # kept for each store
# Transfers from one store: while one waits for its answer, or for this loop, others are received.
_AT_A_TIME = 3


@dataclass(slots=True)
class PeerCounters:
    """What was asked of other stores since the start."""

    fetched: int = 0  # objects that arrived and verified
    fetched_bytes: int = 0
    missing: int = 0  # promised by the index and not sent: gone, or not to be had now
    damaged: int = 0  # arrived and did not verify
    late: int = 0  # not here when computing them would have been done
    away: int = 0  # batches that the other store did not answer

    @property
    def failed(self) -> int:
        return self.missing + self.damaged + self.late + self.away


@dataclass(slots=True, eq=False)
class Peer:
    """Another store's address, its idle connections, and how it answered lately."""

    address: str
    breaker: Breaker
    idle: list[PeerSocket] = field(default_factory=list)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_A_TIME))

    def connection(self, desk: Desk) -> tuple[PeerSocket, bool]:
        """An idle connection, or a new one; whether it is an idle one. Called by several threads.
        Raises `PeerGone` when nobody answers."""
        try:
            return self.idle.pop(), True
        except IndexError:
            return PeerSocket.connect(self.address, desk.token, desk.limits), False


@dataclass(slots=True, eq=False)
class Batch:
    """Part of a run that is brought at once. Until `let_go` what arrives is pinned for whoever
    began it: it stands in `held`."""

    kind: Kind
    namespace: bytes
    run: Run
    n_arrived: int = 0
    wanted: bool = True
    held: list[Entry] = field(default_factory=list)

    def let_go(self, state: StoreState) -> None:
        """Idempotent; what still arrives is pinned for nobody."""
        self.wanted = False
        held, self.held = self.held, []
        state.unpin_all(held)


@dataclass(slots=True, eq=False)
class Desk:
    """What all transfers of one store share."""

    state: StoreState
    token: str
    limits: WireLimits
    threads: ThreadPoolExecutor
    # The records at these indexes led astray.
    forget: Callable[[Batch, Sequence[int]], asyncio.Task[None]]
    count: PeerCounters = field(default_factory=PeerCounters)
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))


# Makes of an answer an entry of each object of the batch that will follow, None for one that does
# not. Called on the loop, which uses the entries: what two cores use in turn costs both of them
# more. Raises `WireError`.
_Offered: TypeAlias = Callable[[], list[Entry | None]]


class Transfer:
    """One batch on its way. The slots that it takes are entered or given back, each once, after
    its thread has let go of them."""

    def __init__(self, desk: Desk, peer: Peer, batch: Batch) -> None:
        self._desk = desk
        self._state = desk.state
        self._peer = peer
        self._batch = batch
        self._most_bytes = desk.state.residents.regions[batch.kind].payload_bytes
        self._sock: PeerSocket | None = None
        self._aborted = False
        self.has_slots = False
        self._doubted: list[int] = []  # indexes of what did not verify
        self._stay: frozenset[int] = frozenset()  # indexes of what is there and is not sent

    def abort(self) -> None:
        """Wake the thread wherever it waits."""
        self._aborted = True
        if self._sock is not None:
            self._sock.abort()

    async def run(self) -> None:
        count = self._desk.count
        try:
            try:
                offered = (await self._in_thread(self._ask))()
            except (PeerGone, WireError) as error:
                count.away += 1
                if not self._aborted:
                    self._peer.breaker.failure()
                    log.warning("another store does not serve: %s", error)
                return
            self._peer.breaker.success()
            missing = [index for index, copy in enumerate(offered) if copy is None]
            if missing:
                count.missing += len(missing)
                gone = [index for index in missing if index not in self._stay]
                if gone:
                    self._desk.forget(self._batch, gone)
            if not self._aborted:
                await self._receive(offered)
        finally:
            sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()

    async def _receive(self, offered: Sequence[Entry | None]) -> None:
        """Take slots for what is offered, receive, verify and enter."""
        indexes = [index for index, copy in enumerate(offered) if copy is not None]
        copies = [copy for copy in offered if copy is not None]
        slots = take_slots(self._state, copies)
        self.has_slots = bool(slots)
        whole = len(slots) == len(copies)  # else the rest is sent for nothing
        taken, sums = copies[: len(slots)], list[int]()
        try:
            views = self._views(taken, slots)
            await self._in_thread(lambda: self._take(views, sums, indexes))
        except (PeerGone, WireError) as error:
            whole = False
            if not self._aborted:
                self._desk.count.away += 1
                log.warning("another store stopped in the middle: %s", error)
        finally:
            # Also when this is cancelled, which `_in_thread` lets happen after its thread only.
            self._settle(taken, slots, sums, indexes)
        if whole and self._doubted:
            # Before their owner is told: it lists anew what it finds sound.
            await asyncio.wait((self._desk.forget(self._batch, self._doubted),))
            with contextlib.suppress(PeerGone):
                await self._in_thread(self._tell_doubts)
        if whole and self._sock is not None and len(self._peer.idle) < _IDLE_SOCKETS:
            self._peer.idle.append(self._sock)
            self._sock = None

    def _views(self, copies: Sequence[Entry], slots: Sequence[int]) -> list[memoryview]:
        residents = self._state.residents
        region, payload = residents.regions[self._batch.kind], residents.arena.payload
        return [
            payload(region, slot, copy.facts.payload_bytes)
            for copy, slot in zip(copies, slots, strict=True)
        ]

    def _settle(
        self,
        copies: Sequence[Entry],
        slots: Sequence[int],
        sums: Sequence[int],
        indexes: Sequence[int],
    ) -> None:
        """All slots after their thread: objects, or free again. `sums` are of the first of them;
        what follows has not arrived."""
        count, batch = self._desk.count, self._batch
        good, places = copies, slots
        if sums != [copy.checksum for copy in copies]:
            good, places = self._sound(copies, slots, sums, indexes)
        entered = enter_copies(self._state, good, places, int(batch.wanted))
        if batch.wanted:
            batch.held += entered
        batch.n_arrived += len(good)
        count.fetched += len(good)
        count.fetched_bytes += sum([copy.facts.payload_bytes for copy in good])

    def _sound(
        self,
        copies: Sequence[Entry],
        slots: Sequence[int],
        sums: Sequence[int],
        indexes: Sequence[int],
    ) -> tuple[list[Entry], list[int]]:
        """Those of `copies` that arrived and verify, with their slots; the other slots are free
        again."""
        count, batch = self._desk.count, self._batch
        good, places = list[Entry](), list[int]()
        for number, (copy, slot) in enumerate(zip(copies, slots, strict=True)):
            if number < len(sums) and sums[number] == copy.checksum:
                good.append(copy)
                places.append(slot)
                continue
            self._state.residents.give(batch.kind, slot, copy.facts.domain)
            if number < len(sums):
                count.damaged += 1
                self._doubted.append(indexes[number])
        return good, places

    # in the thread

    def _ask(self) -> _Offered:
        """Raises `PeerGone`, and `WireError` for an answer that is no offer."""
        desk, batch = self._desk, self._batch
        fetch = Fetch(next(desk.calls), batch.kind, batch.namespace, b"".join(batch.run.digests))
        while True:
            sock, kept = self._peer.connection(desk)
            self._sock = sock
            try:
                if self._aborted:
                    raise PeerGone("given up")
                sock.send(fetch)
                offer = sock.receive()
                if offer is None:
                    raise PeerGone("the connection ended")
            except PeerGone:
                sock.close()
                self._sock = None
                if not kept or self._aborted:
                    raise
                continue  # a connection kept from before may have ended since: the next one
            if not isinstance(offer, Offer):
                raise WireError("expected an Offer")
            self._stay = frozenset(n for n, told in enumerate(offer.present) if told == STAYS)
            return partial(read_offer, offer, fetch, self._most_bytes)

    def _tell_doubts(self) -> None:
        assert self._sock is not None
        batch = self._batch
        for index in self._doubted:
            self._sock.send(Doubt(batch.kind, batch.namespace, batch.run.digests[index]))

    def _take(self, views: Sequence[memoryview], sums: list[int], indexes: Sequence[int]) -> None:
        """Fill `views` with the objects at `indexes` of the batch, and `sums` with what verifies
        them."""
        assert self._sock is not None
        n_full = self._sock.receive_into(views)
        sums.extend(map(checksum, views[:n_full]))
        if n_full < len(views):
            raise PeerGone("the connection ended, or was silent for too long")

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Run and wait, even when cancelled: the thread may be using our slots."""
        future = asyncio.get_running_loop().run_in_executor(
            self._desk.threads, guarded(work, (OSError, HeadraceError, PeerGone))
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.abort()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await asyncio.shield(future)
            raise


class SharedTransfer(Transfer):
    """The same from a folder that is mounted here: nobody is asked, nobody is told of doubts."""

    def _ask(self) -> _Offered:
        batch, folder = self._batch, self._batch.run.folder
        assert folder is not None
        found: list[Told | None] = []
        for digest, packed in zip(batch.run.digests, batch.run.packed, strict=True):
            if self._aborted:
                raise PeerGone("given up")
            header = folder.header(unpack_records(packed)[0])
            found.append(self._told(header, digest))
        return lambda: offered_copies(batch.kind, batch.namespace, found)

    def _told(self, header: SlotHeader | None, digest: Digest) -> Told | None:
        """What a header says of the object of this digest; None if it is another's."""
        if header is None or header.facts[:3] != (self._batch.kind, self._batch.namespace, digest):
            return None
        facts = header.facts
        if not 0 < facts.payload_bytes <= self._most_bytes:
            return None
        size, about = facts.payload_bytes, (header.checksum, header.written_at_s)
        return digest, facts.block, size, *about, facts.parent, facts.domain

    def _take(self, views: Sequence[memoryview], sums: list[int], indexes: Sequence[int]) -> None:
        run = self._batch.run
        for view, index in zip(views, indexes, strict=False):
            if self._aborted or run.folder is None:
                raise PeerGone("given up")
            sums.append(run.folder.read(unpack_records(run.packed[index])[0], view))

    def _tell_doubts(self) -> None:
        return
