"""`invariant` numerics, bit for bit, on states whose every dead byte is NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.model import CacheLayout, KvState, Numerics, StateError, Trunk

BLOCK = 128
relaxed = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def snapshot(driver, part):
    """Whole blocks, the window record and the full slot state at the end of `part`."""
    whole = part.hi // BLOCK
    return (
        [driver.state.read_block(b) for b in part.table[:whole]],
        driver.state.read_window(part.slot, part.hi),
        driver.state.export_slot(part.slot, part.hi),
    )


def same_slot(a, b) -> bool:
    """Equal windows; tails are private float64 and may differ in the last bits."""
    return a.swa == b.swa and a.drafter == b.drafter and a.length_tokens == b.length_tokens


@pytest.fixture(scope="module")
def whole_runs(make_trunk, make_text, driver_type, part_type):
    """whole_runs(name) -> (text, part, logits, snapshot) of one call over a whole text, cached."""
    cache = {}

    def get(name):
        if name not in cache:
            trunk = make_trunk(name)
            text = make_text(301, 5, trunk.config)
            part = part_type(text, 0, 301, slot=0, table=(0, 1, 2))
            driver = driver_type(trunk)
            logits = driver.call(part).logits
            assert not logits.isnan().any()
            cache[name] = (text, part, logits, snapshot(driver, part))
        return cache[name]

    return get


@pytest.mark.parametrize("name", ["t1", "toy"])
@settings(relaxed, max_examples=6)
@given(cuts=st.lists(st.integers(1, 300), max_size=7))
def test_random_chunkings_equal_one_call(name, cuts, whole_runs, make_trunk, driver_type):
    _, part, logits, state = whole_runs(name)
    edges = [0, *sorted(set(cuts)), 301]
    driver = driver_type(make_trunk(name))
    result = driver.run(part, [b - a for a, b in itertools.pairwise(edges)])
    blocks, window, slot = snapshot(driver, part)
    assert torch.equal(result.logits, logits)
    assert (blocks, window) == state[:2] and same_slot(slot, state[2])


@pytest.mark.parametrize(
    "splits",
    [
        [1] * 40 + [261],
        [38, 39, 37, 6, 7, 8, 32, 33, 31, 70],
        [128, 128, 45],
    ],
)
def test_chunkings_at_ring_and_window_sizes(splits, whole_runs, make_trunk, driver_type):
    """One row, ring 38 and its neighbours, backtrack 6, window 32, the block size."""
    _, part, logits, state = whole_runs("t1")
    driver = driver_type(make_trunk("t1"))
    assert torch.equal(driver.run(part, splits).logits, logits)
    assert snapshot(driver, part)[:2] == state[:2]


def test_t2_chunks_equal_one_call(whole_runs, make_trunk, driver_type):
    _, part, logits, state = whole_runs("t2")
    driver = driver_type(make_trunk("t2"))
    assert torch.equal(driver.run(part, [150, 1, 1, 134, 7, 8]).logits, logits)
    assert snapshot(driver, part)[:2] == state[:2]


def test_batched_with_others_equals_alone(make_trunk, make_text, driver_type, part_type):
    """Decode, verify-like, replay-like and prefill rows of four sequences in one call."""
    trunk = make_trunk("t1")
    texts = [make_text(n, seed, trunk.config) for n, seed in ((200, 1), (310, 2), (90, 3), (40, 4))]
    tables = [(3, 9), (1, 7, 4), (12,), (5,)]
    spans = [(150, 156), (60, 310), (89, 90), (0, 40)]  # 6 rows, 250 rows, 1 row, a fresh 40
    alone, states = [], []
    for slot, (text, table, (lo, hi)) in enumerate(zip(texts, tables, spans, strict=True)):
        driver = driver_type(trunk)
        if lo:
            driver.call(part_type(text, 0, lo, slot, table))
        part = part_type(text, lo, hi, slot, table, logits_from=max(lo, hi - 3))
        alone.append(driver.call(part).logits)
        states.append(snapshot(driver, part))
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        together, parts = driver_type(trunk), []
        for slot in order:
            text, table, (lo, hi) = texts[slot], tables[slot], spans[slot]
            if lo:
                together.call(part_type(text, 0, lo, slot, table))
            parts.append(part_type(text, lo, hi, slot, table, logits_from=max(lo, hi - 3)))
        result = together.call(*parts)
        assert torch.equal(result.logits, torch.cat([alone[i] for i in order]))
        assert not result.logits.isnan().any()
        for part in parts:
            blocks, window, slot = snapshot(together, part)
            want = states[part.slot]
            assert (blocks, window) == want[:2] and same_slot(slot, want[2])


@pytest.mark.parametrize("at", [1, 31, 63, 129, 200])
def test_export_and_import_into_another_ring_and_block_table(
    at, make_trunk, make_text, driver_type, part_type
):
    trunk = make_trunk("t1")
    text = make_text(230, 8, trunk.config)
    first = driver_type(trunk, backtrack_rows=6)
    first.call(part_type(text, 0, at, slot=2, table=(0, 1)))
    exported = first.state.export_slot(2, at)
    second = driver_type(trunk, backtrack_rows=9)
    assert second.layout.ring_rows == 41 and first.layout.ring_rows == 38
    assert second.layout.layout_id == first.layout.layout_id
    second.state.import_slot(0, exported)
    for mine, theirs in ((0, 11), (1, 4)):
        if mine * BLOCK < at:
            second.state.write_block(theirs, first.state.read_block(mine))
    splits = [1, 1, 5, 230 - at - 7]
    here = first.run(part_type(text, at, 230, slot=2, table=(0, 1)), splits)
    there = second.run(part_type(text, at, 230, slot=0, table=(11, 4)), splits)
    assert torch.equal(here.logits, there.logits)
    assert not here.logits.isnan().any()
    assert first.state.read_block(0) == second.state.read_block(11)
    assert first.state.read_window(2, 230) == second.state.read_window(0, 230)
    assert first.state.export_slot(2, 230) == second.state.export_slot(0, 230)


def test_two_models_of_one_seed_write_equal_blocks(make_trunk, make_text, driver_type, part_type):
    trunk = make_trunk("t1")
    twin = Trunk.random(trunk.config, 1, Numerics.INVARIANT, token_map=trunk.token_map)
    other = Trunk.random(trunk.config, 2, Numerics.INVARIANT, token_map=trunk.token_map)
    assert twin.weights_id == trunk.weights_id != other.weights_id
    text = make_text(256, 9, trunk.config)
    blocks = []
    for model, splits in ((trunk, [256]), (twin, [100, 156]), (other, [256])):
        driver = driver_type(model)
        driver.run(part_type(text, 0, 256, slot=0, table=(2, 0)), splits)
        blocks.append([driver.state.read_block(b) for b in (2, 0)])
    assert blocks[0] == blocks[1] and blocks[0] != blocks[2]


def test_rollback_overwrites_rejected_rows(make_trunk, make_text, driver_type, part_type):
    """Five rejected rows after each accepted one, across ring wrap and ratio-2 groups."""
    trunk = make_trunk("t1")
    right, wrong = make_text(150, 1, trunk.config), make_text(150, 2, trunk.config)
    plain, tried = driver_type(trunk), driver_type(trunk)
    for driver in (plain, tried):
        driver.call(part_type(right, 0, 120, slot=0, table=(0, 1)))
    for at in range(120, 140):
        mixed = type(right)((*right.ids[: at + 1], *wrong.ids[at + 1 :]))
        shown = tried.call(part_type(mixed, at, at + 6, slot=0, table=(0, 1), logits_from=at))
        want = plain.call(part_type(right, at, at + 1, slot=0, table=(0, 1)))
        assert torch.equal(shown.logits[:1], want.logits)


def test_poison_reaches_logits_if_a_floor_is_ignored(make_trunk, make_text, driver_type, part_type):
    """The NaN filling can show a fault: with the floors lowered it does."""
    trunk = make_trunk("t1")
    text = make_text(128, 3, trunk.config)
    source = driver_type(trunk)
    source.call(part_type(text, 0, 128, slot=0, table=(0,)))
    seen = {}
    for floor in (100, 90):
        driver = driver_type(trunk)
        driver.state.write_block(0, source.state.read_block(0))
        part = part_type(
            text, 100, 128, 0, (0,), swa_floor=floor, decoder_floor=100, write_floor=128
        )
        seen[floor] = bool(driver.call(part).logits.isnan().any())
        driver.state.poison_slot(0)
        driver.call(part)
    assert seen == {100: False, 90: True}


def test_floors_keep_every_dead_byte_out(make_trunk, make_text, driver_type, part_type):
    """SWA floor and decoder floor above 0, then many steps: no NaN though all else is poison."""
    trunk = make_trunk("t1")
    text = make_text(240, 3, trunk.config)
    source = driver_type(trunk)
    source.call(part_type(text, 0, 128, slot=0, table=(0,)))
    driver = driver_type(trunk)
    driver.state.write_block(5, source.state.read_block(0))
    common = {"slot": 1, "table": (5, 2), "swa_floor": 96, "decoder_floor": 120}
    common["write_floor"] = 128
    first = part_type(text, 96, 140, **common, decoder_from=120, logits_from=120)
    result = driver.call(first)
    assert result.encoder_rows == 44 and result.decoder_rows == 20
    assert not result.logits.isnan().any()
    assert result.groups_written == 6 + 6 + 12
    for at in range(140, 200, 3):
        result = driver.call(part_type(text, at, at + 3, **common))
        assert not result.logits.isnan().any()
    poisoned = KvState(
        trunk.config, CacheLayout.of(trunk.config), 1, 1, Numerics.INVARIANT, poison=True
    )
    assert driver.state.read_block(5) == source.state.read_block(0) != poisoned.read_block(0)


def test_state_of_another_kind_is_refused(make_trunk, make_text, driver_type, part_type):
    trunk = make_trunk("t1")
    driver = driver_type(trunk)
    text = make_text(10, 1, trunk.config)
    batch = driver.batch([part_type(text, 0, 4, 0, (0,))])
    fast = KvState(trunk.config, driver.layout, 2, 1, Numerics.FAST)
    with pytest.raises(StateError, match="fast"):
        trunk.forward(batch, fast)
    driver.call(part_type(text, 0, 4, 0, (0,)))
    with pytest.raises(StateError, match="float64"):
        fast.import_slot(0, driver.state.export_slot(0, 4))
    with pytest.raises(StateError, match="17920"):
        driver.state.write_block(0, b"123")
    other = make_trunk("toy")
    with pytest.raises(StateError, match="configuration"):
        other.forward(batch, driver.state)
