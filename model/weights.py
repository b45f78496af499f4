"""Tensors of the text trunk by checkpoint name, and seeded random values for them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.config import LayerKind, LayerSpec, ModelConfig

RECIPE_VERSION = 1
_SUMMANDS = 8


class Init(StrEnum):
    """How a random tensor is scaled; small enough that attention is not uniform by accident."""

    MATRIX = "matrix"  # N(0, 1/fan_in), fan_in = last axis
    EMBEDDING = "embedding"  # N(0, 1)
    NORM = "norm"  # 1 + 0.1 N
    MIX_FN = "mix_fn"  # 0.03 N
    HALF = "half"  # 0.5 N: mix base, sinks, Engram rows
    MIX_SCALE = "mix_scale"  # 0.5 + 0.1 N
    BIAS = "bias"  # 0.1 N
    EXPERTS = "experts"  # distinct expert numbers, a row a token


@dataclass(frozen=True)
class TensorSpec:
    """`shape` is the checkpoint's: [out, in] for matrices."""

    name: str
    shape: tuple[int, ...]
    init: Init


def tensor_specs(c: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors of the text trunk and its drafter, without vision."""
    yield TensorSpec("embed.weight", (c.vocab_size, c.hidden_size), Init.EMBEDDING)
    if not c.tie_word_embeddings:
        yield TensorSpec("head.weight", (c.vocab_size, c.hidden_size), Init.MATRIX)
    yield TensorSpec("norm.weight", (c.hidden_size,), Init.NORM)
    if c.is_v4:
        yield TensorSpec("hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), Init.MIX_FN)
        yield TensorSpec("hc_head_base", (c.hc_mult,), Init.HALF)
        yield TensorSpec("hc_head_scale", (1,), Init.MIX_SCALE)
    for spec in c.layers:
        yield from _layer_specs(c, spec, f"layers.{spec.index}.", c.n_routed_experts)
        if spec.index in c.engram_layer_ids:
            yield from _engram_specs(c, spec.index)
    if c.num_nextn_predict_layers:
        yield from _drafter_specs(c)


def _drafter_specs(c: ModelConfig) -> Iterator[TensorSpec]:
    d, rank, n_stages = c.hidden_size, c.dspark_markov_rank, c.num_nextn_predict_layers
    for stage in range(n_stages):
        spec = LayerSpec(stage, LayerKind.SWA_ONLY, 0, None, None)
        yield from _layer_specs(c, spec, f"mtp.{stage}.", c.dspark_n_routed_experts)
    taps = len(c.dspark_target_layer_ids) * d
    yield TensorSpec("mtp.0.main_proj.weight", (d, taps), Init.MATRIX)
    yield TensorSpec("mtp.0.main_norm.weight", (d,), Init.NORM)
    last = f"mtp.{n_stages - 1}."
    yield TensorSpec(f"{last}norm.weight", (d,), Init.NORM)
    yield TensorSpec(f"{last}markov_head.embed.weight", (c.vocab_size, rank), Init.EMBEDDING)
    yield TensorSpec(f"{last}markov_head.head.weight", (c.vocab_size, rank), Init.MATRIX)
    yield TensorSpec(f"{last}confidence_head.proj.weight", (1, d + rank), Init.MATRIX)


def _engram_specs(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    p, streams = f"layers.{layer}.engram.", c.hc_mult
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    per_token = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    yield TensorSpec(f"{p}embed.weight", (rows, c.engram_head_dim), Init.HALF)
    project = ((streams + 1) * c.hidden_size, per_token)
    yield TensorSpec(f"{p}wkv.weight", project, Init.MATRIX)
    yield TensorSpec(f"{p}q_weight", (streams, c.hidden_size), Init.NORM)
    yield TensorSpec(f"{p}k_weight", (streams, c.hidden_size), Init.NORM)


def _layer_specs(c: ModelConfig, spec: LayerSpec, p: str, n_experts: int) -> Iterator[TensorSpec]:
    d, streams = c.hidden_size, c.hc_mult
    for norm in ("attn_norm", "ffn_norm"):
        yield TensorSpec(f"{p}{norm}.weight", (d,), Init.NORM)
    width = streams * (2 + streams)
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{p}hc_{part}_fn", (width, streams * d), Init.MIX_FN)
        yield TensorSpec(f"{p}hc_{part}_base", (width,), Init.HALF)
        yield TensorSpec(f"{p}hc_{part}_scale", (3,), Init.MIX_SCALE)
    yield from _attention_specs(c, spec, f"{p}attn.")
    yield from _moe_specs(c, spec, f"{p}ffn.", n_experts)


def _attention_specs(c: ModelConfig, spec: LayerSpec, p: str) -> Iterator[TensorSpec]:
    d, hd, heads, groups = c.hidden_size, c.head_dim, c.num_attention_heads, c.o_groups
    yield TensorSpec(f"{p}wq_a.weight", (c.q_lora_rank, d), Init.MATRIX)
    yield TensorSpec(f"{p}q_norm.weight", (c.q_lora_rank,), Init.NORM)
    yield TensorSpec(f"{p}wq_b.weight", (heads * hd, c.q_lora_rank), Init.MATRIX)
    yield TensorSpec(f"{p}wkv.weight", (hd, d), Init.MATRIX)
    yield TensorSpec(f"{p}kv_norm.weight", (hd,), Init.NORM)
    yield TensorSpec(f"{p}wo_a.weight", (groups * c.o_lora_rank, heads // groups * hd), Init.MATRIX)
    yield TensorSpec(f"{p}wo_b.weight", (d, groups * c.o_lora_rank), Init.MATRIX)
    yield TensorSpec(f"{p}attn_sink", (heads,), Init.HALF)
    if c.is_v4:
        yield from _v4_compressor_specs(c, spec, p)
    elif spec.kind is LayerKind.FULL:
        yield TensorSpec(f"{p}compressor.wkv.weight", (hd, d), Init.MATRIX)
        if spec.ratio > 1:
            yield TensorSpec(f"{p}compressor.wgate.weight", (hd, d), Init.MATRIX)
        yield TensorSpec(f"{p}compressor.norm.weight", (hd,), Init.NORM)
        yield TensorSpec(f"{p}indexer.wk.weight", (c.index_head_dim, hd), Init.MATRIX)
        yield TensorSpec(f"{p}indexer.k_norm.weight", (c.index_head_dim,), Init.NORM)
    if spec.kind in (LayerKind.FULL, LayerKind.REINDEX):
        width = c.index_n_heads * c.index_head_dim
        yield TensorSpec(f"{p}indexer.wq_b.weight", (width, c.q_lora_rank), Init.MATRIX)
        yield TensorSpec(f"{p}indexer.weights_proj.weight", (c.index_n_heads, d), Init.MATRIX)


def _v4_compressor_specs(c: ModelConfig, spec: LayerSpec, p: str) -> Iterator[TensorSpec]:
    """One compressor a layer with a ratio, and with ratio 4 one of the index keys."""
    if not spec.owns_kv:
        return
    pools = [("compressor", c.head_dim)]
    if spec.kind is LayerKind.FULL:
        pools.append(("indexer.compressor", c.index_head_dim))
    for name, channels in pools:
        width = channels * (2 if spec.kind is LayerKind.FULL else 1)
        yield TensorSpec(f"{p}{name}.ape", (spec.ratio, width), Init.HALF)
        yield TensorSpec(f"{p}{name}.wkv.weight", (width, c.hidden_size), Init.MATRIX)
        yield TensorSpec(f"{p}{name}.wgate.weight", (width, c.hidden_size), Init.MATRIX)
        yield TensorSpec(f"{p}{name}.norm.weight", (channels,), Init.NORM)


def _moe_specs(c: ModelConfig, spec: LayerSpec, p: str, n_experts: int) -> Iterator[TensorSpec]:
    d, inner = c.hidden_size, c.moe_intermediate_size
    is_stage = p.startswith("mtp.")
    yield TensorSpec(f"{p}gate.weight", (n_experts, d), Init.MATRIX)
    if not is_stage and spec.index < c.num_hash_layers:
        table = (c.vocab_size, c.num_experts_per_tok)
        yield TensorSpec(f"{p}gate.tid2eid", table, Init.EXPERTS)
    else:
        yield TensorSpec(f"{p}gate.bias", (n_experts,), Init.BIAS)
    if not (is_stage or c.is_v4):
        yield TensorSpec(f"{p}gate.bias_vl", (n_experts,), Init.BIAS)
    experts = [f"experts.{e}" for e in range(n_experts)]
    for expert in [*experts, "shared_experts"]:
        yield TensorSpec(f"{p}{expert}.w1.weight", (inner, d), Init.MATRIX)
        yield TensorSpec(f"{p}{expert}.w3.weight", (inner, d), Init.MATRIX)
        yield TensorSpec(f"{p}{expert}.w2.weight", (d, inner), Init.MATRIX)


def _standard(seed: int, name: str, count: int) -> NDArray[np.float64]:
    """`count` values of mean 0 and variance 1, the same on every platform.

    Each is a sum of eight uniform 16-bit integers, scaled: near enough to a normal, and integer
    arithmetic plus one IEEE product, where a library's normal sampler goes through vectorised
    logarithms whose last bits depend on the processor.
    """
    digest = hashlib.sha256(f"headrace-weights-{RECIPE_VERSION}:{seed}:{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    raw = np.random.Philox(key=key).random_raw(-(-count * _SUMMANDS // 4)).astype("<u8", copy=False)
    parts = raw.view("<u2")[: count * _SUMMANDS].reshape(_SUMMANDS, count)
    total = parts.sum(axis=0, dtype=np.int64) - _SUMMANDS * 65535 // 2
    return total * (1.0 / (65536.0 * math.sqrt(_SUMMANDS / 12.0)))


def random_experts(c: ModelConfig, spec: TensorSpec, seed: int) -> torch.Tensor:
    """int64 [vocab, k]: k distinct experts for every token id."""
    vocab, k = spec.shape
    draws = _standard(seed, spec.name, vocab * c.n_routed_experts).reshape(vocab, -1)
    return torch.from_numpy(np.argsort(draws, axis=1, kind="stable")[:, :k].copy())


def random_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """float32 values of one tensor, decided by (seed, name, shape) alone."""
    normal = _standard(seed, spec.name, math.prod(spec.shape))
    if spec.init is Init.MATRIX:
        values = normal * (1.0 / math.sqrt(spec.shape[-1]))
    elif spec.init is Init.EMBEDDING:
        values = normal
    elif spec.init is Init.NORM:
        values = 1.0 + 0.1 * normal
    elif spec.init is Init.MIX_FN:
        values = 0.03 * normal
    elif spec.init is Init.HALF:
        values = 0.5 * normal
    elif spec.init is Init.MIX_SCALE:
        values = 0.5 + 0.1 * normal
    else:
        values = 0.1 * normal
    return torch.from_numpy(values.astype(np.float32).reshape(spec.shape))


class RandomTensors(Mapping[str, torch.Tensor]):
    """Checkpoint name -> float32 tensor (int64 for a table of experts), drawn anew at every look-up
    and held by nobody here.

    `drawn` lists the names looked up, in order: what a build read."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._specs = {spec.name: spec for spec in tensor_specs(config)}
        self._config = config
        self._seed = seed
        self.drawn: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        self.drawn.append(name)
        return _random(self._config, spec, self._seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Checkpoint name -> tensor for the whole text trunk and its drafter."""
    return {spec.name: _random(config, spec, seed) for spec in tensor_specs(config)}


def _random(config: ModelConfig, spec: TensorSpec, seed: int) -> torch.Tensor:
    if spec.init is Init.EXPERTS:
        return random_experts(config, spec, seed)
    return random_tensor(spec, seed)


def random_weights_id(config: ModelConfig, seed: int, token_map: NDArray[np.int64]) -> str:
    """Hex digest of all that decides the random model's state bytes."""
    facts = {
        "recipe": f"random-{RECIPE_VERSION}",
        "seed": seed,
        "config": dataclasses.asdict(config),
        "token_map": hashlib.sha256(token_map.astype("<i8").tobytes()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
