"""The index records of a whole chain at once: which of its blocks are stored, and in which tier.

The same rules as `records.usable_tiers`, which decides on one object, in numpy: a look-up of a
thousand blocks must not cost a thousand steps of Python. A test compares the two on random values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from headrace.core.ids import DIGEST_BYTES
from headrace.kvstore.records import (
    KIND_CODES,
    KINDS_BY_CODE,
    RECORD_BYTES,
    RECORDS,
    TIER_CODES,
    TIERS_BY_CODE,
    WINDOW_TOO,
)
from headrace.kvstore.settings import Kind, Tier


@dataclass(frozen=True, slots=True)
class ChainHits:
    """Leading blocks stored, how many of them per tier (a block in several counts as host before
    ssd before shared), and the numbers of those at whose end a window record may be stored."""

    blocks: int
    by_tier: Mapping[Tier, int]
    windows: tuple[int, ...]


class ChainRecords:
    """Values of the leading keys of a chain, and the digests of all its blocks, joined. What is no
    whole number of records ends the chain, as a missing value does."""

    def __init__(self, values: Sequence[bytes | None], digests: bytes) -> None:
        leading, sizes = _whole(values)
        self._count = len(leading)
        self._records = np.frombuffer(b"".join(leading), RECORDS)
        self._owner = np.repeat(np.arange(self._count), _counts(leading, sizes))
        tails = np.frombuffer(digests, "<u4").reshape(-1, DIGEST_BYTES // 4)[: self._count, 7]
        self._same = tails[self._owner] == self._records["tail"]
        self.stores: list[int] = np.unique(self._records["store"]).tolist()
        self._shared = self._records["tier"] == TIER_CODES[Tier.SHARED]
        self.folders: list[int] = np.unique(self._records["epoch"][self._shared]).tolist()

    def hits(self, epochs: Mapping[int, int], folders: Collection[int]) -> ChainHits:
        """What counts, given the boot epochs of the live stores by number, and the shared folders
        that some living store reads: what lies there outlives its owner."""
        records, owner = self._records, self._owner
        kind = records["kind"] & (0xFF ^ WINDOW_TOO)
        alive = np.zeros(len(records), bool)
        for number in self.stores:
            if number in epochs:
                alive |= (records["store"] == number) & (records["epoch"] == epochs[number])
        if self.folders:
            mounted = np.isin(records["epoch"], list(folders))
            alive = np.where(self._shared, mounted, alive)
        strange = ~np.isin(kind, list(KINDS_BY_CODE)) | ~np.isin(
            records["tier"], list(TIERS_BY_CODE)
        )
        good = alive & self._same & (kind == KIND_CODES[Kind.KV])
        if strange.any():
            good &= ~np.isin(owner, owner[strange])  # such a value is believed in no part
        stored = np.zeros(self._count, bool)
        stored[owner[good]] = True
        blocks = self._count if stored.all() else int(np.argmin(stored))
        good &= owner < blocks
        by_tier: dict[Tier, int] = {}
        so_far = np.zeros(len(records), bool)
        before = 0
        for tier in (Tier.HOST, Tier.SSD, Tier.SHARED):  # the nearest one counts
            so_far |= good & (records["tier"] == TIER_CODES[tier])
            up_to = int(np.unique(owner[so_far]).size)
            by_tier[tier], before = up_to - before, up_to
        windows = np.unique(owner[good & (records["kind"] >= WINDOW_TOO)])
        return ChainHits(
            blocks, {tier: n for tier, n in by_tier.items() if n}, tuple(windows.tolist())
        )


def _whole(values: Sequence[bytes | None]) -> tuple[list[bytes], set[int]]:
    """The leading values that are whole numbers of records, and which lengths they have."""
    end = values.index(None) if None in values else len(values)
    leading = cast(list[bytes], list(values[:end]))
    sizes = set(map(len, leading))
    if any(not size or size % RECORD_BYTES for size in sizes):
        odd = (n for n, value in enumerate(leading) if not value or len(value) % RECORD_BYTES)
        del leading[next(odd) :]
        sizes = set(map(len, leading))
    return leading, sizes


def _counts(values: Sequence[bytes], sizes: set[int]) -> npt.NDArray[np.int64] | int:
    """How many records each value has; one number if it is the same for all."""
    if len(sizes) == 1:
        return next(iter(sizes)) // RECORD_BYTES
    return np.fromiter(map(len, values), np.int64, len(values)) // RECORD_BYTES
