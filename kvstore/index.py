"""The Redis index as a router sees it: which blocks of a chain are stored, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.ids import Digest
from headrace.kvstore.settings import Tier


@dataclass(frozen=True, slots=True)
class Hits:
    """What the index knows of a chain: leading blocks stored, how many of them per tier (host
    counted first), and positions in tokens, ascending, at which a window record is stored."""

    blocks: int
    by_tier: Mapping[Tier, int]
    windows: tuple[int, ...]


class IndexReader:
    """Reads the index; never raises, answers 'nothing stored' on any error or late answer."""

    def __init__(self, redis_url: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        """Whether the last call was answered in time."""
        raise NotImplementedError

    async def hit_blocks(
        self, namespace: bytes, digests: Sequence[Digest], deadline_s: float
    ) -> Hits:
        """One look-up of a chain of block digests from the root on."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
