"""The configuration of a V4.1 model: keys, derived values, layer kinds.

Files have the nested layout of the published `config.json` (`text_config`, `vision_config`).
Unknown keys are refused: a key that we do not know may change the mathematics.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.model.errors import ConfigError

# Facts of the published file that must hold but carry no choice for us: (key, wanted value).
_FIXED_TEXT_KEYS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
    "hc_shifted": (True,),
    "use_fp4_sparse_kv": (True,),
    "attention_dropout": (0, 0.0),
}
# Metadata of the published file that the mathematics does not depend on.
_IGNORED_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "quantization_config",
        "initializer_range",
        "use_cache",
        "description",
    }
)
_SPECIAL_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


class LayerKind(StrEnum):
    """What a layer does besides its sliding window."""

    SWA_ONLY = "swa_only"
    FULL = "full"  # owns global KV and selects
    REINDEX = "reindex"  # reads a source's global KV, selects anew
    REUSE = "reuse"  # reads a source's global KV with the newest selection


@dataclass(frozen=True)
class LayerSpec:
    """`kv_source` and `index_source` are layer numbers; None for a window-only layer."""

    index: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None


@dataclass(frozen=True)
class RopeScaling:
    """YaRN frequencies of the compressed table; there is no attention factor."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Geometry of the image tower; read here, used by the vision role."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class ModelConfig:
    """Every key of the architecture under its published name; validated at construction.

    Sizes are counts of elements, positions count tokens. Raises `ConfigError` naming the key,
    the value found and the value wanted.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_scaling: RopeScaling
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_compressed_vocab_size: int
    max_position_embeddings: int
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16_000_000
    engram_pad_token_id: int = 2
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = -1
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    tie_word_embeddings: bool = False
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = -1
    vision: VisionConfig | None = field(default=None)

    def __post_init__(self) -> None:
        from headrace.model.validate import validate  # it reads this class

        validate(self)

    # ---- reading ---------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path) -> ModelConfig:
        """Read a named configuration of the package (`t1`, `t2`, `toy`, `flash`) or a file.

        A value that ends in `.json` or contains a path separator is a file.
        """
        text = str(name_or_path)
        if text.endswith(".json") or "/" in text:
            path = Path(text)
            if not path.is_file():
                raise ConfigError(f"model configuration file {path.name!r} does not exist")
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        folder = resources.files("headrace.configs") / "models"
        known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".json"))
        if text not in known:
            raise ConfigError(f"model {text!r} is not known; known are {', '.join(known)}")
        return cls.from_dict(json.loads((folder / f"{text}.json").read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Build from the nested layout. Special ids may stand at the top or in `text_config`."""
        top = {k: v for k, v in data.items() if k not in _IGNORED_KEYS}
        if not isinstance(top.get("text_config"), Mapping):
            raise ConfigError("text_config: found nothing, wanted an object with the model's keys")
        values = {k: v for k, v in top.pop("text_config").items() if k not in _IGNORED_KEYS}
        vision = top.pop("vision_config", None)
        for key in _SPECIAL_ID_KEYS:
            if key in top:
                values[key] = top.pop(key)
        if "tie_word_embeddings" in top:
            values["tie_word_embeddings"] = top.pop("tie_word_embeddings")
        if top:
            raise ConfigError(f"{sorted(top)[0]}: unknown key at the top level")
        for key, wanted in _FIXED_TEXT_KEYS.items():
            found = values.pop(key, wanted[0])
            if found not in wanted:
                raise ConfigError(f"{key}: found {found!r}, wanted {wanted[0]!r}")
        scaling = dict(values.get("rope_scaling") or {})
        if (kind := scaling.pop("rope_type", scaling.pop("type", "yarn"))) != "yarn":
            raise ConfigError(f"rope_scaling.rope_type: found {kind!r}, wanted 'yarn'")
        values["rope_scaling"] = _build(RopeScaling, "rope_scaling", scaling)
        if vision is not None:
            vision = {k: v for k, v in vision.items() if k not in _IGNORED_KEYS}
            values["vision"] = _build(VisionConfig, "vision_config", vision)
        return _build(cls, "text_config", values)

    # ---- derived ---------------------------------------------------------------------------

    @cached_property
    def n_encoder_layers(self) -> int:
        """The first layer of ratio 1; all layers if there is none (no decoder half)."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def first_decoder_layer(self) -> int:
        return self.n_encoder_layers

    @property
    def n_decoder_layers(self) -> int:
        return self.num_hidden_layers - self.n_encoder_layers

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(self._layer(index) for index in range(self.num_hidden_layers))

    def layer(self, index: int) -> LayerSpec:
        return self.layers[index]

    def _layer(self, index: int) -> LayerSpec:
        ratio = self.compress_ratios[index]
        if ratio == 0:
            return LayerSpec(index, LayerKind.SWA_ONLY, 0, None, None)
        kv_source = max(s for s in self.kv_source_layer_ids if s <= index)
        index_source = max(s for s in self.index_source_layer_ids if s <= index)
        if index == kv_source:
            kind = LayerKind.FULL
        elif index == index_source:
            kind = LayerKind.REINDEX
        else:
            kind = LayerKind.REUSE
        return LayerSpec(index, kind, ratio, kv_source, index_source)

    @property
    def exact_keep_tokens(self) -> int:
        """keep from which a truncated prefill equals the untruncated run: W+(n_dec-1)(W-1)."""
        window = self.sliding_window
        return window + max(0, self.n_decoder_layers - 1) * (window - 1)

    @property
    def replay_reach_rows(self) -> int:
        """Encoder rows before a start that rebuild every encoder window exactly: n_enc(W-1)."""
        return self.n_encoder_layers * (self.sliding_window - 1)


def _build(cls: type[Any], where: str, values: Mapping[str, Any]) -> Any:
    """Construct a dataclass from JSON values; lists become tuples, names and types are checked."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields or key == "vision" and not dataclasses.is_dataclass(values[key]):
            raise ConfigError(f"{where}.{key}: unknown key")
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"{where}.{name}: found nothing, wanted a value")
    cleaned = {
        key: _typed(f"{where}.{key}", str(fields[key].type), value) for key, value in values.items()
    }
    return cls(**cleaned)


def _typed(key: str, wanted: str, value: Any) -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if wanted == "int" and is_int:
        return value
    if wanted == "float" and (is_int or isinstance(value, float)):
        return float(value)
    if wanted == "bool" and isinstance(value, bool):
        return value
    if wanted == "float | None" and (value is None or is_int or isinstance(value, float)):
        return None if value is None else float(value)
    if wanted == "tuple[int, ...]" and isinstance(value, list | tuple):
        return tuple(_typed(key, "int", item) for item in value)
    if dataclasses.is_dataclass(value):
        return value
    raise ConfigError(f"{key}: found {value!r}, wanted {wanted}")
