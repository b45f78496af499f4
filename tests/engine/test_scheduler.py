"""The scheduler as a pure function of jobs and results; no model runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chain import as_token_ids, block_digests
from headrace.core.errors import IllegalTransition
from headrace.core.ids import JobKey, RequestId
from headrace.core.request import FinishReason, GenRequest
from headrace.core.rows import Geometry, plan_decode, plan_prefill
from headrace.engine import (
    BlockDone,
    EngineDamaged,
    EngineSettings,
    Half,
    Job,
    NotANumber,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
)
from headrace.engine.admission import ModelLimits
from headrace.engine.blocks import BlockPool
from headrace.engine.fills import FillGuard
from headrace.engine.lease import Resources, SlotPool
from headrace.engine.plan import SegmentResult, StepPlan, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SEQUENCE_TABLE, SequenceEvent, SequenceState

NewScheduler = Callable[..., Scheduler]
NewRequest = Callable[..., GenRequest]
Answer = Callable[..., StepResult]
T1 = Geometry(32, 6, 6)
NO_IDS = as_token_ids([])


def begin(scheduler: Scheduler, request: GenRequest, hit_blocks: int = 0) -> None:
    admission = scheduler.admit(Job(request, NO_IDS, hit_blocks))
    assert admission is not None and admission.fills == ()
    maker = plan_decode if scheduler.half is Half.FULL else plan_prefill
    plan = maker(request.n_tokens, hit_blocks * 128, request.keep_tokens, (), T1)
    assert scheduler.start(request.key, plan) is not None


def spans(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(str(s.key.request_id), s.start, s.end, s.decoder_start) for s in plan.segments]


# ---- the state table ------------------------------------------------------------------------

ANSWERS = {
    # state: (what START, ROWS, TOKEN, HOLD, PARK, UNPARK, FINISH, FAIL, RELEASE lead to);
    # "-" ignored, "!" impossible
    "filling": ("known", "!", "!", "!", "!", "!", "!", "failed", "released"),
    "known": ("!", "known", "decoding", "!", "!", "decoding", "finished", "failed", "released"),
    "decoding": ("!", "!", "decoding", "held", "!", "!", "finished", "failed", "released"),
    "held": ("!", "!", "!", "!", "parked", "decoding", "!", "!", "released"),
    "parked": ("!", "!", "!", "!", "!", "decoding", "!", "!", "released"),
    "finished": ("!", "-", "-", "-", "!", "!", "-", "-", "released"),
    "failed": ("-", "-", "-", "-", "!", "!", "-", "-", "released"),
    "released": ("-", "-", "-", "-", "-", "-", "-", "-", "-"),
}


@pytest.mark.parametrize("state", SequenceState)
def test_every_pair_of_state_and_event_has_its_answer(state: SequenceState) -> None:
    for event, wanted in zip(SequenceEvent, ANSWERS[state], strict=True):
        if wanted == "!":
            with pytest.raises(IllegalTransition, match=f"{event} is impossible in state {state}"):
                SEQUENCE_TABLE.step(state, event)
            continue
        step = SEQUENCE_TABLE.step(state, event)
        assert step.ignored is (wanted == "-")
        assert step.state == (state if step.ignored else wanted)


# ---- plans ----------------------------------------------------------------------------------


def test_known_rows_run_oldest_first_within_the_budget(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler(max_rows_per_step=100, replay_rows_per_step=30)
    for name in ("a", "b", "c"):
        begin(scheduler, new_request(70, name=name))
    plan = scheduler.plan()
    assert plan is not None
    assert spans(plan) == [("a", 0, 70, 26), ("b", 0, 30, 26)]
    assert scheduler.plan() == plan  # planning changes nothing
    scheduler.advance(answer(plan))
    second = scheduler.plan()
    assert second is not None
    # `a` decodes now, so others are held to the budget for replay.
    assert spans(second) == [("a", 70, 71, 70), ("b", 30, 60, 30)]
    scheduler.advance(answer(second))
    third = scheduler.plan()
    assert third is not None
    assert spans(third) == [("a", 71, 72, 71), ("b", 60, 70, 60), ("c", 0, 20, 20)]


def test_logits_only_at_the_last_known_row(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler(max_rows_per_step=40, replay_rows_per_step=40)
    begin(scheduler, new_request(100))
    sampled = []
    for _ in range(4):
        plan = scheduler.plan()
        assert plan is not None
        sampled += [(s.start, s.end) for s in plan.segments if s.sampling is not None]
        scheduler.advance(answer(plan))
    assert sampled == [(80, 100), (100, 101)]


def test_known_rows_are_cut_where_records_are_made(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler(spacing=256)
    begin(scheduler, new_request(700, keep_tokens=44))
    cuts = []
    events = []
    while scheduler.has_work and len(cuts) < 4:
        plan = scheduler.plan()
        assert plan is not None
        cuts += [(s.end, s.window) for s in plan.segments]
        events += scheduler.advance(answer(plan))
    # every 256 tokens, and each grain from floor(700 - 44) = 640 on
    assert cuts == [(256, True), (512, True), (640, True), (700, False)]
    assert [e.position for e in events if isinstance(e, WindowDone)] == [256, 512, 640]
    assert [e.index for e in events if isinstance(e, BlockDone)] == [0, 1, 2, 3, 4]


def test_no_record_before_a_replay_has_warmed_up(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    """Exact replay from e: a record is valid from e + n_enc (W-1) on, never before."""
    scheduler = new_scheduler(spacing=128)
    donor, request = new_request(1000, name="donor", max_tokens=1), new_request(1000, max_tokens=1)
    begin(scheduler, donor)
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.advance(answer(plan))
    begin(scheduler, request, hit_blocks=4)
    sequence = next(s for s in scheduler.sequences() if s.key == request.key)
    assert sequence.plan is not None
    assert (sequence.plan.start, sequence.plan.write_floor) == (326, 512)
    # 326 + 186 = 512: the record at 384 would come from rows that are not warm.
    assert sequence.records == (512, 640, 768, 896)
    plan = scheduler.plan()
    assert plan is not None
    (segment,) = plan.segments
    assert (segment.encoder_floor, segment.decoder_floor, segment.write_floor) == (326, 956, 512)
    scheduler.release(request.key)
    begin(scheduler, new_request(1000, name="x", max_tokens=1, keep_tokens=400), hit_blocks=5)
    other = next(s for s in scheduler.sequences() if s.key.request_id == "x")
    assert other.plan is not None and other.plan.start == 414
    assert other.records == (640, 768, 896)


def test_decode_rows_make_a_record_at_each_grain(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler()
    request = new_request(126, max_tokens=4)
    begin(scheduler, request)
    events = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        events.append(scheduler.advance(answer(plan, token=9)))
    kinds = [[type(event).__name__ for event in step] for step in events]
    done = ["TokenSampled"]
    assert kinds == [done, done, ["BlockDone", "WindowDone", "TokenSampled"], done]
    block = next(e for e in events[2] if isinstance(e, BlockDone))
    ids = as_token_ids([*request.token_ids, 9, 9])
    assert block.digest == block_digests(request.chain_root, ids)[0]
    tokens = [e for step in events for e in step if isinstance(e, TokenSampled)]
    assert [t.index for t in tokens] == [0, 1, 2, 3]
    assert [t.finish for t in tokens] == [None, None, None, FinishReason.LENGTH]
    assert [(t.encoder_rows, t.decoder_rows) for t in tokens] == [
        (126, 44),
        (127, 45),
        (128, 46),
        (129, 47),
    ]


def test_the_encoder_half_ends_with_its_rows(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler(Half.ENCODER)
    begin(scheduler, new_request(300))
    events = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        assert all(s.decoder_rows == 0 and s.sampling is None for s in plan.segments)
        events += scheduler.advance(answer(plan))
    assert [e.index for e in events if isinstance(e, BlockDone)] == [0, 1]
    assert [e.position for e in events if isinstance(e, WindowDone)] == [256]
    assert events[-1] == RowsDone(JobKey(RequestId("r"), 0), 256, 0)


def test_an_empty_encoder_plan_is_done_at_once(
    new_scheduler: NewScheduler, new_request: NewRequest
) -> None:
    scheduler = new_scheduler(Half.ENCODER)
    request = new_request(100)
    begin(scheduler, request)
    assert scheduler.has_work and scheduler.plan() is None
    assert scheduler.take_pending() == (RowsDone(request.key, 0, 0),)
    assert not scheduler.has_work


def test_a_released_sequence_is_not_heard_of_again(
    new_scheduler: NewScheduler, new_request: NewRequest, answer: Answer
) -> None:
    scheduler = new_scheduler()
    request = new_request(50)
    begin(scheduler, request)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.release(request.key) is not None
    assert scheduler.advance(answer(plan)) == ()  # the step was in flight
    assert scheduler.totals.late_events == 1
    assert scheduler.release(request.key) is None
    late = plan_decode(50, 0, 44, (), T1)
    assert scheduler.start(request.key, late) is None
    assert scheduler.totals.late_events == 2
    assert not scheduler.has_work
    empty = new_request(100, name="e")
    encoder = new_scheduler(Half.ENCODER)
    begin(encoder, empty)
    encoder.release(empty.key)
    assert encoder.take_pending() == ()


def test_one_failed_sequence_leaves_the_others(
    new_scheduler: NewScheduler, new_request: NewRequest
) -> None:
    scheduler = new_scheduler()
    for name in ("a", "b"):
        begin(scheduler, new_request(50, name=name))
    plan = scheduler.plan()
    assert plan is not None
    error = NotANumber("x")
    parts = (SegmentResult(error=error, ran=False), SegmentResult(token_id=3))
    events = scheduler.advance(StepResult(plan, parts, 50, 44, 0, 0.0))
    assert [type(e) for e in events] == [SequenceFailed, TokenSampled]
    assert events[0] == SequenceFailed(plan.segments[0].key, error)
    after = scheduler.plan()
    assert after is not None
    assert [s.key.request_id for s in after.segments] == ["b"]


def test_rows_that_the_model_did_not_run_are_damage(
    new_scheduler: NewScheduler, new_request: NewRequest
) -> None:
    scheduler = new_scheduler()
    begin(scheduler, new_request(50))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(EngineDamaged, match="planned 50 encoder and 44 decoder rows"):
        scheduler.advance(StepResult(plan, (SegmentResult(token_id=1),), 50, 43, 0, 0.0))
    with pytest.raises(EngineDamaged, match="no token"):
        scheduler.advance(StepResult(plan, (SegmentResult(),), 50, 44, 0, 0.0))


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(4, 200),
    st.integers(1, 120),
)
def test_every_row_runs_exactly_once(
    new_request: NewRequest,
    jobs: list[tuple[int, int]],
    max_rows: int,
    replay_rows: int,
) -> None:
    """Whatever the budgets: each sequence's segments are its plan's rows, in order, no gaps."""
    sizes = EngineSettings(64, 4, max_rows, replay_rows)
    cut = Resources(BlockPool(64), SlotPool(4), FillGuard())
    scheduler = Scheduler(sizes, Half.FULL, T1, ModelLimits(4096, 4096), cut, 128)
    waiting = [
        new_request(n, name=f"r{number}", max_tokens=tokens)
        for number, (n, tokens) in enumerate(jobs)
    ]
    sizes_of = {r.key: (r.n_tokens, r.max_tokens) for r in waiting}
    seen: dict[JobKey, list[tuple[int, int]]] = {key: [] for key in sizes_of}
    while waiting or scheduler.has_work:
        while waiting and scheduler.admit(Job(waiting[0], NO_IDS, 0)) is not None:
            request = waiting.pop(0)
            scheduler.start(request.key, plan_decode(request.n_tokens, 0, 44, (), T1))
        plan = scheduler.plan()
        assert plan is not None
        decoding = [s for s in plan.segments if s.start >= sizes_of[s.key][0]]
        rows = sum(s.encoder_rows for s in plan.segments)
        assert rows <= max_rows
        assert list(plan.segments[: len(decoding)]) == decoding
        if decoding:
            assert rows - len(decoding) <= replay_rows
        for segment in plan.segments:
            seen[segment.key].append((segment.start, segment.end))
        parts = tuple(
            SegmentResult(token_id=5 if s.sampling else None, window=b"w" if s.window else None)
            for s in plan.segments
        )
        decoder = sum(s.decoder_rows for s in plan.segments)
        for event in scheduler.advance(StepResult(plan, parts, rows, decoder, 0, 0.0)):
            if isinstance(event, TokenSampled) and event.finish:
                n, tokens = sizes_of[event.key]
                assert event.encoder_rows == n + tokens - 1
                assert event.decoder_rows == min(n, 44) + tokens - 1
                scheduler.release(event.key)
    for key, parts_run in seen.items():
        n, tokens = sizes_of[key]
        assert parts_run[0][0] == 0 and parts_run[-1][1] == n + tokens - 1
        assert all(a[1] == b[0] for a, b in zip(parts_run, parts_run[1:], strict=False))
    cut.blocks.check([])
    cut.slots.check([])
