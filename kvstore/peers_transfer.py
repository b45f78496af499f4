"""One batch of objects on its way from one store to another: asked for, received, verified."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import HeadraceError, WireError
from headrace.core.ids import Digest
from headrace.core.limits import WireLimits
from headrace.core.states import Visibility
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.elsewhere import Where
from headrace.kvstore.io_threads import guarded
from headrace.kvstore.layout import HEADER_BYTES, SlotHeader, checksum
from headrace.kvstore.objects import Entry, Saving, object_key
from headrace.kvstore.peers_wire import Doubt, Fetch, Offer, PeerGone, PeerSocket
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_IDLE_SOCKETS = 4  # kept for each store
_AT_A_TIME = 2  # transfers from one store


@dataclass(slots=True)
class PeerCounters:
    """What was asked of other stores since the start."""

    fetched: int = 0  # objects that arrived and verified
    fetched_bytes: int = 0
    missing: int = 0  # promised by the index, not there any more
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


@dataclass(slots=True, eq=False)
class Item:
    where: Where
    entry: Entry | None = None  # pinned, once it is here
    wanted: bool = True  # whoever asked still waits, and takes the pin over


@dataclass(slots=True, eq=False)
class Desk:
    """What all transfers of one store share."""

    state: StoreState
    token: str
    limits: WireLimits
    threads: ThreadPoolExecutor
    forget: Callable[[Where], None]
    count: PeerCounters = field(default_factory=PeerCounters)
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Transfer:
    """One batch on its way. The slots that it takes are entered or given back, each once, after
    its thread has let go of them."""

    def __init__(
        self, desk: Desk, peer: Peer, kind: Kind, namespace: bytes, batch: Sequence[Item]
    ) -> None:
        self._desk = desk
        self._state = desk.state
        self._peer = peer
        self._kind = kind
        self._namespace = namespace
        self._batch = batch
        self._sock: PeerSocket | None = None
        self._aborted = False
        self.has_slots = False
        self.doubted: list[Digest] = []

    def abort(self) -> None:
        """Wake the thread wherever it waits."""
        self._aborted = True
        if self._sock is not None:
            self._sock.abort()

    async def run(self) -> None:
        count = self._desk.count
        try:
            try:
                offer = await self._in_thread(self._ask)
                headers = self._judge(offer)
            except (PeerGone, WireError) as error:
                count.away += 1
                if not self._aborted:
                    self._peer.breaker.failure()
                    log.warning("another store does not serve: %s", error)
                return
            self._peer.breaker.success()
            if not self._aborted:
                await self._receive(headers)
        finally:
            sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()

    async def _receive(self, headers: Sequence[SlotHeader | None]) -> None:
        """Take slots for what is offered, receive, verify and enter."""
        arena, residents = self._state.residents.arena, self._state.residents
        taken: list[tuple[Item, SlotHeader, int]] = []
        views: list[memoryview] = []
        for item, header in zip(self._batch, headers, strict=True):
            if header is None:
                continue
            slot = residents.take(self._kind, header.facts.domain)
            if slot is None:
                break  # the rest is sent for nothing
            self.has_slots = True
            length = header.facts.payload_bytes
            views.append(arena.payload(residents.regions[self._kind], slot, length))
            taken.append((item, header, slot))
        sums: list[int] = []
        whole = len(taken) == sum(header is not None for header in headers)
        try:
            items = [item for item, _, _ in taken]
            await self._in_thread(lambda: self._take(views, sums, items))
        except (PeerGone, WireError) as error:
            whole = False
            if not self._aborted:
                self._desk.count.away += 1
                log.warning("another store stopped in the middle: %s", error)
        finally:
            # Also when this is cancelled, which `_in_thread` lets happen after its thread only.
            for index, (item, header, slot) in enumerate(taken):
                self._settle(item, header, slot, sums[index] if index < len(sums) else None)
        if whole and self.doubted:
            with contextlib.suppress(PeerGone):
                await self._in_thread(self._tell_doubts)
        if whole and self._sock is not None and len(self._peer.idle) < _IDLE_SOCKETS:
            self._peer.idle.append(self._sock)
            self._sock = None

    def _settle(self, item: Item, header: SlotHeader, slot: int, got: int | None) -> None:
        """One slot after its thread: an object, or free again."""
        residents, desk = self._state.residents, self._desk
        if got != header.checksum:
            residents.give(self._kind, slot, header.facts.domain)
            if got is not None:
                desk.count.damaged += 1
                desk.forget(item.where)
                self.doubted.append(header.facts.digest)
            return
        entry = self._enter(header, slot, int(item.wanted))
        item.entry = entry if item.wanted else None
        desk.count.fetched += 1
        desk.count.fetched_bytes += header.facts.payload_bytes

    def _enter(self, header: SlotHeader, slot: int, pins: int) -> Entry:
        """The object that a verified slot holds, with so many pins more. An earlier one of that key
        stays, and the slot is free again. Its owner keeps it on disk and lists it: this copy lives
        in the arena only."""
        state, facts = self._state, header.facts
        key = object_key(facts.kind, facts.namespace, facts.digest)
        entry = state.objects.get(key)
        if entry is not None:
            state.residents.give(facts.kind, slot, facts.domain)
            entry.pins += pins
            state.residents.settle(entry)
            return entry
        entry = Entry(
            key,
            facts,
            header.checksum,
            header.written_at_s,
            Visibility.SEALED,
            Saving.GIVEN_UP,
            pins=pins,
            copy=True,
        )
        state.enter_new(entry, slot)
        state.residents.settle(entry)
        return entry

    def _judge(self, offer: Offer) -> list[SlotHeader | None]:
        """The header of each object of the batch that will follow. Raises `WireError` for an offer
        that is none; what is missing costs its record."""
        cut = len(offer.headers) // HEADER_BYTES
        if (
            len(offer.present) != len(self._batch)
            or offer.present.strip(b"\0\1")
            or len(offer.headers) != HEADER_BYTES * sum(offer.present)
        ):
            raise WireError(f"an offer of {cut} headers that does not match its question")
        region = self._state.residents.regions[self._kind]
        out: list[SlotHeader | None] = []
        at = 0
        for item, present in zip(self._batch, offer.present, strict=True):
            if not present:
                self._desk.count.missing += 1
                self._desk.forget(item.where)
                out.append(None)
                continue
            header = SlotHeader.unpack(offer.headers[at : at + HEADER_BYTES])
            at += HEADER_BYTES
            if (
                header is None
                or header.facts.kind is not self._kind
                or header.facts.namespace != self._namespace
                or header.facts.digest != item.where.digest
                or not 0 < header.facts.payload_bytes <= region.payload_bytes
            ):
                raise WireError("an offer of something that was not asked for")
            out.append(header)
        return out

    # in the thread

    def _ask(self) -> Offer:
        desk = self._desk
        fetch = Fetch(
            next(desk.calls),
            self._kind,
            self._namespace,
            b"".join(item.where.digest for item in self._batch),
        )
        while True:
            kept = bool(self._peer.idle)
            sock = self._peer.idle.pop() if kept else None
            sock = sock or PeerSocket.connect(self._peer.address, desk.token, desk.limits)
            self._sock = sock
            try:
                if self._aborted:
                    raise PeerGone("given up")
                sock.send(fetch)
                offer = sock.receive()
            except PeerGone:
                sock.close()
                self._sock = None
                if not kept or self._aborted:
                    raise
                continue  # a connection kept from before may have ended since: the next one
            if not isinstance(offer, Offer) or offer.call != fetch.call:
                raise WireError("expected an Offer")
            return offer

    def _tell_doubts(self) -> None:
        assert self._sock is not None
        for digest in self.doubted:
            self._sock.send(Doubt(self._kind, self._namespace, digest))

    def _take(self, views: Sequence[memoryview], sums: list[int], items: Sequence[Item]) -> None:
        assert self._sock is not None
        self._sock.receive_into(views)
        sums.extend(map(checksum, views))

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

    def _ask(self) -> list[SlotHeader | None]:  # type: ignore[override]  # goes to _judge alone
        found: list[SlotHeader | None] = []
        for item in self._batch:
            folder = item.where.folder
            found.append(None if folder is None else folder.header(item.where.record))
        return found

    def _judge(self, found: list[SlotHeader | None]) -> list[SlotHeader | None]:  # type: ignore[override]
        region = self._state.residents.regions[self._kind]
        out: list[SlotHeader | None] = []
        for item, header in zip(self._batch, found, strict=True):
            good = (
                header is not None
                and header.facts.kind is self._kind
                and header.facts.namespace == self._namespace
                and header.facts.digest == item.where.digest
                and 0 < header.facts.payload_bytes <= region.payload_bytes
            )
            if not good:
                self._desk.count.missing += 1
                self._desk.forget(item.where)
            out.append(header if good else None)
        return out

    def _take(self, views: Sequence[memoryview], sums: list[int], items: Sequence[Item]) -> None:
        for view, item in zip(views, items, strict=True):
            if self._aborted or item.where.folder is None:
                raise PeerGone("given up")
            sums.append(item.where.folder.read(item.where.record, view))

    def _tell_doubts(self) -> None:
        return
