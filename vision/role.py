"""The vision role: one image tower, its store client, its membership."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from headrace.core.card import ModelCard, Role, VisionCard
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.deployment import Deployment
from headrace.core.messages import LoadReport, VisionJob
from headrace.core.replica import Opened, Replica, ReplicaSizes
from headrace.core.role import Ready, RoleSettings
from headrace.kvstore import Beat, StoreClient
from headrace.model import (
    CacheLayout,
    ServedModel,
    model_card,
    one_thread_on_cpu,
    resolve_numerics,
)
from headrace.vision.encode import ImageEncoder
from headrace.vision.preprocess import PREPROCESSING_VERSION
from headrace.vision.settings import VisionSettings
from headrace.vision.work import VisionWork

log = logging.getLogger(__name__)

STORE_WAIT_S = 2.0  # at start, for the store to answer; without it everything is a miss


class VisionReplica(Replica[VisionWork]):
    """`encoder` and `store` are there from the end of `start` on."""

    encoder: ImageEncoder
    store: StoreClient

    def __init__(
        self, role: RoleSettings, settings: VisionSettings, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(
            role,
            Role.VISION,
            ReplicaSizes(settings.max_patches_per_step, 0, 0),
            VisionJob,
            partial(Beat.of, role, clock=clock),
        )
        self.settings = settings
        self._clock = clock

    async def _open(self, held: AsyncExitStack) -> Opened[VisionWork]:
        deployment = self.role.deployment
        one_thread_on_cpu(deployment.device)
        self.encoder, card = await asyncio.to_thread(load_encoder, deployment, self.settings)
        self.store = StoreClient(
            self.role.store_address,
            self.role.token,
            card.namespace().digest(),
            name=self.role.name,
            clock=self._clock,
            times=deployment.leases,
        )
        held.push_async_callback(self.store.close)
        if not await self.store.connect(STORE_WAIT_S):
            log.warning("%s starts without its store", self.role.name)
        work = VisionWork(self.encoder, self.store, self.settings, self._clock, self.on_ended)
        tower = self.encoder.tower
        seen = VisionCard(PREPROCESSING_VERSION, tower.identity, tower.geometry)
        return Opened(work, card, seen)

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
    """Be a vision replica until `stop` is set or a drain is over; `Replica.serve` says the rest."""
    await VisionReplica(role, settings).serve(ready, stop)
