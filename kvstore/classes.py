"""A role's ends of the store, one for each exactness class that its deployment reads."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.card import ModelCard
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.ids import JobKey
from headrace.core.role import RoleSettings
from headrace.kvstore.client import StoreClient
from headrace.kvstore.settings import Kind


@dataclass(frozen=True, slots=True)
class ClassStores:
    """`own` is the namespace that the deployment writes, `exact` that of exact bytes: one and the
    same client, unless the deployment replays."""

    own: StoreClient
    exact: StoreClient

    @staticmethod
    def of(role: RoleSettings, card: ModelCard, clock: Clock = SYSTEM_CLOCK) -> ClassStores:
        """Clients of the role's store, not connected yet."""
        deployment = role.deployment

        def client(exactness: str) -> StoreClient:
            return StoreClient(
                role.store_address,
                role.token,
                card.namespace(exactness).digest(),
                name=role.name,
                clock=clock,
                times=deployment.leases,
            )

        own = client(deployment.exactness)
        return ClassStores(own, own if deployment.exactness == "exact" else client("exact"))

    @property
    def each(self) -> tuple[StoreClient, ...]:
        return (self.own,) if self.own is self.exact else (self.own, self.exact)

    async def connect(self, deadline_s: float) -> bool:
        """Begin to keep the connections; whether all are there after `deadline_s` each."""
        return all([await store.connect(deadline_s) for store in self.each])

    async def close(self) -> None:
        for store in self.each:
            await store.close()

    async def renew(self, lease: JobKey) -> None:
        for store in self.each:
            await store.renew(lease)

    async def release(self, lease: JobKey, kind: Kind | None = None) -> None:
        """As `StoreClient.release`, for what either client holds."""
        for store in self.each:
            await store.release(lease, kind)
