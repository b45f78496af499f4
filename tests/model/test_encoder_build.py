"""The encoder-only build: what it draws, what it holds, and that its state is the full build's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

from headrace.model import (
    CacheLayout,
    KvState,
    ModelConfig,
    Numerics,
    StateError,
    Trunk,
    load_named,
)
from headrace.model.weights import RandomTensors, tensor_specs

# The first decoder layer's part: what publishes global KV and its index keys, and nothing else.
SOURCE = (
    "attn_norm.weight",
    "attn.compressor.wkv.weight",
    "attn.compressor.norm.weight",
    "attn.indexer.wk.weight",
    "attn.indexer.k_norm.weight",
)

# Of all parameters, with the Engram layers' own and without.
SHARES = {
    "t1": {True: 0.475, False: 0.427},
    "t2": {True: 0.475, False: 0.427},
    "flash": {True: 0.62, False: 0.487},
}


def build(name: str, *, encoder_only: bool) -> tuple[Trunk, RandomTensors]:
    config = ModelConfig.load(name)
    tensors = RandomTensors(config, 3)
    token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    trunk = Trunk(
        config,
        tensors,
        Numerics.FAST,
        token_map=token_map,
        weights_id="test",
        encoder_only=encoder_only,
    )
    return trunk, tensors


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def read_bytes(config: ModelConfig, names: list[str], *, engram: bool) -> int:
    sizes = {spec.name: 4 * math.prod(spec.shape) for spec in tensor_specs(config)}
    return sum(sizes[name] for name in names if engram or ".engram." not in name)


def encoder_names(config: ModelConfig) -> set[str]:
    first = config.n_encoder_layers
    wanted = {"embed.weight"} | {f"layers.{first}.{part}" for part in SOURCE}
    for spec in tensor_specs(config):
        parts = spec.name.split(".")
        if parts[0] == "layers" and int(parts[1]) < first:
            wanted.add(spec.name)
    return wanted


@pytest.mark.parametrize("name", ["toy", "t1", "t2"])
def test_names_are_those_of_the_encoder_half(name: str) -> None:
    trunk, tensors = build(name, encoder_only=True)
    config, first = trunk.config, trunk.config.n_encoder_layers
    assert 0 < first < config.num_hidden_layers and first not in config.engram_layer_ids
    assert sorted(tensors.drawn) == sorted(encoder_names(config))  # each once
    _, full = build(name, encoder_only=False)
    assert sorted(full.drawn) == sorted(spec.name for spec in tensor_specs(config))


@pytest.mark.parametrize("name", ["t1", "t2"])
def test_bytes_against_the_full_build(name: str) -> None:
    """Bytes read from the source and bytes allocated, as shares of the full build; embedding and
    head included. The Engram tables lie in the encoder half: both builds read them."""
    half, drawn = build(name, encoder_only=True)
    full, everything = build(name, encoder_only=False)
    config = half.config
    read = {
        engram: read_bytes(config, drawn.drawn, engram=engram)
        / read_bytes(config, everything.drawn, engram=engram)
        for engram in (True, False)
    }
    assert {engram: round(share, 3) for engram, share in read.items()} == SHARES[name]

    held = {trunk: list(tensors_of(trunk.params)) for trunk in (half, full)}
    n_bytes = {trunk: sum(t.nbytes for t in found) for trunk, found in held.items()}
    # Matrices are fused and transposed, so only small things differ between read and held.
    for trunk, source in ((half, drawn), (full, everything)):
        total = read_bytes(config, source.drawn, engram=True)
        assert n_bytes[trunk] == pytest.approx(total, rel=2e-3)
    assert n_bytes[half] / n_bytes[full] == pytest.approx(read[True], abs=2e-3)
    assert len(half.params.layers) == config.n_encoder_layers + 1
    source_bytes = sum(t.nbytes for t in tensors_of(half.params.layers[-1]))
    assert source_bytes < 0.1 * sum(t.nbytes for t in tensors_of(full.params.layers[-1]))


def test_figures_of_the_release() -> None:
    """By its tensor list: no weights are made here."""
    config = ModelConfig.load("flash")
    names, every = sorted(encoder_names(config)), [spec.name for spec in tensor_specs(config)]
    for engram, wanted in SHARES["flash"].items():
        half = read_bytes(config, names, engram=engram)
        assert round(half / read_bytes(config, every, engram=engram), 3) == wanted


@pytest.mark.parametrize("name", ["t1", "t2"])
def test_slots_have_rings_of_the_encoder_half_alone(name: str) -> None:
    config = ModelConfig.load(name)
    layout = CacheLayout.of(config)
    half = KvState(config, layout, 1, 3, Numerics.FAST, encoder_only=True)
    full = KvState(config, layout, 1, 3, Numerics.FAST)
    assert full.slot_bytes == layout.slot_bytes
    per_layer = layout.ring_rows * layout.swa_row_bytes
    left_out = config.n_decoder_layers + config.num_nextn_predict_layers
    assert full.slot_bytes - half.slot_bytes == left_out * per_layer
    assert half.rings.shape[1] == config.n_encoder_layers == half.ring_layers
    with pytest.raises(StateError, match="slot of 12 layers: this state has rings of 6"):
        half.export_slot(0, 5)
    half.import_slot(1, full.export_slot(0, 5, layers="encoder"))


def test_the_named_model_has_the_same_weights_id() -> None:
    half = load_named("toy", 0, Numerics.INVARIANT, encoder_only=True)
    full = load_named("toy", 0, Numerics.INVARIANT)
    assert half.encoder_only and half.weights_id == full.weights_id
    assert torch.equal(half.params.layers[0].w13, full.params.layers[0].w13)
    other = load_named("toy", 1, Numerics.INVARIANT, encoder_only=True)
    assert other.weights_id != half.weights_id
