"""The outer life of a replica's process: what it says of itself, its socket, its routers, its end.

Rooms of roles lie side by side and may not import each other; what prefill, decode and vision have
in common around their engines lies here: `ReplicaShell` is seen from outside, `Replica` is the
order in which a role starts, serves and gives back. It knows no engine, no store and no Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from headrace.core import faults
from headrace.core.card import Member, ModelCard, Role, VisionCard
from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.ids import JobKey, new_boot_id
from headrace.core.messages import (
    Cancel,
    DecodeJob,
    Drain,
    Hello,
    JobFailed,
    LoadReport,
    PrefillJob,
    VisionJob,
)
from headrace.core.peers import Peer, PeerServer
from headrace.core.role import Ready, RoleSettings
from headrace.core.states import REPLICA_TABLE, ReplicaEvent, ReplicaState

log = logging.getLogger(__name__)

REPORT_S = 0.5
STOP_S = 5.0  # at stop, for the step in flight and the last releases
AnyJob: TypeAlias = PrefillJob | DecodeJob | VisionJob
Handlers: TypeAlias = Mapping[type[Any], Callable[[Peer, Any], None]]


@dataclass(frozen=True, slots=True)
class ReplicaSizes:
    """What a membership record says of an engine's size."""

    max_rows_per_step: int
    n_blocks: int
    n_slots: int


class ReplicaShell:
    """State, identity, listening socket and end of one replica. Owned by one event loop.

    `handlers`, `on_joined` and `on_left` as in `PeerServer`; Drain is handled here. `on_drain()` is
    called once when a drain begins."""

    def __init__(
        self,
        role: RoleSettings,
        kind: Role,
        sizes: ReplicaSizes,
        handlers: Handlers,
        on_joined: Callable[[Peer], None],
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
            on_joined,
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

    def report(
        self, make: Callable[[int], LoadReport], routers: Iterable[Peer] | None = None
    ) -> None:
        """Post `make(last dispatch of that router)` to these routers, or to all connected ones."""
        for router in self.server.routers() if routers is None else routers:
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
        REPLICA_TABLE.move(self, event, self.role.name)

    def _peer_left(self, peer: Peer) -> None:
        self._dispatches.pop(peer, None)
        self._on_left(peer)


class Work(Protocol):
    """What a replica does with its jobs, as far as its life around them must know."""

    draining: bool  # no new jobs

    @property
    def jobs(self) -> Sized:
        """Those that still hold something."""

    def accept(self, router: Peer, message: Any, /) -> None:
        """Take or refuse a job."""

    def cancel(self, key: JobKey, /) -> None: ...

    def peer_left(self, peer: Peer, /) -> None:
        """A router, or the other end of a hand-off, is gone."""

    async def keep(self) -> None:
        """Called every third of `handoff_s`: prolong what live jobs lease."""

    async def stop(self, reason: str, /) -> None:
        """End every job with a retryable failure; return when all is given back."""


class Membership(Protocol):
    """The leased record by which others find this replica (`kvstore.Beat`)."""

    async def start(self) -> bool: ...

    async def now(self) -> bool: ...

    async def stop(self) -> None: ...


W = TypeVar("W", bound=Work)


@dataclass(frozen=True, slots=True)
class Opened(Generic[W]):
    """What a role serves with, once all is loaded, and what it says of its model."""

    work: W
    card: ModelCard
    vision: VisionCard | None = None


class Replica(ABC, Generic[W]):
    """One replica of a pool. `start` brings it to serving, `run` serves until stopped or drained,
    `close` gives back; `serve` is all three. Owned by one event loop.

    The socket listens before anything is loaded; jobs that come too early are refused as
    retryable. `work` is there from the end of `start` until `close`. `others` handles what comes
    besides jobs and cancels; `membership(member)` makes the record of this replica."""

    def __init__(
        self,
        role: RoleSettings,
        kind: Role,
        sizes: ReplicaSizes,
        job: type[AnyJob],
        membership: Callable[[Callable[[], Member]], Membership],
        others: Handlers | None = None,
    ) -> None:
        self.role = role
        self.shell = ReplicaShell(
            role,
            kind,
            sizes,
            {job: self._on_job, Cancel: self._on_cancel, **(others or {})},
            self._on_joined,
            self._on_left,
            self._on_drain,
        )
        self.work: W | None = None
        self._membership = membership(self.shell.member)
        self._held = contextlib.AsyncExitStack()

    @abstractmethod
    async def _open(self, held: contextlib.AsyncExitStack) -> Opened[W]:
        """Load the model, reach the store, make the work. `held` takes the ends of what was opened,
        in the order of opening: they are called in reverse. Raises `ConfigError`."""

    @abstractmethod
    def load_report(self, last_dispatch: int) -> LoadReport:
        """This replica's load now; called only while there is `work`."""

    def member(self) -> Member:
        """The membership record of this moment."""
        return self.shell.member()

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, open what the role serves with, announce READY. Raises `ConfigError`."""
        faults.arm_from_environment(loopback_only=self.role.on_loopback)
        await self.shell.listen()
        await self._membership.start()
        opened = await self._open(self._held)
        self.work = opened.work
        self.shell.every(REPORT_S, self._report)
        self.shell.every(self.role.deployment.leases.handoff_s / 3, opened.work.keep)
        self.shell.warm(opened.card, opened.vision)
        await self._membership.now()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Serve until `stop` is set or a drain is over. Raises `HeadraceError` when what it serves
        with ended by itself."""
        await self.shell.run(stop)

    async def close(self) -> None:
        """Withdraw, cut every link, end what runs, give everything back. Idempotent."""
        await self._membership.stop()
        await self.shell.close()  # first: whoever still reached us would send its next try here
        work, self.work = self.work, None
        if work is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await work.stop(f"the {self.shell.kind.value} replica stops")
        await self._held.aclose()

    async def serve(self, ready: Ready | None, stop: asyncio.Event | None) -> None:
        """The whole life: `ready(member)` is called once, when it serves and is announced.

        Raises `ConfigError` for settings that must not start, and `HeadraceError` when its own
        accounts broke: the process should end then and be started anew."""
        try:
            await self.start()
            if ready is not None:
                ready(self.member())
            await self.run(stop)
        finally:
            await self.close()

    # ---- what arrives ----------------------------------------------------------------------

    def _on_job(self, router: Peer, message: AnyJob) -> None:
        self.shell.dispatched(router, message.dispatch)
        if self.work is not None:
            self.work.accept(router, message)
            return
        key = message.key if isinstance(message, VisionJob) else message.request.key
        cold = Unavailable(f"this {self.shell.kind.value} replica has not loaded its model yet")
        router.post(JobFailed(key, cold.code, cold.message, retryable=True))

    def _on_cancel(self, router: Peer, message: Cancel) -> None:
        if self.work is not None:
            self.work.cancel(message.key)

    def _on_joined(self, peer: Peer) -> None:
        """A router that has just come chooses by what is here, not by what it sends itself."""
        if self.work is not None and peer.hello.role is Role.ROUTER:
            self.shell.report(self.load_report, [peer])

    def _on_left(self, peer: Peer) -> None:
        if self.work is not None:
            self.work.peer_left(peer)

    def _on_drain(self) -> None:
        if self.work is not None:
            self.work.draining = True
        self.on_ended()

    def on_ended(self) -> None:
        """A job gave everything back: routers should know of the room at once."""
        self._post_reports()
        if self.shell.draining and (self.work is None or not self.work.jobs):
            self.shell.end()

    # ---- load ------------------------------------------------------------------------------

    async def _report(self) -> None:
        self._post_reports()

    def _post_reports(self) -> None:
        if self.work is not None:
            self.shell.report(self.load_report)
