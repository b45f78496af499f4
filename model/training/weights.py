"""The trainable tensors: all tensors of a kind in one stack, named as the checkpoint names them.

`layers.*.attn.wq_a.weight` is [layers, out, in] and `layers.*.ffn.experts.*.w1.weight`
[layers * experts, out, in], numbers replaced by stars and the stack in the order of the numbers.
Stacks keep the count of small operations a step low and let the optimiser work on batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from headrace.model.checkpoint import Checkpoint, Selection
from headrace.model.checkpoint.json_files import CONFIG_NAME
from headrace.model.checkpoint.names import tensor_table
from headrace.model.checkpoint.release import Quantisation
from headrace.model.checkpoint.stored import Encoding
from headrace.model.config import ModelConfig
from headrace.model.errors import ConfigError
from headrace.model.training import fake

_NUMBER = re.compile(r"\.(\d+)\.")
# Adam's: everything that is no hidden matrix, or whose rows are looked up.
_NOT_HIDDEN = (
    *("embed.weight", "head.weight", ".gate.weight", "weights_proj.weight"),
    *("_fn", "proj", "q_weight", "k_weight"),
)
_KEPT_WIDE = (
    *(".gate.weight", "q_weight", "k_weight", "hc_attn", "hc_ffn"),
    *("bias", "attn_sink", "norm"),
)


@dataclass(frozen=True)
class Stack:
    """`names` in stack order; `shape` of one tensor."""

    pattern: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether the matrix optimiser takes it."""
        return len(self.shape) == 2 and not any(word in self.pattern for word in _NOT_HIDDEN)

    @property
    def stays_wide(self) -> bool:
        """Whether it is used in float32: norms, mixes, router, sinks, biases."""
        return any(word in self.pattern for word in _KEPT_WIDE) or len(self.shape) == 1

    @property
    def is_bias_of_router(self) -> bool:
        return self.pattern.endswith(("gate.bias", "gate.bias_vl"))


def pattern_of(name: str) -> str:
    if name.endswith("engram.embed.weight"):  # tables differ in their rows
        return name
    return _NUMBER.sub(".*.", _NUMBER.sub(".*.", name))


def build_stacks(config: ModelConfig) -> dict[str, Stack]:
    """Pattern -> stack of all tensors of the release, drafter and tower included."""
    names: dict[str, list[str]] = {}
    facts = {}
    for entry in tensor_table(config, Quantisation()):
        pattern = pattern_of(entry.name)
        names.setdefault(pattern, []).append(entry.name)
        facts[pattern] = (entry.shape, entry.encoding)
    return {p: Stack(p, tuple(found), *facts[p]) for p, found in names.items()}


def _start(stack: Stack, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    """Values before training, [n, *shape]."""
    n, shape, pattern = len(stack.names), stack.shape, stack.pattern
    normal = torch.randn((n, *shape), generator=generator)
    if pattern.endswith(("hc_attn_base", "hc_ffn_base")):
        return _mix_base(n, config.hc_mult, pattern.endswith("hc_ffn_base"))
    if pattern.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return torch.full((n, *shape), 0.3)
    if pattern.endswith("_fn"):
        return 0.02 * normal
    if pattern.endswith("embed.weight"):
        return (0.1 if "engram" in pattern else 0.4) * normal
    if pattern.endswith(("q_weight", "k_weight")) or "norm" in pattern:
        return torch.ones((n, *shape))
    if pattern in ("image_start", "image_end", "image_newline"):
        return 0.4 * normal
    if len(shape) == 1:  # biases and sinks
        return torch.zeros((n, *shape))
    if (
        pattern.endswith(("wo_b.weight", "w2.weight", "attn.wo.weight"))
        and "aligner" not in pattern
    ):
        return 0.2 / math.sqrt(shape[-1]) * normal  # what is added to the streams starts small
    if pattern == "head.weight" or "markov_head.head" in pattern:
        return 0.3 / math.sqrt(shape[-1]) * normal
    return normal / math.sqrt(shape[-1])


def _mix_base(n: int, streams: int, is_ffn: bool) -> torch.Tensor:
    """Sublayer s reads mostly stream s mod hc, writes to all, and mixes streams hardly."""
    rows = []
    for index in range(n):
        chosen = (2 * index + is_ffn + 1) % streams
        pre = torch.full((streams,), -1.5)
        pre[chosen] = 1.5
        post = torch.linspace(-0.5, 0.5, streams).roll(index)
        rows.append(torch.cat((pre, post, 3.0 * torch.eye(streams).flatten())))
    return torch.stack(rows)


def start_weights(
    stacks: Mapping[str, Stack], config: ModelConfig, seed: int
) -> dict[str, torch.Tensor]:
    """Pattern -> float32 [n, *shape], decided by (config, seed)."""
    generator = torch.Generator().manual_seed(seed)
    return {p: _start(s, config, generator) for p, s in sorted(stacks.items())}


def stack_tensors(
    stacks: Mapping[str, Stack], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Checkpoint names -> stacks, of those whose every tensor is there."""
    return {
        p: torch.stack([tensors[name].float() for name in s.names])
        for p, s in stacks.items()
        if all(name in tensors for name in s.names)
    }


def unstack(
    stacks: Mapping[str, Stack], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Stacks -> checkpoint names."""
    return {
        name: part
        for p, value in values.items()
        for name, part in zip(stacks[p].names, value.unbind(0), strict=True)
    }


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Checkpoint name -> float32 values of a training run's weights files, or of a whole
    checkpoint. What a checkpoint stores in few bits rounds to the same bits again, so training and
    exporting can go on from either. Raises `ConfigError` for a folder of neither."""
    files = sorted(folder.glob("weights-*.safetensors"))
    if files:
        return {name: value.float() for file in files for name, value in load_file(file).items()}
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{folder}: found neither weights-*.safetensors nor {CONFIG_NAME}; wanted the --out of"
            " a training run or a checkpoint such as configs/models/demo"
        )
    with Checkpoint.open(folder, Selection.FULL) as checkpoint:
        return dict(checkpoint.tensors(torch.float32))


class Used:
    """One step's weights as the forward multiplies with them.

    Matrices in `compute`, the rest float32; with `rounded` as the checkpoint will store them.
    """

    def __init__(
        self,
        stacks: Mapping[str, Stack],
        values: Mapping[str, torch.Tensor],
        compute: torch.dtype,
        *,
        rounded: bool,
    ) -> None:
        self._places = {name: (p, at) for p in values for at, name in enumerate(stacks[p].names)}
        self._parts: dict[str, tuple[torch.Tensor, ...]] = {}
        self._stacks: dict[str, torch.Tensor] = {}
        for pattern, value in values.items():
            stack = stacks[pattern]
            used = fake.weight(value, stack.encoding) if rounded else value
            if not stack.stays_wide or compute == torch.float64:
                used = used.to(compute)
            self._stacks[pattern] = used
            if "experts.*" not in pattern:
                self._parts[pattern] = used.unbind(0)

    def __getitem__(self, name: str) -> torch.Tensor:
        pattern, at = self._places[name]
        return self._parts[pattern][at]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def experts(self, prefix: str, layer: int, n_layers: int, matrix: str) -> torch.Tensor:
        """[experts, out, in] of one layer; `prefix` is `layers` or `mtp`."""
        pattern = f"{prefix}.*.ffn.experts.*.{matrix}.weight"
        if pattern not in self._parts:
            stack = self._stacks[pattern]
            self._parts[pattern] = stack.unflatten(0, (n_layers, -1)).unbind(0)
        return self._parts[pattern][layer]
