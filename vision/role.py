"""The vision role: one image tower, its store client, its membership."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import torch

from headrace.core import faults
from headrace.core.card import Member, ModelCard, Role, VisionCard
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.deployment import Deployment
from headrace.core.errors import Unavailable
from headrace.core.messages import Cancel, JobFailed, LoadReport, VisionJob
from headrace.core.peers import Peer
from headrace.core.replica import ReplicaShell, ReplicaSizes
from headrace.core.role import Ready, RoleSettings
from headrace.kvstore import Beat, MemberBoard, StoreClient
from headrace.model import (
    CacheLayout,
    ServedModel,
    model_card,
    resolve_numerics,
)
from headrace.vision.encode import ImageEncoder
from headrace.vision.preprocess import PREPROCESSING_VERSION
from headrace.vision.settings import VisionSettings
from headrace.vision.work import VisionWork

log = logging.getLogger(__name__)

REPORT_S = 0.5
STORE_WAIT_S = 2.0
STOP_S = 5.0  # at stop, for the last releases


class VisionReplica:
    """`start` brings it to serving, `run` serves until stopped or drained, `close` gives back.

    The socket listens before the tower is loaded; jobs that come too early are refused as
    retryable. `work`, `encoder` and `store` are there from the end of `start` on."""

    encoder: ImageEncoder
    store: StoreClient

    def __init__(
        self, role: RoleSettings, settings: VisionSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.role = role
        self.settings = settings
        self._clock = clock
        self.shell = ReplicaShell(
            role,
            Role.VISION,
            ReplicaSizes(settings.max_patches_per_step, 0, 0),
            {VisionJob: self._on_job, Cancel: self._on_cancel},
            self._on_left,
            self._on_drain,
        )
        self._board = MemberBoard.of(role, clock=clock)
        self._beat = Beat(self._board, self.shell.member, role.deployment.leases)
        self.work: VisionWork | None = None

    def member(self) -> Member:
        return self.shell.member()

    # ---- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, load the tower, reach the store, announce READY. Raises `ConfigError`."""
        faults.arm_from_environment(loopback_only=self.role.on_loopback)
        deployment = self.role.deployment
        if torch.device(deployment.device).type == "cpu":
            torch.set_num_threads(1)  # several replicas share the cores of a host
        await self.shell.listen()
        await self._beat.start()
        self.encoder, card = await asyncio.to_thread(load_encoder, deployment, self.settings)
        self.store = StoreClient(
            self.role.store_address,
            self.role.token,
            card.namespace().digest(),
            name=self.role.name,
            clock=self._clock,
            times=deployment.leases,
        )
        if not await self.store.connect(STORE_WAIT_S):
            log.warning("%s starts without its store", self.role.name)
        self.work = VisionWork(self.encoder, self.store, self.settings, self._clock, self._on_ended)
        self.shell.every(REPORT_S, self._report)
        self.shell.every(deployment.leases.handoff_s / 3, self.work.keep)
        tower = self.encoder.tower
        self.shell.warm(card, VisionCard(PREPROCESSING_VERSION, tower.identity, tower.geometry))
        await self._beat.now()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Serve until `stop` is set or a drain is over."""
        await self.shell.run(stop)

    async def close(self) -> None:
        """Withdraw, cut every link, end what runs, give everything back. Idempotent."""
        await self._beat.stop()
        await self.shell.close()  # first: whoever still reached us would send its next try here
        if self.work is not None:
            work, self.work = self.work, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await work.stop("the vision replica stops")
            await self.store.close()
        await self._board.close()

    # ---- what arrives ------------------------------------------------------------------------

    def _on_job(self, router: Peer, message: VisionJob) -> None:
        self.shell.dispatched(router, message.dispatch)
        if self.work is None:
            cold = Unavailable("this vision replica has not loaded its tower yet")
            router.post(JobFailed(message.key, cold.code, cold.message, retryable=True))
            return
        self.work.accept(router, message)

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
        """A job ended: routers should know of the room at once."""
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
        """This replica's load now. A row of its backlog is a patch that waits or runs."""
        assert self.work is not None
        return LoadReport(
            last_dispatch=last_dispatch,
            step=self.work.steps,
            waiting_requests=len(self.work.jobs),
            running_requests=0,
            backlog_rows=self.work.queued_patches,
            resident_tokens=0,
            free_blocks=0,
            free_slots=0,
            rows_per_s=self.work.patches_per_s,
            held_leases=self.work.held_leases,
        )


def load_encoder(
    deployment: Deployment, settings: VisionSettings
) -> tuple[ImageEncoder, ModelCard]:
    """The tower of the deployment's model, and the card of its text model, whose namespace the rows
    are stored in. Raises `ConfigError` for a model without a tower."""
    numerics = resolve_numerics(deployment.numerics, deployment.device)
    served = ServedModel(deployment)
    tower, weights_id = served.vision(numerics, deployment.device)
    config = served.config()
    layout = CacheLayout.of(config)
    card = model_card(deployment.model, config, layout, weights_id, tower.precision)
    return ImageEncoder(tower, settings.limits), card


async def run_vision(
    role: RoleSettings,
    settings: VisionSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Be a vision replica until `stop` is set or a drain is over.

    `ready(member)` is called once, when it serves and is announced. Raises `ConfigError` for
    settings that must not start."""
    replica = VisionReplica(role, settings)
    try:
        await replica.start()
        if ready is not None:
            ready(replica.member())
        await replica.run(stop)
    finally:
        await replica.close()
