"""The outer life of a replica's process: what it says of itself, its socket, its routers, its end.

Rooms of roles lie side by side and may not import each other; what prefill, decode and vision have
in common around their engines lies here. It knows no engine, no store and no Redis.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.card import Member, ModelCard, Role, VisionCard
from headrace.core.errors import HeadraceError
from headrace.core.ids import new_boot_id
from headrace.core.messages import Drain, Hello, LoadReport
from headrace.core.peers import Peer, PeerServer
from headrace.core.role import RoleSettings
from headrace.core.states import REPLICA_TABLE, ReplicaEvent, ReplicaState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaSizes:
    """What a membership record says of an engine's size."""

    max_rows_per_step: int
    n_blocks: int
    n_slots: int


class ReplicaShell:
    """State, identity, listening socket and end of one replica. Owned by one event loop.

    `handlers` as in `PeerServer`; Drain is handled here. `on_left(peer)` is called for every peer
    that leaves, `on_drain()` once when a drain begins."""

    def __init__(
        self,
        role: RoleSettings,
        kind: Role,
        sizes: ReplicaSizes,
        handlers: Mapping[type[Any], Callable[[Peer, Any], None]],
        on_left: Callable[[Peer], None],
        on_drain: Callable[[], None],
    ) -> None:
        self.role = role
        self.kind = kind
        self.sizes = sizes
        self.state = ReplicaState.JOINING
        self.boot_id = new_boot_id()
        self.address = role.listen
        self.card: ModelCard | None = None
        self.vision: VisionCard | None = None
        self._on_left = on_left
        self._on_drain = on_drain
        self._dispatches: dict[Peer, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self.server = PeerServer(
            self.hello,
            {**handlers, Drain: lambda peer, message: self.drain(message.grace_s)},
            self._peer_left,
            role.token,
            role.deployment.wire,
        )

    # ---- what it says of itself ------------------------------------------------------------

    def hello(self) -> Hello:
        """As of now: without a card until the model is loaded."""
        return Hello(self.kind, self.role.name, self.boot_id, self.role.build, self.card)

    def member(self) -> Member:
        """The membership record of this moment."""
        return Member(
            role=self.kind,
            name=self.role.name,
            boot_id=self.boot_id,
            address=self.address,
            pid=os.getpid(),
            build=self.role.build,
            state=self.state,
            card=self.card,
            max_rows_per_step=self.sizes.max_rows_per_step,
            n_blocks=self.sizes.n_blocks,
            n_slots=self.sizes.n_slots,
            vision=self.vision,
        )

    def dispatched(self, router: Peer, dispatch: int) -> None:
        """Remember the highest dispatch number of a router, for its load reports."""
        self._dispatches[router] = max(self._dispatches.get(router, 0), dispatch)

    def report(self, make: Callable[[int], LoadReport]) -> None:
        """Post `make(last dispatch of that router)` to every connected router."""
        for router in self.server.routers():
            report = make(self._dispatches.get(router, 0))
            router.post(replace(report, wire_refused=self.server.refused))

    # ---- life ------------------------------------------------------------------------------

    async def listen(self) -> None:
        self.address = await self.server.listen(self.role.listen)

    def warm(self, card: ModelCard, vision: VisionCard | None = None) -> None:
        """The model is loaded and jobs may come. A drain that came first stays a drain."""
        self.card, self.vision = card, vision
        self._step(ReplicaEvent.WARM)

    def every(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        """Repeat `act` until `close`; an expected error is logged and ends nothing."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await act()
                except HeadraceError as error:
                    log.warning("%s: %s", self.role.name, error.message)

        self._tasks.append(asyncio.create_task(repeat()))

    @property
    def draining(self) -> bool:
        return self.state is ReplicaState.DRAINING

    def drain(self, grace_s: float) -> None:
        """No new jobs from now on; `run` returns when `end` is called, at most after `grace_s`.
        A second drain changes nothing."""
        if not self.draining:
            self._step(ReplicaEvent.DRAIN)
            asyncio.get_running_loop().call_later(grace_s, self.end)
            self._on_drain()

    def end(self, failure: BaseException | None = None) -> None:
        """Make `run` return, or raise because of `failure`."""
        self._failure = self._failure or failure
        self._ended.set()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Return when `stop` is set or the replica ended. Raises `HeadraceError` on a failure."""
        waits = [asyncio.create_task(self._ended.wait())]
        if stop is not None:
            waits.append(asyncio.create_task(stop.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._failure is not None:
            raise HeadraceError(f"{self.role.name} ended by itself") from self._failure

    async def close(self) -> None:
        """End the repeated tasks and cut every connection. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.close()

    def _step(self, event: ReplicaEvent) -> None:
        self.state = REPLICA_TABLE.step(self.state, event, self.role.name).state

    def _peer_left(self, peer: Peer) -> None:
        self._dispatches.pop(peer, None)
        self._on_left(peer)
