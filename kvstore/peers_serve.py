"""A store's end that other stores ask: it lends what lies in the arena while it is being sent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from headrace.core.errors import ConfigError, WireError
from headrace.core.ids import Digest
from headrace.core.limits import WireLimits
from headrace.core.link import parse_address
from headrace.kvstore.copies import find_all, pin_all
from headrace.kvstore.layout import checksum
from headrace.kvstore.loads import Loader
from headrace.kvstore.messages import cut_digests
from headrace.kvstore.objects import Entry
from headrace.kvstore.peers_wire import (
    FOLLOWS,
    GONE,
    STAYS,
    Doubt,
    Fetch,
    Offer,
    PeerGone,
    PeerSocket,
    pack_facts,
    refuse_odd_fetch,
)
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_CONNECTIONS = 96  # of all stores together; one more is closed at its first message
# Who has not shown the cluster's token yet is a stranger: few of them, and not for long, so that
# nobody without the token keeps a store out. One more takes the place of the oldest.
_STRANGERS = 16
_FIRST_FRAME_S = 3.0
_HOLD_S = 30.0  # longest wait for this store's own loop

# What a question named, None for what is not sent; each of the others is pinned once.
_Found: TypeAlias = list[Entry | None]


class _Lent(NamedTuple):
    """What follows, pinned; and what a thread needs to send it, so that it touches no entry: what
    two cores use in turn costs both of them more."""

    entries: list[Entry]
    present: bytes
    facts: bytes
    payloads: list[memoryview]


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
        self._lending: set[asyncio.Task[_Found]] = set()
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
        told: Future[_Lent] = Future()
        self._loop.call_soon_threadsafe(self._lend, fetch, digests, told)
        try:
            lent = told.result(_HOLD_S)
        except TimeoutError:
            told.cancel()
            raise
        about = (lent.present, lent.facts, checksum(lent.facts))
        try:
            peer.send(Offer(fetch.call, fetch.kind, fetch.namespace, *about), lent.payloads)
            self.sent += len(lent.entries)
            self.sent_bytes += sum(map(len, lent.payloads))
        finally:
            self._loop.call_soon_threadsafe(self._state.unpin_all, lent.entries)

    # on the loop

    def _payloads(self, kind: Kind, held: Sequence[Entry]) -> list[memoryview]:
        if not held:  # perhaps of a kind that has no slots here
            return []
        residents = self._state.residents
        region, payload = residents.regions[kind], residents.arena.payload
        return [
            payload(region, entry.slot, entry.facts.payload_bytes)
            for entry in held
            if entry.slot is not None  # each: it is pinned
        ]

    def _lend(self, fetch: Fetch, digests: Sequence[Digest], told: Future[_Lent]) -> None:
        """Tell what is here of `digests`, held in the arena; of blocks the leading ones."""
        kind, found = fetch.kind, _Found()
        if kind is not Kind.STATE:
            found = find_all(self._state, kind, fetch.namespace, digests)
        if kind is Kind.KV and None in found:
            del found[found.index(None) :]
        here = [entry for entry in found if entry is not None]
        if all(entry.slot is not None and not entry.dropped for entry in here):
            pin_all(self._state, here)
            self._tell(told, found, fetch, digests)
            return
        task = asyncio.create_task(self._bring(kind, found), name="store-lend")
        self._lending.add(task)

        def ended(task: asyncio.Task[_Found]) -> None:
            self._lending.discard(task)
            if not task.cancelled() and task.exception() is None:
                self._tell(told, task.result(), fetch, digests)
            elif told.set_running_or_notify_cancel():
                error = None if task.cancelled() else task.exception()
                told.set_exception(error or PeerGone("this store is ending"))

        task.add_done_callback(ended)

    async def _bring(self, kind: Kind, found: _Found) -> _Found:
        """Have what is in `found` in the arena, pinned; None for what cannot be had."""
        each = [entry for entry in found if entry is not None]
        runs = [each] if kind is Kind.KV else [[entry] for entry in each]
        out: _Found = []
        try:
            for run in runs:
                async with self._loader.held(run) as count:
                    pin_all(self._state, run[:count])
                out += [*run[:count], *[None] * (len(run) - count)]
        except BaseException:
            self._state.unpin_all([entry for entry in out if entry is not None])
            raise
        if kind is Kind.KV:
            return out
        brought = iter(out)
        return [None if entry is None else next(brought) for entry in found]

    def _tell(
        self, told: Future[_Lent], found: _Found, fetch: Fetch, digests: Sequence[Digest]
    ) -> None:
        held = [entry for entry in found if entry is not None]
        present, facts = self._present(found, fetch, digests), b"".join(map(pack_facts, held))
        lent = _Lent(held, present, facts, self._payloads(fetch.kind, held))
        if told.set_running_or_notify_cancel():
            told.set_result(lent)
        else:  # nobody waits any more
            self._state.unpin_all(held)

    def _present(self, found: _Found, fetch: Fetch, digests: Sequence[Digest]) -> bytes:
        """Who asks takes the records of what is gone out of the index, and nobody would list again
        what only stays."""
        out = bytearray(FOLLOWS if entry is not None else GONE for entry in found)
        out += bytes(len(digests) - len(found))
        if GONE in out:
            known = find_all(self._state, fetch.kind, fetch.namespace, digests)
            for index, entry in enumerate(known):
                if out[index] == GONE and entry is not None and not entry.copy:
                    out[index] = STAYS
        return bytes(out)

    def _look(self, doubt: Doubt) -> None:
        """Verify what another store could not, and list anew what is sound: the other has taken its
        record away. On the loop."""
        if len(doubt.namespace) != 32 or len(doubt.digest) != 32:
            return
        digest = Digest(doubt.digest)
        entry = self._state.find(doubt.kind, doubt.namespace, digest)
        place = None if entry is None else self._state.place(entry)
        wrong = place is not None and self._state.doom(place, doubt.namespace, digest)
        if entry is not None and not wrong:
            self._state.mark(entry)
