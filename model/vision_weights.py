"""Tensors of the image tower by checkpoint name, seeded random values, and the typed parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from headrace.model.config import ModelConfig, VisionConfig
from headrace.model.errors import ConfigError
from headrace.model.numerics import Precision
from headrace.model.weights import RECIPE_VERSION, Init, TensorSpec, random_tensor

_POSITIVE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "downsample",
)


@dataclass(frozen=True, slots=True)
class Linear:
    """`weight` is [out, in] as stored; `bias` None where the model has none."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BlockParams:
    """One pre-norm block. `w1` gives 2 x intermediate outputs, gate half first."""

    norm1: torch.Tensor
    wqkv: Linear
    wo: Linear
    norm2: torch.Tensor
    w1: Linear
    w2: Linear


@dataclass(frozen=True, slots=True)
class VisionParams:
    """Norms in the accumulate dtype, everything else in the compute dtype."""

    patch: Linear
    blocks: tuple[BlockParams, ...]
    norm: torch.Tensor
    aligner1: Linear
    aligner2: Linear
    start: torch.Tensor
    newline: torch.Tensor
    end: torch.Tensor


def vision_section(config: ModelConfig) -> VisionConfig:
    """The config's image tower, checked. Raises `ConfigError` naming key, found and wanted."""
    vision = config.vision
    if vision is None:
        raise ConfigError("vision_config: found nothing, wanted the image tower's keys")
    for key in _POSITIVE:
        if getattr(vision, key) < 1:
            raise ConfigError(
                f"vision_config.{key}: found {getattr(vision, key)}, wanted 1 or more"
            )
    heads, width = vision.num_attention_heads, vision.hidden_size
    if width % heads or width // heads % 4:
        raise ConfigError(
            f"vision_config.hidden_size: found {width}, wanted {heads} heads of a multiple of 4"
        )
    return vision


def vision_tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors of tower and aligner and the three role rows, with checkpoint shapes."""
    v, d = vision_section(config), config.hidden_size
    width, inner = v.hidden_size, v.intermediate_size
    yield from _linear_specs("vision.patch_embed.proj", width, 3 * v.patch_size**2)
    for index in range(v.num_hidden_layers):
        p = f"vision.blocks.{index}."
        yield TensorSpec(f"{p}norm1.weight", (width,), Init.NORM)
        yield from _linear_specs(f"{p}attn.wqkv", 3 * width, width)
        yield from _linear_specs(f"{p}attn.wo", width, width)
        yield TensorSpec(f"{p}norm2.weight", (width,), Init.NORM)
        yield TensorSpec(f"{p}mlp.w1.weight", (2 * inner, width), Init.MATRIX)
        yield TensorSpec(f"{p}mlp.w2.weight", (width, inner), Init.MATRIX)
    yield TensorSpec("vision.norm.weight", (width,), Init.NORM)
    yield from _linear_specs("aligner.w1", d, width * v.downsample**2)
    yield from _linear_specs("aligner.w2", d, d)
    for role in ("start", "newline", "end"):
        yield TensorSpec(f"image_{role}", (d,), Init.EMBEDDING)


def _linear_specs(name: str, n_out: int, n_in: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (n_out, n_in), Init.MATRIX)
    yield TensorSpec(f"{name}.bias", (n_out,), Init.BIAS)


def random_vision_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Checkpoint name -> float32 tensor, decided by (seed, name, shape) alone."""
    return {spec.name: random_tensor(spec, seed) for spec in vision_tensor_specs(config)}


def random_vision_id(config: ModelConfig, seed: int) -> str:
    """Hex digest of all that decides the random tower's rows, numerics apart."""
    facts = {
        "recipe": f"random-vision-{RECIPE_VERSION}",
        "seed": seed,
        "vision": dataclasses.asdict(vision_section(config)),
        "hidden_size": config.hidden_size,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def vision_params(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    precision: Precision,
    device: torch.device,
) -> VisionParams:
    """Typed copies on `device`. Raises `ConfigError` for a missing tensor or another shape."""
    specs = {spec.name: spec for spec in vision_tensor_specs(config)}

    def get(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in tensors:
            raise ConfigError(f"checkpoint lacks tensor {name}")
        found, wanted = tuple(tensors[name].shape), specs[name].shape
        if found != wanted:
            raise ConfigError(f"{name}: found shape {found}, wanted {wanted}")
        return tensors[name].to(device, dtype).contiguous()

    def linear(name: str) -> Linear:
        bias = f"{name}.bias"
        return Linear(
            get(f"{name}.weight", precision.compute),
            get(bias, precision.compute) if bias in specs else None,
        )

    def norm(name: str) -> torch.Tensor:
        return get(f"{name}.weight", precision.accumulate)

    return VisionParams(
        patch=linear("vision.patch_embed.proj"),
        blocks=tuple(
            BlockParams(
                norm1=norm(f"vision.blocks.{i}.norm1"),
                wqkv=linear(f"vision.blocks.{i}.attn.wqkv"),
                wo=linear(f"vision.blocks.{i}.attn.wo"),
                norm2=norm(f"vision.blocks.{i}.norm2"),
                w1=linear(f"vision.blocks.{i}.mlp.w1"),
                w2=linear(f"vision.blocks.{i}.mlp.w2"),
            )
            for i in range(vision_section(config).num_hidden_layers)
        ),
        norm=norm("vision.norm"),
        aligner1=linear("aligner.w1"),
        aligner2=linear("aligner.w2"),
        start=get("image_start", precision.compute),
        newline=get("image_newline", precision.compute),
        end=get("image_end", precision.compute),
    )
