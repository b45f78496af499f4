"""V4 in `invariant` numerics, bit for bit, on states whose every dead byte is NaN.

The toy has window-only, overlapping (ratio 4) and heavy (ratio 128) layers, two of them routed by
token id; W = 32, 6 layers, so an exact replay reaches back 186 rows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.model import (
    BatchError,
    CacheLayout,
    ConfigError,
    KvState,
    ModelConfig,
    Numerics,
    StateError,
    Trunk,
)

BLOCK = 128
N = 500
relaxed = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def trunk(make_trunk) -> Trunk:
    return make_trunk("v4-toy")


@pytest.fixture(scope="module")
def text(trunk, make_text):
    return make_text(N + 20, 5, trunk.config)


@pytest.fixture(scope="module")
def whole(trunk, text, driver_type, part_type):
    """(logits of the last 116 rows, driver with the window record at 384) of a run over N tokens,
    the part up to 384 in one call."""
    driver = driver_type(trunk)
    table = (0, 1, 2, 3, 4)
    driver.call(part_type(text, 0, 384, slot=0, table=table))
    driver.record = driver.state.read_window(0, 384)
    rest = part_type(text, 384, N, slot=0, table=table, logits_from=384)
    logits = driver.call(rest).logits
    assert not logits.isnan().any()
    return logits, driver


def slot_at(driver, slot: int, length: int):
    return driver.state.export_slot(slot, length)


@settings(relaxed, max_examples=4)
@given(cuts=st.lists(st.integers(1, N - 1), max_size=6))
def test_random_chunkings_equal_one_call(cuts, whole, trunk, text, driver_type, part_type):
    logits, reference = whole
    edges = [0, *sorted({*cuts, N})]
    driver = driver_type(trunk)
    part = part_type(text, 0, N, slot=1, table=(5, 0, 2, 9))
    result = driver.run(part, [b - a for a, b in itertools.pairwise(edges)])
    assert torch.equal(result.logits, logits[-1:])
    for mine, theirs in enumerate((5, 0, 2)):
        assert driver.state.read_block(theirs) == reference.state.read_block(mine)
    # Tails are float32 in either class of numerics, so they are equal too.
    assert slot_at(driver, 1, N) == slot_at(reference, 0, N)


def test_chunks_around_groups_and_rings(whole, trunk, text, driver_type, part_type):
    """Single rows, 4 and its neighbours, ring 38, tail rings 13 and 133, the block."""
    logits, reference = whole
    splits = [1, 1, 1, 1, 3, 5, 4, 12, 13, 14, 37, 38, 39, 128, 133, 7]
    driver = driver_type(trunk)
    part = part_type(text, 0, N, slot=1, table=(5, 0, 2, 9))
    got = driver.run(part, [*splits, N - sum(splits)])
    assert torch.equal(got.logits, logits[-1:])
    assert slot_at(driver, 1, N) == slot_at(reference, 0, N)


def started(driver_type, part_type, trunk, text, whole, *, hit: int, record: bytes | None, **where):
    """A driver that holds the blocks below `hit` and, given a record, the window at 384."""
    driver = driver_type(trunk, backtrack_rows=8)
    table = (7, 3, 9, 1)
    for block in range(hit // BLOCK):
        driver.state.write_block(table[block], whole[1].state.read_block(block))
    if record is not None:
        driver.state.write_window(2, 384, record)
    part = part_type(text, hi=N, slot=2, table=table, write_floor=hit, **where)
    return driver, part


@pytest.mark.parametrize("splits", [None, [1, 2, 3, 60, 50]])
def test_start_from_a_record_is_exact(splits, whole, trunk, text, driver_type, part_type):
    driver, part = started(
        driver_type, part_type, trunk, text, whole, hit=384, record=whole[1].record, lo=384
    )
    assert torch.equal(driver.run(part, splits).logits, whole[0][-1:])
    assert slot_at(driver, 2, N) == slot_at(whole[1], 0, N)


@pytest.mark.parametrize("splits", [None, [1, 2, 183, 60, 56]])
def test_exact_replay_without_a_record(splits, whole, trunk, text, driver_type, part_type):
    """L (W-1) rows before the grain rebuild every window and what the overlap carries."""
    begin = 384 - trunk.config.replay_reach_rows
    assert begin == 198
    driver, part = started(
        driver_type, part_type, trunk, text, whole, hit=384, record=None, lo=begin, swa_floor=begin
    )
    assert torch.equal(driver.run(part, splits).logits, whole[0][-1:])
    for mine, theirs in enumerate((7, 3, 9)):  # nothing below the write floor was touched
        assert driver.state.read_block(theirs) == whole[1].state.read_block(mine)
    assert slot_at(driver, 2, N).swa == slot_at(whole[1], 0, N).swa


def test_a_record_carries_the_overlap(whole, trunk, text, driver_type, part_type):
    """With its overlap replaced the same record gives another text: the bytes count."""
    record = whole[1].record
    carried = sum(tail.carried_bytes for tail in whole[1].layout.tails)
    # three layers of ratio 4: z and v of 4 tokens, first halves of both compressors, float32
    assert carried == 3 * 4 * 2 * (96 + 32) * 4
    assert len(record) == 6 * 31 * 136 + carried == whole[1].layout.window_record_bytes
    wrong = record[:-carried] + bytes(carried)
    driver, part = started(
        driver_type, part_type, trunk, text, whole, hit=384, record=wrong, lo=384
    )
    assert not torch.equal(driver.call(part).logits, whole[0][-1:])


def test_bounded_replay_is_one_function_of_its_start(whole, trunk, text, driver_type, part_type):
    """Approximate, but the same for every chunking, and no dead byte is read."""
    seen = []
    for splits in (None, [1, 30, 2, 115]):
        driver, part = started(
            driver_type, part_type, trunk, text, whole, hit=384, record=None, lo=352, swa_floor=352
        )
        logits = driver.run(part, splits).logits
        assert not logits.isnan().any()
        seen.append((logits, driver.state.read_block(1)))
    assert torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][0], whole[0][-1:])


@pytest.mark.parametrize("depth", [0, 2])
def test_a_group_at_the_start_pools_what_exists(depth, whole, trunk, text, driver_type, part_type):
    """Started fewer than four rows before a group that is written: absent tokens are left out."""
    begin = 384 - depth
    driver, part = started(
        driver_type, part_type, trunk, text, whole, hit=384, record=None, lo=begin, swa_floor=begin
    )
    assert not driver.call(part).logits.isnan().any()


@pytest.mark.parametrize("at", [1, 3, 4, 7, 127, 129, 200, 258])
def test_export_into_another_ring_and_chunking(at, trunk, text, driver_type, part_type):
    first = driver_type(trunk, backtrack_rows=6)
    first.run(part_type(text, 0, at, slot=2, table=(0, 1, 6)), [at])
    second = driver_type(trunk, backtrack_rows=9, ring_rows=77)
    assert second.layout.layout_id == first.layout.layout_id
    second.state.import_slot(0, first.state.export_slot(2, at))
    table = (11, 4, 8)
    for block, theirs in enumerate(table):
        if block * BLOCK < at:
            second.state.write_block(theirs, first.state.read_block(block))
    end = at + 100
    here = first.run(part_type(text, at, end, slot=2, table=(0, 1, 6)), [1, 99])
    there = second.run(part_type(text, at, end, slot=0, table=table), [50, 1, 1, 48])
    assert torch.equal(here.logits, there.logits) and not here.logits.isnan().any()
    assert first.state.export_slot(2, end) == second.state.export_slot(0, end)


def test_rollback_overwrites_rejected_rows(trunk, text, make_text, driver_type, part_type):
    """Five rejected rows after each accepted one, over groups of 4, one of 128, and ring wrap."""
    wrong = make_text(150, 2, trunk.config)
    plain, tried = driver_type(trunk), driver_type(trunk)
    for driver in (plain, tried):
        driver.call(part_type(text, 0, 118, slot=0, table=(0, 1)))
    for at in range(118, 138):
        mixed = type(text)((*text.ids[: at + 1], *wrong.ids[at + 1 :]))
        shown = tried.call(part_type(mixed, at, at + 6, slot=0, table=(0, 1), logits_from=at))
        want = plain.call(part_type(text, at, at + 1, slot=0, table=(0, 1)))
        assert torch.equal(shown.logits[:1], want.logits)


def test_batched_with_others_equals_alone(whole, trunk, text, make_text, driver_type, part_type):
    other = make_text(140, 9, trunk.config)
    together = driver_type(trunk)
    together.call(part_type(text, 0, 384, slot=0, table=(0, 1, 2, 3)))
    parts = (
        part_type(other, 0, 140, slot=3, table=(8, 9)),
        part_type(text, 384, N, slot=0, table=(0, 1, 2, 3)),
    )
    got = together.call(*parts)
    alone = driver_type(trunk).call(parts[0])
    assert torch.equal(got.logits, torch.cat((alone.logits, whole[0][-1:])))
    assert got.encoder_rows == 140 + 116 and got.decoder_rows == 0


# ---- refusals ------------------------------------------------------------------------------


def test_an_encoder_only_build_is_refused_with_its_reason() -> None:
    config = ModelConfig.load("v4-toy")
    with pytest.raises(ConfigError, match="without a decoder half an encoder-only build is the"):
        Trunk.random(config, 1, Numerics.INVARIANT, encoder_only=True)


def test_a_record_inside_a_group_is_refused(whole) -> None:
    with pytest.raises(StateError, match="window record at 382, inside a group of 4"):
        whole[1].state.read_window(0, 382)


def test_a_record_of_another_size_is_refused_before_a_byte_changes(whole, trunk) -> None:
    state = KvState(trunk.config, whole[1].layout, 1, 1, Numerics.INVARIANT)
    with pytest.raises(StateError, match="window bytes: found 37583, wanted 37584"):
        state.write_window(0, 384, whole[1].record[:-1])
    assert not state.rings.any() and not state.tails.any()


def test_image_rows_are_refused(trunk, text, driver_type, part_type) -> None:
    shown = type(text)(text.ids, frozenset({3}))
    with pytest.raises(BatchError, match="no vision"):
        driver_type(trunk).call(part_type(shown, 0, 8, 0, (0,)))


def test_float_rows_are_for_fast_numerics(trunk) -> None:
    plain = CacheLayout.of(trunk.config, kv_quant=False)
    assert plain.layout_id != CacheLayout.of(trunk.config).layout_id
    with pytest.raises(StateError, match="wanted fast numerics"):
        KvState(trunk.config, plain, 1, 1, Numerics.INVARIANT)
