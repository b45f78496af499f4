"""Engram tables of named models: a deployment chooses where they lie; the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.engine import EngineSettings, Half, load_engine
from headrace.model import (
    ModelConfig,
    Numerics,
    Placement,
    Trunk,
    Weights,
    load_named,
    package_tokenizer,
)
from headrace.model.checkpoint import Quantisation, ReleaseConfig, write_random
from headrace.model.engram_store import HeldTable, HostTable
from headrace.model.packed import OnUse


def tables_of(trunk: Trunk) -> list[Any]:
    return [p.engram.table for p in trunk.params.layers if p.engram is not None]


@pytest.mark.parametrize("numerics", [Numerics.INVARIANT, Numerics.FAST])
def test_a_named_model_s_mapped_tables_give_the_same_bits(
    numerics: Numerics, tmp_path: Path, state_and_logits: Callable[[Trunk], Any]
) -> None:
    held = load_named("toy", 3, numerics)
    mapped = load_named(
        "toy", 3, numerics, engram=Placement.MAPPED, engram_directory=tmp_path / "tables"
    )
    assert all(isinstance(t, HeldTable) for t in tables_of(held))
    assert all(isinstance(t, HostTable) for t in tables_of(mapped))
    assert mapped.weights_id == held.weights_id
    assert state_and_logits(mapped) == state_and_logits(held)
    (file,) = (tmp_path / "tables").iterdir()  # complete, no partial beside it
    before = file.stat()
    again = load_named(
        "toy", 3, numerics, engram=Placement.MAPPED, engram_directory=tmp_path / "tables"
    )
    assert file.stat().st_mtime_ns == before.st_mtime_ns  # found, not written anew
    assert tables_of(again)[0].n_rows == held.config.engram_num_embeddings[0]
    other = load_named("toy", 4, numerics)
    assert state_and_logits(other) != state_and_logits(held)


def test_placements_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engram: found 'pinned' on cpu, wanted it on a CUDA"):
        load_named("toy", 0, Numerics.FAST, engram=Placement.PINNED)
    with pytest.raises(ConfigError, match="engram_directory: found nothing"):
        load_named("toy", 0, Numerics.FAST, engram=Placement.MAPPED)
    with pytest.raises(ConfigError, match="engram must be one of"):
        Deployment(engram="disk")
    with pytest.raises(ConfigError, match="weights must be one of"):
        Deployment(weights="fp8")
    with pytest.raises(ConfigError, match="weights: found 'packed', but toy is no checkpoint's"):
        load_named("toy", 0, Numerics.FAST, weights=Weights.PACKED)
    sizes = EngineSettings(n_blocks=4, n_slots=1)
    mapped = Deployment(model="toy", engram="mapped", engram_directory=str(tmp_path))
    assert isinstance(load_engine(mapped, sizes, Half.ENCODER).model.engram[0], HostTable)
    folder = tmp_path / "checkpoint"
    release = ReleaseConfig(ModelConfig.load("toy"), Quantisation())
    tokenizer = package_tokenizer(1024).to_str().encode()
    write_random(folder, release, 1, companions={"tokenizer.json": tokenizer})
    stored = Deployment(model=str(folder), weights="packed", engram="mapped")
    for half in Half:
        model = load_engine(stored, sizes, half).model
        assert isinstance(model.engram[0], HostTable) and isinstance(model.params.layers, OnUse)


@pytest.mark.gpu
def test_pinned_tables_give_the_bits_of_held_ones(
    state_and_logits: Callable[[Trunk], Any],
) -> None:
    held = load_named("toy", 3, Numerics.INVARIANT, "cuda")
    pinned = load_named("toy", 3, Numerics.INVARIANT, "cuda", engram=Placement.PINNED)
    assert torch.from_numpy(tables_of(pinned)[0].stored.data).is_pinned()
    assert state_and_logits(pinned) == state_and_logits(held)
