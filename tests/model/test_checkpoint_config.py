"""config.json of a release, nested and flat, and everything that is refused in it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.model import ConfigError, ModelConfig
from headrace.model.checkpoint import (
    Quantisation,
    ReleaseConfig,
    config_document,
    read_config,
    tensor_table,
)

RATIOS = [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
# The two files published with DeepSeek-V4.1-Flash, by their keys and values.
NESTED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.18.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": RATIOS,
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}
FLAT: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 5120,
    "moe_inter_dim": 2304,
    "n_layers": 40,
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_n_activated_experts": 3,
    "n_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "gate_temp": 1.0,
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1280,
    "head_dim": 512,
    "rope_head_dim": 64,
    "norm_eps": 1e-20,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16000000,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 99092,
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "scale_fmt": "ue8m0",
    "compress_rope_theta": 160000,
    "compress_ratios": RATIOS,
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 1024,
    "vision_min_pixels": 295936,
    "vision_max_wh_ratio": None,
    "image_token_id": 129264,
}


def test_both_published_files_give_the_package_s_flash() -> None:
    wanted = ReleaseConfig(ModelConfig.load("flash"), Quantisation((32, 32), "fp4"))
    assert read_config(NESTED) == wanted
    assert read_config(FLAT) == wanted


def test_the_published_name_of_downsample_is_read_by_the_model_too() -> None:
    assert ModelConfig.from_dict(NESTED) == ModelConfig.load("flash")
    both = changed("vision_config.downsample", 3)
    with pytest.raises(ConfigError, match="vision_config.downsample: found beside downsample_rat"):
        ModelConfig.from_dict(both)


@pytest.mark.parametrize("name", ["toy", "t1", "t2", "flash"])
@pytest.mark.parametrize("quantisation", [None, Quantisation(), Quantisation((128, 128), "fp8")])
def test_what_is_written_reads_back(name: str, quantisation: Quantisation | None) -> None:
    release = ReleaseConfig(ModelConfig.load(name), quantisation)
    document = json.loads(json.dumps(config_document(release)))
    assert read_config(document) == release
    text_only = ReleaseConfig(replace(release.model, vision=None), quantisation)
    assert read_config(config_document(text_only)) == text_only


def test_written_keys_are_the_published_ones() -> None:
    """Without those that no reader needs; the vision norm's epsilon is ours to say."""
    written = config_document(read_config(NESTED))
    unneeded = {"attention_dropout", "initializer_range", "use_cache", "model_type"}
    assert written["text_config"].keys() == NESTED["text_config"].keys() - unneeded
    published_vision = NESTED["vision_config"].keys() - unneeded
    assert written["vision_config"].keys() == published_vision | {"rms_norm_eps"}
    assert written.keys() == NESTED.keys() - {"transformers_version"}
    assert written["quantization_config"] == NESTED["quantization_config"]


def changed(path: str, value: Any) -> dict[str, Any]:
    """NESTED with one key set, by dotted path."""
    document = copy.deepcopy(NESTED)
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gamma", 1, "gamma: unknown key at the top level"),
        ("text_config.gamma", 1, "text_config.gamma: unknown key"),
        ("vision_config.gamma", 1, "vision_config.gamma: unknown key"),
        ("quantization_config.gamma", 1, "quantization_config.gamma: unknown key"),
        ("model_type", "deepseek_v3", "model_type: found 'deepseek_v3', wanted 'deepseek_v41'"),
        ("text_config.gate_temp", 2.0, "text_config.gate_temp: found 2.0, wanted 1.0"),
        ("text_config.scoring_func", "softmax", "scoring_func: found 'softmax', wanted 'sqrtsoft"),
        ("text_config.hidden_size", "5120", "text_config.hidden_size: found '5120', wanted int"),
        ("text_config.rope_scaling", 16, "text_config.rope_scaling: found 16, wanted an object"),
        ("vision_config", [], r"vision_config: found \[\], wanted an object"),
        ("quantization_config", 8, "quantization_config: found 8, wanted an object"),
        (
            "quantization_config.quant_method",
            "awq",
            "quantization_config.quant_method: found 'awq', wanted 'fp8'",
        ),
        (
            "quantization_config.scale_fmt",
            None,
            "quantization_config.scale_fmt: found None, wanted 'ue8m0'",
        ),
        (
            "quantization_config.weight_block_size",
            [64, 64],
            r"weight_block_size: found \[64, 64\], wanted \[32, 32\] or \[128, 128\]",
        ),
        ("quantization_config.weight_block_size", 32, "weight_block_size: found 32, wanted"),
        ("quantization_config.weight_block_size", [32.0, 32], "found .32.0, 32., wanted .32, 32"),
        ("quantization_config.expert_dtype", "int4", "expert_dtype: found 'int4', wanted 'fp4'"),
    ],
)
def test_refused_with_key_found_and_wanted(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(changed(path, value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_hash_layers", 3, "text_config.n_hash_layers: unknown key"),
        ("dtype", "int8", "dtype: found 'int8', wanted 'fp8' or 'bf16'"),
        ("gate_temp", 0.5, "gate_temp: found 0.5, wanted 1.0"),
        ("score_func", "sigmoid", "scoring_func: found 'sigmoid'"),
        ("rope_factor", "x", "rope_scaling.factor: found 'x', wanted float"),
        ("beta_fast", "x", "rope_scaling.beta_fast: found 'x', wanted float"),
        ("weight_block_size", [64, 64], r"weight_block_size: found \[64, 64\], wanted \[32, 32\]"),
        ("weight_block_size", 128, "weight_block_size: found 128, wanted"),
        ("weight_block_size", None, "weight_block_size: found None, wanted"),
    ],
)
def test_flat_file_is_held_to_the_same_rules(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(FLAT | {key: value})


def test_flat_file_may_give_the_size_of_a_block() -> None:
    """Without it 32 x 32; the shapes of scales follow."""
    large = read_config(FLAT | {"weight_block_size": [128, 128]})
    assert large.quantisation == Quantisation((128, 128), "fp4")
    assert large.model == read_config(FLAT).model
    for block, shape in ((32, (40, 160)), (128, (10, 40))):
        release = read_config(FLAT | {"weight_block_size": [block, block]})
        table = tensor_table(release.model, release.quantisation)
        (entry,) = (e for e in table if e.name == "layers.0.attn.wq_a.weight")
        assert [spec.shape for spec in entry.stored] == [(1280, 5120), shape]
    with pytest.raises(ConfigError, match=r"found \[32, 32\], wanted none with dtype 'bf16'"):
        read_config(FLAT | {"dtype": "bf16", "weight_block_size": [32, 32]})


def test_flat_file_without_quantisation_or_tower() -> None:
    release = read_config(FLAT | {"dtype": "bf16", "vision_n_layers": 0})
    assert release.quantisation is None
    assert release.model.vision is None
    assert read_config(FLAT | {"expert_dtype": None}).quantisation == Quantisation((32, 32), "fp8")
