"""Logits and selections against an independent program's outputs (oracle/make_nemo_fixtures.py).

Two kinds of case, see there: `plain` ones are compared as they come; the long ones follow the
program's quantiser codes, each of which must be (almost) as near to our value as our own code.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kernels import Kernels
from headrace.model import ModelConfig, Numerics, RowResult, Trunk

FIXTURES = Path(__file__).parent / "oracle" / "fixtures"
TOLERANCE = 1e-4  # of a logit; their standard deviation is 1
BORDER = 1e-4  # how much farther than our own code the program's may lie, in group maxima


class Follower:
    """Kernels that answer with the program's codes and count where ours differ."""

    def __init__(self, real: Kernels, fixture: dict[str, np.ndarray]) -> None:
        self.real, self.fixture = real, fixture
        self.calls: dict[str, int] = defaultdict(int)
        self.values = self.different = 0

    def kernels(self) -> Kernels:
        return dataclasses.replace(
            self.real,
            quantize_fp8_rows=self.fp8,
            quantize_nvfp4_rows=self.nvfp4,
            quantize_mxfp4=self.mxfp4_key,
            round_mxfp4=self.mxfp4_query,
        )

    def _next(self, kind: str) -> torch.Tensor:
        self.calls[kind] += 1
        return torch.from_numpy(self.fixture[f"{kind}_{self.calls[kind] - 1}"])

    def _compare(self, x: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        largest = x.abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True).expand(-1, -1, 16)
        farther = (x - theirs).abs() - (x - ours).abs()
        assert (farther <= BORDER * largest.reshape(x.shape)).all()
        self.values += x.numel()
        self.different += int((ours != theirs).sum())

    def fp8(self, x: torch.Tensor) -> torch.Tensor:
        if f"fp8_{self.calls['fp8']}" not in self.fixture:  # the drafter's, behind all layers
            self.calls["drafter"] += 1
            return self.real.quantize_fp8_rows(x)
        decode, theirs = self.real.dequantize_fp8_rows, self._next("fp8")
        self._compare(x, decode(self.real.quantize_fp8_rows(x), x.dtype), decode(theirs, x.dtype))
        return theirs

    def nvfp4(self, x: torch.Tensor) -> torch.Tensor:
        decode, theirs = self.real.dequantize_nvfp4_rows, self._next("nvfp4")
        ours = decode(self.real.quantize_nvfp4_rows(x), x.dtype)
        self._compare(x, ours, decode(theirs, x.dtype))
        return theirs

    def mxfp4_key(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self._next("mxfp4k")
        theirs = packed[:, : x.shape[1] // 2], packed[:, x.shape[1] // 2 :]
        ours = self.real.dequantize_mxfp4(*self.real.quantize_mxfp4(x), x.dtype)
        self._compare(x, ours, self.real.dequantize_mxfp4(*theirs, x.dtype))
        return theirs

    def mxfp4_query(self, x: torch.Tensor) -> torch.Tensor:
        packed, half = self._next("mxfp4q"), x.shape[-1] // 2
        theirs = self.real.dequantize_mxfp4(packed[..., :half], packed[..., half:], x.dtype)
        flat = (-1, x.shape[-1])
        self._compare(x.view(flat), self.real.round_mxfp4(x).view(flat), theirs.view(flat))
        return theirs


@pytest.fixture
def run_case(driver_type, part_type, text_type):
    """run_case(name) -> (fixture, config, result, follower) of the whole prompt in one call."""

    def run(case: str):
        with np.load(FIXTURES / f"{case}.npz") as f:
            fixture = dict(f)
        config = dataclasses.replace(
            ModelConfig.load(case[:2]),
            engram_compressed_vocab_size=int(fixture["compressed_vocab"]),
        )
        # Without a map, ids are folded modulo the compressed size, as in the fixture.
        trunk = Trunk.random(config, int(fixture["seed"]), Numerics.FAST)
        follower = Follower(trunk.kernels, fixture)
        if "fp8_0" in fixture:
            trunk.kernels = follower.kernels()
        first, end = (int(i) for i in fixture["image"])
        rows = {first + i: torch.from_numpy(fixture["image_rows"][i]) for i in range(end - first)}
        ids = tuple(int(i) for i in fixture["ids"])
        text = text_type(ids, frozenset(range(first, end)), rows)
        part = part_type(text, 0, len(ids), slot=1, table=(3, 1, 0, 5), logits_from=0)
        return fixture, config, driver_type(trunk).call(part, capture=True), follower

    return run


def check(fixture: dict[str, np.ndarray], config: ModelConfig, result: RowResult) -> None:
    n = fixture["ids"].shape[0]
    assert result.logits.shape == (n, config.vocab_size)
    difference = np.abs(result.logits.numpy()[fixture["logit_rows"]] - fixture["logits"]).max()
    assert difference <= TOLERANCE
    assert (result.logits.argmax(-1).numpy() == fixture["argmax"]).all()
    assert set(result.selections) == set(config.index_source_layer_ids)
    for layer, chosen in result.selections.items():
        expected = fixture[f"selection_{layer}"].astype(np.int64)
        assert (chosen.numpy()[:, : expected.shape[1]] == expected).all(), f"layer {layer}"
        assert (chosen.numpy()[:, expected.shape[1] :] == -1).all()
    entries = int(fixture["candidate_entries"])
    kept = np.unpackbits(fixture["candidates"], axis=1, count=entries).astype(bool)
    visible = np.arange(entries) < np.arange(1, n + 1)[:, None]
    assert result.candidates is not None
    assert ((result.candidates.numpy() & visible) == kept).all()
    # Both choices bite: entries fall to the top-k, blocks to the candidates.
    assert (kept.sum(1) < np.arange(1, n + 1)).any()
    assert (fixture["selection_2"] >= 0).sum(1).max() == config.index_topk
    assert n // 2 > config.index_topk


@pytest.mark.parametrize("case", ["t1-plain-a", "t1-plain-b"])
def test_prompt_in_one_call_equals_the_oracle(case, run_case):
    fixture, config, result, _ = run_case(case)
    check(fixture, config, result)


@pytest.mark.parametrize("case", ["t1-text", "t1-image", "t2-text"])
def test_long_prompt_equals_the_oracle_along_its_codes(case, run_case):
    fixture, config, result, follower = run_case(case)
    check(fixture, config, result)
    kv, index = len(config.kv_source_layer_ids), len(config.index_source_layer_ids)
    assert follower.calls == {
        "fp8": config.num_hidden_layers,
        "drafter": config.num_nextn_predict_layers,
        "nvfp4": kv,
        "mxfp4k": kv,
        "mxfp4q": index,
    }
    assert follower.different <= 1e-4 * follower.values
