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
    folder_epochs,
    folder_key,
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
    several counts as the nearest), and positions in tokens, ascending and at most `128 * blocks`,
    at which a window record is stored. A hint: the store alone decides."""

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
        # Epochs by store, and folders that are mounted: asked for anew with every look-up.
        self._live: dict[int, int] = {}
        self._folders: frozenset[int] = frozenset()

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
                if len(values) < len(digests) and None in values:
                    break  # a hole: nothing behind it counts
            chain = ChainRecords(values, joined)
            missing = [number for number in chain.stores if number not in self._live]
            folders = [epoch for epoch in chain.folders if epoch not in self._folders]
            if missing or folders:
                await self._learn(missing, folders, until_s)
            found = chain.hits(self._live, self._folders)
            windows = [(n, window_digest(digests[n])) for n in found.windows]
            at: list[int] = []
            if windows:
                asked = b"".join([window for _, window in windows])
                records = await self._values(Kind.SWA, namespace, asked, until_s)
                at = [
                    (n + 1) * BLOCK_TOKENS
                    for (n, window), value in zip(windows, records, strict=True)
                    if usable_tiers(value, Kind.SWA, window, self._live, self._folders)
                ]
        except RedisAway:
            return NO_HITS
        return Hits(found.blocks, found.by_tier, tuple(at))

    async def _values(
        self, kind: Kind, namespace: bytes, digests: bytes, until_s: float
    ) -> list[bytes | None]:
        """Values of the objects whose digests are joined, and news of the stores and folders known
        so far."""
        known, folders = tuple(self._live), tuple(self._folders)
        keys = packed_keys(kind, namespace, digests)
        n_before, count = len(known) + len(folders), len(digests) // DIGEST_BYTES
        answer = await self._link.mget_packed(
            n_before + count, _about(known, folders) + keys, until_s - time.monotonic()
        )
        self._live = _live(zip(known, answer, strict=False))
        self._folders = _mounted(folders, answer[len(known) : n_before])
        return answer[n_before:]

    async def _learn(self, numbers: Sequence[int], folders: Sequence[int], until_s: float) -> None:
        answer = await self._link.mget_packed(
            len(numbers) + len(folders), _about(numbers, folders), until_s - time.monotonic()
        )
        self._live.update(_live(zip(numbers, answer, strict=False)))
        self._folders |= _mounted(folders, answer[len(numbers) :])

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
            numbers, folders = store_numbers(values), folder_epochs(values)
            names = [store_key(n) for n in numbers] + [folder_key(epoch) for epoch in folders]
            live = await self._link.get_many(names, until_s - time.monotonic())
            epochs = _live(zip(numbers, live, strict=False))
            mounted = _mounted(folders, live[len(numbers) :])
        except RedisAway:
            return frozenset()
        pairs = zip(digests, values, strict=True)
        return frozenset(d for d, value in pairs if usable_tiers(value, kind, d, epochs, mounted))

    async def close(self) -> None:
        await self._link.close()


def _about(numbers: Iterable[int], folders: Iterable[int]) -> bytes:
    names = [store_key(number) for number in numbers] + [folder_key(epoch) for epoch in folders]
    return b"".join(map(packed_key, names))


def _mounted(folders: Iterable[int], values: Iterable[bytes | None]) -> frozenset[int]:
    pairs = zip(folders, values, strict=True)
    return frozenset(epoch for epoch, value in pairs if value is not None)


def _live(pairs: Iterable[tuple[int, bytes | None]]) -> dict[int, int]:
    """Boot epochs by number, of those that have a live record."""
    found = ((number, LiveStore.unpack(value)) for number, value in pairs)
    return {number: store.epoch for number, store in found if store is not None}
