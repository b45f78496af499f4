"""Cache-layout arithmetic: what a block, a ring row, a tail and a window record weigh and hold.

A block is 128 tokens of global KV of all source layers in one contiguous payload: per source in
layer order the main rows ([data | scales] row by row), then the index keys' data section, then
their scale section (a heavy layer of V4 has no index keys). Row formats: `row_format`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from headrace.core.windows import check_ring, default_ring_rows
from headrace.model.config import LayerKind, ModelConfig
from headrace.model.row_format import KvFormats, RowKind

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


@dataclass(frozen=True, slots=True)
class TailLayout:
    """The last inputs of one pooling compressor: gate z and value v of a token, `width` each.

    An entry reads `span_tokens` tokens: its own r, and with V4's overlap the r before them too.
    `first_value` is where the ring [rows, 2, width] begins among the values of a slot's tails.
    """

    layer: int
    is_index: bool  # V4: index keys have a compressor of their own
    ratio: int
    width: int
    span_tokens: int
    rows: int
    first_value: int

    @property
    def n_values(self) -> int:
        return self.rows * 2 * self.width

    @property
    def history_tokens(self) -> int:
        """Tokens that the next one may be pooled with."""
        return self.span_tokens - 1

    def dead_tokens(self, length_tokens: int) -> int:
        """How many of the `history_tokens` before `length_tokens` no later entry reads."""
        first_read = max(
            0, length_tokens - length_tokens % self.ratio - (self.span_tokens - self.ratio)
        )
        return max(0, min(first_read, length_tokens) - (length_tokens - self.history_tokens))

    @property
    def overlaps(self) -> bool:
        return self.span_tokens > self.ratio

    @property
    def carried_bytes(self) -> int:
        """float32 bytes in a window record: (z, v) of the group before a grain, as the next group
        reads it (its first halves)."""
        return self.ratio * 2 * self.width // 2 * 4 if self.overlaps else 0


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of one sequence's state under one configuration.

    `slot_bytes` counts tails at 4 bytes a value, as `fast` numerics store them (V4 always does);
    `ring_rows` and the rows of tails depend on the backtrack and are private to a replica: they
    never enter a stored or sent object, nor `layout_id`.
    """

    block_bytes: int
    sources: tuple[SourceLayout, ...]
    formats: KvFormats
    swa_row_bytes: int
    head_dim: int
    n_layers: int
    n_encoder_layers: int
    n_stages: int  # drafter stages: each has a ring, none a part in block or window record
    window_tokens: int
    ring_rows: int
    window_record_rows: int
    window_record_bytes: int
    tails: tuple[TailLayout, ...]
    slot_bytes: int
    layout_id: bytes
    is_v4: bool = False
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        backtrack_rows: int = 6,
        *,
        ring_rows: int | None = None,
        kv_quant: bool = True,
    ) -> CacheLayout:
        """`backtrack_rows` = rows of one verify step: at most that many rows minus one roll back.

        Rings have `ring_rows` rows, W + backtrack by default. Without `kv_quant` rows are float32:
        for comparisons in `fast` numerics only. Raises ConfigError as `core.windows` does.
        """
        formats = KvFormats.of(
            config.head_dim,
            config.index_head_dim,
            config.qk_rope_head_dim,
            is_v4=config.is_v4,
            quantised=kv_quant,
        )
        window = config.sliding_window
        if ring_rows is None:
            ring_rows = default_ring_rows(window, backtrack_rows)
        check_ring(window, ring_rows, backtrack_rows)
        sources, block_bytes = _sources(config, formats)
        swa_row_bytes = formats.window.row_bytes
        tails = _tails(config, backtrack_rows)
        tail_bytes = sum(tail.n_values for tail in tails) * 4
        swa_bytes = config.n_encoder_layers * (window - 1) * swa_row_bytes
        n_rings = config.num_hidden_layers + config.num_nextn_predict_layers
        return cls(
            block_bytes=block_bytes,
            sources=sources,
            formats=formats,
            swa_row_bytes=swa_row_bytes,
            head_dim=config.head_dim,
            n_layers=config.num_hidden_layers,
            n_encoder_layers=config.n_encoder_layers,
            n_stages=config.num_nextn_predict_layers,
            window_tokens=window,
            ring_rows=ring_rows,
            window_record_rows=window - 1,
            window_record_bytes=swa_bytes + sum(tail.carried_bytes for tail in tails),
            tails=tails,
            slot_bytes=n_rings * ring_rows * swa_row_bytes + tail_bytes,
            layout_id=_layout_id(config, sources, formats),
            is_v4=config.is_v4,
        )

    @property
    def n_rings(self) -> int:
        """Rings of one slot: layers, then drafter stages."""
        return self.n_layers + self.n_stages

    @property
    def bytes_per_token(self) -> float:
        """Global KV per token of context; a whole number for the published shapes."""
        return self.block_bytes / self.block_tokens

    def source(self, layer: int) -> SourceLayout:
        return next(s for s in self.sources if s.layer == layer)

    def layer_tails(self, layer: int) -> tuple[TailLayout, ...]:
        """The compressor tails of a layer, main before index."""
        return tuple(tail for tail in self.tails if tail.layer == layer)

    def ratio_tail(self, ratio: int) -> TailLayout | None:
        """A tail of that ratio: all of one ratio have equal rows and spans."""
        return next((tail for tail in self.tails if tail.ratio == ratio), None)

    def n_blocks(self, n_tokens: int) -> int:
        """Blocks that a sequence of `n_tokens` positions touches."""
        return -(-n_tokens // self.block_tokens)


def _sources(config: ModelConfig, f: KvFormats) -> tuple[tuple[SourceLayout, ...], int]:
    main_row = f.main.row_bytes
    sources, offset = [], 0
    for spec in config.layers:
        if not spec.owns_kv:
            continue
        rows = BLOCK_TOKENS // spec.ratio
        has_index = spec.kind is LayerKind.FULL
        index_data = f.index.data_bytes if has_index else 0
        index_scale = f.index.scale_bytes if has_index else 0
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


def _tails(config: ModelConfig, backtrack_rows: int) -> tuple[TailLayout, ...]:
    """One for every compressor that pools, in layer order, main before index."""
    tails: list[TailLayout] = []
    value = 0
    for spec in config.layers:
        if not spec.owns_kv or spec.ratio == 1:
            continue
        overlaps = config.is_v4 and spec.kind is LayerKind.FULL
        widths = [config.head_dim]
        if overlaps:
            widths = [2 * config.head_dim, 2 * config.index_head_dim]
        span = spec.ratio * (2 if overlaps else 1)
        for number, width in enumerate(widths):
            rows = span + backtrack_rows - 1
            tail = TailLayout(spec.index, number == 1, spec.ratio, width, span, rows, value)
            tails.append(tail)
            value += tail.n_values
    return tuple(tails)


def _layout_id(config: ModelConfig, sources: tuple[SourceLayout, ...], formats: KvFormats) -> bytes:
    """SHA-256 over everything that decides what the bytes of a block or window record mean."""
    main: list[str] = ["e2m1-low-nibble-even", f"e4m3-per-{MAIN_GROUP}", "row-interleaved"]
    index = ["e2m1-low-nibble-even", f"e8m0-per-{SWA_GROUP}", "data-section,scale-section"]
    window = ["e4m3", f"e8m0-per-{SWA_GROUP}", "layer-major", "position-order", "front-zero"]
    if formats.window.kind is RowKind.FP8_ROPE:
        main = ["e4m3-plain,bf16-rope", "e8m0-per-64,to-8", "row-interleaved"]
        window = [*main[:2], "layer-major", "position-order", "front-zero", "overlaps-f32"]
        index = [*index, "hadamard"]
    if formats.window.kind is RowKind.FLOAT32:
        main = index = window = ["float32"]
    description = {
        "version": _LAYOUT_VERSION,
        "block_tokens": BLOCK_TOKENS,
        "main": main,
        "index": index,
        "window": window,
        "head_dim": config.head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "index_head_dim": config.index_head_dim,
        "sources": [[s.layer, s.ratio, s.main_offset, s.index_data_offset] for s in sources],
        "window_rows": config.sliding_window - 1,
        "window_layers": config.n_encoder_layers,
        "swa_row_bytes": formats.window.row_bytes,
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()
