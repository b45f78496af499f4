"""The decode role: one engine of the full model, its store client, its membership."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from headrace.core.card import Role
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.messages import (
    BlocksReady,
    DecodeJob,
    JobFailed,
    LoadReport,
    PrefillDone,
    StateReady,
    WindowReady,
)
from headrace.core.peers import Peer
from headrace.core.replica import REPORT_S, Opened, Replica, ReplicaSizes
from headrace.core.role import Ready, RoleSettings
from headrace.decode.handoff import Announcement
from headrace.decode.work import Decoder
from headrace.engine import (
    Engine,
    EngineDriver,
    EngineSettings,
    Half,
    load_engine,
    one_thread_on_cpu,
)
from headrace.kvstore import Beat, ClassStores, StoreClient

log = logging.getLogger(__name__)

STORE_WAIT_S = 2.0  # at start, for the store to answer; without it everything is a miss
HANDOFF_FRAMES = (BlocksReady, WindowReady, StateReady, PrefillDone, JobFailed)


class DecodeReplica(Replica[Decoder]):
    """`engine`, `driver` and `stores` are there from the end of `start` on."""

    engine: Engine
    driver: EngineDriver
    stores: ClassStores

    def __init__(
        self, role: RoleSettings, settings: EngineSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(
            role,
            Role.DECODE,
            ReplicaSizes(settings.max_rows_per_step, settings.n_blocks, settings.n_slots),
            DecodeJob,
            partial(Beat.of, role, clock=clock),
            dict.fromkeys(HANDOFF_FRAMES, self._on_announcement),
        )
        self.settings = settings
        self._clock = clock

    @property
    def store(self) -> StoreClient:
        """The store's end for the class that this deployment writes."""
        return self.stores.own

    async def _open(self, held: AsyncExitStack) -> Opened[Decoder]:
        deployment = self.role.deployment
        one_thread_on_cpu(deployment.device)
        self.engine = await asyncio.to_thread(
            load_engine, deployment, self.settings, Half.FULL, clock=self._clock
        )
        card = self.engine.card(deployment.model)
        self.stores = ClassStores.of(self.role, card, self._clock)
        held.push_async_callback(self.stores.close)
        if not await self.stores.connect(STORE_WAIT_S):
            log.warning("%s starts without its store: everything is a miss", self.role.name)
        work = self._wire()
        self.driver.start()
        held.push_async_callback(self.driver.stop)
        self.shell.every(min(REPORT_S, deployment.leases.handoff_s / 4), work.watch)
        return Opened(work, card)

    def _wire(self) -> Decoder:
        deployment = self.role.deployment
        self.driver = EngineDriver(
            self.engine,
            lambda events: self.work.on_events(events) if self.work else None,
            on_failure=self.shell.end,
            name=self.role.name,
        )
        return Decoder(
            self.engine,
            self.driver,
            self.stores,
            self.settings,
            deployment.leases,
            self._clock,
            self._find_prefill,
            self.on_ended,
            deployment.depth_for(self.engine.geometry.window_tokens),
        )

    def _on_announcement(self, prefill: Peer, message: Announcement) -> None:
        if self.work is not None:
            self.work.announced(prefill, message)

    def _find_prefill(self, name: str) -> Peer | None:
        for peer in self.shell.server.peers:
            if peer.hello.role is Role.PREFILL and peer.name == name:
                return peer
        return None

    def load_report(self, last_dispatch: int) -> LoadReport:
        """This replica's load as of the end of the last step."""
        assert self.work is not None
        stats, jobs = self.driver.stats, self.work.jobs.values()
        return stats.load_report(
            last_dispatch,
            waiting_requests=sum(job.waits for job in jobs),
            rows_to_come=sum(job.rows_to_come for job in jobs),
            held_leases=len(jobs),
            parked_requests=sum(job.is_parked for job in jobs),
        )


async def run_decode(
    role: RoleSettings,
    engine: EngineSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Be a decode replica until `stop` is set or a drain is over; `Replica.serve` says the rest."""
    await DecodeReplica(role, engine).serve(ready, stop)
