"""The index records of a whole chain at once: which of its blocks are stored, and in which tier.

The same rules as `records.usable_tiers`, which decides on one object, in numpy: a look-up of a
thousand blocks must not cost a thousand steps of Python. The records of a chain begin with few
different heads (store, tier, kind, epoch), so each head is judged once, in Python, and what it says
is spread over the records. A test compares the two on random values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from headrace.core.ids import DIGEST_BYTES
from headrace.kvstore.records import (
    HEAD,
    KIND_CODES,
    KINDS_BY_CODE,
    RECORD_BYTES,
    RECORDS,
    TIER_CODES,
    TIERS_BY_CODE,
    WINDOW_TOO,
)
from headrace.kvstore.settings import Kind, Tier

_TIERS = (Tier.HOST, Tier.SSD, Tier.SHARED)  # nearest first
# What a record says, as bits: a tier each that it lies in, then these.
_WINDOW, _STRANGE = 8, 16
_SAID = 32
_TIER_BITS = {TIER_CODES[tier]: 1 << number for number, tier in enumerate(_TIERS)}
# What the records of a value say together -> number of the nearest tier; 3: nothing is stored.
_NEAREST = np.array(
    [
        len(_TIERS)
        if said & _STRANGE  # such a value is believed in no part
        else next((n for n in range(len(_TIERS)) if said & 1 << n), len(_TIERS))
        for said in range(_SAID)
    ],
    np.uint8,
)
# Bits that count, by whether the tail of the digest is the right one.
_BELIEVED = np.array([_STRANGE, _SAID - 1], np.uint8)
_FEW = 16


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
        leading, joined, sizes = _whole(values)
        self._count = len(leading)
        records = np.frombuffer(joined, RECORDS)
        tails = np.frombuffer(digests, "<u4").reshape(-1, DIGEST_BYTES // 4)[: self._count, 7]
        counts = _counts(leading, sizes)
        self._same = np.repeat(tails, counts) == records["tail"]
        ends = np.cumsum(np.broadcast_to(counts, self._count), dtype=np.intp)
        self._starts: npt.NDArray[np.intp] = ends - counts  # of each value, among all records
        heads, self._which = _distinct(np.ascontiguousarray(records["head"]))
        self._heads = [HEAD.unpack(head.to_bytes(HEAD.size, "little")) for head in heads]
        self.stores: list[int] = sorted({head[0] for head in self._heads})
        self.folders: list[int] = sorted(
            {head[3] for head in self._heads if head[1] == TIER_CODES[Tier.SHARED]}
        )

    def hits(self, epochs: Mapping[int, int], folders: Collection[int]) -> ChainHits:
        """What counts, given the boot epochs of the live stores by number, and the shared folders
        that some living store reads: what lies there outlives its owner."""
        if not self._count:
            return ChainHits(0, {}, ())
        said = np.array([_said(head, epochs, folders) for head in self._heads], np.uint8)
        each = said[self._which] & _BELIEVED[self._same.view(np.uint8)]
        each = np.bitwise_or.reduceat(each, self._starts)
        nearest = _NEAREST[each]
        stored = nearest < len(_TIERS)
        blocks = self._count if stored.all() else int(np.argmin(stored))
        by_tier = np.bincount(nearest[:blocks], minlength=len(_TIERS)).tolist()
        windows = np.flatnonzero(each[:blocks] & _WINDOW)
        return ChainHits(
            blocks,
            {tier: n for tier, n in zip(_TIERS, by_tier, strict=True) if n},
            tuple(windows.tolist()),
        )


def _said(
    head: tuple[int, int, int, int], epochs: Mapping[int, int], folders: Collection[int]
) -> int:
    """What a record with this head says of a block of which it is one."""
    store, tier, kind, epoch = head
    if kind & ~WINDOW_TOO not in KINDS_BY_CODE or tier not in TIERS_BY_CODE:
        return _STRANGE
    shared = tier == TIER_CODES[Tier.SHARED]
    alive = epoch in folders if shared else epochs.get(store) == epoch
    if not alive or kind & ~WINDOW_TOO != KIND_CODES[Kind.KV]:
        return 0
    return _TIER_BITS[tier] | (_WINDOW if kind & WINDOW_TOO else 0)


def _distinct(heads: npt.NDArray[np.uint64]) -> tuple[list[int], npt.NDArray[np.intp]]:
    """The different ones, and which of them each is."""
    found: list[int] = []
    which = np.zeros(len(heads), np.intp)
    unknown = np.ones(len(heads), bool)
    at = 0
    while at < len(heads) and unknown[at]:
        if len(found) == _FEW:  # sorting them all costs more than a few passes, and less than many
            every, which = np.unique(heads, return_inverse=True)
            return every.tolist(), which
        same = heads == heads[at]
        which[same] = len(found)
        found.append(int(heads[at]))
        unknown &= ~same
        at = int(np.argmax(unknown))
    return found, which


def _whole(values: Sequence[bytes | None]) -> tuple[Sequence[bytes], bytes, set[int]]:
    """The leading values that are whole numbers of records, the same joined, and which lengths they
    have."""
    try:
        leading = cast(Sequence[bytes], values)
        joined = b"".join(leading)
    except TypeError:  # a hole
        leading = cast(Sequence[bytes], values[: values.index(None)])
        joined = b"".join(leading)
    sizes = set(map(len, leading))
    if any(not size or size % RECORD_BYTES for size in sizes):
        odd = (n for n, value in enumerate(leading) if not value or len(value) % RECORD_BYTES)
        leading = leading[: next(odd)]
        joined, sizes = b"".join(leading), set(map(len, leading))
    return leading, joined, sizes


def _counts(values: Sequence[bytes], sizes: set[int]) -> npt.NDArray[np.int64] | int:
    """How many records each value has; one number if it is the same for all."""
    if len(sizes) == 1:
        return next(iter(sizes)) // RECORD_BYTES
    return np.fromiter(map(len, values), np.int64, len(values)) // RECORD_BYTES
