"""What happened in a store since its start; read by `stat` and by the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import Histogram

from headrace.core.chain import BLOCK_TOKENS
from headrace.core.metrics import Metric
from headrace.kvstore.policy import COMMON
from headrace.kvstore.settings import Tier

UNKNOWN = COMMON - 1  # no group: nothing that was found says whose it is
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


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
    prefetched: int = 0  # brought while their request stood in line, and there at its turn
    read_errors: int = 0  # batches whose read failed in an unforeseen way
    slow_reads: int = 0  # objects not waited for, since computing them anew was sooner
    writes: int = 0
    evicted: int = 0  # arena copies that made room, or went idle
    evictions: dict[Eviction, int] = field(default_factory=lambda: dict.fromkeys(Eviction, 0))
    tenants: dict[int, TenantCount] = field(default_factory=dict)  # by group number
    load_s: Histogram = field(default_factory=lambda: _histogram(Metric.STORE_LOAD_SECONDS))
    sync_s: Histogram = field(default_factory=lambda: _histogram(Metric.STORE_SYNC_SECONDS))

    def tenant(self, group: int) -> TenantCount:
        return self.tenants.setdefault(group, TenantCount())

    def prefix(self, group: int, here: Sequence[bool], found: int, asked: int) -> None:
        """Count one look-up of a chain of `asked` blocks: for each that the store knew whether it
        lay in the arena, and how many of these, from the first on, it delivered."""
        self.hits += found
        self.misses += asked - found
        tenant = self.tenant(group)
        for counts, part in (
            (tenant.hit_tokens, here[:found]),
            (tenant.promised_tokens, here[found:]),
        ):
            in_arena = sum(part)
            counts[Tier.HOST] += in_arena * BLOCK_TOKENS
            counts[Tier.SSD] += (len(part) - in_arena) * BLOCK_TOKENS
        tenant.missed_tokens += (asked - len(here)) * BLOCK_TOKENS

    def evict(self, why: Eviction, n: int = 1) -> None:
        self.evictions[why] += n


def _histogram(metric: Metric) -> Histogram:
    text = {
        Metric.STORE_LOAD_SECONDS: "one batch read from disk and verified",
        Metric.STORE_SYNC_SECONDS: "one group made durable",
    }
    return Histogram(metric.value, text[metric], registry=None, buckets=_BUCKETS_S)
