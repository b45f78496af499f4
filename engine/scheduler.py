"""Which rows run in the next step, and what follows from the rows that ran.

Pure: no tensors, no clock, no model. `plan` and `advance` are two of the three calls of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.core.chain import BLOCK_TOKENS
from headrace.core.errors import Overloaded
from headrace.core.ids import JobKey
from headrace.core.request import GenRequest, HandoffMode
from headrace.core.rows import (
    Geometry,
    RowPlan,
    StartKind,
    plan_adopted,
    plan_parked,
    record_positions,
)
from headrace.engine.admission import ModelLimits, blocks_to_reserve, check_job, check_plan
from headrace.engine.errors import EngineDamaged
from headrace.engine.jobs import (
    Admission,
    BlockDone,
    Event,
    Fill,
    Job,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
)
from headrace.engine.lease import Lease, Resources
from headrace.engine.plan import KnownRows, Segment, SegmentResult, StepPlan, StepResult
from headrace.engine.sequence import DigestChain, Sequence, SequenceEvent, SequenceState
from headrace.engine.settings import EngineSettings, Half


@dataclass(slots=True)
class RowTotals:
    """Rows run since the engine was made, and results that came for sequences already gone."""

    encoder_rows: int = 0
    decoder_rows: int = 0
    late_events: int = 0


class Scheduler:
    """Owns all sequences. Not thread-safe."""

    def __init__(
        self,
        settings: EngineSettings,
        half: Half,
        geometry: Geometry,
        limits: ModelLimits,
        resources: Resources,
        record_spacing_tokens: int,
    ) -> None:
        self.settings = settings
        self.half = half
        self.geometry = geometry
        self.limits = limits
        self.resources = resources
        self.record_spacing_tokens = record_spacing_tokens
        self.totals = RowTotals()
        self._sequences: dict[JobKey, Sequence] = {}
        self._order: dict[JobKey, None] = {}  # started and unfinished, in the order of start
        self._pending: list[Event] = []  # events that no step produces

    # ---- sequences -------------------------------------------------------------------------

    def admit(self, job: Job) -> Admission | None:
        """Reserve everything that the job will ever need, or None when there is no room now.

        Raises `InvalidRequest` if it can never fit or holds ids outside the vocabulary, and
        `ValueError` if the key is already admitted."""
        request = job.request
        if request.key in self._sequences:
            raise ValueError(f"{request.key} is already admitted")
        check_job(job, self.half, self.limits, self.settings)
        ids = request.token_ids + job.generated_ids
        digests = DigestChain(request, ids)
        hits = [digests[index] for index in range(job.hit_blocks)]
        lease = Lease.reserve(self.resources, hits, blocks_to_reserve(request, self.half))
        if lease is None:
            return None
        self._sequences[request.key] = Sequence(request, ids, digests, job.hit_blocks, lease)
        return Admission(
            request.key,
            tuple(
                Fill(index, hits[index], lease.blocks[index], lease.ticket)
                for index in range(lease.n_shared, job.hit_blocks)
            ),
        )

    def start(self, key: JobKey, plan: RowPlan) -> Sequence | None:
        """Let the rows of `plan` run. None when the sequence is gone (released meanwhile).

        Raises `ValueError` when the plan is not one for this sequence or a fill that it needs is
        missing or in flight, `Overloaded` when a hit below the resident prefix needs blocks that
        are not there; in both cases nothing changed."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state is SequenceState.FAILED:
            self.totals.late_events += 1
            return None
        check_plan(plan, sequence, self.half)
        lease = sequence.lease
        filled = self._filled(sequence, plan)
        if not lease.make_private(plan.write_floor // BLOCK_TOKENS):
            raise Overloaded(f"{key}: no blocks to compute what should have been a hit")
        sequence.on(SequenceEvent.START)
        self.resources.guard.close(lease.ticket)
        for index in filled:
            lease.commit(index, sequence.digests[index])
        sequence.plan = plan
        sequence.next_row = plan.start
        sequence.next_block = plan.write_floor // BLOCK_TOKENS
        sequence.records = self._records(sequence, plan)
        if plan.kind is StartKind.STATE:
            pass  # `adopt` gives the token that follows
        elif plan.start == plan.end:
            sequence.on(SequenceEvent.FINISH)
            self._pending.append(RowsDone(key, 0, 0))
        else:
            self._order[key] = None
        return sequence

    def adopt(self, key: JobKey, token_id: int, ran: RowPlan | None = None) -> Sequence | None:
        """Go on without rows, since another engine ran them or this one did before: at N with the
        first token given, or where tokens were generated at the newest of them, which is
        `token_id`; `ran` is the plan of the run that was parked then. All complete blocks below
        that are filled. None when the sequence is gone.

        Raises `ValueError` as `start` does."""
        sequence = self._sequences.get(key)
        if sequence is None:
            self.totals.late_events += 1
            return None
        request = sequence.request
        if sequence.generated:
            if ran is None:
                raise ValueError(f"{key}: which rows made the state is not told")
            plan = plan_parked(len(sequence.ids) - 1, ran)
        else:
            plan = plan_adopted(request.n_tokens, request.keep_tokens, self.geometry)
        started = self.start(key, plan)
        if started is None:
            return None
        if started.generated:
            started.on(SequenceEvent.UNPARK)
        else:
            self._pending.append(self._take_token(started, token_id))
        if started.state is SequenceState.DECODING:
            self._order[key] = None
        return started

    def rest(self, sequence: Sequence) -> None:
        """No step runs the sequence until `rejoin`."""
        self._order.pop(sequence.key, None)

    def rejoin(self, sequence: Sequence) -> None:
        """A decoding sequence takes its place behind those that run."""
        self._order[sequence.key] = None

    def release(self, key: JobKey) -> Sequence | None:
        """Close the sequence's lease, in whatever state it is. None when it is already gone."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return None
        sequence.on(SequenceEvent.RELEASE)
        self._order.pop(key, None)
        self._pending = [event for event in self._pending if event.key != key]
        sequence.lease.close()
        return sequence

    def request(self, key: JobKey) -> GenRequest | None:
        """The request of an admitted sequence."""
        sequence = self._sequences.get(key)
        return sequence.request if sequence is not None else None

    def sequence(self, key: JobKey) -> Sequence | None:
        """One that is admitted and not yet released."""
        return self._sequences.get(key)

    def sequences(self) -> Iterator[Sequence]:
        """All admitted and not yet released."""
        return iter(self._sequences.values())

    @property
    def has_work(self) -> bool:
        """Whether a step would run rows or deliver events."""
        return bool(self._order or self._pending)

    def _filled(self, sequence: Sequence, plan: RowPlan) -> range:
        """Block numbers that the rows of `plan` read and that a fill has put in place."""
        done, writing = self.resources.guard.look(sequence.lease.ticket)
        if writing:
            raise ValueError(f"{sequence.key} was started while a fill is in flight")
        reads = plan.encoder_rows or plan.kind is StartKind.STATE
        last = min(plan.write_floor, plan.end) if reads else 0
        filled = range(sequence.lease.n_shared, last // BLOCK_TOKENS)
        for index in filled:
            if sequence.lease.blocks[index] not in done:
                raise ValueError(f"{sequence.key}: block {index} of the hit was not filled")
        return filled

    def _records(self, sequence: Sequence, plan: RowPlan) -> tuple[int, ...]:
        """Positions of the known rows at which a *valid* window record can be made."""
        if not _makes_windows(sequence, plan):
            return ()
        earliest = plan.start
        if plan.kind is StartKind.REPLAY:
            earliest += self.geometry.replay_rows
        positions = record_positions(
            plan.start,
            len(sequence.ids),
            sequence.request.keep_tokens,
            self.record_spacing_tokens,
        )
        return tuple(x for x in positions if earliest <= x <= plan.end)

    # ---- one step --------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, None when no row is to run. Changes nothing.

        Every decoding sequence gets its row; then known rows, oldest sequence first, up to
        `max_rows_per_step`, or `replay_rows_per_step` when others decode."""
        running = [self._sequences[key] for key in self._order]
        segments = [self._decode_segment(s) for s in running if s.state is SequenceState.DECODING]
        budget = self.settings.max_rows_per_step - len(segments)
        if segments:
            budget = min(budget, self.settings.replay_rows_per_step)
        for sequence in running:
            if sequence.state is SequenceState.KNOWN and budget > 0:
                segment = self._known_segment(sequence, budget)
                budget -= segment.encoder_rows
                segments.append(segment)
        return StepPlan(tuple(segments)) if segments else None

    def ahead(self, plan: StepPlan) -> tuple[KnownRows, ...]:
        """The rows of known tokens that follow when `plan` has run, at most a step's; changes
        nothing. A guess: who comes or goes meanwhile is not known."""
        ends = {segment.key: segment.end for segment in plan.segments}
        room, found = self.settings.max_rows_per_step, []
        for key in self._order:
            sequence = self._sequences[key]
            if sequence.state is not SequenceState.KNOWN or sequence.plan is None:
                continue
            start = ends.get(key, sequence.next_row)
            end = min(start + room, sequence.plan.end)
            if start < end:
                found.append(KnownRows(sequence.lease.slot, start, end))
                room -= end - start
        return tuple(found)

    def _decode_segment(self, sequence: Sequence) -> Segment:
        row = sequence.next_row
        assert sequence.plan is not None
        window = (row + 1) % BLOCK_TOKENS == 0 and _makes_windows(sequence, sequence.plan)
        return self._segment(sequence, row, row + 1, window)

    def _known_segment(self, sequence: Sequence, budget: int) -> Segment:
        assert sequence.plan is not None
        start = sequence.next_row
        cut = next((x for x in sequence.records if x > start), sequence.plan.end)
        end = min(start + budget, cut, sequence.plan.end)
        return self._segment(sequence, start, end, end in sequence.records)

    def _segment(self, sequence: Sequence, start: int, end: int, window: bool) -> Segment:
        plan = sequence.plan
        assert plan is not None
        samples = self.half is Half.FULL and end == len(sequence.ids)
        return Segment(
            key=sequence.key,
            slot=sequence.lease.slot,
            start=start,
            end=end,
            decoder_start=min(max(start, plan.decoder_start), end),
            encoder_floor=plan.encoder_floor,
            decoder_floor=plan.decoder_floor,
            write_floor=plan.write_floor,
            sampling=sequence.request.sampling if samples else None,
            window=window,
        )

    def advance(self, result: StepResult) -> tuple[Event, ...]:
        """What follows from a step, in the order of its plan; a sequence's blocks and windows
        come before its token. Raises `EngineDamaged` when the rows that ran are not the plan's."""
        parts = list(zip(result.plan.segments, result.segments, strict=True))
        ran = [segment for segment, part in parts if part.ran]
        planned = (sum(s.encoder_rows for s in ran), sum(map(self._decoder_rows, ran)))
        if planned != (result.encoder_rows, result.decoder_rows):
            raise EngineDamaged(
                f"planned {planned[0]} encoder and {planned[1]} decoder rows,"
                f" the model ran {result.encoder_rows} and {result.decoder_rows}"
            )
        self.totals.encoder_rows += result.encoder_rows
        self.totals.decoder_rows += result.decoder_rows
        events: list[Event] = []
        for segment, part in parts:
            sequence = self._sequences.get(segment.key)
            if sequence is None:
                self.totals.late_events += 1
            elif part.error is not None:
                sequence.on(SequenceEvent.FAIL)
                self._order.pop(segment.key, None)
                events.append(SequenceFailed(segment.key, part.error))
            else:
                events.extend(self._advance_one(sequence, segment, part))
        return tuple(events)

    def _decoder_rows(self, segment: Segment) -> int:
        return segment.decoder_rows if self.geometry.has_decoder_half else 0

    def take_pending(self) -> tuple[Event, ...]:
        """Events that no step produces, each delivered once."""
        pending, self._pending = tuple(self._pending), []
        return pending

    def _advance_one(
        self, sequence: Sequence, segment: Segment, part: SegmentResult
    ) -> Iterator[Event]:
        plan = sequence.plan
        assert plan is not None
        sequence.next_row = segment.end
        sequence.encoder_rows += segment.encoder_rows
        sequence.decoder_rows += self._decoder_rows(segment)
        yield from self._complete_blocks(sequence)
        if part.window is not None:
            yield WindowDone(sequence.key, segment.end, part.window)
        if part.token_id is not None:
            yield self._take_token(sequence, part.token_id)
        elif segment.end < plan.end:
            sequence.on(SequenceEvent.ROWS)
        elif self.half is Half.ENCODER:
            self._finish(sequence)
            yield RowsDone(sequence.key, sequence.encoder_rows, sequence.decoder_rows)
        else:
            raise EngineDamaged(f"{sequence.key}: the last known row gave no token")

    def _complete_blocks(self, sequence: Sequence) -> Iterator[BlockDone]:
        lease = sequence.lease
        while (sequence.next_block + 1) * BLOCK_TOKENS <= sequence.next_row:
            index = sequence.next_block
            digest = sequence.digests[index]
            lease.commit(index, digest)
            sequence.next_block += 1
            yield BlockDone(sequence.key, index, digest, lease.blocks[index])

    def _take_token(self, sequence: Sequence, token_id: int) -> TokenSampled:
        sequence.ids.append(token_id)
        reason = sequence.finish_reason(token_id)
        if reason is None:
            sequence.on(SequenceEvent.TOKEN)
        else:
            self._finish(sequence)
        return TokenSampled(
            key=sequence.key,
            index=sequence.generated - 1,
            token_id=token_id,
            finish=reason,
            encoder_rows=sequence.encoder_rows,
            decoder_rows=sequence.decoder_rows,
        )

    def _finish(self, sequence: Sequence) -> None:
        sequence.on(SequenceEvent.FINISH)
        self._order.pop(sequence.key, None)


def _makes_windows(sequence: Sequence, plan: RowPlan) -> bool:
    """Windows that a bounded replay left are approximate and stay so; and in mode `replay` nobody
    starts from one, since the blocks under it may be approximate."""
    replays = sequence.request.mode is HandoffMode.REPLAY
    return not replays and plan.kind is not StartKind.BOUNDED
