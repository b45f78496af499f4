"""The prefill role: one engine of the encoder half, its store client, its links, its membership."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from headrace.core.card import Role
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.messages import BindDecode, LoadReport, PrefillJob
from headrace.core.peers import Peer
from headrace.core.replica import Opened, Replica, ReplicaSizes
from headrace.core.request import HandoffMode
from headrace.core.role import Ready, RoleSettings
from headrace.engine import (
    Engine,
    EngineDriver,
    EngineSettings,
    Half,
    load_engine,
    one_thread_on_cpu,
)
from headrace.kvstore import Beat, ClassStores, StoreClient
from headrace.prefill.jobs import NOT_ADMITTED
from headrace.prefill.links import DecodeLinks
from headrace.prefill.work import Prefiller

log = logging.getLogger(__name__)

STORE_WAIT_S = 2.0  # at start, for the store to answer; without it everything is a miss


class PrefillReplica(Replica[Prefiller]):
    """`engine`, `driver`, `stores` and `links` are there from the end of `start` on."""

    engine: Engine
    driver: EngineDriver
    stores: ClassStores
    links: DecodeLinks

    def __init__(
        self, role: RoleSettings, settings: EngineSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(
            role,
            Role.PREFILL,
            ReplicaSizes(settings.max_rows_per_step, settings.n_blocks, settings.n_slots),
            PrefillJob,
            partial(Beat.of, role, clock=clock),
            {BindDecode: self._on_bind},
        )
        self.settings = settings
        self._clock = clock

    @property
    def store(self) -> StoreClient:
        """The store's end for the class that this deployment writes."""
        return self.stores.own

    async def _open(self, held: AsyncExitStack) -> Opened[Prefiller]:
        deployment = self.role.deployment
        one_thread_on_cpu(deployment.device)
        # Mode `state` alone needs the decoder half here.
        half = Half.FULL if deployment.handoff_mode is HandoffMode.STATE else Half.ENCODER
        self.engine = await asyncio.to_thread(
            load_engine, deployment, self.settings, half, clock=self._clock
        )
        card = self.engine.card(deployment.model)
        self.stores = ClassStores.of(self.role, card, self._clock)
        held.push_async_callback(self.stores.close)
        if not await self.stores.connect(STORE_WAIT_S):
            log.warning("%s starts without its store: everything is a miss", self.role.name)
        work = self._wire()
        self.driver.start()
        held.push_async_callback(self.driver.stop)
        held.push_async_callback(self.links.close)
        return Opened(work, card)

    def _wire(self) -> Prefiller:
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
        return Prefiller(
            self.engine,
            self.driver,
            self.stores,
            self.links,
            self.settings,
            deployment.leases,
            self._clock,
            self.on_ended,
            deployment.depth_for(self.engine.geometry.window_tokens),
            deployment.underway_wait_factor,
        )

    def _on_bind(self, router: Peer, message: BindDecode) -> None:
        if self.work is not None:
            self.work.bind(router, message)

    def load_report(self, last_dispatch: int) -> LoadReport:
        """This replica's load as of the end of the last step."""
        assert self.work is not None
        stats, jobs = self.driver.stats, self.work.jobs.values()
        not_admitted = sum(job.state in NOT_ADMITTED for job in jobs)
        return stats.load_report(
            last_dispatch,
            waiting_requests=not_admitted + stats.waiting,
            rows_to_come=sum(job.rows_to_come for job in jobs),
            held_leases=len(jobs),
        )


async def run_prefill(
    role: RoleSettings,
    engine: EngineSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Be a prefill replica until `stop` is set or a drain is over; `Replica.serve` says the
    rest."""
    await PrefillReplica(role, engine).serve(ready, stop)
