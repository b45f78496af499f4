"""From a parsed `config.json` to the values of a `ModelConfig`: key by key, nothing unknown.

V4.1's file is nested (`text_config`, `vision_config`), V4's is flat; `model_type` tells which.
A key that we do not know may change the mathematics, so it is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from headrace.model.errors import ConfigError


class Family(StrEnum):
    """`model_type` of a configuration file: which of the two architectures it describes."""

    V41 = "deepseek_v41"
    V4 = "deepseek_v4"


# Facts of the published files that must hold but carry no choice for us: key -> wanted values.
_FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
    "attention_dropout": (0, 0.0),
}
_FIXED_BY_FAMILY: dict[Family, dict[str, tuple[Any, ...]]] = {
    Family.V41: _FIXED_KEYS | {"hc_shifted": (True,), "use_fp4_sparse_kv": (True,)},
    Family.V4: _FIXED_KEYS | {"mlp_bias": (False,)},
}
# Metadata of the published files that the mathematics does not depend on.
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
MAX_INTEGER = (1 << 63) - 1  # what a file may say anywhere; products of some still fit a float
# V4's file says the experts' format beside the model's keys; it is a matter of the checkpoint.
_IGNORED_V4 = _IGNORED_KEYS | {"expert_dtype"}
_TOP_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "tie_word_embeddings",
)
# Keys of V4.1 mechanisms; V4's values follow from its ratios.
V41_ONLY_PREFIXES = ("engram_", "dspark_", "candidate_", "kv_source_", "index_source_", "vision")


def family_of(data: Mapping[str, Any]) -> Family:
    """The family that `model_type` names; V4.1 without one. Raises `ConfigError`."""
    found = data.get("model_type", Family.V41.value)
    if found not in tuple(Family):
        wanted = " or ".join(repr(family.value) for family in Family)
        raise ConfigError(f"model_type: found {found!r}, wanted {wanted}")
    return Family(found)


def read_values(
    data: Mapping[str, Any], scaling_type: type[Any], vision_type: type[Any]
) -> dict[str, Any]:
    """Values of `ModelConfig` by field name, fixed keys checked and taken out. Raises ConfigError.

    `scaling_type` and `vision_type` are the classes of `rope_scaling` and `vision`.
    """
    family = family_of(data)
    text = data.get("text_config")
    if "family" in data or isinstance(text, Mapping) and "family" in text:
        raise ConfigError("family: unknown key, wanted model_type, which says it")
    values = _v4_values(data) if family is Family.V4 else _v41_values(data)
    for key, wanted in _FIXED_BY_FAMILY[family].items():
        found = values.pop(key, wanted[0])
        if found not in wanted:
            raise ConfigError(f"{key}: found {found!r}, wanted {wanted[0]!r}")
    scaling = dict(values.get("rope_scaling") or {})
    if (kind := scaling.pop("rope_type", scaling.pop("type", "yarn"))) != "yarn":
        raise ConfigError(f"rope_scaling.rope_type: found {kind!r}, wanted 'yarn'")
    values["rope_scaling"] = build(scaling_type, "rope_scaling", scaling)
    if (vision := values.pop("vision_config", None)) is not None:
        vision = {k: v for k, v in vision.items() if k not in _IGNORED_KEYS}
        if "downsample_ratio" in vision:  # the published name; ours is `downsample`
            if "downsample" in vision:
                raise ConfigError("vision_config.downsample: found beside downsample_ratio")
            vision["downsample"] = vision.pop("downsample_ratio")
        values["vision"] = build(vision_type, "vision_config", vision)
    return values | {"family": family}


def _v41_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """The nested layout. Special ids may stand at the top or in `text_config`."""
    top = {k: v for k, v in data.items() if k not in _IGNORED_KEYS}
    if not isinstance(top.get("text_config"), Mapping):
        found = repr(top["text_config"])[:60] if "text_config" in top else "nothing"
        raise ConfigError(f"text_config: found {found}, wanted an object with the model's keys")
    values = {k: v for k, v in top.pop("text_config").items() if k not in _IGNORED_KEYS}
    for key in (*_TOP_KEYS, "vision_config"):
        if key in top:
            values[key] = top.pop(key)
    if top:
        known = (*_TOP_KEYS, "text_config", "vision_config", *_IGNORED_KEYS)
        raise unknown_key("", sorted(top)[0], top, known)
    if "num_hash_layers" in values:
        raise unknown_key("text_config", "num_hash_layers", values, ())
    return values


def _v4_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """The flat layout. Every layer with a ratio owns its KV, every layer of ratio 4 selects.

    The file counts a multi-token-prediction layer, which is not served: its ratio is dropped.
    """
    values = {k: v for k, v in data.items() if k not in _IGNORED_V4}
    for key in values:
        if key.startswith(V41_ONLY_PREFIXES):
            found = f"found {values[key]!r:.60}, wanted no key of V4.1's mechanisms"
            raise ConfigError(f"{key}: unknown key in a {Family.V4.value} configuration, {found}")
    layers: Any = values.get("num_hidden_layers")
    ratios: Any = values.get("compress_ratios")
    extra = values.pop("num_nextn_predict_layers", 0)
    for key, value, wanted in (
        ("num_hidden_layers", layers, int),
        ("compress_ratios", ratios, list),
    ):
        if not isinstance(value, wanted):
            raise ConfigError(f"{key}: found {value!r}, wanted {wanted.__name__}")
    if isinstance(extra, int) and len(ratios) == layers + extra:
        ratios = ratios[:layers]
    values["compress_ratios"] = ratios
    values["kv_source_layer_ids"] = [i for i, r in enumerate(ratios[:layers]) if r]
    values["index_source_layer_ids"] = [i for i, r in enumerate(ratios[:layers]) if r == 4]
    return values | {
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "engram_compressed_vocab_size": values.get("vocab_size"),
    }


def unknown_key(
    where: str, key: str, values: Mapping[str, Any], known: Iterable[str]
) -> ConfigError:
    """The refusal of a key that may change the mathematics, with the known one most like it."""
    near = difflib.get_close_matches(key, list(known), 1)
    wanted = f"it removed, or {near[0]}" if near else "it removed"
    name = f"{where}.{key}" if where else f"{key}"
    level = "" if where else " at the top level"
    return ConfigError(f"{name}: unknown key{level}, found {values[key]!r:.60}, wanted {wanted}")


def build(cls: type[Any], where: str, values: Mapping[str, Any]) -> Any:
    """Construct a dataclass from JSON values; lists become tuples, names and types are checked."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields or key == "vision" and not dataclasses.is_dataclass(values[key]):
            raise unknown_key(where, key, values, fields)
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
    if is_int and not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise ConfigError(f"{key}: found {value!r:.60}, wanted at most {MAX_INTEGER}")
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
    if dataclasses.is_dataclass(value) or isinstance(value, Family):
        return value
    raise ConfigError(f"{key}: found {value!r:.100}, wanted {wanted}")
