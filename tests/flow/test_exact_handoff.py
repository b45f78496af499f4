"""An exact hand-off equals one engine with the same keep, bit for bit.

A prefill engine (encoder half; for V4 all layers) and a decode engine in one process; objects pass
as bytes through a dict keyed by digest. The yardstick is the `all` engine: the same prompt cold,
with window records at every grain.

The default run takes every N, and every keep, hit and window choice of each configuration at least
once (`test_the_default_run_covers`); the whole product takes half an hour:

    pytest -m slow tests/flow/test_exact_handoff.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from headrace_tests_flow_engines import MAX_TOKENS, Run, cold_run, make_engine, request, run_engine

from headrace.core.ids import Digest
from headrace.core.request import GenRequest
from headrace.core.rows import (
    Geometry,
    RowPlan,
    StartKind,
    floor_grain,
    plan_decode,
    plan_prefill,
    record_position,
)
from headrace.engine import Half
from headrace.model import Numerics, Trunk, load_named

WINDOWS = {"t1": 32, "t2": 128, "v4-toy": 32}
EXACT_HALO = {"t1": 187, "t2": 763}
GEOMETRY = {"t1": Geometry(32, 6, 6), "t2": Geometry(128, 6, 6), "v4-toy": Geometry(32, 6, 0)}


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
    return [w, w + 12, 2 * w, EXACT_HALO[config]] if config in EXACT_HALO else [1]


def default_cases() -> list[Case]:
    """Two cases a length, with and without the record, keep and hits rotating at other periods;
    then the longest prompt with the smallest keep, where exact replay starts above 0 on T2."""
    cases = []
    for config in WINDOWS:
        for place, n in enumerate(lengths(config)):
            keep = keeps(config)[place % len(keeps(config))]
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
    # without the record: ending at start = 198, across it, before it
    places += [(176,), (190,), (100, 150)]
    cases = [
        Case("t1", 500, 44, list(HITS)[place % 5], record, starts)
        for place, starts in enumerate(places)
        for record in (True, False)
    ]
    cases += [Case("t1", 512, 44, "decode loads one block", False, (122, 458))]
    cases += [
        Case("t1", 512, 44, hits, True, (490,)) for hits in ("cold prefill", "prefill finds all")
    ]
    # T2, keep 140: F = 360, H = 384, p = start = 256, and 0 without the record
    cases += [Case("t2", 500, 140, "cold prefill", r, (245, 350, 375, 478)) for r in (True, False)]
    return cases


def whole_product(config: str, n: int, keep: int) -> list[Case]:
    return [Case(config, n, keep, h, r) for h, r in product(HITS, (True, False))]


@pytest.fixture(scope="module")
def trunks() -> dict[str, Trunk]:
    torch.set_num_threads(1)
    return {name: load_named(name, 0, Numerics.INVARIANT) for name in WINDOWS}


# ---- one case --------------------------------------------------------------------------------


def decode_plan(case: Case, geometry: Geometry) -> tuple[RowPlan, int]:
    """The plan, and the hit in blocks."""
    n, wanted = case.n_tokens, HITS[case.hits].decode
    hit = n // 128 if wanted is None else min(wanted, n // 128)
    windows = [record_position(n, case.keep_tokens)] if case.record else []
    return plan_decode(n, hit * 128, case.keep_tokens, windows, geometry), hit


def check(case: Case, trunk: Trunk) -> None:
    wanted = cold_run(trunk, case.n_tokens, case.keep_tokens, case.pictures)
    vocab = trunk.config.vocab_size
    job = request(case.n_tokens, case.keep_tokens, case.pictures, vocab_size=vocab)
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

    decoder_rows = plan.decoder_rows if engine.geometry.has_decoder_half else 0
    assert run.first_rows == (plan.encoder_rows, decoder_rows)
    assert run.logits == wanted.logits
    assert run.tokens == wanted.tokens
    assert run.slot == wanted.slot
    drafted = (0, MAX_TOKENS - 1) if trunk.config.num_nextn_predict_layers else ()
    assert run.drafts == {i: wanted.drafts[i] for i in drafted}
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
    for record, start in ((True, 384), (False, 198)):
        plan, hit = decode_plan(Case("t1", 500, 44, "cold prefill", record), GEOMETRY["t1"])
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
    for config in WINDOWS:
        mine = [case for case in default_cases() if case.config == config]
        assert {c.n_tokens for c in mine} == set(lengths(config))
        several_blocks = [c for c in mine if c.n_tokens >= 256]
        both = (True, False)
        assert {(c.hits, c.record) for c in several_blocks} == set(product(HITS, both))
        assert {(c.keep_tokens, c.record) for c in several_blocks} == set(
            product(keeps(config), both)
        )
        assert any(floor_grain(c.n_tokens) == c.n_tokens for c in several_blocks)
        starts = {decode_plan(c, GEOMETRY[config])[0].kind for c in mine}
        assert starts == {StartKind.COLD, StartKind.WINDOW, StartKind.REPLAY}  # the exact ones
