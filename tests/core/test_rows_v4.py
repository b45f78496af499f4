"""Row plans of a model without a decoder half: keep is 1, every row runs all layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.rows import (
    GRAIN,
    Geometry,
    StartKind,
    floor_grain,
    plan_adopted,
    plan_decode,
    plan_prefill,
    plan_resume,
    record_position,
    record_positions,
    wants_prefill,
)
from headrace.core.windows import bounded_start, check_keep, check_ring, default_ring_rows

FLASH = Geometry(window_tokens=128, n_encoder_layers=43, n_decoder_layers=0)
TOY = Geometry(window_tokens=32, n_encoder_layers=6, n_decoder_layers=0)
geometries = st.builds(Geometry, st.integers(5, 128), st.integers(1, 43), st.just(0))
lengths = st.integers(1, 20_000)


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], Geometry]:
    """(N, hit, windows, geometry)."""
    n = draw(lengths)
    hit = GRAIN * draw(st.integers(0, n // GRAIN))
    grains = st.integers(1, n // GRAIN + 1).map(lambda b: b * GRAIN)
    return n, hit, tuple(draw(st.lists(grains, max_size=5))), draw(geometries)


def test_the_release_by_hand() -> None:
    """N = 10,000, all 78 blocks stored: p = 9984; without its record 43 * 127 rows before it."""
    handed = plan_decode(10_000, 9984, 1, (9984,), FLASH)
    assert (handed.start, handed.end, handed.write_floor) == (9984, 10_000, 9984)
    assert (handed.kind, handed.window_position) == (StartKind.WINDOW, 9984)
    alone = plan_decode(10_000, 9984, 1, (), FLASH)
    assert FLASH.replay_rows == 5461
    assert (alone.start, alone.encoder_floor) == (4522, 4522)  # 9984 - 5461 = 4523, down to even
    assert alone.kind is StartKind.REPLAY


def test_a_prompt_that_ends_with_a_block_runs_its_last_block_again() -> None:
    """H = N is allowed; the last row is needed for its logits, and windows lie at grains only."""
    plan = plan_decode(512, 512, 1, (384, 512), TOY)
    assert (plan.start, plan.end, plan.write_floor) == (384, 512, 512)
    assert plan.window_position == 384 == record_position(512, 1)


@given(asked())
def test_decode_starts_where_the_formula_says(case) -> None:
    n, hit, windows, geometry = case
    plan = plan_decode(n, hit, 1, windows, geometry)
    p = floor_grain(min(hit, n - 1))
    c = max((x for x in windows if x <= p), default=0)
    e = max(0, p - geometry.n_encoder_layers * (geometry.window_tokens - 1)) // 2 * 2
    assert plan.start == max(c, e) and plan.end == n
    assert plan.encoder_floor == (0 if plan.start == c else e)
    assert (plan.write_floor, plan.decoder_start) == (hit, n - 1)
    assert plan.start <= p <= n - 1  # the last row always runs
    if p in windows:
        assert plan.encoder_rows <= max(n - hit, GRAIN)


@given(asked(), st.integers(0, 400))
def test_a_bounded_replay_is_of_all_layers_from_p(case, depth: int) -> None:
    n, hit, windows, geometry = case
    plan = plan_decode(n, hit, 1, windows, geometry, depth_tokens=depth)
    p = floor_grain(min(hit, n - 1))
    assert plan.start == bounded_start(p, depth) == max(0, p - depth) // 2 * 2
    assert plan.window_position == 0 and plan.encoder_floor == plan.start
    exact = plan.start == 0 or p - plan.start >= geometry.replay_rows
    assert exact == (plan.kind in (StartKind.COLD, StartKind.REPLAY))


@given(asked())
def test_prefill_makes_what_decode_starts_from(case) -> None:
    n, hit, windows, geometry = case
    plan = plan_prefill(n, hit, 1, windows, geometry)
    p = record_position(n, 1)
    assert p == floor_grain(n - 1)
    assert plan.decoder_start == plan.end  # no row has logits
    assert plan.start <= plan.end <= floor_grain(n) and plan.write_floor == hit
    if plan.encoder_rows:
        assert plan.start <= min(hit, p) and plan.end >= p
    else:
        assert p == 0 or p in windows
    handed = plan_decode(n, floor_grain(n), 1, (p,) if p else (), geometry)
    assert handed.start == p and handed.encoder_rows == n - p <= GRAIN


@given(asked(), st.integers(1, 300), st.integers(0, 20_000))
def test_a_resume_is_a_prompt_of_m_tokens(case, generated: int, first: int) -> None:
    n, hit, windows, geometry = case
    m = n + generated
    assert plan_resume(m, hit, first, windows, geometry) == plan_decode(
        m, hit, 1, windows, geometry
    )


@given(lengths, st.integers(1, 3000))
def test_records_lie_where_the_next_turn_starts(length: int, question: int) -> None:
    """The next turn knows `length` + `question` tokens and finds the blocks of all rows but the
    newest token's: its p is a record of this one."""
    made = record_positions(0, length, 1, 8192)
    p = floor_grain(min(floor_grain(length - 1), length + question - 1))
    assert p == 0 or p in made


def test_state_is_taken_over_with_no_row() -> None:
    plan = plan_adopted(300, 1, TOY)
    assert (plan.encoder_rows, plan.write_floor, plan.kind) == (0, 256, StartKind.STATE)


def test_few_rows_need_no_prefill_replica() -> None:
    for n, wanted in ((128, False), (129, True)):
        plan = plan_decode(n, 0, 1, (), TOY)
        assert wants_prefill(plan, n, 1, 0) is wanted


def test_keep_is_one() -> None:
    assert TOY.keep_for(0) == TOY.check_keep(1) == TOY.exact_keep_tokens == 1
    assert Deployment().keep_for(TOY) == 1 and Deployment().keep_for(Geometry(32, 6, 6)) == 44
    with pytest.raises(ConfigError, match=r"must be 1 for a model without a decoder .* got 44"):
        TOY.check_keep(44)
    with pytest.raises(ConfigError, match="keep_tokens must be 1"):
        plan_decode(300, 0, 44, (), TOY)


# ---- bounds of rings and keep --------------------------------------------------------------


def test_bounds_name_both_numbers() -> None:
    assert default_ring_rows(128, 6) == 134 == check_ring(128, 134, 6)
    with pytest.raises(ConfigError, match=r"window \+ backtrack = 128 \+ 6 = 134, got 133"):
        check_ring(128, 133, 6)
    with pytest.raises(ConfigError, match="backtrack_rows must be at least 1, got 0"):
        check_ring(128, 134, 0)
    assert check_keep(128, 128) == 128
    with pytest.raises(ConfigError, match=r"at least the window \(128\), got 127"):
        check_keep(128, 127)
