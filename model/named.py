"""A ready model by configuration name: config, tokenizer's token map, random weights, masks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer

from headrace.model.config import ModelConfig
from headrace.model.errors import ConfigError
from headrace.model.numerics import Numerics
from headrace.model.token_map import build_token_map
from headrace.model.trunk import Trunk
from headrace.model.vision import VisionTower
from headrace.model.weights import random_weights_id


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


def load_named(
    config_name: str | Path,
    seed: int,
    numerics: Numerics,
    device: str | torch.device = "cpu",
    *,
    compute_dtype: torch.dtype | None = None,
    encoder_only: bool = False,
) -> Trunk:
    """Random-weight trunk of a named configuration with its package tokenizer.

    `encoder_only` draws no tensor of the decoder half but those of its first layer's KV source;
    `weights_id` is the same. Raises ConfigError when the token map's size is not the
    configuration's.
    """
    config = ModelConfig.load(config_name)
    tokenizer = package_tokenizer(config.vocab_size)
    token_map = build_token_map(tokenizer).ids if config.engram_layer_ids else None
    return Trunk.random(
        config,
        seed,
        numerics,
        device,
        reserved_token_ids(tokenizer, config.eos_token_id),
        token_map=token_map,
        compute_dtype=compute_dtype,
        encoder_only=encoder_only,
    )


def load_named_vision(
    config_name: str | Path,
    seed: int,
    numerics: Numerics,
    device: str | torch.device = "cpu",
) -> tuple[VisionTower, str]:
    """The random image tower of a named configuration, and the weights id of its text trunk, of
    which no tensor is drawn. Raises ConfigError if the configuration has no tower."""
    config = ModelConfig.load(config_name)
    token_map = build_token_map(package_tokenizer(config.vocab_size)).ids
    tower = VisionTower.random(config, seed, numerics, device)
    return tower, random_weights_id(config, seed, token_map)
