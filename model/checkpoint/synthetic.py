"""Random checkpoints with the real names, formats and index, for tests and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from headrace.model.checkpoint.names import Selection, select, tensor_table
from headrace.model.checkpoint.reader import OnProgress
from headrace.model.checkpoint.release import ReleaseConfig
from headrace.model.checkpoint.writer import DEFAULT_SHARD_BYTES, write_values
from headrace.model.weights import Init, TensorSpec, random_experts, random_tensor

_BY_ENDING = {
    "_fn": Init.MIX_FN,
    "_base": Init.HALF,
    "hc_attn_scale": Init.MIX_SCALE,
    "hc_head_scale": Init.MIX_SCALE,
    ".ape": Init.HALF,
    "tid2eid": Init.EXPERTS,
    "hc_ffn_scale": Init.MIX_SCALE,
    "attn_sink": Init.HALF,
    "gate.bias": Init.BIAS,
    "gate.bias_vl": Init.BIAS,
    "q_weight": Init.NORM,
    "k_weight": Init.NORM,
    "engram.embed.weight": Init.HALF,
    "markov_head.embed.weight": Init.EMBEDDING,
    "image_start": Init.EMBEDDING,
    "image_end": Init.EMBEDDING,
    "image_newline": Init.EMBEDDING,
    ".bias": Init.BIAS,
}


def init_of(name: str, shape: tuple[int, ...]) -> Init:
    """How a random weight of that name is scaled; the trunk's recipe, extended to all parts."""
    if name == "embed.weight":
        return Init.EMBEDDING
    for ending, init in _BY_ENDING.items():
        if name.endswith(ending):
            return init
    return Init.NORM if len(shape) == 1 else Init.MATRIX


class RandomValues(Mapping[str, torch.Tensor]):
    """Name -> float32 values (int64 for a table of experts) of one seed, made anew at each look-up.

    The trunk's are those of `Trunk.random` with the same seed.
    """

    def __init__(self, release: ReleaseConfig, seed: int) -> None:
        table = tensor_table(release.model, release.quantisation)
        self._config = release.model
        self._shapes = {entry.name: entry.shape for entry in table}
        self.seed = seed

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        spec = TensorSpec(name, shape, init_of(name, shape))
        if spec.init is Init.EXPERTS:
            return random_experts(self._config, spec, self.seed)
        return random_tensor(spec, self.seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def write_random(
    folder: str | Path,
    release: ReleaseConfig,
    seed: int,
    *,
    selection: Selection = Selection.FULL,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    prefix: str = "",
    companions: Mapping[str, bytes] | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Write a random checkpoint; the same bytes for the same arguments on every machine."""
    return write_values(
        folder,
        release,
        RandomValues(release, seed),
        selection=selection,
        max_shard_bytes=max_shard_bytes,
        prefix=prefix,
        companions=companions,
        on_progress=on_progress,
    )


def stored_bytes(release: ReleaseConfig, selection: Selection = Selection.FULL) -> int:
    """What `write_random` would put into shards, headers not counted."""
    table = tensor_table(release.model, release.quantisation)
    return sum(entry.n_bytes for entry in select(release.model, table, selection))
