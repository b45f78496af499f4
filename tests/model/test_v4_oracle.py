"""V4 against transformers' `deepseek_v4`, live and by kept outputs; see the module that makes them.

float32 in `fast` numerics with float32 rows: that program quantises nothing, so only rounding
separates the two and prompts of any length can be compared as they come.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from headrace_tests import module

from headrace.model import Numerics, Trunk

ORACLE = Path(__file__).parent / "oracle"
TOLERANCE = 1e-4  # of a logit; their standard deviation is 1


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return module("tests/model/oracle/make_transformers_fixtures.py")


@pytest.fixture(scope="module")
def theirs(program):
    return program.build("v4-toy", program.SEED)


def ours(config, seed, ids, driver_type, part_type, text_type, splits=None):
    """Logits of all rows and the selections of the last call."""
    driver = driver_type(Trunk.random(config, seed, Numerics.FAST), kv_quant=False)
    text = text_type(tuple(int(i) for i in ids))
    logits, lo, result = [], 0, None
    for m in splits or [len(ids)]:
        part = part_type(text, lo, lo + m, slot=1, table=(3, 1, 0, 5), logits_from=lo)
        result = driver.call(part, capture=True)
        logits.append(result.logits)
        lo += m
    assert lo == len(ids)
    return torch.cat(logits), result.selections


def check_selections(found, expected) -> None:
    assert set(found) == set(expected) == {1, 3, 5}
    for layer, chosen in expected.items():
        mine = np.sort(found[layer].numpy(), axis=1)[:, -chosen.shape[1] :]
        assert (mine == chosen).all(), f"layer {layer}"


@pytest.mark.parametrize("splits", [None, [50, 1, 77, 60, 112]])
def test_logits_equal_the_live_program(splits, program, theirs, driver_type, part_type, text_type):
    model, config = theirs
    ids = program.prompt(program.CASES[1], config)
    expected, selections = program.run(model, config, ids)
    got, found = ours(config, program.SEED, ids, driver_type, part_type, text_type, splits)
    assert (got - expected).abs().max() <= TOLERANCE
    assert (got.argmax(-1) == expected.argmax(-1)).all()
    if splits is None:
        check_selections(found, selections)
        # The choice bites, and two heavy entries are visible.
        assert (selections[1] >= 0).sum(1).max() == config.index_topk < len(ids) // 4
        assert len(ids) // 128 == 2


@pytest.mark.parametrize("seed", [77, 78])
def test_other_weights_and_texts(seed, program, driver_type, part_type, text_type):
    model, config = program.build("v4-toy", seed)
    ids = np.random.default_rng(seed).integers(3, config.vocab_size, 150)
    expected, selections = program.run(model, config, ids)
    got, found = ours(config, seed, ids, driver_type, part_type, text_type)
    assert (got - expected).abs().max() <= TOLERANCE
    assert (got.argmax(-1) == expected.argmax(-1)).all()
    check_selections(found, selections)


@pytest.mark.parametrize("case", ["v4-short", "v4-long"])
def test_logits_equal_the_kept_outputs(case, program, theirs, driver_type, part_type, text_type):
    with np.load(ORACLE / "fixtures" / f"{case}.npz") as f:
        kept = dict(f)
    config = theirs[1]
    got, found = ours(config, program.SEED, kept["ids"], driver_type, part_type, text_type)
    last = torch.from_numpy(kept["logits"])
    assert (got[-len(last) :] - last).abs().max() <= TOLERANCE
    assert (got.argmax(-1).numpy() == kept["argmax"]).all()
    names = (key for key in kept if key.startswith("selection_"))
    check_selections(found, {int(n.removeprefix("selection_")): kept[n] for n in names})


def test_every_mechanism_changes_the_logits(program, theirs, driver_type, part_type, text_type):
    """What the comparison would notice: each of V4's own tensors, set to zero (tables of experts:
    turned by one), moves logits by far more than the tolerance."""
    config = theirs[1]
    ids = program.prompt(program.CASES[1], config)
    tensors = program.random_tensors(config, program.SEED)
    expected, _ = ours(config, program.SEED, ids, driver_type, part_type, text_type)

    def changed(name: str) -> float:
        other = dict(tensors)
        if name.endswith("tid2eid"):
            other[name] = (tensors[name] + 1) % config.n_routed_experts
        else:
            other[name] = torch.zeros_like(tensors[name])
        model = Trunk(
            config, other, Numerics.FAST, token_map=np.zeros(0, np.int64), weights_id="changed"
        )
        driver = driver_type(model, kv_quant=False)
        text = text_type(tuple(int(i) for i in ids))
        part = part_type(text, 0, len(ids), slot=1, table=(3, 1, 0, 5), logits_from=0)
        return float((driver.call(part).logits - expected).abs().max())

    for name in (
        "hc_head_fn",
        "hc_head_base",
        "layers.0.ffn.gate.tid2eid",
        "layers.1.attn.compressor.ape",
        "layers.1.attn.compressor.wgate.weight",
        "layers.1.attn.indexer.compressor.ape",
        "layers.2.attn.compressor.ape",
        "layers.2.attn.compressor.wgate.weight",
        "layers.5.attn.attn_sink",
        "layers.5.ffn.gate.bias",
    ):
        assert changed(name) > 100 * TOLERANCE, name
