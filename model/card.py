"""What a replica announces of the model that it serves, whether it holds the text trunk or not."""

from __future__ import annotations

import torch

from headrace.core.card import ModelCard
from headrace.model.config import ModelConfig
from headrace.model.layout import CacheLayout
from headrace.model.numerics import Precision
from headrace.model.slot_bytes import most_bytes

_DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


def model_card(
    name: str, config: ModelConfig, layout: CacheLayout, weights_id: str, precision: Precision
) -> ModelCard:
    """The card of the text model `weights_id` under `name`. All roles of a cluster make equal ones:
    the namespace that follows from it is where their stored objects lie."""
    return ModelCard(
        name=name,
        weights=weights_id,
        layout_id=layout.layout_id,
        numerics=f"{precision.numerics.value}-{_DTYPE_NAMES[precision.compute]}",
        vocab_size=config.vocab_size,
        max_position_tokens=config.max_position_embeddings,
        window_tokens=config.sliding_window,
        n_encoder_layers=config.n_encoder_layers,
        n_decoder_layers=config.n_decoder_layers,
        block_bytes=layout.block_bytes,
        window_record_bytes=layout.window_record_bytes,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        image_token_id=config.image_token_id,
        state_bytes=most_bytes(layout),
    )
