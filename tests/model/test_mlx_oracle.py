"""Logits against a second independent program, which decodes over a cache of its own
(oracle/make_mlx_fixtures.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.model import ModelConfig, Numerics, Trunk

FIXTURES = Path(__file__).parent / "oracle" / "fixtures"
TOLERANCE = 1e-4  # of a logit; their standard deviation is 1
SEED = 41


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    """T1 without Engram, which that program does not have."""
    config = dataclasses.replace(
        ModelConfig.load("t1"),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_compressed_vocab_size=4096,
    )
    return Trunk.random(config, SEED, Numerics.FAST)


@pytest.mark.parametrize("case", ["t1-mlx-a", "t1-mlx-b"])
def test_prompt_and_cached_decode_equal_the_oracle(
    case, trunk, driver_type, part_type, text_type
) -> None:
    with np.load(FIXTURES / f"{case}.npz") as f:
        fixture = dict(f)
    ids = tuple(int(i) for i in fixture["ids"])
    n, prefill = len(ids), int(fixture["prefill"])
    text = text_type(ids)
    whole = driver_type(trunk).call(part_type(text, 0, n, 1, (3,), logits_from=0)).logits
    last = torch.from_numpy(fixture["logits"])
    assert (whole[-len(last) :] - last).abs().max() <= TOLERANCE
    assert (whole.argmax(-1).numpy() == fixture["argmax"]).all()

    driver = driver_type(trunk)
    driver.call(part_type(text, 0, prefill, 1, (3,)))
    rows = [driver.call(part_type(text, p, p + 1, 1, (3,))).logits for p in range(prefill, n)]
    decoded = torch.cat(rows)
    assert (decoded.argmax(-1).numpy() == fixture["decoded_argmax"]).all()
    assert (decoded[::4] - torch.from_numpy(fixture["decoded"])).abs().max() <= TOLERANCE
    # Beyond the window, the top-k and the candidates: all of them choose.
    c = trunk.config
    assert n > c.sliding_window and n // 2 > c.index_topk
    assert n > c.candidate_topk_blocks * c.candidate_block_size
