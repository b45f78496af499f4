"""Drafts against an independent program's (oracle/make_dspark_fixtures.py): float32, `fast`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.model import DraftBatch, ModelConfig, Numerics, Trunk

FIXTURES = Path(__file__).parent / "oracle" / "fixtures"
TOLERANCE = 1e-4  # of a logit; their standard deviation is 1.4
COLUMNS = slice(0, None, 8)  # of the vocabulary, as kept


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    with np.load(FIXTURES / "t1-plain-a.npz") as f:
        size, seed = int(f["compressed_vocab"]), int(f["seed"])
    config = dataclasses.replace(ModelConfig.load("t1"), engram_compressed_vocab_size=size)
    return Trunk.random(config, seed, Numerics.FAST)


@pytest.mark.parametrize(("case", "n_anchors"), [("t1-plain-a", 2), ("t1-plain-b", 6)])
def test_drafts_equal_the_oracle(
    case: str,
    n_anchors: int,
    trunk: Trunk,
    driver_type: Any,
    part_type: Any,
    text_type: Callable[..., Any],
) -> None:
    with np.load(FIXTURES / "dspark.npz") as f:
        fixture = {key: f[f"{case}/{key}"] for key in ("ids", "anchors", "tokens", "logits")}
        confidences = f[f"{case}/confidences"]
    assert len(fixture["anchors"]) == n_anchors
    text = text_type(tuple(int(i) for i in fixture["ids"]))
    for number, position in enumerate(int(a) for a in fixture["anchors"]):
        driver = driver_type(trunk)
        driver.call(part_type(text, 0, position, slot=1, table=(3,)))
        slot, anchor, at = (torch.tensor([x]) for x in (1, text.ids[position], position))
        block = trunk.draft(DraftBatch(slot, anchor, at, torch.tensor([0])), driver.state)
        previous = anchor
        for index in range(block.n_steps):
            logits, confidence = block.step(index, previous)
            previous = logits.argmax(-1)
            assert int(previous) == fixture["tokens"][number, index]
            kept = logits[0, COLUMNS].numpy()
            assert np.abs(kept - fixture["logits"][number, index]).max() <= TOLERANCE
            assert abs(float(confidence) - confidences[number, index]) <= TOLERANCE / 10
    # Blocks differ from each other, and steps from each other.
    assert len({tuple(row) for row in fixture["tokens"].tolist()}) == n_anchors
    assert confidences.std() > 0.01
