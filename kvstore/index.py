"""The Redis index as a router sees it: which blocks of a chain are stored, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.chain import BLOCK_TOKENS, window_digest
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.ids import Digest
from headrace.kvstore.records import (
    LiveStore,
    record_key,
    store_key,
    store_numbers,
    usable_tiers,
)
from headrace.kvstore.redis_link import Client, RedisAway, RedisLink
from headrace.kvstore.settings import Kind, Tier

DEADLINE_S = 0.05
_KEYS_A_CALL = 1000  # Redis serves nobody else meanwhile: about half a millisecond


@dataclass(frozen=True, slots=True)
class Hits:
    """What the index knows of a chain: leading blocks stored, how many of them per tier (a block in
    both counts as host), and positions in tokens, ascending and at most `128 * blocks`, at which a
    window record is stored. A hint: the store alone decides."""

    blocks: int = 0
    by_tier: Mapping[Tier, int] = field(default_factory=dict)
    windows: tuple[int, ...] = ()


NO_HITS = Hits()


class IndexReader:
    """Reads the index; never raises, answers 'nothing stored' on any error or late answer.

    Calls share one deadline of 50 ms and a breaker: after three failures in a row nothing is asked
    for a second. Used from one event loop."""

    def __init__(self, redis_url: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._link = RedisLink(redis_url, DEADLINE_S, clock)

    @property
    def healthy(self) -> bool:
        """Whether the last call that was made was answered in time."""
        return self._link.healthy

    @property
    def errors(self) -> int:
        """Calls that failed or were late, since the start."""
        return self._link.errors

    async def hit_blocks(
        self, namespace: bytes, digests: Sequence[Digest], deadline_s: float = DEADLINE_S
    ) -> Hits:
        """One look-up of a chain of block digests from the root on, cut at the first hole."""
        if not digests:
            return NO_HITS
        windows = [window_digest(digest) for digest in digests]
        keys = [record_key(Kind.KV, namespace, digest) for digest in digests]
        keys += [record_key(Kind.SWA, namespace, digest) for digest in windows]

        async def look_up(client: Client) -> tuple[list[bytes | None], dict[int, int]]:
            values: list[bytes | None] = []
            for begin in range(0, len(keys), _KEYS_A_CALL):
                values += await client.mget(keys[begin : begin + _KEYS_A_CALL])
            return values, await _epochs(client, values)

        try:
            values, epochs = await self._link.call(look_up, deadline_s)
        except RedisAway:
            return NO_HITS
        by_tier: dict[Tier, int] = {}
        blocks = 0
        for digest, value in zip(digests, values, strict=False):
            tiers = usable_tiers(value, Kind.KV, digest, epochs)
            if not tiers:
                break
            blocks += 1
            tier = Tier.HOST if Tier.HOST in tiers else Tier.SSD
            by_tier[tier] = by_tier.get(tier, 0) + 1
        at = tuple(
            (number + 1) * BLOCK_TOKENS
            for number in range(blocks)
            if usable_tiers(values[len(digests) + number], Kind.SWA, windows[number], epochs)
        )
        return Hits(blocks, by_tier, at)

    async def present(
        self,
        namespace: bytes,
        kind: Kind,
        digests: Sequence[Digest],
        deadline_s: float = DEADLINE_S,
    ) -> frozenset[Digest]:
        """Those of `digests` that some live store has listed as an object of `kind`. A hint, as
        `hit_blocks` is: what is sealed and not yet listed is missing here."""
        if not digests:
            return frozenset()
        keys = [record_key(kind, namespace, digest) for digest in digests]

        async def look_up(client: Client) -> tuple[list[bytes | None], dict[int, int]]:
            values = await client.mget(keys)
            return values, await _epochs(client, values)

        try:
            values, epochs = await self._link.call(look_up, deadline_s)
        except RedisAway:
            return frozenset()
        pairs = zip(digests, values, strict=True)
        return frozenset(d for d, value in pairs if usable_tiers(value, kind, d, epochs))

    async def close(self) -> None:
        await self._link.close()


async def _epochs(client: Client, values: Sequence[bytes | None]) -> dict[int, int]:
    """Boot epochs of the live stores that `values` name."""
    numbers = store_numbers(values)
    if not numbers:
        return {}
    live = await client.mget([store_key(number) for number in numbers])
    found = ((number, LiveStore.unpack(value)) for number, value in zip(numbers, live, strict=True))
    return {number: store.epoch for number, store in found if store is not None}
