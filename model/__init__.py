"""The V4.1 family and V4 as torch modules; knows tensors, not requests.

A `ModelConfig` names the architecture, a `CacheLayout` says what its state weighs, a `KvState`
holds that state for all sequences of a replica, and a `Trunk` runs a `RowBatch` (decode, verify,
replay and prefill rows of many sequences in one call) against it and returns a `RowResult`;
`Trunk.draft` makes a `DraftBlock` of guesses at what follows from a `DraftBatch`.
In `invariant` numerics the bits of every stored byte and every logit are independent of what
else shared the call; see `Numerics`. Engram needs a token map, built once from a tokenizer.
Random weights depend on (config, seed) alone and are the same on every machine.
"""

from typing import TYPE_CHECKING

from headrace.core.doors import names_of

if TYPE_CHECKING:
    from headrace.model.card import model_card
    from headrace.model.config import LayerKind, LayerSpec, ModelConfig, RopeScaling, VisionConfig
    from headrace.model.dspark import DraftBatch, DraftBlock
    from headrace.model.engram_store import Placement
    from headrace.model.errors import BatchError, ConfigError, StateError
    from headrace.model.layout import BLOCK_TOKENS, CacheLayout, SourceLayout
    from headrace.model.named import (
        load_named,
        load_named_vision,
        package_tokenizer,
        reserved_token_ids,
    )
    from headrace.model.numerics import Numerics, one_thread_on_cpu, resolve_numerics
    from headrace.model.packed import Weights
    from headrace.model.rows import RowBatch, RowResult
    from headrace.model.served import ServedModel
    from headrace.model.slot_bytes import SequenceBytes, pack_state, restore_state, unpack_state
    from headrace.model.state import KvState, SlotState
    from headrace.model.token_map import TokenMap, build_token_map
    from headrace.model.trunk import Trunk
else:
    __getattr__ = names_of(__name__, __file__)

__all__ = [
    "BLOCK_TOKENS",
    "BatchError",
    "CacheLayout",
    "ConfigError",
    "DraftBatch",
    "DraftBlock",
    "KvState",
    "LayerKind",
    "LayerSpec",
    "ModelConfig",
    "Numerics",
    "Placement",
    "RopeScaling",
    "RowBatch",
    "RowResult",
    "SequenceBytes",
    "ServedModel",
    "SlotState",
    "SourceLayout",
    "StateError",
    "TokenMap",
    "Trunk",
    "VisionConfig",
    "Weights",
    "build_token_map",
    "load_named",
    "load_named_vision",
    "model_card",
    "pack_state",
    "package_tokenizer",
    "reserved_token_ids",
    "one_thread_on_cpu",
    "resolve_numerics",
    "restore_state",
    "unpack_state",
]
