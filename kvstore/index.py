"""The Redis index as a router sees it: which blocks of a chain are stored, and where."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.chain import BLOCK_TOKENS, window_digest
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.ids import DIGEST_BYTES, Digest
from headrace.kvstore.chain_records import ChainRecords
from headrace.kvstore.records import (
    LiveStore,
    packed_key,
    packed_keys,
    record_key,
    store_key,
    store_numbers,
    usable_tiers,
)
from headrace.kvstore.redis_link import RedisAway, RedisLink
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

    A look-up ends within `deadline_s`, and a breaker is shared: after three failures in a row
    nothing is asked for a second. Used from one event loop."""

    def __init__(
        self, redis_url: str, *, deadline_s: float = DEADLINE_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._link = RedisLink(redis_url, deadline_s, clock)
        self._live: dict[int, int] = {}  # epochs by store; asked for anew with every look-up

    @property
    def healthy(self) -> bool:
        """Whether the last call that was made was answered in time."""
        return self._link.healthy

    @property
    def errors(self) -> int:
        """Calls that failed or were late, since the start."""
        return self._link.errors

    async def hit_blocks(self, namespace: bytes, digests: Sequence[Digest]) -> Hits:
        """One look-up of a chain of block digests from the root on, cut at the first hole."""
        if not digests:
            return NO_HITS
        joined = b"".join(digests)
        until_s = time.monotonic() + self._link.deadline_s
        try:
            values: list[bytes | None] = []
            for begin in range(0, len(digests), _KEYS_A_CALL):
                part = joined[begin * DIGEST_BYTES : (begin + _KEYS_A_CALL) * DIGEST_BYTES]
                values += await self._values(Kind.KV, namespace, part, until_s)
                if None in values:
                    break  # a hole: nothing behind it counts
            chain = ChainRecords(values, joined)
            missing = [number for number in chain.stores if number not in self._live]
            if missing:
                await self._learn(missing, until_s)
            found = chain.hits(self._live)
            windows = [(n, window_digest(digests[n])) for n in found.windows]
            at: list[int] = []
            if windows:
                asked = b"".join([window for _, window in windows])
                records = await self._values(Kind.SWA, namespace, asked, until_s)
                at = [
                    (n + 1) * BLOCK_TOKENS
                    for (n, window), value in zip(windows, records, strict=True)
                    if usable_tiers(value, Kind.SWA, window, self._live)
                ]
        except RedisAway:
            return NO_HITS
        return Hits(found.blocks, found.by_tier, tuple(at))

    async def _values(
        self, kind: Kind, namespace: bytes, digests: bytes, until_s: float
    ) -> list[bytes | None]:
        """Values of the objects whose digests are joined, and news of the stores known so far."""
        known = tuple(self._live)
        names = b"".join([packed_key(store_key(number)) for number in known])
        keys = packed_keys(kind, namespace, digests)
        count = len(digests) // DIGEST_BYTES
        answer = await self._link.mget_packed(
            len(known) + count, names + keys, until_s - time.monotonic()
        )
        self._live = _live(zip(known, answer, strict=False))
        return answer[len(known) :]

    async def _learn(self, numbers: Sequence[int], until_s: float) -> None:
        names = b"".join([packed_key(store_key(number)) for number in numbers])
        answer = await self._link.mget_packed(len(numbers), names, until_s - time.monotonic())
        self._live.update(_live(zip(numbers, answer, strict=True)))

    async def present(
        self, namespace: bytes, kind: Kind, digests: Sequence[Digest]
    ) -> frozenset[Digest]:
        """Those of `digests` that some live store has listed as an object of `kind`. A hint, as
        `hit_blocks` is: what is sealed and not yet listed is missing here."""
        if not digests:
            return frozenset()
        keys = [record_key(kind, namespace, digest) for digest in digests]

        until_s = time.monotonic() + self._link.deadline_s
        try:
            values = await self._link.get_many(keys)
            numbers = store_numbers(values)
            names = [store_key(number) for number in numbers]
            live = await self._link.get_many(names, until_s - time.monotonic())
            epochs = _live(zip(numbers, live, strict=True))
        except RedisAway:
            return frozenset()
        pairs = zip(digests, values, strict=True)
        return frozenset(d for d, value in pairs if usable_tiers(value, kind, d, epochs))

    async def close(self) -> None:
        await self._link.close()


def _live(pairs: Iterable[tuple[int, bytes | None]]) -> dict[int, int]:
    """Boot epochs by number, of those that have a live record."""
    found = ((number, LiveStore.unpack(value)) for number, value in pairs)
    return {number: store.epoch for number, store in found if store is not None}
