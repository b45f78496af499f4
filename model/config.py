"""The configuration of a V4.1 or V4 model: keys, derived values, layer kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, cast

from headrace.model.config_file import Family, build, read_values
from headrace.model.errors import ConfigError

_CONFIG_NAME = "config.json"  # of a checkpoint's folder
HEAVY_RATIO = 128  # V4: groups without overlap and without an index


class LayerKind(StrEnum):
    """What a layer does besides its sliding window."""

    SWA_ONLY = "swa_only"
    FULL = "full"  # owns global KV and selects
    HEAVY = "heavy"  # owns global KV of ratio 128 and looks at every visible entry (V4)
    REINDEX = "reindex"  # reads a source's global KV, selects anew
    REUSE = "reuse"  # reads a source's global KV with the newest selection


def checkpoint_folder(name_or_path: str | Path) -> Path | None:
    """The folder of weights that a model's name means, if it means one: the package's or a path."""
    text = str(name_or_path)
    if not text or text.endswith(".json"):
        return None
    packaged = Path(str(resources.files("headrace.configs"))) / "models" / text
    folder = Path(text) if "/" in text else packaged
    return folder if (folder / _CONFIG_NAME).is_file() else None


def package_models() -> list[str]:
    """Names of the package's configurations and checkpoints."""
    folder = resources.files("headrace.configs") / "models"
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir())


@dataclass(frozen=True)
class LayerSpec:
    """`kv_source` and `index_source` are layer numbers; None for what the layer does not have."""

    index: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None

    @property
    def owns_kv(self) -> bool:
        """Whether the layer's compressor writes global KV."""
        return self.kv_source == self.index


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
    """Every key of both architectures under its published name; validated at construction.

    V4 has neither a decoder half nor Engram, candidates, drafter stages or vision: those keys are
    empty, and every layer with a ratio is its own source (`kv_source_layer_ids`).

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
    family: Family = Family.V41
    num_hash_layers: int = 0  # V4: first layers whose experts follow from the token id

    def __post_init__(self) -> None:
        from headrace.model.validate import validate  # it reads this class

        validate(self)

    # ---- reading ---------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path) -> ModelConfig:
        """Read a named configuration of the package (`t1`, `flash`, `v4-toy`, ..) or a file.

        A value that ends in `.json` or contains a path separator is a file; a checkpoint's folder,
        of the package (`demo`) or by its path, gives its config.json.
        """
        from headrace.model.checkpoint.json_files import read_json
        from headrace.model.checkpoint.release import read_config  # they read this class

        text = str(name_or_path)
        if (checkpoint := checkpoint_folder(text)) is not None:
            return read_config(read_json(checkpoint / _CONFIG_NAME)).model
        if text.endswith(".json") or "/" in text:
            path = Path(text)
            if not path.is_file():
                raise ConfigError(f"model configuration file {path.name!r} does not exist")
            return cls.from_dict(read_json(path))
        folder = resources.files("headrace.configs") / "models"
        if text not in (known := package_models()):
            raise ConfigError(f"model {text!r} is not known; known are {', '.join(known)}")
        return cls.from_dict(json.loads((folder / f"{text}.json").read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Build from a parsed `config.json` of either family. Raises `ConfigError`."""
        values = read_values(data, RopeScaling, VisionConfig)
        return cast(ModelConfig, build(cls, "text_config", values))

    # ---- derived ---------------------------------------------------------------------------

    @cached_property
    def n_encoder_layers(self) -> int:
        """The first layer of ratio 1; all layers if there is none (no decoder half)."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    @property
    def is_v4(self) -> bool:
        """V4: streams collapsed by a sublayer's own mixes, normed query heads, a pooled head."""
        return self.family is Family.V4

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
        if ratio == HEAVY_RATIO:
            return LayerSpec(index, LayerKind.HEAVY, ratio, index, None)
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
