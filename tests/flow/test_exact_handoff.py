"""An exact hand-off equals one engine with the same keep, bit for bit.

A prefill engine (encoder half) and a decode engine (both halves) in one process; objects pass as
bytes through a dict keyed by digest. The yardstick is the `all` engine: the same prompt cold, with
window records at every grain. All engines hand out blocks and slots filled with NaN, have other
ring sizes, other block numbers and other step sizes, and run `invariant` numerics.

The default run takes every N, and every keep, hit and window choice of each configuration at least
once (`test_the_default_run_covers`); the whole product takes half an hour:

    pytest -m slow tests/flow/test_exact_handoff.py
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch

from headrace.core.chain import TOKEN_TYPE, as_token_ids
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.images import ImageSpan, span_block_digests
from headrace.core.request import FinishReason, GenRequest, HandoffMode, Sampling
from headrace.core.rows import (
    Geometry,
    RowPlan,
    StartKind,
    floor_grain,
    plan_decode,
    plan_prefill,
    record_position,
)
from headrace.engine import (
    BlockDone,
    Engine,
    EngineSettings,
    Half,
    Job,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
    spans_to_run,
)
from headrace.model import Numerics, SlotState, Trunk, load_named

ROOT = Digest(bytes(range(32)))
MAX_TOKENS = 4
PICTURE_ROWS = 22
IMAGE_TOKEN_ID = 4001
WINDOWS = {"t1": 32, "t2": 128}
EXACT_HALO = {"t1": 187, "t2": 763}


@dataclass(frozen=True)
class Hits:
    """Blocks stored before the request came, as the prefill and the decode engine find them.

    None stands for all whole blocks of the prompt."""

    prefill: int | None
    decode: int | None


HITS = {
    "cold prefill": Hits(0, None),
    "prefill finds one block": Hits(1, None),
    "prefill finds all": Hits(None, None),
    "decode loads one block": Hits(0, 1),
    "decode loads nothing": Hits(0, 0),
}


@dataclass(frozen=True)
class Case:
    config: str
    n_tokens: int
    keep_tokens: int
    hits: str
    record: bool
    pictures: tuple[int, ...] = ()  # where spans begin

    def __str__(self) -> str:
        record = "record" if self.record else "no record"
        seen = f"-pictures{self.pictures}" if self.pictures else ""
        return f"{self.config}-N{self.n_tokens}-keep{self.keep_tokens}-{self.hits}-{record}{seen}"


def lengths(config: str) -> list[int]:
    w = WINDOWS[config]
    wanted = {1, 2, w - 1, w, w + 1, *range(127, 131), 255, 256, 257, 300, 383, 384, 385}
    return sorted(wanted | {500, 640, 1000})


def keeps(config: str) -> list[int]:
    w = WINDOWS[config]
    return [w, w + 12, 2 * w, EXACT_HALO[config]]


def default_cases() -> list[Case]:
    """Two cases a length, with and without the record, keep and hits rotating at other periods;
    then the longest prompt with the smallest keep, where exact replay starts above 0 on T2."""
    cases = []
    for config in WINDOWS:
        for place, n in enumerate(lengths(config)):
            keep = keeps(config)[place % 4]
            for record in (True, False):
                hits = list(HITS)[(place + 2 * record) % 5]
                cases.append(Case(config, n, keep, hits, record))
        for hits in ("cold prefill", "prefill finds all"):
            cases.append(Case(config, 1000, keeps(config)[0], hits, record=False))
    return cases


def picture_cases() -> list[Case]:
    """T1, keep 44: N = 500 with F = 456, H = p = start = 384 (198 without the record), and N = 512
    with H = N and F = 468. Spans of 22 rows."""
    # over a block's end; before start and ending at it; across start and H; across F; at N; at 0
    places = [(118,), (300, 362), (376,), (446,), (478,), (0, 350, 372)]
    cases = [
        Case("t1", 500, 44, list(HITS)[place % 5], record, starts)
        for place, starts in enumerate(places)
        for record in (True, False)
    ]
    at_n = Case("t1", 512, 44, "cold prefill", True, (490,))
    return [*cases, at_n, Case("t1", 512, 44, "decode loads one block", False, (122, 458))]


def whole_product(config: str, n: int, keep: int) -> list[Case]:
    return [Case(config, n, keep, h, r) for h, r in product(HITS, (True, False))]


@pytest.fixture(scope="module")
def trunks() -> dict[str, Trunk]:
    torch.set_num_threads(1)
    return {name: load_named(name, 0, Numerics.INVARIANT) for name in WINDOWS}


# ---- running one engine ----------------------------------------------------------------------


@dataclass
class Run:
    """Everything that one engine showed of one request."""

    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)  # of every sampled row, in order
    done_blocks: dict[int, bytes] = field(default_factory=dict)  # from BlockDone
    windows: dict[int, bytes] = field(default_factory=dict)  # from WindowDone
    first_rows: tuple[int, int] = (0, 0)  # at the first token, or at RowsDone
    groups_written: int = 0
    held_blocks: list[bytes] = field(default_factory=list)  # all blocks with KV, at the end
    slot: SlotState | None = None  # at the end, all layers


def request(case: Case) -> GenRequest:
    draw = random.Random(7)
    ids = as_token_ids([draw.randrange(16, 3900) for _ in range(case.n_tokens)])
    spans = tuple(
        ImageSpan(start, PICTURE_ROWS, Digest(bytes([number + 1] * 32)))
        for number, start in enumerate(case.pictures)
    )
    for span in spans:
        ids[span.start : span.end] = array(TOKEN_TYPE, [IMAGE_TOKEN_ID] * span.n_tokens)
    return GenRequest(
        request_id=RequestId("r"),
        epoch=0,
        token_ids=ids,
        chain_root=ROOT,
        digests=span_block_digests(ROOT, ids, spans),
        keep_tokens=case.keep_tokens,
        max_tokens=MAX_TOKENS,
        sampling=Sampling(),
        stop_token_ids=(),
        mode=HandoffMode.EXACT,
        domain="d",
        deadline_s=60.0,
        images=spans,
    )


@cache
def picture_rows(digest: Digest, hidden_size: int) -> torch.Tensor:
    """Seeded rows on the grid of 2^-16, as a tower gives them."""
    generator = torch.Generator().manual_seed(digest[0])
    shape = (PICTURE_ROWS, hidden_size)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.round(rows * 65536) / 65536


def make_engine(
    trunk: Trunk, half: Half, *, rows: int, backtrack_rows: int, spacing: int = 8192
) -> Engine:
    engine = Engine(
        trunk,
        EngineSettings(n_blocks=12, n_slots=2, max_rows_per_step=rows, replay_rows_per_step=rows),
        half,
        record_spacing_tokens=spacing,
        poison=True,
        backtrack_rows=backtrack_rows,
    )
    if half is Half.FULL:
        # Shift block and slot numbers, so that no two engines use the same ones.
        decoy = Case("", 300, 128, "", False)
        admitted = engine.admit(Job(request(decoy), as_token_ids([]), 0))
        assert admitted is not None
        engine.release(admitted.key)
    return engine


def run_engine(
    engine: Engine,
    job: GenRequest,
    hit_blocks: int,
    plan: RowPlan,
    store: dict[Digest, bytes],
    window: bytes | None,
) -> Run:
    run = Run()
    engine.runner.on_logits = lambda key, position, row: run.logits.append(row.numpy().tobytes())
    admission = engine.admit(Job(job, as_token_ids([]), hit_blocks))
    assert admission is not None
    for fill in admission.fills:
        assert engine.write_fill(fill, store[fill.digest])
    needed = spans_to_run(job, plan)  # rows of others are not there, and must not be missed
    width = engine.model.config.hidden_size
    pictures = {span.digest: picture_rows(span.digest, width) for span in needed}
    assert engine.start(job.key, plan, window, pictures)
    original = engine.runner.run

    def counting(step):  # type: ignore[no-untyped-def]
        result = original(step)
        run.groups_written += result.groups_written
        return result

    engine.runner.run = counting  # type: ignore[method-assign]
    while engine.has_work:
        for event in engine.step():
            take(engine, event, run)
    collect(engine, job.key, run)
    engine.release(job.key)
    engine.check_integrity()
    assert engine.stats().held_blocks == 0
    return run


def take(engine: Engine, event: object, run: Run) -> None:
    match event:
        case SequenceFailed(error=error):
            raise error
        case BlockDone(index=index, block=block):
            run.done_blocks[index] = bytes(engine.block_view(block))
        case WindowDone(position=position, payload=payload):
            run.windows[position] = payload
        case TokenSampled():
            if not run.tokens:
                run.first_rows = (event.encoder_rows, event.decoder_rows)
            run.tokens.append(event.token_id)
            assert event.index == len(run.tokens) - 1
            assert (event.finish is FinishReason.LENGTH) == (len(run.tokens) == MAX_TOKENS)
        case RowsDone():
            run.first_rows = (event.encoder_rows, event.decoder_rows)


def collect(engine: Engine, key: JobKey, run: Run) -> None:
    (sequence,) = (s for s in engine.scheduler.sequences() if s.key == key)
    length = sequence.next_row
    used = engine.state.layout.n_blocks(length)
    if engine.half is Half.FULL:
        run.held_blocks = [engine.state.read_block(b) for b in sequence.lease.blocks[:used]]
        run.slot = engine.state.export_slot(sequence.lease.slot, length)


# ---- one case --------------------------------------------------------------------------------


@cache
def reference(trunk: Trunk, config: str, n: int, keep: int, pictures: tuple[int, ...] = ()) -> Run:
    """The `all` engine, cold, with a window record at every grain."""
    job = request(Case(config, n, keep, "", True, pictures))
    engine = make_engine(trunk, Half.FULL, rows=512, backtrack_rows=6, spacing=128)
    plan = plan_decode(n, 0, keep, (), engine.geometry)
    run = run_engine(engine, job, 0, plan, {}, None)
    assert run.first_rows == (n, min(n, keep))
    assert sorted(run.windows) == list(range(128, n + MAX_TOKENS, 128))
    return run


def decode_plan(case: Case, geometry: Geometry) -> tuple[RowPlan, int]:
    """The plan, and the hit in blocks."""
    n, wanted = case.n_tokens, HITS[case.hits].decode
    hit = n // 128 if wanted is None else min(wanted, n // 128)
    windows = [record_position(n, case.keep_tokens)] if case.record else []
    return plan_decode(n, hit * 128, case.keep_tokens, windows, geometry), hit


def check(case: Case, trunk: Trunk) -> None:
    wanted = reference(trunk, case.config, case.n_tokens, case.keep_tokens, case.pictures)
    job = request(case)
    n_blocks = case.n_tokens // 128
    stored = {d: wanted.done_blocks[i] for i, d in enumerate(job.digests)}

    store, record = prefill_side(case, trunk, job, stored, wanted)
    engine = make_engine(trunk, Half.FULL, rows=203, backtrack_rows=9)
    plan, hit = decode_plan(case, engine.geometry)
    if record and hit == n_blocks:
        assert plan.kind is StartKind.WINDOW
        assert plan.encoder_rows <= max(case.n_tokens - hit * 128, case.keep_tokens + 127)
    assert plan.decoder_rows == min(case.n_tokens, case.keep_tokens)
    run = run_engine(engine, job, hit, plan, store, record if plan.window_position else None)

    assert run.first_rows == (plan.encoder_rows, plan.decoder_rows)
    assert run.logits == wanted.logits
    assert run.tokens == wanted.tokens
    assert run.slot == wanted.slot
    assert run.held_blocks == wanted.held_blocks
    assert run.done_blocks == {i: b for i, b in wanted.done_blocks.items() if i >= hit}
    assert all(wanted.windows[x] == payload for x, payload in run.windows.items())
    length = case.n_tokens + MAX_TOKENS - 1
    ratios = [source.ratio for source in engine.state.layout.sources]
    assert run.groups_written == sum(length // r - hit * 128 // r for r in ratios)


def prefill_side(
    case: Case, trunk: Trunk, job: GenRequest, stored: dict[Digest, bytes], wanted: Run
) -> tuple[dict[Digest, bytes], bytes | None]:
    """Run prefill; the store afterwards and the window record that decode is to have."""
    n_blocks = case.n_tokens // 128
    prefill_hit = HITS[case.hits].prefill
    hit = n_blocks if prefill_hit is None else min(prefill_hit, n_blocks)
    engine = make_engine(trunk, Half.ENCODER, rows=77, backtrack_rows=3)
    known = {128: wanted.windows[128]} if hit and case.record else {}
    plan = plan_prefill(case.n_tokens, hit * 128, case.keep_tokens, known, engine.geometry)
    run = run_engine(engine, job, hit, plan, stored, known.get(plan.window_position))

    assert run.first_rows == (plan.encoder_rows, 0)
    assert engine.stats().encoder_rows_total == plan.encoder_rows
    assert engine.stats().decoder_rows_total == 0
    assert sorted(run.done_blocks) == list(range(hit, n_blocks))
    assert all(wanted.done_blocks[i] == block for i, block in run.done_blocks.items())
    assert all(wanted.windows[x] == payload for x, payload in run.windows.items())
    p = record_position(case.n_tokens, case.keep_tokens)
    if run.done_blocks:
        assert plan.encoder_rows >= 128 * (n_blocks - hit) > 0
    if p:
        assert p in run.windows or p in known
    store = {job.digests[i]: stored[job.digests[i]] for i in range(hit)}
    store |= {job.digests[i]: block for i, block in run.done_blocks.items()}
    made = {**known, **run.windows}
    return store, made[p] if case.record and p else None


@pytest.mark.parametrize("case", default_cases(), ids=str)
def test_handoff_equals_all(case: Case, trunks: dict[str, Trunk]) -> None:
    check(case, trunks[case.config])


@pytest.mark.parametrize("case", picture_cases(), ids=str)
def test_handoff_equals_all_with_pictures(case: Case, trunks: dict[str, Trunk]) -> None:
    check(case, trunks[case.config])


def test_picture_cases_lie_where_they_say() -> None:
    geometry = Geometry(32, 6, 6)
    for record, start in ((True, 384), (False, 198)):
        plan, hit = decode_plan(Case("t1", 500, 44, "cold prefill", record), geometry)
        assert (plan.start, plan.decoder_start, hit * 128) == (start, 456, 384)
    assert record_position(500, 44) == 384


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "n", "keep"),
    [(config, n, keep) for config in WINDOWS for n in lengths(config) for keep in keeps(config)],
)
def test_whole_product(config: str, n: int, keep: int, trunks: dict[str, Trunk]) -> None:
    for case in whole_product(config, n, keep):
        check(case, trunks[config])


def test_the_default_run_covers() -> None:
    for config, w in WINDOWS.items():
        mine = [case for case in default_cases() if case.config == config]
        assert {c.n_tokens for c in mine} == set(lengths(config))
        several_blocks = [c for c in mine if c.n_tokens >= 256]
        both = (True, False)
        assert {(c.hits, c.record) for c in several_blocks} == set(product(HITS, both))
        assert {(c.keep_tokens, c.record) for c in several_blocks} == set(
            product(keeps(config), both)
        )
        assert any(floor_grain(c.n_tokens) == c.n_tokens for c in several_blocks)
        starts = {decode_plan(c, Geometry(w, 6, 6))[0].kind for c in mine}
        assert starts == {StartKind.COLD, StartKind.WINDOW, StartKind.REPLAY}  # the exact ones
