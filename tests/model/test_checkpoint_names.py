"""The tensor table against the published sums and against the modules that consume it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from headrace.model import ConfigError, LayerKind, ModelConfig
from headrace.model.checkpoint import (
    Part,
    Quantisation,
    Selection,
    TensorEntry,
    tensor_table,
    totals_by_part,
)
from headrace.model.checkpoint.names import select
from headrace.model.checkpoint.synthetic import init_of
from headrace.model.vision_weights import vision_tensor_specs
from headrace.model.weights import tensor_specs

MODELS = ["toy", "t1", "t2", "flash"]


@pytest.fixture(scope="module")
def flash() -> tuple[TensorEntry, ...]:
    return tensor_table(ModelConfig.load("flash"), Quantisation())


def test_flash_has_the_published_sums(flash: tuple[TensorEntry, ...]) -> None:
    """96,085 tensors, 475.24 GiB, 552 B backbone and 196 B Engram parameters."""
    totals = totals_by_part(flash)
    assert sum(t.n_tensors for t in totals.values()) == 96_085
    assert round(sum(t.n_bytes for t in totals.values()) / 2**30, 2) == 475.24
    backbone = (Part.EMBEDDING, Part.ENCODER, Part.KV_SOURCE, Part.DECODER, Part.HEAD)
    assert round(sum(totals[p].n_parameters for p in backbone) / 1e9) == 552
    assert totals[Part.ENGRAM].n_parameters // 10**9 == 196


def test_flash_layers_have_the_published_counts(flash: tuple[TensorEntry, ...]) -> None:
    config = ModelConfig.load("flash")
    counts: Counter[int] = Counter()
    for entry in flash:
        if entry.layer is not None and entry.part not in (Part.DRAFTER, Part.ENGRAM):
            counts[entry.layer] += len(entry.stored)
    by_kind = {
        LayerKind.SWA_ONLY: 2334,
        LayerKind.REUSE: 2334,
        LayerKind.REINDEX: 2337,
        LayerKind.FULL: 2342,
    }
    wanted = {spec.index: by_kind[spec.kind] for spec in config.layers} | {20: 2341}
    assert dict(counts) == wanted


# Copied from the published table, stored name -> dtype, stored shape.
PUBLISHED = {
    "embed.weight": ("BF16", (129280, 5120)),
    "head.weight": ("BF16", (129280, 5120)),
    "norm.weight": ("BF16", (5120,)),
    "image_newline": ("BF16", (5120,)),
    "layers.0.hc_attn_fn": ("F32", (24, 20480)),
    "layers.39.hc_ffn_base": ("F32", (24,)),
    "layers.7.hc_ffn_scale": ("F32", (3,)),
    "layers.3.attn.wq_a.weight": ("F8_E4M3", (1280, 5120)),
    "layers.3.attn.wq_a.scale": ("F8_E8M0", (40, 160)),
    "layers.3.attn.wq_b.weight": ("F8_E4M3", (32768, 1280)),
    "layers.3.attn.wkv.weight": ("F8_E4M3", (512, 5120)),
    "layers.3.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
    "layers.3.attn.wo_b.weight": ("F8_E4M3", (5120, 8192)),
    "layers.3.attn.attn_sink": ("F32", (64,)),
    "layers.2.attn.compressor.wgate.weight": ("BF16", (512, 5120)),
    "layers.20.attn.compressor.wkv.weight": ("BF16", (512, 5120)),
    "layers.24.attn.indexer.wq_b.weight": ("F8_E4M3", (4096, 1280)),
    "layers.24.attn.indexer.weights_proj.weight": ("BF16", (32, 5120)),
    "layers.20.attn.indexer.wk.weight": ("BF16", (128, 512)),
    "layers.20.attn.indexer.k_norm.weight": ("BF16", (128,)),
    "layers.5.ffn.gate.weight": ("BF16", (384, 5120)),
    "layers.5.ffn.gate.bias_vl": ("F32", (384,)),
    "layers.5.ffn.experts.383.w1.weight": ("I8", (2304, 2560)),
    "layers.5.ffn.experts.383.w3.scale": ("F8_E8M0", (2304, 160)),
    "layers.5.ffn.experts.0.w2.weight": ("I8", (5120, 1152)),
    "layers.5.ffn.experts.0.w2.scale": ("F8_E8M0", (5120, 72)),
    "layers.5.ffn.shared_experts.w2.weight": ("F8_E4M3", (5120, 2304)),
    "layers.14.engram.embed.weight": ("F8_E4M3", (384016682, 256)),
    "layers.14.engram.embed.scale": ("F8_E8M0", (384016682, 8)),
    "layers.1.engram.wkv.weight": ("F8_E4M3", (25600, 6144)),
    "layers.1.engram.q_weight": ("BF16", (4, 5120)),
    "mtp.1.ffn.experts.127.w1.weight": ("I8", (2304, 2560)),
    "mtp.0.main_proj.weight": ("F8_E4M3", (5120, 15360)),
    "mtp.0.main_norm.weight": ("BF16", (5120,)),
    "mtp.2.norm.weight": ("BF16", (5120,)),
    "mtp.2.markov_head.head.weight": ("BF16", (129280, 256)),
    "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5376)),
    "vision.patch_embed.proj.weight": ("BF16", (1024, 588)),
    "vision.blocks.31.mlp.w1.weight": ("BF16", (5632, 1024)),
    "aligner.w1.weight": ("BF16", (5120, 9216)),
}
ABSENT = (
    "layers.20.attn.compressor.wgate.weight",
    "layers.24.attn.indexer.wk.weight",
    "layers.3.attn.indexer.wq_b.weight",
    "layers.0.attn.compressor.wkv.weight",
    "layers.2.engram.embed.weight",
    "mtp.1.main_proj.weight",
    "mtp.0.norm.weight",
    "mtp.0.ffn.experts.128.w1.weight",
    "layers.40.attn_norm.weight",
)


def test_flash_has_the_published_names_dtypes_and_shapes(flash: tuple[TensorEntry, ...]) -> None:
    stored = {s.name: (s.dtype, s.shape) for entry in flash for s in entry.stored}
    assert {name: stored.get(name) for name in PUBLISHED} == PUBLISHED
    assert not [name for name in ABSENT if name in stored]


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_the_modules_ask_for(name: str) -> None:
    config = ModelConfig.load(name)
    table = tensor_table(config, Quantisation())
    names = [entry.name for entry in table]
    assert len(set(names)) == len(names)
    stored = [spec.name for entry in table for spec in entry.stored]
    assert len(set(stored)) == len(stored)
    asked = [e for e in select(config, table, Selection.TEXT) if not e.optional]
    text = {e.name: e.shape for e in asked}
    assert text == {spec.name: spec.shape for spec in tensor_specs(config)}
    vision = {e.name: e.shape for e in select(config, table, Selection.VISION)}
    assert vision == {spec.name: spec.shape for spec in vision_tensor_specs(config)}
    for spec in (*tensor_specs(config), *vision_tensor_specs(config)):
        assert init_of(spec.name, spec.shape) is spec.init, spec.name


def test_encoder_needs_five_tensors_of_the_first_decoder_layer(
    flash: tuple[TensorEntry, ...],
) -> None:
    config = ModelConfig.load("flash")
    encoder = select(config, flash, Selection.ENCODER)
    assert {e.name for e in encoder if e.layer is not None and e.layer >= 20} == {
        "layers.20.attn_norm.weight",
        "layers.20.attn.compressor.wkv.weight",
        "layers.20.attn.compressor.norm.weight",
        "layers.20.attn.indexer.wk.weight",
        "layers.20.attn.indexer.k_norm.weight",
    }
    assert {e.layer for e in encoder if e.part is Part.ENGRAM} == {1, 14}
    assert {e.name for e in encoder if e.layer is None} == {"embed.weight"}


def test_unused_drafter_bias_alone_is_optional(flash: tuple[TensorEntry, ...]) -> None:
    names = [entry.name for entry in flash if entry.optional]
    assert names == [f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)]


def test_formats_follow_the_quantisation() -> None:
    config = ModelConfig.load("toy")

    def stored_bytes(quantisation: Quantisation | None) -> int:
        return sum(entry.n_bytes for entry in tensor_table(config, quantisation))

    plain = tensor_table(config, None)
    wide = sum(math.prod(e.shape) * (4 if str(e.encoding) == "F32" else 2) for e in plain)
    assert stored_bytes(None) == wide
    assert {str(e.encoding) for e in plain} == {"BF16", "F32"}
    big = {str(e.encoding) for e in tensor_table(config, Quantisation((128, 128), "fp8"))}
    assert big == {"BF16", "F32", "FP8 128x128", "FP8 1x32"}
    assert stored_bytes(Quantisation()) < stored_bytes(Quantisation((128, 128), "fp8")) < wide


def test_tied_and_missing_parts() -> None:
    config = replace(
        ModelConfig.load("toy"),
        tie_word_embeddings=True,
        vision=None,
        num_nextn_predict_layers=0,
        compress_ratios=(0, 2, 1, 1),
        dspark_target_layer_ids=(),
    )
    table = tensor_table(config, Quantisation())
    assert "head.weight" not in {entry.name for entry in table}
    assert {entry.part for entry in table} == set(Part) - {Part.DRAFTER, Part.VISION}
    with pytest.raises(ConfigError, match="vision_config: found nothing"):
        select(config, table, Selection.VISION)
