"""What goes into an engine and what comes out of it: jobs, admissions and events, all values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.chain import TokenIds
from headrace.core.errors import HeadraceError
from headrace.core.ids import Digest, JobKey
from headrace.core.messages import LoadReport
from headrace.core.request import FinishReason, GenRequest


@dataclass(frozen=True, slots=True)
class Job:
    """`generated_ids`: tokens a former attempt produced; they count against `max_tokens`.

    `hit_blocks`: leading blocks of the known tokens whose global KV is resident here or will be
    copied in by `write_fill`; the rest is computed."""

    request: GenRequest
    generated_ids: TokenIds
    hit_blocks: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Block number `index` of a sequence, to be copied into `block` of the engine's state.

    `ticket` names the reservation: a fill that comes after its sequence was released or started
    is recognised and dropped, whoever owns the block by then."""

    index: int
    digest: Digest
    block: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Admission:
    """`fills`: the blocks below `hit_blocks` that are not resident, in order."""

    key: JobKey
    fills: tuple[Fill, ...]


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """One token. `index` counts generated tokens from 0, those of former attempts included.

    With `finish` STOP the token is the stop id and no part of the text. Rows are those of this
    sequence so far, counted by the runner."""

    key: JobKey
    index: int
    token_id: int
    finish: FinishReason | None
    encoder_rows: int
    decoder_rows: int


@dataclass(frozen=True, slots=True)
class BlockDone:
    """Block `index` is complete: its bytes are `Engine.block_view(block)` until `release(key)`."""

    key: JobKey
    index: int
    digest: Digest
    block: int


@dataclass(frozen=True, slots=True)
class WindowDone:
    """The window record at `position`, copied out."""

    key: JobKey
    position: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RowsDone:
    """All rows of an ENCODER plan ran; blocks and window records came before it."""

    key: JobKey
    encoder_rows: int
    decoder_rows: int


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """This sequence cannot go on; others are unharmed. Its lease is open until `release(key)`."""

    key: JobKey
    error: HeadraceError


Event: TypeAlias = TokenSampled | BlockDone | WindowDone | RowsDone | SequenceFailed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `free_blocks + held_blocks` is the pool's size.

    `waiting`: admitted, not started; `running`: started, not finished, in the steps; `parked`: held
    or parked, their blocks reserved; `backlog_rows`: rows of known tokens that the first two still
    have to run (estimated before `start`). `free_blocks`: what an admission may take;
    `resident_blocks` of them hold committed bytes and are evicted oldest first. `resident_tokens`:
    tokens whose global KV live sequences hold. `rows_per_s` is measured over the last steps, 0
    before the first. Totals count since the engine was made."""

    waiting: int
    running: int
    parked: int
    backlog_rows: int
    free_blocks: int
    resident_blocks: int
    held_blocks: int
    free_slots: int
    resident_tokens: int
    steps: int
    rows_per_s: float
    encoder_rows_total: int
    decoder_rows_total: int
    late_events: int

    def load_report(
        self,
        last_dispatch: int,
        *,
        waiting_requests: int,
        rows_to_come: int,
        held_leases: int,
        parked_requests: int = 0,
    ) -> LoadReport:
        """What a replica tells a router: this, and what its jobs know that the engine does not.
        `rows_to_come`: rows of jobs that were not admitted yet."""
        return LoadReport(
            last_dispatch=last_dispatch,
            step=self.steps,
            waiting_requests=waiting_requests,
            running_requests=self.running,
            backlog_rows=self.backlog_rows + rows_to_come,
            resident_tokens=self.resident_tokens,
            free_blocks=self.free_blocks,
            free_slots=self.free_slots,
            rows_per_s=self.rows_per_s,
            held_leases=held_leases,
            parked_requests=parked_requests,
        )
