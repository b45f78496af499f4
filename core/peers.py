"""The two ends of a connection between roles: greeting, pairing, and dispatch by message type.

Hello goes first in both directions. Engines that would exchange stored objects must agree on layout
id and namespace; one that does not is told why and the connection is closed. What a role then does
with a message is its own business: it gives a table from message class to a plain function. Should
one fail, that is an end of the job that the message was about, and of nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.card import Role
from headrace.core.errors import ConfigError, HeadraceError, Unavailable, WireError
from headrace.core.ids import JobKey, RequestId
from headrace.core.limits import WireLimits
from headrace.core.link import Link, open_link, serve_links
from headrace.core.messages import MESSAGES, Hello, JobFailed

log = logging.getLogger(__name__)

NO_JOB = JobKey(RequestId(""), 0)  # the key of a JobFailed that concerns the connection
_ENGINES = (Role.PREFILL, Role.DECODE)


@dataclass(eq=False)
class Peer:
    """One greeted connection. Lives as long as its link; compared by identity."""

    link: Link
    hello: Hello

    @property
    def name(self) -> str:
        return self.hello.name

    def post(self, message: Any) -> None:
        """Queue a message without waiting; dropped when the peer is gone (`Link.post`)."""
        self.link.post(message)


def refusal(mine: Hello, theirs: Hello) -> HeadraceError | None:
    """Why these two must not exchange objects, or None. Routers carry no card and are welcome."""
    if mine.card is None or theirs.card is None:
        if mine.role in _ENGINES and theirs.role in _ENGINES:
            cold = theirs.name if theirs.card is None else mine.name
            return Unavailable(f"{cold} has not loaded its model yet")
        return None
    if mine.card.layout_id != theirs.card.layout_id:
        ours, other = mine.card.layout_id.hex()[:16], theirs.card.layout_id.hex()[:16]
        return ConfigError(f"layout id {other} of {theirs.name}, {mine.name} has {ours}")
    if mine.card.namespace() != theirs.card.namespace():
        ours, other = (
            str(card.namespace().digest().hex()[:16]) for card in (mine.card, theirs.card)
        )
        return ConfigError(f"namespace {other} of {theirs.name}, {mine.name} has {ours}")
    return None


async def introduce(address: str, mine: Hello, token: str, limits: WireLimits) -> Peer:
    """Connect to a role and greet it.

    Raises `ConnectionError` when it does not answer within `connect_s`, `Unavailable` when it is
    not warm, `ConfigError` when it serves something else, `WireError` when it speaks otherwise."""
    link = await open_link(address, MESSAGES, token, limits)
    try:
        await link.send(mine)
        peer = Peer(link, await _hello(link, limits))
        if (problem := refusal(mine, peer.hello)) is not None:
            raise problem
        return peer
    except BaseException:
        link.abort()
        raise


async def _hello(link: Link, limits: WireLimits) -> Hello:
    try:
        async with asyncio.timeout(limits.connect_s):
            message = await link.receive()
    except TimeoutError:
        raise ConnectionAbortedError("the peer did not greet in time") from None
    if message is None:
        raise ConnectionResetError("the peer closed before greeting")
    if not isinstance(message, Hello):
        raise WireError(f"expected Hello first, got {type(message).__name__}")
    return message


class PeerServer:
    """The listening end of a role.

    `handlers` maps message classes to `f(peer, message)`, called in the order of arrival on the
    loop's thread and not allowed to wait; a class not in it ends the connection. `on_joined(peer)`
    is called when a peer was greeted, before its first message, and `on_left(peer)` exactly once
    for each, after its last one.

    `refused` counts connections that ended because of what came on them, `failed` messages whose
    handler raised: the sender is told that this job failed here."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        handlers: Mapping[type[Any], Callable[[Peer, Any], None]],
        on_left: Callable[[Peer], None],
        token: str,
        limits: WireLimits,
        on_joined: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        self._hello = hello
        self._handlers = dict(handlers)
        self._on_left = on_left
        self._on_joined = on_joined
        self._token = token
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self.peers: list[Peer] = []
        self.refused = 0
        self.failed = 0

    async def listen(self, address: str) -> str:
        """Bind and serve; returns the address really bound."""
        self._server, actual = await serve_links(
            address, self._serve, MESSAGES, self._token, self._limits
        )
        return actual

    def routers(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.hello.role is Role.ROUTER]

    async def close(self) -> None:
        """Stop listening and cut every connection; returns when their handlers are done."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in tuple(self._links):
            link.abort()
        while self._links:
            await asyncio.sleep(0.005)

    async def _serve(self, link: Link) -> None:
        self._links.add(link)
        try:
            theirs = await _hello(link, self._limits)
            mine = self._hello()
            await link.send(mine)
            if (problem := refusal(mine, theirs)) is not None:
                log.warning("refused %s: %s", theirs.name, problem.message)
                retryable = isinstance(problem, Unavailable)
                await link.send(JobFailed(NO_JOB, problem.code, problem.message, retryable))
                return
            await self._receive(Peer(link, theirs))
        except WireError:
            self.refused += 1
            raise
        finally:
            self._links.discard(link)

    async def _receive(self, peer: Peer) -> None:
        self.peers.append(peer)
        try:
            self._on_joined(peer)
            async for message in peer.link:
                handle = self._handlers.get(type(message))
                if handle is None:
                    raise WireError(f"{peer.name} sent {type(message).__name__} to the wrong role")
                try:
                    handle(peer, message)
                except WireError:
                    raise
                except Exception:  # a bug here must not take the peer's other jobs along
                    log.exception("%s: %s failed", peer.name, type(message).__name__)
                    self._answer_failed(peer, message)
        finally:
            self.peers.remove(peer)
            self._on_left(peer)

    def _answer_failed(self, peer: Peer, message: Any) -> None:
        self.failed += 1
        about = getattr(message, "request", message)
        key = getattr(about, "key", None)
        if isinstance(key, JobKey):
            internal = HeadraceError("internal error")
            peer.post(JobFailed(key, internal.code, internal.message, retryable=False))
