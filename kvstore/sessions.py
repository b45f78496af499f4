"""One client's connection, as the store sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from typing import Any

from headrace.core.errors import WireError
from headrace.core.frames import FrameCodec
from headrace.core.link import Link
from headrace.kvstore.commits import commit_blocks
from headrace.kvstore.messages import (
    STORE_MESSAGES,
    Abandon,
    Ahead,
    AskStat,
    Attach,
    Attached,
    Cancel,
    Commit,
    Done,
    Doom,
    GiveBack,
    Granted,
    Opened,
    OpenObjects,
    OpenPrefix,
    OpenWindow,
    Ping,
    Prefetch,
    Prefetched,
    Release,
    Renew,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    Stat,
    cut_digests,
    facts_of,
    pack_pairs,
    pack_places,
    pack_slots,
    unpack_pairs,
)
from headrace.kvstore.questions import Question
from headrace.kvstore.store import Promises, Store

log = logging.getLogger(__name__)
_ATTACH_S = 5.0
_CALLS = 1024  # of one client at a time; more end its connection


def send_with_descriptor(
    sock: socket.socket, token: str, frame_bytes: int, message: Any, fd: int
) -> None:
    """Send one frame whose first byte carries a descriptor. The socket's buffer must be empty.

    Raises `ConnectionError` when the socket does not take all of it at once."""
    frame = FrameCodec(token, frame_bytes).encode(STORE_MESSAGES.encode(message))
    with socket.socket(fileno=os.dup(sock.fileno())) as plain:  # asyncio's wrapper cannot sendmsg
        try:
            sent = socket.send_fds(plain, [frame], [fd])
        except BlockingIOError:
            sent = 0
    if sent != len(frame):
        raise ConnectionAbortedError("the peer took nothing")


class Session:
    """Serves one link until it ends, then frees what its client had reserved. Leases stay: they
    belong to a request, not to a connection."""

    def __init__(
        self, store: Store, link: Link, number: int, descriptor: int, token: str, frame_bytes: int
    ) -> None:
        self._store = store
        self._link = link
        self._number = number
        self._descriptor = descriptor
        self._token = token
        self._frame_bytes = frame_bytes
        self._namespace = b""
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Raises `WireError` on a client that does not keep to the protocol."""
        try:
            async with asyncio.timeout(_ATTACH_S):
                attach = await self._link.receive()
        except TimeoutError:
            raise WireError("the client did not attach in time") from None
        if attach is None:
            return
        if not isinstance(attach, Attach) or len(attach.namespace) != 32:
            raise WireError("expected Attach with a namespace of 32 bytes first")
        self._namespace = attach.namespace
        state = self._store.state
        attached = Attached(state.boot, state.residents.arena.regions, state.granted.reserve_s)
        send_with_descriptor(
            self._link.socket, self._token, self._frame_bytes, attached, self._descriptor
        )
        self._store.connections += 1
        try:
            async for message in self._link:
                self._take(message)
        finally:
            self._store.connections -= 1
            running = tuple(self._calls.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            freed = state.reserving.close_connection(self._number)
            state.granted.close_connection(self._number)
            if freed:
                log.info("%s left %d reservations", attach.name or "a client", freed)

    def _take(self, message: Any) -> None:
        store, state = self._store, self._store.state
        match message:
            case Reserve():
                self._reserve(message)
            case Seal():
                self._seal(message)
            case Commit():
                self._commit(message)
            case Ahead():
                self._ahead(message)
            case GiveBack():
                state.granted.give_back(self._number, message.grants)
            case OpenPrefix():
                self._open_prefix(message)
            case OpenWindow() | OpenObjects():
                self._start(message.call, self._open(message))
            case Prefetch():
                self._start(message.call, self._prefetch(message))
            case Cancel():
                task = self._calls.get(message.call)
                if task is not None:
                    task.cancel()
            case Abandon():
                state.reserving.abandon(self._number, message.reservations)
            case Renew():
                self._link.post(Done(message.call, state.leases.renew(message.lease)))
            case Release():
                state.release(message.lease, message.kind)
                self._link.post(Done(message.call, True))
            case Doom():
                right = state.doom(message.place, self._namespace, message.digest)
                if message.call:
                    self._link.post(Done(message.call, right))
            case AskStat():
                self._link.post(Stat(message.call, store.stat()))
            case Ping():
                self._link.post(Done(message.call, True))
            case Question():
                self._start(message.call, self._tell(message))
            case _:
                raise WireError(f"a client does not send {type(message).__name__}")

    def _start(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        if call in self._calls or len(self._calls) >= _CALLS:
            work.close()
            raise WireError(f"a call number twice, or more than {_CALLS} calls at a time")
        task = asyncio.create_task(work, name="store-call")
        self._calls[call] = task
        task.add_done_callback(lambda done: self._ended(call, done))

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        self._calls.pop(call, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The client must not wait for an answer that comes no more.
            log.error("a call failed", exc_info=error)
            self._link.abort()

    async def _tell(self, question: Question) -> None:
        self._link.post(await self._store.answers.answer(question))

    # What needs no wait is answered at once, in the order of asking; a task costs more than the
    # work of a small batch.

    def _reserve(self, message: Reserve) -> None:
        facts = facts_of(self._namespace, message)
        promises = self._store.reserve_now(self._number, message, facts)
        if promises is not None:
            self._promise(message.call, promises)
            return

        async def wait() -> None:
            self._promise(message.call, await self._store.reserve(self._number, message, facts))

        self._start(message.call, wait())

    def _promise(self, call: int, promises: Promises) -> None:
        offset = self._store.state.offset
        grants = pack_pairs(
            [(0, 0) if made is None else (made.number, offset(made)) for made, _ in promises]
        )
        known = any(place is not None for _, place in promises)
        places = pack_places([place for _, place in promises]) if known else b""
        self._link.post(Reserved(call, grants, places))

    def _seal(self, message: Seal) -> None:
        places, gone = self._store.seal_all(self._number, unpack_pairs(message.written))
        if not gone:
            self._link.post(Sealed(message.call, pack_places(places)))
            return

        async def wait() -> None:
            brought = await self._store.bring_sealed(places, gone)
            self._link.post(Sealed(message.call, pack_places(brought)))

        self._start(message.call, wait())

    def _ahead(self, message: Ahead) -> None:
        if len(message.domain) != 16:
            raise WireError(f"a domain tag has 16 bytes, got {len(message.domain)}")
        first, slots = self._store.grant(self._number, message.domain, message.count, message.least)
        self._link.post(Granted(message.call, first, pack_slots(slots)))

    def _commit(self, message: Commit) -> None:
        facts = facts_of(self._namespace, message)
        written = unpack_pairs(message.written)
        new = commit_blocks(self._store.state, self._number, facts, written, message.lease)
        self._link.post(Done(message.call, new))

    def _open_prefix(self, message: OpenPrefix) -> None:
        digests = cut_digests(message.digests)
        places = self._store.opening.prefix_now(self._namespace, digests, message.lease)
        if places is not None:
            self._link.post(Opened(message.call, 0, places))
            return

        async def wait() -> None:
            with self._store.opening.prefetch.waits():
                brought = await self._store.opening.prefix(self._namespace, digests, message.lease)
            self._link.post(Opened(message.call, 0, brought))

        self._start(message.call, wait())

    async def _open(self, message: OpenWindow | OpenObjects) -> None:
        digests, opening, first = cut_digests(message.digests), self._store.opening, 0
        with opening.prefetch.waits():
            if isinstance(message, OpenWindow):
                first, told = await opening.window(self._namespace, digests, message.lease)
            else:
                told = await opening.objects(message.kind, self._namespace, digests, message.lease)
        self._link.post(Opened(message.call, first, told))

    async def _prefetch(self, message: Prefetch) -> None:
        digests, bring = cut_digests(message.digests), self._store.opening.prefetch.bring
        there = await bring(message.kind, self._namespace, digests, message.lease)
        self._link.post(Prefetched(message.call, there.start, len(there)))
