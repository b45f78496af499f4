"""Connections from a prefill replica to decode replicas: one each, greeted, kept, watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.core.errors import HeadraceError, ReplicaLost, WireError
from headrace.core.ids import JobKey
from headrace.core.limits import WireLimits
from headrace.core.messages import HandoffAck, Hello, JobFailed
from headrace.core.peers import Peer, introduce

log = logging.getLogger(__name__)


class DecodeLinks:
    """At most one connection an address. `on_ack(key)` for every HandoffAck; `on_gone(peer)` once
    for every peer that `get` returned, when its connection ended for whatever reason."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        token: str,
        limits: WireLimits,
        on_ack: Callable[[JobKey], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self._hello = hello
        self._token = token
        self._limits = limits
        self._on_ack = on_ack
        self._on_gone = on_gone
        self._peers: dict[str, Peer] = {}
        self._readers: dict[Peer, asyncio.Task[None]] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def get(self, address: str) -> Peer:
        """The peer at `address`, connected now if it was not.

        Raises `ReplicaLost` when nobody answers there, `Unavailable` when it is not warm yet, and
        `ConfigError` when it serves another layout or namespace."""
        async with self._opening.setdefault(address, asyncio.Lock()):
            peer = self._peers.get(address)
            if peer is not None and not peer.link.closed:
                return peer
            try:
                peer = await introduce(address, self._hello(), self._token, self._limits)
            except ConnectionError as error:
                raise ReplicaLost(f"the decode replica cannot be reached: {error}") from None
            self._peers[address] = peer
            reader = asyncio.create_task(self._read(address, peer), name="decode-link")
            self._readers[peer] = reader
            return peer

    async def close(self) -> None:
        for peer in tuple(self._readers):
            peer.link.abort()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)

    async def _read(self, address: str, peer: Peer) -> None:
        try:
            async for message in peer.link:
                if isinstance(message, HandoffAck):
                    self._on_ack(message.key)
                elif isinstance(message, JobFailed):
                    log.warning("%s gave up a job: %s", peer.name, message.code)
                else:
                    raise WireError(f"{peer.name} sent {type(message).__name__} to a prefill")
        except HeadraceError as error:
            log.warning("closed the connection to %s: %s", peer.name, error.message)
        finally:
            peer.link.abort()
            if self._peers.get(address) is peer:
                del self._peers[address]
            self._readers.pop(peer, None)
            self._on_gone(peer)
