"""Weights held as they are stored: the bits of widened ones, and the bytes that are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.model import DraftBatch, ModelConfig, Numerics, Trunk, Weights
from headrace.model.checkpoint import (
    Checkpoint,
    Quantisation,
    ReleaseConfig,
    Selection,
    load_trunk,
    write_random,
)
from headrace.model.checkpoint.packed import PackedTensors

TOKEN_MAP = np.arange(1024) % 822
FORMATS = {
    "fp8 32, fp4": Quantisation(),
    "fp8 128": Quantisation((128, 128), "fp8"),
    "bf16": None,
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Two of its columns of blocks are cut at 128 x 128."""
    return replace(ModelConfig.load("toy"), moe_intermediate_size=96)


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: Any, config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "toy"
    write_random(path, ReleaseConfig(config, FORMATS[request.param]), 5)
    return path


@pytest.fixture
def everything(
    driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> Callable[[Trunk], tuple[Any, ...]]:
    """Logits, block, slot and a draft after 130 rows in two calls."""

    def run(trunk: Trunk) -> tuple[Any, ...]:
        driver, text = driver_type(trunk), make_text(131, 3, trunk.config)
        logits = [
            driver.call(part_type(text, lo, hi, 0, (0, 1), logits_from=lo)).logits
            for lo, hi in ((0, 128), (128, 130))
        ]
        one = torch.tensor([text.ids[130]])
        batch = DraftBatch(torch.tensor([0]), one, torch.tensor([130]), torch.tensor([0]))
        steps = trunk.draft(batch, driver.state).step(0, one)
        assert not any(x.isnan().any() for x in (*logits, *steps))
        state = driver.state
        tensors = [x.numpy().tobytes() for x in (*logits, *steps)]
        return tensors, state.read_block(0), state.export_slot(0, 130)

    return run


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.INVARIANT])
def test_packed_weights_give_the_bits_of_widened_ones(
    folder: Path, numerics: Numerics, everything: Callable[[Trunk], Any]
) -> None:
    widened = load_trunk(folder, numerics, token_map=TOKEN_MAP)
    packed = load_trunk(folder, numerics, token_map=TOKEN_MAP, weights=Weights.PACKED)
    assert packed.weights_id == widened.weights_id
    assert everything(packed) == everything(widened)


def test_an_encoder_only_build_may_be_packed(
    folder: Path,
    driver_type: Any,
    part_type: Any,
    make_text: Callable[..., Any],
) -> None:
    blocks = []
    for weights in Weights:
        trunk = load_trunk(
            folder, Numerics.INVARIANT, token_map=TOKEN_MAP, encoder_only=True, weights=weights
        )
        driver, text = driver_type(trunk), make_text(128, 4, trunk.config)
        driver.call(part_type(text, 0, 128, 0, (0,), decoder_from=128))
        blocks.append((driver.state.read_block(0), driver.state.read_window(0, 128)))
    assert blocks[0] == blocks[1]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that a value holds; what is made on use is not held."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


ONCE = (
    "embed.weight",
    "head.weight",
    "engram.embed.weight",
    "main_proj.weight",
    "main_norm.weight",
)
ONCE += ("markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight")


def test_held_bytes_are_the_stored_ones(folder: Path, config: ModelConfig) -> None:
    """And beside them, widened, what no layer owns: embedding, head, norms, what joins the taps and
    refines drafts."""
    with Checkpoint.open(folder, Selection.TEXT) as checkpoint:
        packed = PackedTensors(checkpoint)
        assert len(packed) == len(checkpoint.entries)
        held = [e for e in checkpoint.entries if not e.name.endswith(ONCE)]
        held = [e for e in held if e.name != "norm.weight"]
        held = [e for e in held if not e.optional]  # no model asks for one
        assert packed.held_bytes == sum(entry.n_bytes for entry in held)
    trunk = load_trunk(folder, Numerics.FAST, token_map=TOKEN_MAP, weights=Weights.PACKED)
    widened = load_trunk(folder, Numerics.FAST, token_map=TOKEN_MAP)
    d, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    taps = len(config.dspark_target_layer_ids)
    values = 2 * vocab * d + d  # embedding, head, norm
    values += taps * d * d + 2 * d + 2 * vocab * rank + d + rank  # drafter
    resident = sum(t.nbytes for t in tensors_of(trunk.params))
    assert resident == 4 * values
    tables = sum(table.values.nbytes for table in trunk.engram)
    whole = sum(t.nbytes for t in tensors_of(widened.params))
    assert packed.held_bytes + resident + tables < 0.75 * whole


class Counting(Mapping[str, torch.Tensor]):
    """Counts what is looked up."""

    def __init__(self, inner: Mapping[str, torch.Tensor]) -> None:
        self.inner, self.seen = inner, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.seen.append(name)
        return self.inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def test_only_chosen_experts_are_widened(
    folder: Path,
    config: ModelConfig,
    driver_type: Any,
    part_type: Any,
    make_text: Callable[..., Any],
) -> None:
    with Checkpoint.open(folder, Selection.TEXT) as checkpoint:
        tensors = Counting(PackedTensors(checkpoint))
        trunk = Trunk(
            config,
            tensors,
            Numerics.FAST,
            token_map=TOKEN_MAP,
            weights_id="",
            widen_on_use=True,
        )
    assert not [name for name in tensors.seen if ".experts." in name]
    tensors.seen.clear()
    driver, text = driver_type(trunk), make_text(5, 4, config)
    driver.call(part_type(text, 0, 1, 0, (0,)))
    experts = [name for name in tensors.seen if ".experts." in name]
    # w1, w2 and w3 of each chosen expert in each layer; the drafter's stages ran no experts.
    assert len(experts) == 3 * config.num_experts_per_tok * config.num_hidden_layers
    assert len(set(experts)) == len(experts)
    assert not [name for name in experts if name.startswith("mtp.")]
