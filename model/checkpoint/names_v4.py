"""The tensors of a V4 checkpoint: names, shapes and formats from the configuration.

Checked against the published files by a sum: V4-Flash has 69,187 tensors, 1,575 of which belong to
its multi-token-prediction layer (`mtp.`), which is not served and not named here.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.model.checkpoint.names_v41 import (
    Formats,
    attention_entries,
    expert_entries,
    formats_of,
    mix_entries,
)
from headrace.model.checkpoint.parts import Part, TensorEntry
from headrace.model.checkpoint.release import Quantisation
from headrace.model.checkpoint.stored import BF16, F32, I64
from headrace.model.config import LayerKind, LayerSpec, ModelConfig

UNREAD_PREFIXES = ("mtp.",)


def v4_entries(c: ModelConfig, quantisation: Quantisation | None) -> Iterator[TensorEntry]:
    """All weights in file order: embedding, layers, head. There is no half to leave out, so every
    layer belongs to the encoder part."""
    f, d, streams = formats_of(quantisation), c.hidden_size, c.hc_mult
    yield TensorEntry("embed.weight", (c.vocab_size, d), BF16, Part.EMBEDDING)
    for spec in c.layers:
        yield from _layer(c, f, spec, f"layers.{spec.index}.")
    yield TensorEntry("hc_head_fn", (streams, streams * d), F32, Part.HEAD)
    yield TensorEntry("hc_head_base", (streams,), F32, Part.HEAD)
    yield TensorEntry("hc_head_scale", (1,), F32, Part.HEAD)
    yield TensorEntry("norm.weight", (d,), BF16, Part.HEAD)
    if not c.tie_word_embeddings:
        yield TensorEntry("head.weight", (c.vocab_size, d), BF16, Part.HEAD)


def _layer(c: ModelConfig, f: Formats, spec: LayerSpec, p: str) -> Iterator[TensorEntry]:
    d, part, index = c.hidden_size, Part.ENCODER, spec.index
    for norm in ("attn_norm", "ffn_norm"):
        yield TensorEntry(f"{p}{norm}.weight", (d,), BF16, part, index)
    yield from mix_entries(c, index, p, part)
    yield from attention_entries(c, f, index, f"{p}attn.", part)
    if spec.owns_kv:
        yield from _compressor(c, spec, f"{p}attn.compressor.", c.head_dim)
    if spec.kind is LayerKind.FULL:
        queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield TensorEntry(f"{p}attn.indexer.wq_b.weight", queries, f.dense, part, index)
        weights = (c.index_n_heads, d)
        yield TensorEntry(f"{p}attn.indexer.weights_proj.weight", weights, BF16, part, index)
        yield from _compressor(c, spec, f"{p}attn.indexer.compressor.", c.index_head_dim)
    yield TensorEntry(f"{p}ffn.gate.weight", (c.n_routed_experts, d), BF16, part, index)
    if index < c.num_hash_layers:
        table = (c.vocab_size, c.num_experts_per_tok)
        yield TensorEntry(f"{p}ffn.gate.tid2eid", table, I64, part, index)
    else:
        yield TensorEntry(f"{p}ffn.gate.bias", (c.n_routed_experts,), F32, part, index)
    yield from expert_entries(c, f, index, f"{p}ffn.", part, c.n_routed_experts)


def _compressor(c: ModelConfig, spec: LayerSpec, p: str, channels: int) -> Iterator[TensorEntry]:
    """Ratio 4 projects twice its channels: groups overlap."""
    width = channels * (2 if spec.kind is LayerKind.FULL else 1)
    part, index = Part.ENCODER, spec.index
    yield TensorEntry(f"{p}ape", (spec.ratio, width), F32, part, index)
    for name in ("wkv", "wgate"):
        yield TensorEntry(f"{p}{name}.weight", (width, c.hidden_size), BF16, part, index)
    yield TensorEntry(f"{p}norm.weight", (channels,), BF16, part, index)
