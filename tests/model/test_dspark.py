"""The drafter's state and blocks: `invariant` numerics, bit for bit, on states full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.model import (
    BatchError,
    CacheLayout,
    ConfigError,
    DraftBatch,
    KvState,
    ModelConfig,
    Numerics,
    Trunk,
)

NAMES = ("t1", "toy")


def block_of(
    trunk: Trunk,
    state: KvState,
    *sequences: tuple[int, int, int],
    floor: int = 0,
    temperatures: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy tokens [s, block], logits [s, block, vocab], confidences [s, block] of sequences
    (slot, anchor id, anchor position)."""
    slots, anchors, positions = (torch.tensor(column) for column in zip(*sequences, strict=True))
    floors = torch.full_like(positions, floor)
    batch = DraftBatch(slots, anchors, positions, floors)
    block = trunk.draft(batch, state, temperatures=temperatures)
    tokens, logits, confidences, previous = [], [], [], anchors
    for index in range(block.n_steps):
        step, confidence = block.step(index, previous)
        previous = step.argmax(-1)
        tokens.append(previous)
        logits.append(step)
        confidences.append(confidence)
    return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidences, 1)


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=NAMES)
def trunk(request: Any, make_trunk: Callable[..., Trunk]) -> Trunk:
    return make_trunk(request.param)


@pytest.fixture
def filled(
    driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """filled(trunk, n, splits=None, slot=0, seed=5, decoder_from=0) -> (driver, text): n rows."""

    def fill(trunk: Trunk, n: int, splits: Any = None, **changes: Any) -> tuple[Any, Any]:
        slot, floor = changes.get("slot", 0), changes.get("decoder_from", 0)
        driver = changes.get("driver") or driver_type(trunk, **changes.get("sizes", {}))
        text = make_text(n + 12, changes.get("seed", 5), trunk.config)
        table = tuple(range(4 * slot, 4 * slot + 4))
        part = part_type(text, 0, n, slot, table, decoder_floor=floor, decoder_from=floor)
        driver.run(part, splits)
        return driver, text

    return fill


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 100, 165])
def test_a_block_does_not_depend_on_chunks_rings_slots_or_company(
    trunk: Trunk, filled: Callable[..., Any], n: int
) -> None:
    one, text = filled(trunk, n)
    anchor = text.ids[n]
    before = one.state.rings.clone()
    wanted = block_of(trunk, one.state, (0, anchor, n))
    assert torch.equal(one.state.rings, before)  # a draft leaves nothing behind
    assert not any(x.isnan().any() for x in wanted)
    assert wanted[0].shape == (1, trunk.config.dspark_block_size)

    cuts = [n // 3, 1, n - n // 3 - 1] if n >= 6 else [1] * n
    other, _ = filled(trunk, n, cuts, slot=2, sizes={"backtrack_rows": 9})
    filled(trunk, 77, slot=1, seed=9, driver=other)
    three = ((1, 40, 77), (2, anchor, n), (1, 41, 70))
    together = block_of(trunk, other.state, *three)
    assert equal([x[1:2] for x in together], wanted)
    assert not torch.equal(together[1][0], together[1][1])


def test_a_block_depends_on_its_window_its_anchor_and_nothing_older(
    trunk: Trunk, filled: Callable[..., Any]
) -> None:
    n, window = 90, trunk.config.sliding_window
    driver, text = filled(trunk, n)
    layout, state = driver.layout, driver.state
    wanted = block_of(trunk, state, (0, text.ids[n], n))
    assert not equal(wanted, block_of(trunk, state, (0, text.ids[n] + 1, n)))
    stages = range(layout.n_layers, layout.n_rings)
    ring = state.rings[0, layout.n_layers :]
    for back in range(1, layout.ring_rows + 1):
        row = (n - back) % layout.ring_rows
        kept = ring[:, row].clone()
        # Another position's keys in this place are seen inside the window only.
        ring[:, row] = ring[:, (row + 1) % layout.ring_rows].clone()
        changed = block_of(trunk, state, (0, text.ids[n], n))
        assert equal(changed, wanted) is (back > window), back
        ring[:, row] = kept
    assert len(stages) == trunk.config.num_nextn_predict_layers
    state.rings[0, : layout.n_layers] = 0xFF  # the target's own rows do not enter
    assert equal(block_of(trunk, state, (0, text.ids[n], n)), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_only_decoder_rows_are_committed(
    name: str, make_trunk: Callable[..., Trunk], filled: Callable[..., Any]
) -> None:
    """The prompt truncated at F leaves rows below F as they lay, and blocks never read them."""
    trunk = make_trunk(name)
    n, floor = 120, 80
    driver, text = filled(trunk, n, [50, 40, 30], decoder_from=floor)
    ring = driver.state.rings[0, driver.layout.n_layers :]
    rows = driver.layout.ring_rows
    written = {p % rows for p in range(floor, n)}
    dead = [r for r in range(rows) if r not in written]
    assert (ring[:, dead] == 0xFF).all()  # as poisoned
    assert not (ring[:, sorted(written)] == 0xFF).all(-1).any()
    one = block_of(trunk, driver.state, (0, text.ids[n], n), floor=floor)
    assert not any(x.isnan().any() for x in one)


def test_rejected_rows_are_overwritten_by_the_next_commit(
    trunk: Trunk, driver_type: Any, part_type: Any, make_text: Callable[..., Any], text_type: Any
) -> None:
    """Verified rows with other tokens, then the true ones: bits of a run without the detour, for
    every number of rejected rows and around a ring's wrap."""
    block = trunk.config.dspark_block_size
    ring = CacheLayout.of(trunk.config).ring_rows
    text = make_text(2 * ring + 20, 5, trunk.config)
    for start in (ring - 3, 2 * ring - block, 2 * ring - 1):
        for rejected in range(1, block + 1):
            driver, straight = driver_type(trunk), driver_type(trunk)
            driver.run(part_type(text, 0, start, 0, (0,)))
            n = start + block + 1 - rejected  # rows that stay of a verify step
            wrong = tuple((i + 7) % 900 + 31 for i in text.ids[n : start + block + 1])
            detour = text_type(text.ids[:n] + wrong)
            driver.run(part_type(detour, start, start + block + 1, 0, (0,)))
            driver.run(part_type(text, n, n + 2, 0, (0,)))
            straight.run(part_type(text, 0, n + 2, 0, (0,)))
            sequence = (0, text.ids[n + 2], n + 2)
            wanted = block_of(trunk, straight.state, sequence)
            assert equal(block_of(trunk, driver.state, sequence), wanted)
            assert driver.state.export_slot(0, n + 2).drafter == (
                straight.state.export_slot(0, n + 2).drafter
            )


@pytest.mark.parametrize(
    "changes",
    [
        {"dspark_target_layer_ids": (0, 1, 3)},  # two in the encoder half, one behind its end
        {"dspark_target_layer_ids": (2,), "dspark_block_size": 1},
        {
            "num_nextn_predict_layers": 2,
            "compress_ratios": (0, 2, 1, 1, 0, 0),
            "dspark_block_size": 5,
            "sliding_window": 8,
        },
        # No decoder half: all rows are committed, also where none has logits.
        {"compress_ratios": (0, 2, 2, 2, 0), "kv_source_layer_ids": (1, 2)},
    ],
    ids=["taps of both halves", "one tap", "two stages", "no decoder half"],
)
def test_other_drafters(
    changes: dict[str, Any], driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> None:
    """Chunks with and without decoder rows against one call of the same floor."""
    config = replace(ModelConfig.load("toy"), **changes)
    trunk, text = Trunk.random(config, 1, Numerics.INVARIANT), make_text(90, 5, config)
    floor = 41 if config.n_decoder_layers else 0
    blocks = []
    for splits in ([80], [40, 3, 1, 36]):
        driver = driver_type(trunk)
        part = part_type(text, 0, 80, 0, (0,), decoder_floor=floor, decoder_from=floor)
        driver.run(part, splits)
        exported = driver.state.export_slot(0, 80).drafter
        assert len(exported) == config.num_nextn_predict_layers * config.sliding_window * 33
        blocks.append((exported, block_of(trunk, driver.state, (0, text.ids[80], 80), floor=floor)))
    (one, drafts), (other, same) = blocks
    assert one == other and equal(drafts, same)
    assert drafts[0].shape == (1, config.dspark_block_size)
    assert not any(x.isnan().any() for x in drafts)


@pytest.mark.parametrize("n", [3, 33, 140])
def test_blocks_go_on_elsewhere_from_exported_rows(
    trunk: Trunk, filled: Callable[..., Any], driver_type: Any, n: int
) -> None:
    driver, text = filled(trunk, n)
    other = driver_type(trunk, backtrack_rows=11)
    exported = driver.state.export_slot(0, n)
    window, layout = trunk.config.sliding_window, driver.layout
    assert len(exported.drafter) == layout.n_stages * window * layout.swa_row_bytes
    other.state.import_slot(3, exported)
    assert other.state.export_slot(3, n) == exported
    wanted = block_of(trunk, driver.state, (0, text.ids[n], n))
    assert equal(block_of(trunk, other.state, (3, text.ids[n], n)), wanted)
    assert driver.state.export_slot(0, n, layers="encoder").drafter == b""


def test_confidences_follow_their_temperatures(trunk: Trunk, filled: Callable[..., Any]) -> None:
    driver, text = filled(trunk, 60)
    sequence, block = (0, text.ids[60], 60), trunk.config.dspark_block_size
    _, logits, plain = block_of(trunk, driver.state, sequence)
    temperatures = [0.5 + index for index in range(block)]
    _, same, scaled = block_of(trunk, driver.state, sequence, temperatures=temperatures)
    assert torch.equal(same, logits)
    wanted = torch.sigmoid(torch.logit(plain.double()) / torch.tensor(temperatures))
    assert torch.allclose(scaled.double(), wanted, atol=1e-4)
    assert ((plain > 0) & (plain < 1)).all() and plain.std() > 0
    *_, sharp = block_of(trunk, driver.state, sequence, temperatures=[1e-9] * block)
    assert (((sharp == 1) | (sharp < 1e-20)) & (sharp > 0)).all()  # held within +-60


def test_masked_tokens_are_not_drafted(
    driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> None:
    config = ModelConfig.load("toy")
    trunk = Trunk.random(config, 1, Numerics.INVARIANT, masked_token_ids=(3, 700))
    driver, text = driver_type(trunk), make_text(40, 5, config)
    driver.run(part_type(text, 0, 30, 0, (0,)))
    _, logits, _ = block_of(trunk, driver.state, (0, text.ids[30], 30))
    assert (logits[..., [3, 700]] == -torch.inf).all()
    assert logits.isinf().sum() == 2 * config.dspark_block_size


def test_what_no_block_can_be_made_of_is_refused(trunk: Trunk, filled: Callable[..., Any]) -> None:
    driver, config = filled(trunk, 20)[0], trunk.config
    good = (0, 40, 20)
    for bad, what in (
        ((4, 40, 20), "slots"),
        ((-1, 40, 20), "slots"),
        ((0, config.vocab_size, 20), "anchors"),
        ((0, 40, config.max_position_embeddings), "positions"),
    ):
        with pytest.raises(BatchError, match=what):
            block_of(trunk, driver.state, good, bad)
    for temperatures in ([1.0], [1.0] * config.dspark_block_size + [1.0], [0.0] * 9):
        with pytest.raises(BatchError, match="temperatures"):
            block_of(trunk, driver.state, good, temperatures=temperatures)
    layout = driver.layout
    half = KvState(config, layout, 1, 1, trunk.numerics, encoder_only=True)
    with pytest.raises(BatchError, match="encoder half only"):
        block_of(trunk, half, good)


def test_a_model_without_drafter_has_no_rings_for_one(
    driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> None:
    config = ModelConfig.load("toy")
    stages = config.num_nextn_predict_layers
    plain = replace(
        config,
        num_nextn_predict_layers=0,
        compress_ratios=config.compress_ratios[:-stages],
        dspark_target_layer_ids=(),
    )
    trunk = Trunk.random(plain, 1, Numerics.INVARIANT)
    driver, text = driver_type(trunk), make_text(40, 5, plain)
    logits = driver.run(part_type(text, 0, 30, 0, (0,))).logits
    assert driver.state.ring_layers == plain.num_hidden_layers
    assert driver.state.export_slot(0, 30).drafter == b""
    with pytest.raises(BatchError, match="no drafter"):
        block_of(trunk, driver.state, (0, 40, 30))
    other = driver_type(Trunk.random(config, 1, Numerics.INVARIANT))
    assert torch.equal(other.run(part_type(text, 0, 30, 0, (0,))).logits, logits)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dspark_target_layer_ids": ()}, "dspark_target_layer_ids: found ()"),
        ({"dspark_target_layer_ids": (3, 2)}, "ascending layer numbers"),
        ({"dspark_target_layer_ids": (4,)}, "dspark_target_layer_ids: found (4,)"),
        ({"dspark_block_size": 0}, "dspark_block_size: found 0, wanted in 1..256"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok: found 5, wanted at most"),
        ({"dspark_noise_token_id": -1}, "dspark_noise_token_id: found -1"),
        (
            {"num_nextn_predict_layers": -1, "compress_ratios": (0, 2, 1)},
            "found -1, wanted in 0..64",
        ),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(ModelConfig.load("toy"), **changes)
    assert sentence in str(refused.value)
