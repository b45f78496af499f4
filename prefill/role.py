"""The prefill role: one engine of the encoder half, its store client, its links, its membership."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import torch

from headrace.core import faults
from headrace.core.card import Member, Role
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.errors import Unavailable
from headrace.core.messages import BindDecode, Cancel, JobFailed, LoadReport, PrefillJob
from headrace.core.peers import Peer
from headrace.core.replica import ReplicaShell, ReplicaSizes
from headrace.core.request import HandoffMode
from headrace.core.role import Ready, RoleSettings
from headrace.engine import Engine, EngineDriver, EngineSettings, Half, load_engine
from headrace.kvstore import Beat, ClassStores, MemberBoard, StoreClient
from headrace.prefill.jobs import NOT_ADMITTED
from headrace.prefill.links import DecodeLinks
from headrace.prefill.work import Prefiller

log = logging.getLogger(__name__)

REPORT_S = 0.5
STORE_WAIT_S = 2.0  # at start, for the store to answer; without it everything is a miss
STOP_S = 5.0  # at stop, for the step in flight and the last releases


class PrefillReplica:
    """`start` brings it to serving, `run` serves until stopped or drained, `close` gives back.

    The socket listens before the model is loaded; jobs that come too early are refused as
    retryable. `work`, `engine`, `driver` and `stores` are there from the end of `start` on."""

    engine: Engine
    driver: EngineDriver
    stores: ClassStores
    links: DecodeLinks

    def __init__(
        self, role: RoleSettings, settings: EngineSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.role = role
        self.settings = settings
        self._clock = clock
        self.shell = ReplicaShell(
            role,
            Role.PREFILL,
            ReplicaSizes(settings.max_rows_per_step, settings.n_blocks, settings.n_slots),
            {PrefillJob: self._on_job, BindDecode: self._on_bind, Cancel: self._on_cancel},
            self._on_left,
            self._on_drain,
        )
        self._board = MemberBoard.of(role, clock=clock)
        self._beat = Beat(self._board, self.shell.member, role.deployment.leases)
        self.work: Prefiller | None = None

    @property
    def store(self) -> StoreClient:
        """The store's end for the class that this deployment writes."""
        return self.stores.own

    def member(self) -> Member:
        return self.shell.member()

    # ---- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, load the model, reach the store, announce READY. Raises `ConfigError`."""
        faults.arm_from_environment(loopback_only=self.role.on_loopback)
        deployment = self.role.deployment
        if torch.device(deployment.device).type == "cpu":
            torch.set_num_threads(1)  # several engines share the cores of a host
        await self.shell.listen()
        await self._beat.start()
        # Mode `state` alone needs the decoder half here.
        half = Half.FULL if deployment.handoff_mode is HandoffMode.STATE else Half.ENCODER
        self.engine = await asyncio.to_thread(
            load_engine, deployment, self.settings, half, clock=self._clock
        )
        card = self.engine.card(deployment.model)
        self.stores = ClassStores.of(self.role, card, self._clock)
        if not await self.stores.connect(STORE_WAIT_S):
            log.warning("%s starts without its store: everything is a miss", self.role.name)
        self._wire()
        self.shell.warm(card)
        await self._beat.now()

    def _wire(self) -> None:
        deployment = self.role.deployment
        self.links = DecodeLinks(
            self.shell.hello,
            self.role.token,
            deployment.wire,
            lambda key: self.work.acknowledged(key) if self.work else None,
            lambda peer: self.work.decode_left(peer) if self.work else None,
        )
        self.driver = EngineDriver(
            self.engine,
            lambda events: self.work.on_events(events) if self.work else None,
            on_failure=self.shell.end,
            name=self.role.name,
        )
        self.work = Prefiller(
            self.engine,
            self.driver,
            self.stores,
            self.links,
            self.settings,
            deployment.leases,
            self._clock,
            self._on_ended,
            deployment.depth_for(self.engine.geometry.window_tokens),
            deployment.underway_wait_factor,
        )
        self.driver.start()
        self.shell.every(REPORT_S, self._report)
        self.shell.every(deployment.leases.handoff_s / 3, self.work.keep)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Serve until `stop` is set or a drain is over. Raises when the engine ends by itself."""
        await self.shell.run(stop)

    async def close(self) -> None:
        """Withdraw, cut every link, end what runs, give everything back. Idempotent."""
        await self._beat.stop()
        await self.shell.close()  # first: whoever still reached us would send its next try here
        if self.work is not None:
            work, self.work = self.work, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await work.stop("the prefill replica stops")
            await self.links.close()
            await self.driver.stop()
            await self.stores.close()
        await self._board.close()

    # ---- what arrives ------------------------------------------------------------------------

    def _on_job(self, router: Peer, message: PrefillJob) -> None:
        self.shell.dispatched(router, message.dispatch)
        if self.work is None:
            cold = Unavailable("this prefill replica has not loaded its model yet")
            router.post(JobFailed(message.request.key, cold.code, cold.message, retryable=True))
            return
        self.work.accept(router, message)

    def _on_bind(self, router: Peer, message: BindDecode) -> None:
        if self.work is not None:
            self.work.bind(router, message)

    def _on_cancel(self, router: Peer, message: Cancel) -> None:
        if self.work is not None:
            self.work.cancel(message.key)

    def _on_left(self, peer: Peer) -> None:
        if self.work is not None:
            self.work.router_left(peer)

    def _on_drain(self) -> None:
        if self.work is not None:
            self.work.draining = True
        self._on_ended()

    def _on_ended(self) -> None:
        """A job gave everything back: routers should know of the room at once."""
        self._post_reports()
        if self.shell.draining and (self.work is None or not self.work.jobs):
            self.shell.end()

    # ---- load ----------------------------------------------------------------------------------

    async def _report(self) -> None:
        self._post_reports()

    def _post_reports(self) -> None:
        if self.work is not None:
            self.shell.report(self.load_report)

    def load_report(self, last_dispatch: int) -> LoadReport:
        """This replica's load as of the end of the last step."""
        assert self.work is not None
        stats, jobs = self.driver.stats, self.work.jobs.values()
        not_admitted = sum(job.state in NOT_ADMITTED for job in jobs)
        return LoadReport(
            last_dispatch=last_dispatch,
            step=stats.steps,
            waiting_requests=not_admitted + stats.waiting,
            running_requests=stats.running,
            backlog_rows=stats.backlog_rows + sum(job.rows_to_come for job in jobs),
            resident_tokens=stats.resident_tokens,
            free_blocks=stats.free_blocks,
            free_slots=stats.free_slots,
            rows_per_s=stats.rows_per_s,
            held_leases=len(self.work.jobs),
        )


async def run_prefill(
    role: RoleSettings,
    engine: EngineSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Be a prefill replica until `stop` is set or a drain is over.

    `ready(member)` is called once, when it serves and is announced. Raises `ConfigError` for
    settings that must not start, and `HeadraceError` when the engine's own accounts broke: the
    process should end then and be started anew."""
    replica = PrefillReplica(role, engine)
    try:
        await replica.start()
        if ready is not None:
            ready(replica.member())
        await replica.run(stop)
    finally:
        await replica.close()
