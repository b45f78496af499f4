"""config.json of a release: its layout, the flat one of V4.1's own program, quantisation.

Key names and the pairs of the rename table are those of the two files published with
DeepSeek-V4.1-Flash (config.json and inference/config.json). Unknown keys are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.model.config import ModelConfig
from headrace.model.config_file import V41_ONLY_PREFIXES, Family, family_of, unknown_key
from headrace.model.errors import ConfigError

MODEL_TYPE = Family.V41.value
_TOP_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

# flat name -> name in text_config; the others are the same in both
_TEXT_RENAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "route_scale": "routed_scaling_factor",
    "score_func": "scoring_func",
    "norm_eps": "rms_norm_eps",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
_ROPE_RENAMES = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}
_VISION_RENAMES = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}
_FIXED_FACTS: dict[str, Any] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
# Settings of the release's own program run, not of the model; files say the scale's dtype.
_FLAT_IGNORED = frozenset(
    {"max_batch_size", "max_seq_len", "temperature", "scale_dtype", "scale_fmt", "model_type"}
)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a release's weights are stored. `weight_block` = rows, columns of a dense FP8 block."""

    weight_block: tuple[int, int] = (32, 32)
    expert_dtype: str = "fp4"

    def __post_init__(self) -> None:
        if self.weight_block not in ((32, 32), (128, 128)):
            found = list(self.weight_block)
            raise ConfigError(f"weight_block_size: found {found}, wanted [32, 32] or [128, 128]")
        if self.expert_dtype not in ("fp4", "fp8"):
            raise ConfigError(f"expert_dtype: found {self.expert_dtype!r}, wanted 'fp4' or 'fp8'")


def released_quantisation(config: ModelConfig) -> Quantisation:
    """That of the published files of a configuration's family."""
    return Quantisation((128, 128)) if config.is_v4 else Quantisation()


@dataclass(frozen=True, slots=True)
class ReleaseConfig:
    """A checkpoint's configuration; without quantisation all matrices are BF16."""

    model: ModelConfig
    quantisation: Quantisation | None


def read_config(document: Mapping[str, Any]) -> ReleaseConfig:
    """From a parsed config.json, nested or flat. Raises ConfigError with key, found and wanted."""
    if "text_config" not in document and "n_layers" in document:
        document = _nested(document)
    top = dict(document)
    family = family_of(top)
    stored = top.pop("quantization_config", None)
    if family is Family.V4 and isinstance(stored, Mapping) and "expert_dtype" in top:
        stored = {"expert_dtype": top.pop("expert_dtype"), **stored}  # where V4's file says it
    quantisation = _quantisation(stored)
    text = top.get("text_config")
    if isinstance(text, Mapping):
        text = dict(text)
        if (temperature := text.pop("gate_temp", 1.0)) != 1.0:
            raise ConfigError(f"text_config.gate_temp: found {temperature!r}, wanted 1.0")
        if not isinstance(scaling := text.get("rope_scaling", {}), Mapping):
            raise ConfigError(f"text_config.rope_scaling: found {scaling!r}, wanted an object")
        top["text_config"] = text
    vision = top.get("vision_config")
    if vision is not None and not isinstance(vision, Mapping):
        raise ConfigError(f"vision_config: found {vision!r}, wanted an object")
    return ReleaseConfig(ModelConfig.from_dict(top), quantisation)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested document of a flat one."""
    text: dict[str, Any] = {}
    scaling: dict[str, Any] = {"rope_type": "yarn"}
    vision: dict[str, Any] = {}
    top: dict[str, Any] = {"model_type": MODEL_TYPE}
    for key, value in flat.items():
        if key in _FLAT_IGNORED or key in ("dtype", "expert_dtype", "weight_block_size"):
            continue
        if key in _ROPE_RENAMES:
            scaling[_ROPE_RENAMES[key]] = value
        elif key in _VISION_RENAMES:
            vision[_VISION_RENAMES[key]] = value
        elif key in _TOP_IDS:
            top[key] = value
        else:
            text[_TEXT_RENAMES.get(key, key)] = value
    text["rope_scaling"] = scaling
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(original, int):
        # The flat file does not say it: YaRN stretches the original length by its factor.
        text.setdefault("max_position_embeddings", int(factor * original))
    if "engram_pad_token_id" in text:
        top.setdefault("pad_token_id", text["engram_pad_token_id"])
    if vision.get("num_hidden_layers"):
        top["vision_config"] = vision
    dtype = flat.get("dtype", "fp8")
    if dtype not in ("fp8", "bf16"):
        raise ConfigError(f"dtype: found {dtype!r}, wanted 'fp8' or 'bf16'")
    if dtype == "fp8":
        # The published flat file does not give the block: 32 x 32 is what its weights have. Shapes
        # are checked against it.
        experts = flat.get("expert_dtype") or "fp8"
        stored = quantisation_document(Quantisation((32, 32), experts))
        block = flat.get("weight_block_size", stored["weight_block_size"])
        top["quantization_config"] = stored | {"weight_block_size": block}
    elif (block := flat.get("weight_block_size")) is not None:
        raise ConfigError(f"weight_block_size: found {block!r:.60}, wanted none with dtype 'bf16'")
    return top | {"text_config": text}


def _quantisation(value: Any) -> Quantisation | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"quantization_config: found {value!r}, wanted an object")
    values = dict(value)
    fixed = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    for key, wanted in (fixed | {"fmt": "e4m3"}).items():
        found = values.pop(key, None if key in fixed else wanted)
        if found != wanted:
            raise ConfigError(f"quantization_config.{key}: found {found!r}, wanted {wanted!r}")
    block = values.pop("weight_block_size", None)
    if not isinstance(block, list) or [type(side) for side in block] != [int, int]:
        raise ConfigError(
            f"quantization_config.weight_block_size: found {block!r}, wanted [32, 32] or [128, 128]"
        )
    experts = values.pop("expert_dtype", "fp8")
    if values:
        known = (*fixed, "fmt", "weight_block_size", "expert_dtype")
        raise unknown_key("quantization_config", sorted(values)[0], values, known)
    return Quantisation((block[0], block[1]), experts)


def quantisation_document(quantisation: Quantisation) -> dict[str, Any]:
    """The `quantization_config` object of a config.json."""
    return {
        "quant_method": "fp8",
        "expert_dtype": quantisation.expert_dtype,
        "activation_scheme": "dynamic",
        "weight_block_size": list(quantisation.weight_block),
        "scale_fmt": "ue8m0",
    }


def config_document(release: ReleaseConfig) -> dict[str, Any]:
    """The published config.json of a release, nested for V4.1 and flat for V4; `read_config` of it
    gives `release` back."""
    if release.model.is_v4:
        return _v4_document(release)
    text = dataclasses.asdict(release.model)
    vision = text.pop("vision")
    del text["family"], text["num_hash_layers"]  # V4's
    document: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        **{key: text.pop(key) for key in _TOP_IDS},
    }
    if release.quantisation is not None:
        document["quantization_config"] = quantisation_document(release.quantisation)
    text["rope_scaling"] = {"rope_type": "yarn", **text["rope_scaling"]}
    document["text_config"] = text | _FIXED_FACTS
    if vision is not None:
        vision["downsample_ratio"] = vision.pop("downsample")
        document["vision_config"] = vision
    return document


def _v4_document(release: ReleaseConfig) -> dict[str, Any]:
    values = dataclasses.asdict(release.model)
    kept = {k: v for k, v in values.items() if not k.startswith(V41_ONLY_PREFIXES)}
    for key in ("family", "num_nextn_predict_layers", "image_token_id"):
        del kept[key]
    document = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": Family.V4.value,
        "torch_dtype": "bfloat16",
        **kept,
        "rope_scaling": {"type": "yarn", **kept["rope_scaling"]},
        **_FIXED_FACTS,
    }
    if release.quantisation is not None:
        stored = quantisation_document(release.quantisation)
        document["expert_dtype"] = stored.pop("expert_dtype")
        document["quantization_config"] = stored
    return document
