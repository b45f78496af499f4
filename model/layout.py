"""Cache-layout arithmetic: what a block, a ring row, a tail and a window record weigh and hold.

A block is 128 tokens of global KV of all source layers in one contiguous payload: per source in
layer order the main rows ([packed e2m1 | e4m3 scales] row by row), then the index keys' data
section, then their scale section. A ring row is [e4m3 | E8M0 scales].
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from headrace.model.config import LayerKind, ModelConfig
from headrace.model.errors import ConfigError

BLOCK_TOKENS = 128
SWA_GROUP = 32  # channels per E8M0 scale in window rows and index keys
MAIN_GROUP = 16  # channels per e4m3 scale in main entries
_LAYOUT_VERSION = 1


@dataclass(frozen=True)
class SourceLayout:
    """Where one source layer's entries lie inside a block; all offsets and sizes in bytes."""

    layer: int
    ratio: int
    rows_per_block: int
    main_offset: int
    main_row_bytes: int
    index_data_offset: int
    index_scale_offset: int
    index_data_bytes: int  # per entry
    index_scale_bytes: int  # per entry


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of one sequence's state under one configuration.

    `slot_bytes` counts tails at 4 bytes a value, as `fast` numerics store them; `ring_rows` and
    `tail_rows` depend on the backtrack and are private to a replica: they never enter a stored
    or sent object, nor `layout_id`.
    """

    block_bytes: int
    sources: tuple[SourceLayout, ...]
    swa_row_bytes: int
    n_layers: int
    n_encoder_layers: int
    window_tokens: int
    ring_rows: int
    window_record_rows: int
    window_record_bytes: int
    tail_rows: int
    tail_history_rows: int
    tail_layers: tuple[int, ...]
    slot_bytes: int
    layout_id: bytes
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def of(cls, config: ModelConfig, backtrack_rows: int = 6) -> CacheLayout:
        """`backtrack_rows` = rows of one verify step: at most that many rows minus one roll back.

        Raises ConfigError if it is below 1.
        """
        if config.is_v4:
            raise ConfigError("model_type: found 'deepseek_v4', which has no cache layout here")
        if backtrack_rows < 1:
            raise ConfigError(f"backtrack_rows: found {backtrack_rows}, wanted at least 1")
        sources, block_bytes = _sources(config)
        swa_row_bytes = config.head_dim + config.head_dim // SWA_GROUP
        window = config.sliding_window
        tail_layers = tuple(s.layer for s in sources if s.ratio > 1)
        ratio = max((s.ratio for s in sources), default=1)
        tail_rows = ratio + backtrack_rows - 1
        ring_rows = window + backtrack_rows
        tail_bytes = len(tail_layers) * tail_rows * 2 * config.head_dim * 4
        return cls(
            block_bytes=block_bytes,
            sources=sources,
            swa_row_bytes=swa_row_bytes,
            n_layers=config.num_hidden_layers,
            n_encoder_layers=config.n_encoder_layers,
            window_tokens=window,
            ring_rows=ring_rows,
            window_record_rows=window - 1,
            window_record_bytes=config.n_encoder_layers * (window - 1) * swa_row_bytes,
            tail_rows=tail_rows,
            tail_history_rows=ratio - 1,
            tail_layers=tail_layers,
            slot_bytes=config.num_hidden_layers * ring_rows * swa_row_bytes + tail_bytes,
            layout_id=_layout_id(config, sources, swa_row_bytes),
        )

    @property
    def bytes_per_token(self) -> float:
        """Global KV per token of context; a whole number for the published shapes."""
        return self.block_bytes / self.block_tokens

    def source(self, layer: int) -> SourceLayout:
        return next(s for s in self.sources if s.layer == layer)

    def n_blocks(self, n_tokens: int) -> int:
        """Blocks that a sequence of `n_tokens` positions touches."""
        return -(-n_tokens // self.block_tokens)


def _sources(config: ModelConfig) -> tuple[tuple[SourceLayout, ...], int]:
    main_row = config.head_dim // 2 + config.head_dim // MAIN_GROUP
    index_data = config.index_head_dim // 2
    index_scale = config.index_head_dim // SWA_GROUP
    sources, offset = [], 0
    for spec in config.layers:
        if spec.kind is not LayerKind.FULL:
            continue
        rows = BLOCK_TOKENS // spec.ratio
        data_offset = offset + rows * main_row
        scale_offset = data_offset + rows * index_data
        sources.append(
            SourceLayout(
                layer=spec.index,
                ratio=spec.ratio,
                rows_per_block=rows,
                main_offset=offset,
                main_row_bytes=main_row,
                index_data_offset=data_offset,
                index_scale_offset=scale_offset,
                index_data_bytes=index_data,
                index_scale_bytes=index_scale,
            )
        )
        offset = scale_offset + rows * index_scale
    return tuple(sources), offset


def _layout_id(config: ModelConfig, sources: tuple[SourceLayout, ...], swa_row_bytes: int) -> bytes:
    """SHA-256 over everything that decides what the bytes of a block or window record mean."""
    description = {
        "version": _LAYOUT_VERSION,
        "block_tokens": BLOCK_TOKENS,
        "main": ["e2m1-low-nibble-even", f"e4m3-per-{MAIN_GROUP}", "row-interleaved"],
        "index": ["e2m1-low-nibble-even", f"e8m0-per-{SWA_GROUP}", "data-section,scale-section"],
        "window": ["e4m3", f"e8m0-per-{SWA_GROUP}", "layer-major", "position-order", "front-zero"],
        "head_dim": config.head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "index_head_dim": config.index_head_dim,
        "sources": [[s.layer, s.ratio, s.main_offset, s.index_data_offset] for s in sources],
        "window_rows": config.sliding_window - 1,
        "window_layers": config.n_encoder_layers,
        "swa_row_bytes": swa_row_bytes,
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()
