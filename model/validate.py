"""Refusals of a model configuration. Every message names key, found and wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

from headrace.model.engram_hash import ascending, sum_of_primes
from headrace.model.errors import ConfigError

if TYPE_CHECKING:
    from headrace.model.config import ModelConfig

# Key -> least and most. The upper bounds are several times the published sizes: a number beyond
# is a slip or an attack, which else would be noticed when memory or patience ends.
_BOUNDS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 17),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "head_dim": (1, 1 << 14),
    "q_lora_rank": (1, 1 << 17),
    "o_groups": (1, 4096),
    "o_lora_rank": (1, 1 << 17),
    "sliding_window": (1, 1 << 20),
    "moe_intermediate_size": (1, 1 << 18),
    "n_routed_experts": (1, 1 << 14),
    "num_experts_per_tok": (1, 1 << 14),
    "index_n_heads": (1, 4096),
    "index_head_dim": (1, 1 << 14),
    "index_topk": (1, 1 << 24),
    "max_position_embeddings": (1, (1 << 31) - 1),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1000),
    "candidate_topk_blocks": (1, 1 << 24),
    "engram_compressed_vocab_size": (1, 1 << 24),
    "engram_max_ngram_size": (2, 16),
    "engram_n_heads": (1, 256),
    "engram_head_dim": (1, 1 << 14),
    "engram_vocab_size": (1, 1 << 32),
    "num_nextn_predict_layers": (0, 64),
    "dspark_block_size": (1, 256),
    "dspark_markov_rank": (1, 1 << 17),
    "dspark_n_routed_experts": (1, 1 << 14),
    "dspark_num_experts_per_tok": (1, 1 << 14),
}
_VISION_BOUNDS: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (1, 1024),
    "hidden_size": (1, 1 << 15),
    "num_attention_heads": (1, 1024),
    "intermediate_size": (1, 1 << 17),
    "patch_size": (1, 1024),
    "downsample": (1, 64),
    "max_image_tokens": (1, 1 << 20),
    "min_pixels": (0, 1 << 32),
}
_POSITIVE_NUMBERS = (
    "routed_scaling_factor",
    "swiglu_limit",
    "rms_norm_eps",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
)
_MOST_EXPERTS = 1 << 18  # of all layers: each is six tensors of a checkpoint


def _refuse(key: str, found: object, wanted: str) -> NoReturn:
    raise ConfigError(f"{key}: found {found!r}, wanted {wanted}")


def validate(c: ModelConfig) -> None:
    """Raise `ConfigError` on the first rule that `c` breaks; `c` is not changed."""
    for key, (least, most) in _BOUNDS.items():
        if not least <= getattr(c, key) <= most:
            _refuse(key, getattr(c, key), f"in {least}..{most}")
    _validate_numbers(c)
    _validate_dimensions(c)
    if c.is_v4:
        _validate_v4(c)
    else:
        _validate_drafter(c)
        _validate_layers(c)
    _validate_index(c)
    _validate_engram(c)
    _validate_ids(c)


def _validate_numbers(c: ModelConfig) -> None:
    numbers = {key: getattr(c, key) for key in _POSITIVE_NUMBERS}
    numbers |= {f"rope_scaling.{k}": v for k, v in vars(c.rope_scaling).items()}
    if (vision := c.vision) is not None:
        for key, (least, most) in _VISION_BOUNDS.items():
            if not least <= (found := getattr(vision, key)) <= most:
                _refuse(f"vision_config.{key}", found, f"in {least}..{most}")
        for key in ("rope_theta", "rms_norm_eps"):
            numbers[f"vision_config.{key}"] = getattr(vision, key)
        if vision.max_wh_ratio is not None:
            numbers["vision_config.max_wh_ratio"] = vision.max_wh_ratio
    for key, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            _refuse(key, value, "a finite number above 0")
    experts = c.num_hidden_layers * c.n_routed_experts
    experts += c.num_nextn_predict_layers * c.dspark_n_routed_experts
    if experts > _MOST_EXPERTS:
        _refuse("n_routed_experts", f"{experts} in all layers", f"at most {_MOST_EXPERTS}")


def _validate_dimensions(c: ModelConfig) -> None:
    for key in ("head_dim", "index_head_dim"):
        if getattr(c, key) % 32:
            _refuse(key, getattr(c, key), "a multiple of 32 (quantisation group)")
    smallest = min(c.head_dim, c.index_head_dim)
    if c.qk_rope_head_dim % 2 or not 0 < c.qk_rope_head_dim <= smallest:
        _refuse("qk_rope_head_dim", c.qk_rope_head_dim, f"even and in 2..{smallest}")
    if c.num_attention_heads % c.o_groups:
        _refuse("o_groups", c.o_groups, f"a divisor of num_attention_heads {c.num_attention_heads}")
    if c.num_experts_per_tok > c.n_routed_experts:
        _refuse("num_experts_per_tok", c.num_experts_per_tok, f"at most {c.n_routed_experts}")
    if c.sliding_window < 2:
        _refuse("sliding_window", c.sliding_window, "at least 2")


def _validate_v4(c: ModelConfig) -> None:
    """V4's ratios and what follows from them; the keys of V4.1's mechanisms are empty."""
    n, ratios = c.num_hidden_layers, c.compress_ratios
    if len(ratios) != n:
        _refuse("compress_ratios", len(ratios), f"{n} entries, or those of the drafter besides")
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 4, 128):
            _refuse(f"compress_ratios[{index}]", ratio, "0, 4 or 128")
    empty = ("engram_layer_ids", "engram_num_embeddings", "dspark_target_layer_ids")
    for key in (*empty, "num_nextn_predict_layers", "vision"):
        if getattr(c, key):
            _refuse(key, getattr(c, key), "nothing: it belongs to V4.1")
    if c.candidate_source_layer_id != -1:
        _refuse("candidate_source_layer_id", c.candidate_source_layer_id, "-1")
    sources = tuple(i for i, ratio in enumerate(ratios) if ratio)
    if c.kv_source_layer_ids != sources:
        _refuse("kv_source_layer_ids", c.kv_source_layer_ids, f"all layers with a ratio {sources}")
    indexed = tuple(i for i in sources if ratios[i] == 4)
    if c.index_source_layer_ids != indexed:
        _refuse("index_source_layer_ids", c.index_source_layer_ids, f"those of ratio 4 {indexed}")
    if not 0 <= c.num_hash_layers <= n:
        _refuse("num_hash_layers", c.num_hash_layers, f"in 0..{n}")
    # A group of ratio 4 reads the four tokens before it: exact replay rebuilds W-1 of them.
    if c.sliding_window < 5:
        _refuse("sliding_window", c.sliding_window, "at least 5")
    if (plain := c.head_dim - c.qk_rope_head_dim) % 64 or not plain:
        _refuse("head_dim", c.head_dim, f"qk_rope_head_dim + a multiple of 64, not + {plain}")
    if c.index_head_dim & (c.index_head_dim - 1):
        _refuse("index_head_dim", c.index_head_dim, "a power of 2 (Hadamard rotation)")


def _validate_layers(c: ModelConfig) -> None:
    n = c.num_hidden_layers
    if c.num_hash_layers:
        _refuse("num_hash_layers", c.num_hash_layers, "0: it belongs to V4")
    wanted = n + c.num_nextn_predict_layers
    if len(c.compress_ratios) != wanted:
        _refuse("compress_ratios", len(c.compress_ratios), f"{wanted} entries (layers + drafter)")
    for index, ratio in enumerate(c.compress_ratios):
        if ratio not in ((0, 1, 2) if index < n else (0,)):
            _refuse(f"compress_ratios[{index}]", ratio, "0, 1 or 2 (0 for drafter stages)")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, key)
        if not ascending(ids) or any(not 0 <= i < n for i in ids):
            _refuse(key, ids, f"ascending layer numbers below {n}")
        for i in ids:
            if c.compress_ratios[i] == 0:
                _refuse(key, i, "only layers with a compression ratio above 0")
    for i in c.kv_source_layer_ids:
        if i not in c.index_source_layer_ids:
            _refuse("index_source_layer_ids", c.index_source_layer_ids, f"kv source {i} in it too")
    for index in range(n):
        ratio = c.compress_ratios[index]
        if ratio == 0:
            continue
        sources = [s for s in c.kv_source_layer_ids if s <= index]
        if not sources:
            _refuse("kv_source_layer_ids", c.kv_source_layer_ids, f"a source at or below {index}")
        if c.compress_ratios[sources[-1]] != ratio:
            _refuse(f"compress_ratios[{index}]", ratio, f"the ratio of its source {sources[-1]}")
        if max(s for s in c.index_source_layer_ids if s <= index) < sources[-1]:
            _refuse("index_source_layer_ids", c.index_source_layer_ids, f"a source for {index}")
    _validate_decoder_half(c)


def _validate_decoder_half(c: ModelConfig) -> None:
    first = c.first_decoder_layer
    if first == c.num_hidden_layers:
        return
    if first not in c.kv_source_layer_ids:
        _refuse("kv_source_layer_ids", c.kv_source_layer_ids, f"the first decoder layer {first}")
    if first == 0:
        _refuse("compress_ratios[0]", 1, "0 or 2: the encoder half must not be empty")
    for key in ("kv_source_layer_ids", "engram_layer_ids"):
        for i in getattr(c, key):
            if i > first:
                _refuse(key, i, f"nothing inside the decoder half, which starts at {first}")


def _validate_index(c: ModelConfig) -> None:
    if c.candidate_source_layer_id != -1:
        if c.candidate_source_layer_id not in c.index_source_layer_ids:
            _refuse(
                "candidate_source_layer_id",
                c.candidate_source_layer_id,
                f"-1 or one of index_source_layer_ids {c.index_source_layer_ids}",
            )
        # Candidates are entry numbers: a later source of another KV would read them wrongly.
        later = [s for s in c.kv_source_layer_ids if s > c.candidate_source_layer_id]
        if c.candidate_source_layer_id not in c.kv_source_layer_ids or later:
            _refuse(
                "candidate_source_layer_id", c.candidate_source_layer_id, "the last kv source or -1"
            )
    if c.candidate_block_size not in (8, 16):
        _refuse("candidate_block_size", c.candidate_block_size, "8 or 16")
    if c.candidate_topk_blocks % 4:
        _refuse("candidate_topk_blocks", c.candidate_topk_blocks, "a multiple of 4")
    most = c.candidate_topk_blocks * c.candidate_block_size
    if c.index_topk > most:
        _refuse("index_topk", c.index_topk, f"at most topk blocks x block size = {most}")


def _validate_engram(c: ModelConfig) -> None:
    if not ascending(c.engram_layer_ids) or any(
        not 0 <= i < c.num_hidden_layers for i in c.engram_layer_ids
    ):
        _refuse("engram_layer_ids", c.engram_layer_ids, "ascending layer numbers")
    sums = sum_of_primes(
        len(c.engram_layer_ids), c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size
    )
    if tuple(c.engram_num_embeddings) != sums:
        _refuse("engram_num_embeddings", c.engram_num_embeddings, f"the sums of primes {sums}")
    if c.engram_compressed_vocab_size > c.vocab_size:
        _refuse(
            "engram_compressed_vocab_size",
            c.engram_compressed_vocab_size,
            f"at most vocab_size {c.vocab_size}",
        )


def _validate_ids(c: ModelConfig) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id"):
        if not 0 <= getattr(c, key) < c.vocab_size:
            _refuse(key, getattr(c, key), f"in 0..{c.vocab_size - 1}")
    for key in ("image_token_id", "dspark_noise_token_id"):
        if not -1 <= getattr(c, key) < c.vocab_size:
            _refuse(key, getattr(c, key), f"in -1..{c.vocab_size - 1}")


def _validate_drafter(c: ModelConfig) -> None:
    if not c.num_nextn_predict_layers:
        return
    taps = c.dspark_target_layer_ids
    if not taps or not ascending(taps) or any(not 0 <= i < c.num_hidden_layers for i in taps):
        _refuse("dspark_target_layer_ids", taps, "one or more ascending layer numbers")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        most = c.dspark_n_routed_experts
        _refuse("dspark_num_experts_per_tok", c.dspark_num_experts_per_tok, f"at most {most}")
    if c.dspark_noise_token_id < 0:
        _refuse("dspark_noise_token_id", c.dspark_noise_token_id, f"in 0..{c.vocab_size - 1}")
