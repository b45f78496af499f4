"""A store's end that other stores ask: it lends what lies in the arena while it is being sent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError, WireError
from headrace.core.ids import Digest
from headrace.core.limits import WireLimits
from headrace.core.link import parse_address
from headrace.kvstore.loads import Loader
from headrace.kvstore.messages import cut_digests
from headrace.kvstore.objects import Entry
from headrace.kvstore.peers_wire import (
    Doubt,
    Fetch,
    Offer,
    PeerGone,
    PeerSocket,
    refuse_odd_fetch,
)
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_CONNECTIONS = 64  # of all stores together; one more is closed at its first message
# Who has not shown the cluster's token yet is a stranger: few of them, and not for long, so that
# nobody without the token keeps a store out. One more takes the place of the oldest.
_STRANGERS = 16
_FIRST_FRAME_S = 3.0
_HOLD_S = 30.0  # longest wait for this store's own loop


@dataclass(slots=True)
class _Lent:
    """Objects held in the arena until `pins` is closed."""

    present: bytes
    headers: list[memoryview]
    payloads: list[memoryview]
    pins: contextlib.AsyncExitStack


class PeerServer:
    """Serves other stores on one TCP address, each connection from a thread of its own."""

    def __init__(
        self, state: StoreState, loader: Loader, token: str, limits: WireLimits | None = None
    ) -> None:
        self._state = state
        self._loader = loader
        self._token = token
        self._limits = limits or WireLimits()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._sockets: dict[PeerSocket, threading.Thread] = {}
        self._strangers: dict[PeerSocket, None] = {}  # oldest first
        self._known: set[PeerSocket] = set()
        self._standing = threading.Lock()  # of the two before
        self._loop: asyncio.AbstractEventLoop | None = None
        self.sent = 0  # objects
        self.sent_bytes = 0
        self.refused = 0  # connections that did not keep to the protocol, or were too many

    async def start(self, address: str) -> str:
        """Listen on `address` (port 0 picks one); the address it really is. Raises `ConfigError`
        when it cannot be had."""
        scheme, host, port = parse_address(address)
        if scheme != "tcp":
            raise ConfigError(f"peer_listen must be tcp://host:port, got {scheme}")
        if host in ("0.0.0.0", "::"):
            raise ConfigError(
                "peer_listen must name an address that other hosts reach this one by, since they"
                f" are told it, got {address}"
            )
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(_CONNECTIONS + _STRANGERS)
        except OSError as error:
            made.close()
            raise ConfigError(f"peer_listen: {address} cannot be had ({error.strerror})") from None
        made.setblocking(False)
        self._listening = made
        self._accepting = asyncio.create_task(self._accept(made), name="store-peers")
        name = made.getsockname()
        return f"tcp://[{name[0]}]:{name[1]}" if ":" in name[0] else f"tcp://{name[0]}:{name[1]}"

    async def close(self) -> None:
        """End every connection and wait for its thread. Idempotent."""
        accepting, self._accepting = self._accepting, None
        if accepting is not None:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        while self._sockets:  # their threads may wait for this loop
            for sock in tuple(self._sockets):
                sock.abort()
            await asyncio.sleep(0.005)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors left: others must go first
                log.warning("a store could not be let in: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            peer = PeerSocket(sock, self._token, self._limits)
            with self._standing:
                oldest = next(iter(self._strangers), None)
                full = len(self._strangers) >= _STRANGERS
                self._strangers[peer] = None
            if full and oldest is not None:
                self._turn_away(oldest)
            loop.call_later(_FIRST_FRAME_S, self._turn_away, peer)
            thread = threading.Thread(
                target=self._serve, args=(peer,), name="store-peer", daemon=True
            )
            self._sockets[peer] = thread
            thread.start()

    def _turn_away(self, peer: PeerSocket) -> None:
        """End a connection, unless it has shown the token meanwhile."""
        with self._standing:
            stranger = peer in self._strangers
            self._strangers.pop(peer, None)
        if stranger:
            self.refused += 1
            peer.abort()

    def _let_in(self, peer: PeerSocket) -> None:
        """Count who showed the token among the known. Raises `WireError` when they are too many,
        `PeerGone` for one that was turned away just now."""
        with self._standing:
            if peer in self._known:
                return
            if peer not in self._strangers:
                raise PeerGone("turned away")
            del self._strangers[peer]
            if len(self._known) >= _CONNECTIONS:
                raise WireError(f"at most {_CONNECTIONS} connections of other stores")
            self._known.add(peer)

    def _serve(self, peer: PeerSocket) -> None:
        # In a thread of its own, until the connection ends.
        assert self._loop is not None
        try:
            while (message := peer.receive(idle=True)) is not None:
                self._let_in(peer)
                if isinstance(message, Fetch):
                    refuse_odd_fetch(message)
                    self._answer(peer, message)
                elif isinstance(message, Doubt):
                    self._loop.call_soon_threadsafe(self._look, message)
                else:
                    raise WireError(f"a store does not send {type(message).__name__}")
        except WireError as error:
            self.refused += 1
            log.warning("closed a connection of another store: %s", error.message)
        except (PeerGone, TimeoutError):
            pass
        except RuntimeError:
            log.info("a store asked while this one ended")  # its loop is closed
        except Exception:
            log.exception("serving another store failed")
        finally:
            with self._standing:
                self._strangers.pop(peer, None)
                self._known.discard(peer)
            peer.close()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._sockets.pop, peer, None)

    def _answer(self, peer: PeerSocket, fetch: Fetch) -> None:
        assert self._loop is not None
        digests = cut_digests(fetch.digests)
        lending = self._lend(fetch.kind, fetch.namespace, digests)
        lent = asyncio.run_coroutine_threadsafe(lending, self._loop).result(_HOLD_S)
        try:
            offer = Offer(fetch.call, lent.present, b"".join(lent.headers))
            peer.send(offer, lent.payloads)
            self.sent += len(lent.payloads)
            self.sent_bytes += sum(len(view) for view in lent.payloads)
        finally:
            asyncio.run_coroutine_threadsafe(lent.pins.aclose(), self._loop)

    async def _lend(self, kind: Kind, namespace: bytes, digests: Sequence[Digest]) -> _Lent:
        """Have what is here of `digests` in the arena and hold it. Of blocks the leading ones."""
        found = [self._state.find(kind, namespace, digest) for digest in digests]
        pins = contextlib.AsyncExitStack()
        held: list[Entry] = []
        try:
            if kind is Kind.KV:
                leading = found[: found.index(None)] if None in found else found
                run = [entry for entry in leading if entry is not None]
                count = await pins.enter_async_context(self._loader.held(run))
                held = run[:count]
            elif kind is not Kind.STATE:  # a sequence's own, and nobody's business
                for entry in filter(None, found):
                    if await pins.enter_async_context(self._loader.held([entry])) > 0:
                        held.append(entry)
        except BaseException:
            await pins.aclose()
            raise
        here = set(held)
        arena, regions = self._state.residents.arena, self._state.residents.regions
        headers, payloads = [], []
        for entry in held:
            assert entry.slot is not None  # held
            headers.append(arena.header(regions[kind], entry.slot))
            payloads.append(arena.payload(regions[kind], entry.slot, entry.facts.payload_bytes))
        return _Lent(bytes(entry in here for entry in found), headers, payloads, pins)

    def _look(self, doubt: Doubt) -> None:
        """Verify what another store could not. On the loop."""
        if len(doubt.namespace) != 32 or len(doubt.digest) != 32:
            return
        digest = Digest(doubt.digest)
        entry = self._state.find(doubt.kind, doubt.namespace, digest)
        place = None if entry is None else self._state.place(entry)
        if place is not None:
            self._state.doom(place, doubt.namespace, digest)
