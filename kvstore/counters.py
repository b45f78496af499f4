"""What happened in a store since its start; read by `stat` and by the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.kvstore.settings import Tier


class Eviction(StrEnum):
    """Why something left a tier."""

    ROOM = "room"  # its arena slot was needed
    IDLE = "idle"  # nobody used it for the time of its kind
    RECYCLED = "recycled"  # its segment was reused and nobody had used it
    ORPHANED = "orphaned"  # the block that it hung on went
    MOVED = "moved"  # no loss: its segment was reused, it was written to the next one
    MISLAID = "mislaid"  # should have moved, but could not be read or written


@dataclass(slots=True)
class TenantCount:
    """Tokens by the group of domains that they belong to. `promised` are tokens that the store
    knew of, by the tier where they lay, and could not deliver."""

    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    promised_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    missed_tokens: int = 0


@dataclass(slots=True)
class Counters:
    """Counts from 0 at the start of the process."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    dropped: int = 0  # puts refused for want of room
    unsaved: int = 0  # objects that stay in the arena only
    refused: int = 0
    loads: int = 0
    writes: int = 0
    evicted: int = 0  # arena copies that made room, or went idle
    evictions: dict[Eviction, int] = field(default_factory=lambda: dict.fromkeys(Eviction, 0))
    tenants: dict[int, TenantCount] = field(default_factory=dict)  # by group number

    def tenant(self, group: int) -> TenantCount:
        return self.tenants.setdefault(group, TenantCount())

    def evict(self, why: Eviction, n: int = 1) -> None:
        self.evictions[why] += n
