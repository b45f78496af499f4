"""One call's index arithmetic, done on the host before any layer runs.

`plan_call` checks the batch's contract and turns positions, floors and tables into index
tensors on the model's device. The encoder half works on all rows, the decoder half on the rows
marked `decoder`; each has its own `HalfPlan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.errors import BatchError
from headrace.model.layout import CacheLayout
from headrace.model.rows import RowBatch

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Segment:
    """Adjacent rows that attend in one operation: `n_sequences` sequences of `m` rows each.

    A short segment (m rows fit into the ring beside a window) stores its rows first and gathers
    whole windows from the ring: `ring_index` names [rows, W] of them. A long one is a single
    sequence that gathers W-1 history rows (dead ones replaced by zeros) and slides over history +
    own rows without copying. `ring_index` is flat and counts ring rows of layer 0; layer l adds
    l * ring_rows. `dead` is bool [rows, W]: True where the row must not look.
    """

    rows: slice
    n_sequences: int
    m: int
    short: bool
    ring_index: torch.Tensor  # int64 [rows * W] (short) or [W-1]
    history_dead: torch.Tensor | None  # bool [W-1, 1]
    dead: torch.Tensor
    tables: torch.Tensor  # int64 [n_sequences, blocks], absent blocks clamped to 0
    longest: int  # positions of the longest sequence, the newest row included


@dataclass(frozen=True)
class GroupWrites:
    """Groups of one ratio that complete in this call at or above the write floor."""

    rows: torch.Tensor  # int64 [g]: the row of each group's last token
    blocks: torch.Tensor  # int64 [g]
    entries: torch.Tensor  # int64 [g]: row inside the block
    positions: torch.Tensor  # int64 [g]: the group's first token
    # Earlier tokens that the entries read, oldest first, [g, span-1]: from this call where
    # `in_call`. `absent` ([g, span], only with overlap): there is no such token.
    earlier_rows: torch.Tensor
    earlier_tail: torch.Tensor
    earlier_in_call: torch.Tensor
    absent: torch.Tensor | None
    slots: torch.Tensor
    # Rows of the call whose (gate, value) stay in the tail rings of this ratio.
    tail_rows: torch.Tensor
    tail_slots: torch.Tensor
    tail_ring: torch.Tensor

    @property
    def count(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True)
class HalfPlan:
    """Rows of one half. `row_index` is None where they are all rows of the call."""

    n: int
    row_index: torch.Tensor | None
    positions: torch.Tensor
    sequence: torch.Tensor
    segments: tuple[Segment, ...]
    stored_rows: torch.Tensor | None  # rows that reach the ring; None = all
    stored_index: torch.Tensor  # int64, flat as `ring_index`
    visible: dict[int, torch.Tensor]  # ratio -> complete groups up to each row, int64 [n]
    image: torch.Tensor | None  # bool [n] or None where no row lies in an image


@dataclass(frozen=True)
class CallPlan:
    """Everything of a call that depends on indices only."""

    n: int
    encoder: HalfPlan
    decoder: HalfPlan | None
    tables: torch.Tensor  # int64 [n_sequences, max_blocks], absent blocks clamped to 0
    writes: dict[int, GroupWrites]  # ratio -> groups
    logits_rows: torch.Tensor | None  # rows of the decoder half; None = all of them
    n_logits: int
    history: Ints
    history_image: Bools


def _host(x: torch.Tensor) -> NDArray[Any]:
    return np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x)


@dataclass(frozen=True)
class _Rows:
    """The batch on the host, or a subset of its rows."""

    positions: Ints
    slots: Ints
    sequence: Ints
    floor: Ints
    starts: Ints  # first row of each run of one sequence
    counts: Ints

    @classmethod
    def of(cls, positions: Ints, slots: Ints, sequence: Ints, floor: Ints) -> _Rows:
        cuts = np.flatnonzero(np.diff(sequence)) + 1
        starts = np.concatenate(([0], cuts)) if positions.size else np.zeros(0, np.int64)
        counts = np.diff(np.append(starts, positions.size))
        return cls(positions, slots, sequence, floor, starts, counts)

    def take(self, index: Ints, floor: Ints) -> _Rows:
        return _Rows.of(
            self.positions[index], self.slots[index], self.sequence[index], floor[index]
        )


class Planner:
    """Plans calls for one layout and device; holds nothing between calls."""

    def __init__(
        self,
        layout: CacheLayout,
        ratios: tuple[int, ...],
        max_ngram: int,
        device: torch.device,
        ring_layers: int,
    ) -> None:
        """`ring_layers`: layers that have rings in the state that the plans are for."""
        self.layout = layout
        self.ring_layers = ring_layers
        self.ratios = ratios
        self.max_ngram = max_ngram
        self.device = device

    def plan(self, batch: RowBatch) -> CallPlan:
        """Raises BatchError naming the broken rule; the batch is not changed."""
        tables = _host(batch.block_tables)
        rows = _Rows.of(
            _host(batch.positions),
            _host(batch.slots),
            _host(batch.sequence),
            _host(batch.swa_floor),
        )
        decoder = _host(batch.decoder)
        logits = _host(batch.logits)
        image = _host(batch.history_image)
        self._check(batch, rows, tables, decoder, logits)
        clamped = np.maximum(tables, 0)
        encoder_half = self._half(rows, None, clamped, image[:, 0])
        decoder_half, logits_rows = None, None
        if decoder.any():
            index = np.flatnonzero(decoder)
            everything = index.size == decoder.size
            decoder_half = self._half(
                rows.take(index, _host(batch.decoder_floor)),
                None if everything else index,
                clamped,
                image[index, 0],
            )
            wanted = np.flatnonzero(logits[index])
            logits_rows = None if wanted.size == index.size else self._send(wanted)
        return CallPlan(
            n=rows.positions.size,
            encoder=encoder_half,
            decoder=decoder_half,
            tables=self._send(clamped),
            writes={
                ratio: self._groups(ratio, rows, tables, _host(batch.write_floor))
                for ratio in self.ratios
            },
            logits_rows=logits_rows,
            n_logits=int(logits.sum()),
            history=_host(batch.history_ids),
            history_image=image,
        )

    def _send(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _check(
        self, batch: RowBatch, rows: _Rows, tables: Ints, decoder: Bools, logits: Bools
    ) -> None:
        n = rows.positions.size
        if n == 0:
            raise BatchError("row batch is empty; a call needs at least one row")
        if tuple(batch.history_ids.shape) != (n, self.max_ngram):
            found = tuple(batch.history_ids.shape)
            raise BatchError(f"history_ids has shape {found}, wanted {(n, self.max_ngram)}")
        if np.unique(rows.sequence[rows.starts]).size != rows.starts.size:
            raise BatchError("rows of one sequence are not adjacent")
        inner = np.ones(n, bool)
        inner[rows.starts] = False
        before = np.flatnonzero(inner) - 1
        if (rows.positions[before + 1] - rows.positions[before] != 1).any():
            raise BatchError("positions of one sequence are not consecutive")
        if (rows.slots[before + 1] != rows.slots[before]).any():
            raise BatchError("one sequence uses two slots")
        if (decoder[before] & ~decoder[before + 1]).any():
            raise BatchError("decoder rows of one sequence are not a suffix of its rows")
        if (logits & ~decoder).any():
            raise BatchError("a row with logits is not a decoder row")
        if np.unique(rows.slots[rows.starts]).size != rows.starts.size:
            raise BatchError("two sequences share a slot")
        last = rows.positions // self.layout.block_tokens
        if last.max() >= tables.shape[1]:
            raise BatchError(f"block_tables has {tables.shape[1]} columns, row needs {last.max()}")
        for first, count in zip(rows.starts, rows.counts, strict=True):
            end = last[first + count - 1] + 1
            if (tables[rows.sequence[first], :end] < 0).any():
                raise BatchError(f"sequence {rows.sequence[first]} lacks a block below row's end")

    def _last_of_each(self, rows: _Rows, limit: int) -> Ints:
        """Row numbers of the last `limit` rows of every sequence, in order."""
        ends = rows.starts + rows.counts
        from_end = np.repeat(ends, rows.counts) - np.arange(rows.positions.size)
        return np.flatnonzero(from_end <= limit)

    def _half(self, rows: _Rows, index: Ints | None, tables: Ints, image: Bools) -> HalfPlan:
        stored = self._last_of_each(rows, self.layout.ring_rows)
        everything = stored.size == rows.positions.size
        return HalfPlan(
            n=rows.positions.size,
            row_index=None if index is None else self._send(index),
            positions=self._send(rows.positions),
            sequence=self._send(rows.sequence),
            segments=tuple(self._segments(rows, tables)),
            stored_rows=None if everything else self._send(stored),
            stored_index=self._send(self._ring_index(rows.slots[stored], rows.positions[stored])),
            visible={r: self._send((rows.positions + 1) // r) for r in self.ratios},
            image=self._send(image) if image.any() else None,
        )

    def _ring_index(self, slots: Ints, positions: Ints) -> Ints:
        """Flat row numbers in rings[:, 0] of a [n_slots, L, ring_rows] array."""
        ring = self.layout.ring_rows
        return slots * (self.ring_layers * ring) + positions % ring

    def _segments(self, rows: _Rows, tables: Ints) -> list[Segment]:
        # A sequence of m rows may be stored before it attends iff ring >= W + m - 1.
        most = self.layout.ring_rows - self.layout.window_tokens + 1
        segments: list[Segment] = []
        run = 0
        while run < rows.starts.size:
            m, stop = int(rows.counts[run]), run + 1
            short = m <= most
            while short and stop < rows.starts.size and rows.counts[stop] == m:
                stop += 1
            segments.append(self._segment(rows, tables, run, stop, m, short))
            run = stop
        return segments

    def _segment(
        self, rows: _Rows, tables: Ints, run: int, stop: int, m: int, short: bool
    ) -> Segment:
        window = self.layout.window_tokens
        part = slice(int(rows.starts[run]), int(rows.starts[run]) + m * (stop - run))
        positions = rows.positions[part]
        floor = np.maximum(rows.floor[part], 0)
        seen = positions[:, None] - np.arange(window - 1, -1, -1)
        dead = seen < floor[:, None]
        history_dead = None
        if short:
            ring_index = self._ring_index(rows.slots[part, None], seen).ravel()
        else:
            history = seen[0, :-1]
            ring_index = self._ring_index(rows.slots[part.start], history)
            # An entry that any row may see holds a value; the rest may hold anything.
            history_dead = self._send((history < floor.min())[:, None])
        longest = int(positions.max()) + 1
        n_blocks = self.layout.n_blocks(longest)
        return Segment(
            rows=part,
            n_sequences=stop - run,
            m=m,
            short=short,
            ring_index=self._send(ring_index),
            history_dead=history_dead,
            dead=self._send(dead),
            tables=self._send(tables[rows.sequence[rows.starts[run:stop]], :n_blocks]),
            longest=longest,
        )

    def _groups(self, ratio: int, rows: _Rows, tables: Ints, write_floor: Ints) -> GroupWrites:
        first_row = np.repeat(rows.starts, rows.counts)
        done = (rows.positions + 1) % ratio == 0
        picked = np.flatnonzero(done & (rows.positions >= write_floor))
        entry = (rows.positions[picked] + 1) // ratio - 1
        per_block = self.layout.block_tokens // ratio
        tail = self.layout.ratio_tail(ratio)
        span, ring = (1, 1) if tail is None else (tail.span_tokens, tail.rows)
        ago = np.arange(span - 1, 0, -1)
        earlier = picked[:, None] - ago
        read = rows.positions[picked, None] - np.arange(span - 1, -1, -1)
        absent = None
        if tail is not None and tail.overlaps:
            absent = self._send(read < np.maximum(rows.floor[picked, None], 0))
        kept = self._last_of_each(rows, 0 if tail is None else ring)
        return GroupWrites(
            rows=self._send(picked),
            blocks=self._send(tables[rows.sequence[picked], entry // per_block]),
            entries=self._send(entry % per_block),
            positions=self._send(entry * ratio),
            earlier_rows=self._send(np.maximum(earlier, 0)),
            earlier_tail=self._send(read[:, :-1] % ring),
            earlier_in_call=self._send(earlier >= first_row[picked, None]),
            absent=absent,
            slots=self._send(rows.slots[picked]),
            tail_rows=self._send(kept),
            tail_slots=self._send(rows.slots[kept]),
            tail_ring=self._send(rows.positions[kept] % ring),
        )
