"""The second call of a step: a plan becomes a row batch, the model runs it, tokens are drawn.

The runner keeps what rows need beyond the model's state: the token ids and the block table of
every slot. Rows are counted from what the model says it ran.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import faults
from headrace.core.chain import BLOCK_TOKENS, TokenIds
from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.ids import JobKey
from headrace.core.images import ImageSpan
from headrace.engine.errors import NotANumber
from headrace.engine.finite import FiniteCheck
from headrace.engine.pictures import PictureRows, PictureTable
from headrace.engine.plan import KnownRows, Segment, SegmentResult, StepPlan, StepResult
from headrace.engine.sampler import sample
from headrace.model import KvState, RowBatch, RowResult, Trunk

_log = logging.getLogger(__name__)

LogitsHook = Callable[[JobKey, int, torch.Tensor], None]


@dataclass(slots=True)
class _Tally:
    """What the model ran in one step, over all its calls that came to an end."""

    encoder_rows: int = 0
    decoder_rows: int = 0
    groups_written: int = 0

    def add(self, result: RowResult) -> None:
        self.encoder_rows += result.encoder_rows
        self.decoder_rows += result.decoder_rows
        self.groups_written += result.groups_written


class Runner:
    """Mutates `state`; not thread-safe. `on_logits(key, position, row)` is a hook for tests: it
    sees the float32 logits of every row that has them, before a token is drawn."""

    def __init__(self, trunk: Trunk, state: KvState, clock: Clock) -> None:
        self.trunk = trunk
        self.state = state
        self.clock = clock
        self.on_logits: LogitsHook | None = None
        self._finite = FiniteCheck(state.layout)
        self._history = trunk.config.engram_max_ngram_size
        width = min(state.n_blocks * BLOCK_TOKENS, trunk.config.max_position_embeddings)
        # Ids lie behind max_ngram - 1 places that say "before the start of the text".
        self._ids = np.full((state.n_slots, width + self._history), -1, dtype=np.int64)
        self._tables = np.full((state.n_slots, state.n_blocks), -1, dtype=np.int64)
        dtype = trunk.precision.accumulate
        self._pictures = PictureTable(state.n_slots, width, trunk.config.hidden_size, dtype)

    def open(
        self,
        slot: int,
        ids: TokenIds,
        blocks: list[int],
        spans: tuple[ImageSpan, ...] = (),
        pictures: PictureRows | None = None,
    ) -> None:
        """Take a slot into use for a sequence with these known tokens, blocks and picture spans;
        `pictures` has the rows of those spans that will run."""
        self._pictures.open(slot, spans, pictures or {})
        pad = self._history - 1
        self._ids[slot, pad : pad + len(ids)] = np.frombuffer(ids, dtype=np.uint32)
        self._tables[slot] = -1
        self._tables[slot, : len(blocks)] = blocks

    def expect(self, spans: Sequence[KnownRows]) -> None:
        """Tell the model which rows of known tokens will run in a later step."""
        if not spans or not self.trunk.reads_ahead:
            return
        slots = np.repeat([s.slot for s in spans], [s.end - s.start for s in spans])
        positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        self.trunk.expect(*self._histories(slots, positions))

    def run_drafts(
        self, segments: Sequence[Segment], drafts: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Logits float32 [rows, vocab] of all rows of each segment, in one call of the model, where
        row start + 1 + i has token `drafts[.][i]`; the token of row `start` is known.

        The rows stay in the state as if the drafts were true: the caller tells by `accept` which
        tokens follow, and runs the positions after them anew. Raises what the model raises; rows
        of the call then count as not run."""
        for segment, tokens in zip(segments, drafts, strict=True):
            self.accept(segment.slot, segment.start + 1, tokens)
        batch = self._batch(tuple(segments), all_logits=True)
        counts = [segment.end - segment.start for segment in segments]
        return list(self.trunk.forward(batch, self.state).logits.split(counts))

    def accept(self, slot: int, position: int, token_ids: Sequence[int]) -> None:
        """The tokens of a slot from `position` on, which replace what was there."""
        first = self._history - 1 + position
        self._ids[slot, first : first + len(token_ids)] = token_ids

    def close(self, slot: int) -> None:
        """Drop what is held for a slot beside the state. Idempotent."""
        self._pictures.close(slot)

    def run(self, plan: StepPlan) -> StepResult:
        """Never raises for what one sequence did: its `SegmentResult` carries the error.

        When the common call fails, every segment runs alone, so that only the one at fault is
        lost; rows that ran in the failed call leave no trace, see `_save`."""
        began_s = self.clock.now_s()
        tally = _Tally()
        saved = self._save(plan) if len(plan.segments) > 1 else {}
        try:
            parts = self._run_together(plan.segments, tally)
        except Exception as error:
            _log.exception("a step of %d sequences failed", len(plan.segments))
            if len(plan.segments) == 1:
                parts = [_failed(error)]
            else:
                tally = _Tally()
                parts = [self._run_alone(s, saved.get(s.slot), tally) for s in plan.segments]
        return StepResult(
            plan=plan,
            segments=tuple(parts),
            encoder_rows=tally.encoder_rows,
            decoder_rows=tally.decoder_rows,
            groups_written=tally.groups_written,
            seconds=self.clock.now_s() - began_s,
        )

    # ---- inside ----------------------------------------------------------------------------

    def _run_together(self, segments: tuple[Segment, ...], tally: _Tally) -> list[SegmentResult]:
        fault = faults.hit("engine.step")
        result = self.trunk.forward(self._batch(segments), self.state)
        if fault == "nan" and len(result.logits):
            result.logits[0] = float("nan")
        tokens = self._tokens(segments, result.logits)
        parts = [self._collect(segment, tokens) for segment in segments]
        tally.add(result)  # last: rows of a call that raised, here too, count as not run
        return parts

    def _run_alone(
        self, segment: Segment, saved: tuple[torch.Tensor, torch.Tensor] | None, tally: _Tally
    ) -> SegmentResult:
        if saved is not None:
            self.state.rings[segment.slot], self.state.tails[segment.slot] = saved
        try:
            return self._run_together((segment,), tally)[0]
        except Exception as error:
            _log.exception("%s failed alone", segment.key)
            return _failed(error)

    def _save(self, plan: StepPlan) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Rings and tails that a failed call could spoil for the retry.

        A row overwrites the ring row of position p - ring_rows, which no retry of up to
        ring_rows - (W-1) rows reads: one row alone needs no copy. Blocks need none: a retry
        writes the same groups again before it reads them."""
        return {
            s.slot: (self.state.rings[s.slot].clone(), self.state.tails[s.slot].clone())
            for s in plan.segments
            if s.end - s.start > 1
        }

    def _batch(self, segments: tuple[Segment, ...], *, all_logits: bool = False) -> RowBatch:
        """Vectorised over rows; the cost per sequence is one line of a small table. Logits are
        those of a segment's last row where it samples, or of all rows."""
        columns = np.array(
            [
                (
                    s.start,
                    s.end,
                    s.slot,
                    s.encoder_floor,
                    s.decoder_floor,
                    s.write_floor,
                    s.decoder_start,
                    s.sampling is not None,
                )
                for s in segments
            ],
            dtype=np.int64,
        ).T
        starts, ends, slots = columns[:3]
        counts = ends - starts
        sequence = np.repeat(np.arange(len(segments)), counts)
        first_row = np.cumsum(counts) - counts
        positions = np.arange(len(sequence)) - first_row[sequence] + starts[sequence]
        history, image = self._histories(slots[sequence], positions)
        width = -(-int(ends.max()) // BLOCK_TOKENS)
        samples = columns[7][sequence] > 0
        row = {name: torch.from_numpy(columns[i][sequence]) for i, name in _ROW_COLUMNS.items()}
        return RowBatch(
            history_ids=torch.from_numpy(history),
            history_image=torch.from_numpy(image),
            embeddings=self._pictures.embeddings(
                len(positions),
                list(zip(first_row.tolist(), slots.tolist(), starts, ends, strict=True)),
            ),
            positions=torch.from_numpy(positions),
            sequence=torch.from_numpy(sequence),
            block_tables=torch.from_numpy(self._tables[slots, :width]),
            decoder=torch.from_numpy(positions >= columns[6][sequence]),
            logits=torch.from_numpy(all_logits | ((positions == ends[sequence] - 1) & samples)),
            **row,
        )

    def _histories(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Token ids [n, max_ngram] at and before these positions, newest first, -1 before the
        text, and whether they lie in a picture."""
        back = positions[:, None] - np.arange(self._history)
        ids = self._ids[slots[:, None], back + (self._history - 1)]
        return ids, self._pictures.mask(slots[:, None], back)

    def _tokens(
        self, segments: tuple[Segment, ...], logits: torch.Tensor
    ) -> dict[JobKey, int | None]:
        """Draw for the segments that sample, and append what was drawn to the slot's ids."""
        wanted = [s for s in segments if s.sampling is not None]
        if not wanted:
            return {}
        if self.on_logits is not None:
            for segment, row in zip(wanted, logits, strict=True):
                self.on_logits(segment.key, segment.end - 1, row)
        samplings = [s.sampling for s in wanted if s.sampling is not None]
        tokens = sample(logits, samplings, [s.end for s in wanted])
        for segment, token in zip(wanted, tokens, strict=True):
            if token is not None:
                self._ids[segment.slot, self._history - 1 + segment.end] = token
        drawn = [s for s, token in zip(wanted, tokens, strict=True) if token is not None]
        last = self._ids.shape[1] - self._history  # a text that is full has no next row
        self.expect([KnownRows(s.slot, s.end, s.end + 1) for s in drawn if s.end < last])
        return {segment.key: token for segment, token in zip(wanted, tokens, strict=True)}

    def _collect(self, segment: Segment, tokens: dict[JobKey, int | None]) -> SegmentResult:
        token = tokens.get(segment.key)
        if segment.sampling is not None and token is None:
            return SegmentResult(error=NotANumber("the model's output was not a number"))
        window = self.state.read_window(segment.slot, segment.end) if segment.window else None
        if not self._shareable(segment, window):
            return SegmentResult(error=NotANumber("the model's state was not a number"))
        return SegmentResult(token_id=token, window=window)

    def _shareable(self, segment: Segment, window: bytes | None) -> bool:
        """Whether the blocks that became complete and the record hold numbers only."""
        first = max(segment.start, segment.write_floor) // BLOCK_TOKENS
        end = segment.end // BLOCK_TOKENS
        if first < end:
            blocks = self._tables[segment.slot, first:end].tolist()
            if not self._finite.blocks(self.state, blocks):
                return False
        return window is None or self._finite.window(window)


# Per-row values that are the segment's: index in the table of `_batch` -> field of RowBatch.
_ROW_COLUMNS = {2: "slots", 3: "swa_floor", 4: "decoder_floor", 5: "write_floor"}


def _failed(error: Exception) -> SegmentResult:
    known = isinstance(error, HeadraceError)
    shown = error if known else HeadraceError("the replica failed to run this request")
    assert isinstance(shown, HeadraceError)
    return SegmentResult(error=shown, ran=False)
