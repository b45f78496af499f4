"""A role's end of the store: opens, puts and reads objects; survives restarts of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.ids import Digest, JobKey
from headrace.core.limits import LeaseTimes
from headrace.core.messages import Place
from headrace.kvstore.settings import Kind, StoreStat

Buffer: TypeAlias = bytes | bytearray | memoryview


class StoreClient:
    """One per process. While the store is away every call answers as a miss; nothing raises on
    the request path. Used from one event loop; `read_into` alone may be called from any thread."""

    def __init__(
        self,
        address: str,
        token: str,
        namespace: bytes,
        *,
        name: str = "",
        clock: Clock = SYSTEM_CLOCK,
        times: LeaseTimes | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether a store answers now."""
        raise NotImplementedError

    @property
    def held(self) -> int:
        """Reservations not yet sealed, plus leases taken here and neither released nor expired."""
        raise NotImplementedError

    async def connect(self, deadline_s: float) -> bool:
        """Begin to keep a connection; returns whether there is one after at most `deadline_s`."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the connection for good. Idempotent."""
        raise NotImplementedError

    async def open_prefix(
        self, digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[Place, ...]:
        """Places of the longest stored prefix of `digests` (block digests from the root on)."""
        raise NotImplementedError

    async def open_windows(
        self, candidates: Sequence[tuple[int, Digest]], lease: JobKey | None
    ) -> tuple[int, Place] | None:
        """The first candidate (position, digest of the *block* ending there) with a record."""
        raise NotImplementedError

    async def put(
        self,
        kind: Kind,
        items: Sequence[tuple[Digest, Buffer]],
        *,
        lease: JobKey | None = None,
        wait_s: float = 0.0,
        parent: Digest | None = None,
        first_block: int = 0,
        domain: str = "",
    ) -> tuple[Place | None, ...]:
        """Store objects; one answer an item, None where it was dropped."""
        raise NotImplementedError

    def read_into(self, place: Place, digest: Digest, dest: bytearray | memoryview) -> bool:
        """Copy an object's payload into `dest` and verify it. False is a miss."""
        raise NotImplementedError

    async def renew(self, lease: JobKey) -> bool:
        """Prolong a lease by `handoff_s` from now; False when the store does not know it."""
        raise NotImplementedError

    async def release(self, lease: JobKey, kind: Kind | None = None) -> None:
        """End a lease, or only its part on objects of one kind. Idempotent."""
        raise NotImplementedError

    async def doom(self, place: Place, digest: Digest) -> None:
        """Report bytes that did not verify; the store looks itself and drops what is damaged."""
        raise NotImplementedError

    async def stat(self) -> StoreStat | None:
        """The store's own account; None while it is away."""
        raise NotImplementedError
