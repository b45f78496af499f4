"""A step as values: what shall run (`StepPlan`), and what came of it (`StepResult`).

The plan is a snapshot: nothing in it changes while the step is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.core.ids import JobKey
from headrace.core.request import Sampling


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, end) of one sequence in one step.

    Rows from `decoder_start` on (== end: none) run the decoder half. `sampling` not None: the
    last row has logits and a token is drawn from them. `window`: copy the window record at `end`
    out after the step. Floors as in `RowBatch`."""

    key: JobKey
    slot: int
    start: int
    end: int
    decoder_start: int
    encoder_floor: int
    decoder_floor: int
    write_floor: int
    sampling: Sampling | None
    window: bool

    @property
    def encoder_rows(self) -> int:
        return self.end - self.start

    @property
    def decoder_rows(self) -> int:
        return self.end - self.decoder_start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Never empty. Decoding segments come first, then those of known tokens, oldest first."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Rows [start, end) of the sequence in a slot, whose tokens are known."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """`token_id` where the segment sampled; `error` when this sequence cannot go on. `ran` False:
    its rows did not run to the end, and the counts of the step leave them out."""

    token_id: int | None = None
    window: bytes | None = None
    error: HeadraceError | None = None
    ran: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """`segments` in the order of the plan's. Row counts are those of the model, taken where the
    rows ran; rows that a retry ran again are not counted twice. `seconds` is the step's time."""

    plan: StepPlan
    segments: tuple[SegmentResult, ...]
    encoder_rows: int
    decoder_rows: int
    groups_written: int
    seconds: float
