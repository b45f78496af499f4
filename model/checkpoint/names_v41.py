"""The tensors of a V4.1 checkpoint: names, shapes and formats from the configuration.

Checked against the published files by its sums: for Flash 96,085 tensors in 475.24 GiB, and 2334,
2337, 2342 and 2341 tensors in a Reuse layer, a Reindex layer, a Full layer and layer 20.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.model.checkpoint.parts import Part, TensorEntry
from headrace.model.checkpoint.release import Quantisation
from headrace.model.checkpoint.stored import BF16, F32, FP8_ROWS, MXFP4, Encoding, Kind
from headrace.model.config import LayerKind, LayerSpec, ModelConfig


@dataclass(frozen=True, slots=True)
class Formats:
    """How the three kinds of large weights are stored."""

    dense: Encoding
    experts: Encoding
    engram: Encoding


def formats_of(quantisation: Quantisation | None) -> Formats:
    """Those of a release with this quantisation; all BF16 without."""
    if quantisation is None:
        return Formats(BF16, BF16, BF16)
    dense = Encoding(Kind.FP8, quantisation.weight_block)
    return Formats(dense, MXFP4 if quantisation.expert_dtype == "fp4" else dense, FP8_ROWS)


def v41_entries(c: ModelConfig, quantisation: Quantisation | None) -> Iterator[TensorEntry]:
    """All weights in file order: embedding, layers, head, drafter, vision."""
    f = formats_of(quantisation)
    d, vocab = c.hidden_size, c.vocab_size
    yield TensorEntry("embed.weight", (vocab, d), BF16, Part.EMBEDDING)
    for spec in c.layers:
        part = Part.ENCODER if spec.index < c.n_encoder_layers else Part.DECODER
        yield from _layer(c, f, spec, f"layers.{spec.index}.", part, c.n_routed_experts)
        if spec.index in c.engram_layer_ids:
            yield from _engram(c, f, spec.index)
    yield TensorEntry("norm.weight", (d,), BF16, Part.HEAD)
    if not c.tie_word_embeddings:
        yield TensorEntry("head.weight", (vocab, d), BF16, Part.HEAD)
    yield from _drafter(c, f)
    yield from _vision(c)


def _layer(
    c: ModelConfig, f: Formats, spec: LayerSpec, p: str, part: Part, n_experts: int
) -> Iterator[TensorEntry]:
    """`part` is where the layer belongs; the first decoder layer's KV source is told apart."""
    d, index = c.hidden_size, spec.index
    is_source = part is Part.DECODER and index == c.first_decoder_layer
    norm_part = Part.KV_SOURCE if is_source else part
    yield TensorEntry(f"{p}attn_norm.weight", (d,), BF16, norm_part, index)
    yield TensorEntry(f"{p}ffn_norm.weight", (d,), BF16, part, index)
    yield from mix_entries(c, index, p, part)
    yield from attention_entries(c, f, index, f"{p}attn.", part)
    if spec.kind is LayerKind.FULL:
        yield from _kv_source(c, spec, f"{p}attn.", norm_part)
    if spec.kind in (LayerKind.FULL, LayerKind.REINDEX):
        queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield TensorEntry(f"{p}attn.indexer.wq_b.weight", queries, f.dense, part, index)
        weights = (c.index_n_heads, d)
        yield TensorEntry(f"{p}attn.indexer.weights_proj.weight", weights, BF16, part, index)
    yield from _experts(c, f, index, f"{p}ffn.", part, n_experts)


def mix_entries(c: ModelConfig, index: int, p: str, part: Part) -> Iterator[TensorEntry]:
    """Stream mixes of both sublayers."""
    streams = c.hc_mult
    width = streams * (2 + streams)
    for half in ("attn", "ffn"):
        yield TensorEntry(f"{p}hc_{half}_fn", (width, streams * c.hidden_size), F32, part, index)
        yield TensorEntry(f"{p}hc_{half}_base", (width,), F32, part, index)
        yield TensorEntry(f"{p}hc_{half}_scale", (3,), F32, part, index)


def attention_entries(
    c: ModelConfig, f: Formats, index: int, p: str, part: Part
) -> Iterator[TensorEntry]:
    """Projections, norms and sinks that every layer has."""
    d, hd, heads, groups = c.hidden_size, c.head_dim, c.num_attention_heads, c.o_groups
    dense: dict[str, tuple[int, int]] = {
        "wq_a": (c.q_lora_rank, d),
        "wq_b": (heads * hd, c.q_lora_rank),
        "wkv": (hd, d),
        "wo_a": (groups * c.o_lora_rank, heads // groups * hd),
        "wo_b": (d, groups * c.o_lora_rank),
    }
    for name, shape in dense.items():
        yield TensorEntry(f"{p}{name}.weight", shape, f.dense, part, index)
    yield TensorEntry(f"{p}q_norm.weight", (c.q_lora_rank,), BF16, part, index)
    yield TensorEntry(f"{p}kv_norm.weight", (hd,), BF16, part, index)
    yield TensorEntry(f"{p}attn_sink", (heads,), F32, part, index)


def _kv_source(c: ModelConfig, spec: LayerSpec, p: str, part: Part) -> Iterator[TensorEntry]:
    """Compressor and index keys; the gate pools groups, so a ratio of 1 has none."""
    projection = (c.head_dim, c.hidden_size)
    yield TensorEntry(f"{p}compressor.wkv.weight", projection, BF16, part, spec.index)
    if spec.ratio > 1:
        yield TensorEntry(f"{p}compressor.wgate.weight", projection, BF16, part, spec.index)
    yield TensorEntry(f"{p}compressor.norm.weight", (c.head_dim,), BF16, part, spec.index)
    keys = (c.index_head_dim, c.head_dim)
    yield TensorEntry(f"{p}indexer.wk.weight", keys, BF16, part, spec.index)
    yield TensorEntry(f"{p}indexer.k_norm.weight", (c.index_head_dim,), BF16, part, spec.index)


def _experts(
    c: ModelConfig, f: Formats, index: int, p: str, part: Part, n_experts: int
) -> Iterator[TensorEntry]:
    d = c.hidden_size
    yield TensorEntry(f"{p}gate.weight", (n_experts, d), BF16, part, index)
    yield TensorEntry(f"{p}gate.bias", (n_experts,), F32, part, index)
    # The drafter never runs on image rows: its bias_vl is published and not used.
    unused = part is Part.DRAFTER
    yield TensorEntry(f"{p}gate.bias_vl", (n_experts,), F32, part, index, optional=unused)
    yield from expert_entries(c, f, index, p, part, n_experts)


def expert_entries(
    c: ModelConfig, f: Formats, index: int, p: str, part: Part, n_experts: int
) -> Iterator[TensorEntry]:
    """Routed experts and the shared one."""
    d, inner = c.hidden_size, c.moe_intermediate_size
    for expert in [*(f"experts.{e}" for e in range(n_experts)), "shared_experts"]:
        encoding = f.dense if expert == "shared_experts" else f.experts
        for name, shape in (("w1", (inner, d)), ("w2", (d, inner)), ("w3", (inner, d))):
            yield TensorEntry(f"{p}{expert}.{name}.weight", shape, encoding, part, index)


def _engram(c: ModelConfig, f: Formats, index: int) -> Iterator[TensorEntry]:
    p, streams = f"layers.{index}.engram.", c.hc_mult
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(index)]
    per_token = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    table, project = (rows, c.engram_head_dim), ((streams + 1) * c.hidden_size, per_token)
    yield TensorEntry(f"{p}embed.weight", table, f.engram, Part.ENGRAM, index)
    yield TensorEntry(f"{p}wkv.weight", project, f.dense, Part.ENGRAM, index)
    for name in ("q_weight", "k_weight"):
        yield TensorEntry(f"{p}{name}", (streams, c.hidden_size), BF16, Part.ENGRAM, index)


def _drafter(c: ModelConfig, f: Formats) -> Iterator[TensorEntry]:
    """Stages are window-only layers; the first also joins the taps, the last refines drafts."""
    d, rank, last = c.hidden_size, c.dspark_markov_rank, c.num_nextn_predict_layers - 1
    for stage in range(last + 1):
        p = f"mtp.{stage}."
        spec = LayerSpec(stage, LayerKind.SWA_ONLY, 0, None, None)
        yield from _layer(c, f, spec, p, Part.DRAFTER, c.dspark_n_routed_experts)
        if stage == 0:
            taps = (d, len(c.dspark_target_layer_ids) * d)
            yield TensorEntry(f"{p}main_proj.weight", taps, f.dense, Part.DRAFTER, stage)
            yield TensorEntry(f"{p}main_norm.weight", (d,), BF16, Part.DRAFTER, stage)
        if stage == last:
            yield TensorEntry(f"{p}norm.weight", (d,), BF16, Part.DRAFTER, stage)
            for name in ("embed", "head"):
                markov = (c.vocab_size, rank)
                yield TensorEntry(
                    f"{p}markov_head.{name}.weight", markov, BF16, Part.DRAFTER, stage
                )
            confidence = f"{p}confidence_head.proj.weight"
            yield TensorEntry(confidence, (1, d + rank), BF16, Part.DRAFTER, stage)


def _vision(c: ModelConfig) -> Iterator[TensorEntry]:
    v = c.vision
    if v is None:
        return
    d, dim, inner = c.hidden_size, v.hidden_size, v.intermediate_size

    def entry(name: str, *shape: int) -> TensorEntry:
        return TensorEntry(name, shape, BF16, Part.VISION)

    for name in ("image_start", "image_end", "image_newline"):
        yield entry(name, d)
    yield entry("vision.patch_embed.proj.weight", dim, 3 * v.patch_size**2)
    yield entry("vision.patch_embed.proj.bias", dim)
    for i in range(v.num_hidden_layers):
        p = f"vision.blocks.{i}."
        yield entry(f"{p}norm1.weight", dim)
        yield entry(f"{p}attn.wqkv.weight", 3 * dim, dim)
        yield entry(f"{p}attn.wqkv.bias", 3 * dim)
        yield entry(f"{p}attn.wo.weight", dim, dim)
        yield entry(f"{p}attn.wo.bias", dim)
        yield entry(f"{p}norm2.weight", dim)
        yield entry(f"{p}mlp.w1.weight", 2 * inner, dim)
        yield entry(f"{p}mlp.w2.weight", dim, inner)
    yield entry("vision.norm.weight", dim)
    yield entry("aligner.w1.weight", d, v.downsample**2 * dim)
    yield entry("aligner.w1.bias", d)
    yield entry("aligner.w2.weight", d, d)
    yield entry("aligner.w2.bias", d)
