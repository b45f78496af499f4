"""Row plans against the worked examples and against the properties that make a start exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.rows import (
    Geometry,
    StartKind,
    floor_grain,
    plan_adopted,
    plan_decode,
    plan_parked,
    plan_prefill,
    plan_resume,
    record_position,
    record_positions,
    wants_prefill,
)

FLASH = Geometry(window_tokens=128, n_encoder_layers=20, n_decoder_layers=20)
T1 = Geometry(window_tokens=32, n_encoder_layers=6, n_decoder_layers=6)


def test_published_numbers_of_flash() -> None:
    assert FLASH.replay_rows == 2540
    assert FLASH.exact_keep_tokens == 2541
    assert T1.exact_keep_tokens == 187


def test_all_blocks_and_window_stored_runs_a_bounded_suffix() -> None:
    # N = 1000: p = floor(860) = 768 lies 92 rows before the first decoder row
    plan = plan_decode(1000, 896, 140, [768], FLASH)
    assert (plan.start, plan.decoder_start, plan.write_floor) == (768, 860, 896)
    assert plan.encoder_rows == 232 <= max(1000 - 896, 140 + 127)
    assert plan.decoder_rows == 140
    assert plan.kind is StartKind.WINDOW


def test_a_window_stored_at_the_hit_is_of_no_use_to_that_prompt() -> None:
    assert plan_decode(1000, 896, 140, [896], FLASH).kind is StartKind.COLD


def test_missing_window_replays_exactly_as_far_as_needed() -> None:
    plan = plan_decode(10_000, 9_984, 140, [], FLASH)
    assert plan.kind is StartKind.REPLAY
    assert plan.start == 10_000 - 140 - 2540 == plan.encoder_floor


def test_an_odd_replay_start_is_rounded_down_to_even() -> None:
    plan = plan_decode(10_001, 9_984, 140, [], FLASH)
    assert 10_001 - 140 - 2540 == 7321
    assert plan.start == 7320


def test_prefill_of_a_cold_prompt_ends_at_the_last_whole_block() -> None:
    plan = plan_prefill(1000, 0, 140, [], FLASH)
    assert (plan.start, plan.end, plan.decoder_rows) == (0, 896, 0)


def test_prefill_with_everything_stored_has_nothing_to_run() -> None:
    assert plan_prefill(1000, 896, 140, [768], FLASH).encoder_rows == 0


def test_a_record_at_the_last_grain_does_not_stand_for_blocks_that_are_missing() -> None:
    small = Geometry(64, 1, 1)
    assert record_position(448, 64) == 384  # p is the end of the last whole block
    plan = plan_prefill(448, 256, 64, [384], small)
    assert (plan.end, plan.write_floor) == (384, 256)
    assert plan.encoder_rows >= 128
    assert plan_prefill(448, 384, 64, [384], small).encoder_rows == 0


def test_prefill_that_lacks_only_the_window_runs_up_to_it() -> None:
    plan = plan_prefill(10_000, 9_984, 140, [], FLASH)
    assert plan.end == record_position(10_000, 140) == 9_856
    assert plan.start == 9_856 - 2540
    assert plan.write_floor == 9_984  # every row lies below it: nothing is written


def test_keep_below_the_window_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least the window \(128\), got 127"):
        plan_decode(1000, 0, 127, [], FLASH)


@pytest.mark.parametrize("hit", [1, 127, 129, 1024])
def test_a_hit_that_is_no_whole_block_of_the_prompt_is_refused(hit: int) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        plan_decode(1000, hit, 140, [], FLASH)


def test_short_prompts_and_few_rows_stay_on_decode() -> None:
    short = plan_decode(267, 0, 140, [], FLASH)
    assert not wants_prefill(short, 267, 140, 0)
    assert wants_prefill(plan_decode(268, 0, 140, [], FLASH), 268, 140, 0)
    assert not wants_prefill(plan_decode(5000, 4992, 140, [4736], FLASH), 5000, 140, 512)
    assert wants_prefill(plan_decode(5000, 4992, 140, [], FLASH), 5000, 140, 512)


prompts = st.integers(1, 6000)
geometries = st.builds(Geometry, st.integers(2, 200), st.integers(1, 24), st.integers(1, 24))


@given(prompts, st.data(), geometries)
def test_every_decode_plan_is_exact_and_bounded(n: int, data: st.DataObject, g: Geometry) -> None:
    """Start is exact: 0, a stored window, or replay_rows before the first row that matters."""
    keep = data.draw(st.integers(g.window_tokens, g.exact_keep_tokens))
    hit = 128 * data.draw(st.integers(0, n // 128))
    windows = [128 * i for i in range(1, n // 128 + 1) if data.draw(st.booleans())]
    plan = plan_decode(n, hit, keep, windows, g)
    latest = max(0, min(hit, n - keep))
    assert 0 <= plan.start <= latest
    assert plan.decoder_start == max(0, n - keep) >= plan.start
    if plan.kind is StartKind.REPLAY:
        assert plan.start % 2 == 0
        assert latest - plan.start >= g.replay_rows
        assert latest - plan.start <= g.replay_rows + 1
        assert not any(plan.start < w <= latest for w in windows)
        assert plan.encoder_floor == plan.start
    elif plan.kind is StartKind.WINDOW:
        assert plan.start in windows
        assert plan.encoder_floor == 0
    else:
        assert plan.start == 0
    if record_position(n, keep) in [0, *windows] and hit == floor_grain(n):
        assert plan.encoder_rows <= max(n - hit, keep + 127)


@given(prompts, st.data(), geometries)
def test_prefill_leaves_decode_a_bounded_suffix(n: int, data: st.DataObject, g: Geometry) -> None:
    """Whatever was stored before, after a prefill the decode plan starts at its window record."""
    keep = data.draw(st.integers(g.window_tokens, g.window_tokens * 2))
    hit = 128 * data.draw(st.integers(0, n // 128))
    windows = [128 * i for i in range(1, n // 128 + 1) if data.draw(st.booleans())]
    plan = plan_prefill(n, hit, keep, windows, g)
    p = record_position(n, keep)
    assert plan.start <= p <= plan.end or plan.encoder_rows == 0
    assert plan.encoder_rows == 0 or plan.end in (p, floor_grain(n))
    if p not in windows and p:
        assert plan.start < p  # the run passes p, so the record can be made
    if plan.kind is StartKind.REPLAY:
        assert min(hit, p) - plan.start >= g.replay_rows
    after = plan_decode(n, floor_grain(n), keep, {*windows, p} - {0}, g)
    assert after.start >= p  # an exact replay may be shorter still when its reach is tiny
    assert after.encoder_rows <= max(n % 128, keep + 127)


def test_resume_keeps_the_first_runs_decoder_floor_while_it_is_in_reach() -> None:
    # M = 1010 known tokens of a prompt of N = 1000, keep 140: D is still F = 860
    plan = plan_resume(1010, 896, 860, [768], FLASH)
    assert (plan.start, plan.decoder_start, plan.write_floor) == (768, 860, 896)
    # long after: the halo W + (n_dec - 1)(W - 1) = 2541 decides
    late = plan_resume(9000, 8960, 860, [], FLASH)
    assert late.decoder_start == 9000 - 2541


def test_records_of_a_run_cover_the_next_turns_start() -> None:
    assert record_positions(0, 1000, 140, 8192) == (768, 896)
    assert record_positions(768, 1000, 140, 8192) == (896,)
    assert record_positions(0, 20_000, 140, 8192)[:2] == (8192, 16_384)
    assert record_positions(0, 100, 44, 8192) == ()


def test_a_bounded_replay_starts_a_depth_before_the_latest_start() -> None:
    t1 = Geometry(32, 6, 6)
    for depth, start, kind in (
        (32, 864, StartKind.BOUNDED),  # R = H = 896, below F = 956
        (33, 862, StartKind.BOUNDED),  # down to even
        (184, 712, StartKind.BOUNDED),
        (185, 710, StartKind.REPLAY),  # 186 = 6 * 31 rows: all windows are whole again
        (896, 0, StartKind.COLD),
        (2000, 0, StartKind.COLD),
    ):
        plan = plan_decode(1000, 896, 44, (896,), t1, depth_tokens=depth)
        assert (plan.start, plan.kind, plan.encoder_floor) == (start, kind, start)
        assert (plan.window_position, plan.write_floor, plan.decoder_start) == (0, 896, 956)


def test_a_bounded_prefill_makes_no_record_and_runs_nothing_for_one() -> None:
    t1 = Geometry(32, 6, 6)
    plan = plan_prefill(1000, 896, 44, (), t1, depth_tokens=32)
    assert plan.encoder_rows == 0
    plan = plan_prefill(1000, 512, 44, (512,), t1, depth_tokens=32)
    assert (plan.start, plan.end, plan.write_floor) == (480, 896, 512)
    assert plan_prefill(1000, 0, 44, (), t1, depth_tokens=32).kind is StartKind.COLD


def test_a_parked_state_runs_no_row_and_keeps_the_floors_of_its_run() -> None:
    ran = plan_decode(500, 384, 44, (), Geometry(32, 6, 6), depth_tokens=32)
    assert (ran.encoder_floor, ran.decoder_floor) == (352, 456)
    plan = plan_parked(515, ran)
    assert (plan.encoder_rows, plan.decoder_rows, plan.start) == (0, 0, 515)
    assert (plan.write_floor, plan.decoder_floor, plan.encoder_floor) == (512, 456, 352)


def test_an_adopted_state_runs_no_row() -> None:
    plan = plan_adopted(301, 44, Geometry(32, 6, 6))
    assert (plan.encoder_rows, plan.decoder_rows, plan.start) == (0, 0, 301)
    assert (plan.write_floor, plan.decoder_floor, plan.encoder_floor) == (256, 257, 0)
