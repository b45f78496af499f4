"""A ready model by name: a checkpoint's weights where there are some, else random ones."""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer

from headrace.model.checkpoint.load import load_trunk, load_vision, weights_id
from headrace.model.config import ModelConfig, checkpoint_folder
from headrace.model.engram_store import (
    EngramTable,
    Placement,
    StoredRows,
    map_file,
    table_of,
    write_once,
)
from headrace.model.errors import ConfigError
from headrace.model.numerics import Numerics, Precision
from headrace.model.packed import Weights
from headrace.model.token_map import build_token_map
from headrace.model.trunk import Trunk
from headrace.model.vision import VisionTower
from headrace.model.weights import (
    RECIPE_VERSION,
    Init,
    TensorSpec,
    random_tensor,
    random_weights_id,
)


def package_tokenizer(vocab_size: int) -> Tokenizer:
    """The package's tokenizer of that many ids; raises ConfigError if there is none."""
    name = f"tokenizer-{vocab_size}.json"
    path = resources.files("headrace.configs") / "tokenizer" / name
    if not path.is_file():
        raise ConfigError(f"vocab_size: found {vocab_size}, no package tokenizer has that size")
    return Tokenizer.from_str(path.read_text(encoding="utf-8"))


def reserved_token_ids(tokenizer: Tokenizer, eos_token_id: int) -> tuple[int, ...]:
    """Added tokens except EOS: a model with random weights must not emit them.

    Chat parsers react to them, and no text of an untrained model means one.
    """
    return tuple(sorted(i for i in tokenizer.get_added_tokens_decoder() if i != eos_token_id))


# What a trained model may say besides text: the mark of a tool call, and the end of its thoughts.
_SPOKEN = ("｜DSML｜", "</think>")


def unspoken_token_ids(tokenizer: Tokenizer, eos_token_id: int) -> tuple[int, ...]:
    """The reserved ids that no answer of a trained model holds: turns, pictures, place holders."""
    spoken = {tokenizer.token_to_id(mark) for mark in _SPOKEN}
    return tuple(i for i in reserved_token_ids(tokenizer, eos_token_id) if i not in spoken)


def load_named(
    config_name: str | Path,
    seed: int,
    numerics: Numerics,
    device: str | torch.device = "cpu",
    *,
    compute_dtype: torch.dtype | None = None,
    encoder_only: bool = False,
    engram: Placement = Placement.MEMORY,
    engram_directory: Path | None = None,
    weights: Weights = Weights.WIDENED,
) -> Trunk:
    """The trunk of a checkpoint (its folder, or its name in the package), or of a named
    configuration with random weights of `seed`; with the package tokenizer of its size.

    `encoder_only` reads or draws no tensor of the decoder half but those of its first layer's KV
    source; `weights_id` is the same. MAPPED Engram tables are a checkpoint's own files; random ones
    are written into `engram_directory` unless they are there. Only a checkpoint has PACKED weights.
    Raises ConfigError when the token map's size is not the configuration's and for a placement or
    weights that cannot be, CheckpointError for a damaged checkpoint.
    """
    config = ModelConfig.load(config_name)
    tokenizer = package_tokenizer(config.vocab_size)
    if (folder := checkpoint_folder(config_name)) is not None:
        return load_trunk(
            folder,
            numerics,
            device,
            unspoken_token_ids(tokenizer, config.eos_token_id),
            compute_dtype=compute_dtype,
            encoder_only=encoder_only,
            engram=engram,
            weights=weights,
        )
    if weights is Weights.PACKED:
        raise ConfigError(f"weights: found 'packed', but {config_name} is no checkpoint's")
    token_map = build_token_map(tokenizer).ids if config.engram_layer_ids else None
    tables: dict[int, EngramTable] = {}
    if engram is not Placement.MEMORY:
        compute = Precision.of(numerics, compute_dtype).compute
        tables = random_tables(
            config, seed, engram, compute, torch.device(device), engram_directory
        )
    return Trunk.random(
        config,
        seed,
        numerics,
        device,
        reserved_token_ids(tokenizer, config.eos_token_id),
        token_map=token_map,
        compute_dtype=compute_dtype,
        encoder_only=encoder_only,
        engram_tables=tables,
    )


def random_tables(
    config: ModelConfig,
    seed: int,
    placement: Placement,
    compute: torch.dtype,
    device: torch.device,
    directory: Path | None,
) -> dict[int, EngramTable]:
    """The tables of `Trunk.random` elsewhere; files are named by what decides their values."""
    if placement is Placement.MAPPED and directory is None:
        raise ConfigError("engram_directory: found nothing, wanted a folder for mapped tables")
    placement.check(device)
    tables: dict[int, EngramTable] = {}
    for number, layer in enumerate(config.engram_layer_ids):
        name = f"layers.{layer}.engram.embed.weight"
        shape = (config.engram_num_embeddings[number], config.engram_head_dim)
        values = partial(random_tensor, TensorSpec(name, shape, Init.HALF), seed)
        if placement is Placement.PINNED or directory is None:
            tables[layer] = table_of(values(), placement, compute, device)
            continue
        file = f"engram-{RECIPE_VERSION}-{seed}-{layer}-{shape[0]}x{shape[1]}.f32"
        write_once(directory / file, values)
        raw = map_file(directory / file, shape[0] * shape[1] * 4)
        stored = StoredRows(raw.reshape(shape[0], -1), None, torch.float32)
        tables[layer] = table_of(stored, placement, compute, device)
    return tables


def load_named_vision(
    config_name: str | Path,
    seed: int,
    numerics: Numerics,
    device: str | torch.device = "cpu",
) -> tuple[VisionTower, str]:
    """The image tower of a checkpoint or the random one of a named configuration, and the weights
    id of its text trunk, of which no tensor is read. Raises ConfigError without a tower."""
    config = ModelConfig.load(config_name)
    token_map = build_token_map(package_tokenizer(config.vocab_size)).ids
    if (folder := checkpoint_folder(config_name)) is not None:
        return load_vision(folder, numerics, device), weights_id(folder, token_map)
    tower = VisionTower.random(config, seed, numerics, device)
    return tower, random_weights_id(config, seed, token_map)
