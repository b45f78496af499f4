"""Capacity as arithmetic: what a model's weights and state weigh, layer by layer, and what fits.

State sizes come from `CacheLayout`, the same that allocates; weight sizes from the table of
checkpoint tensors. Nothing here holds a figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headrace.core.rows import Geometry
from headrace.model.checkpoint.names import (
    Part,
    PartTotal,
    Selection,
    tensor_table,
    totals_by_part,
)
from headrace.model.checkpoint.release import Quantisation
from headrace.model.config import LayerKind, ModelConfig
from headrace.model.errors import ConfigError
from headrace.model.layout import BLOCK_TOKENS, CacheLayout, SourceLayout

TAIL_VALUE_BYTES = 4  # float32, as `fast` numerics hold compressor tails
RECORD_SPACING_TOKENS = 8192  # a window record is kept at least this often
MOST_DEVICES = 4096
MOST_MEMORY_BYTES = 1 << 50
MOST_ROWS = 1024  # of a verify step
_CONTEXTS = (1024, 8192, 32_768, 131_072, 1_048_576)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer, or one drafter stage (`layer` then counts stages). Sizes in bytes.

    Block sizes are of one 128-token block and zero where the layer owns no global KV; ring and tail
    sizes are of one state slot. `alignment_bytes` is the largest power of two that divides the
    start of each of its sections in every block; `padding_bytes` what a block spends on nothing.
    """

    layer: int
    is_drafter: bool
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None
    main_data_bytes: int
    main_scale_bytes: int
    index_data_bytes: int
    index_scale_bytes: int
    alignment_bytes: int
    padding_bytes: int
    ring_rows: int
    ring_data_bytes: int
    ring_scale_bytes: int
    tail_rows: int
    tail_bytes: int
    weight_bytes: int

    @property
    def block_bytes(self) -> int:
        data = self.main_data_bytes + self.index_data_bytes
        return data + self.main_scale_bytes + self.index_scale_bytes + self.padding_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / BLOCK_TOKENS

    @property
    def slot_bytes(self) -> int:
        return self.ring_data_bytes + self.ring_scale_bytes + self.tail_bytes


@dataclass(frozen=True, slots=True)
class HandoffSize:
    """What crosses from prefill to decode: so much a complete block and so much once.

    `state` also hands over the entries of the incomplete block, at most one block more.
    """

    mode: str
    per_block_bytes: int
    fixed_bytes: int

    def of(self, prompt_tokens: int) -> int:
        """Bytes for a prompt; a whole number of blocks is meant exactly."""
        return prompt_tokens // BLOCK_TOKENS * self.per_block_bytes + self.fixed_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """What is left of one device after its share of the weights, and what that holds.

    Weights split evenly over `tp` devices; global KV and slots lie on every one (there is one KV
    head). Activations, graphs and communication buffers are not counted. `free_bytes` is negative
    where the weights do not fit. `tokens` is what fits if blocks take all (None without global KV);
    `sequences[c]` how many sequences of c tokens, their slots included.
    """

    build: str
    engram_on_device: bool
    weight_bytes: int
    free_bytes: int
    tokens: int | None
    sequences: dict[int, int]


@dataclass(frozen=True)
class LayoutReport:
    """Everything `headrace layout` prints. Bytes, tokens and rows as the names say."""

    config: ModelConfig
    layout: CacheLayout
    quantisation: Quantisation | None
    backtrack_rows: int
    keep_tokens: int
    memory_bytes: int | None
    tp: int
    rows: tuple[LayerRow, ...]
    weights: dict[Part, PartTotal]
    handoffs: tuple[HandoffSize, ...]
    fits: tuple[Fit, ...] = field(default=())

    @property
    def block_bytes(self) -> int:
        return sum(row.block_bytes for row in self.rows)

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / BLOCK_TOKENS

    @property
    def slot_bytes(self) -> int:
        """One sequence's rings and tails, drafter stages included."""
        return sum(row.slot_bytes for row in self.rows)

    @property
    def window_record_bytes(self) -> int:
        return self.layout.window_record_bytes

    @property
    def persisted_bytes_per_token(self) -> float:
        """In a long text with a window record every RECORD_SPACING_TOKENS."""
        return self.bytes_per_token + self.window_record_bytes / RECORD_SPACING_TOKENS

    @property
    def exact_keep_tokens(self) -> int:
        return self.config.exact_keep_tokens

    def weight_bytes(self, parts: Iterable[Part]) -> int:
        return sum(self.weights[part].n_bytes for part in parts if part in self.weights)

    def encoder_share(self, with_engram: bool) -> float | None:
        """Bytes of an encoder-only build over those of the whole checkpoint; None without a half
        to leave out."""
        if self.config.n_decoder_layers == 0:
            return None
        left_out = frozenset() if with_engram else frozenset({Part.ENGRAM})
        whole = self.weight_bytes(frozenset(Part) - left_out)
        return self.weight_bytes(Selection.ENCODER.parts - left_out) / whole


def layout_report(
    config: ModelConfig,
    memory_bytes: int | None = None,
    tp: int = 1,
    backtrack_rows: int = 6,
    keep_tokens: int | None = None,
    *,
    quantisation: Quantisation | None = Quantisation(),  # noqa: B008 - frozen
) -> LayoutReport:
    """The arithmetic of one configuration; `memory_bytes` is that of one device. Without
    `keep_tokens` the keep is the model's default, as in a deployment.

    Raises ConfigError naming the bound and the value: keep below the window (without a decoder half
    any but 1), tp, memory or backtrack out of bounds.
    """
    geometry = Geometry(config.sliding_window, config.n_encoder_layers, config.n_decoder_layers)
    for name, value, most in (
        ("tp", tp, MOST_DEVICES),
        ("memory_bytes", memory_bytes, MOST_MEMORY_BYTES),
        ("backtrack_rows", backtrack_rows, MOST_ROWS),
        ("keep_tokens", keep_tokens, config.max_position_embeddings),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name}: found {value}, wanted in 1..{most}")
    keep = geometry.keep_for(0) if keep_tokens is None else geometry.check_keep(keep_tokens)
    layout = CacheLayout.of(config, backtrack_rows)
    table = tensor_table(config, quantisation)
    weights = totals_by_part(table)
    by_layer: dict[tuple[bool, int], int] = {}
    for entry in table:
        if entry.layer is not None:
            key = (entry.part is Part.DRAFTER, entry.layer)
            by_layer[key] = by_layer.get(key, 0) + entry.n_bytes
    rows = (*_trunk_rows(config, layout, by_layer), *_drafter_rows(config, layout, by_layer))
    report = LayoutReport(
        config=config,
        layout=layout,
        quantisation=quantisation,
        backtrack_rows=backtrack_rows,
        keep_tokens=keep,
        memory_bytes=memory_bytes,
        tp=tp,
        rows=rows,
        weights=weights,
        handoffs=_handoffs(config, layout),
    )
    if memory_bytes is None:
        return report
    return _with_fits(report, memory_bytes)


def _ring(layout: CacheLayout) -> tuple[int, int]:
    """(data, scale) bytes of one layer's ring."""
    form = layout.formats.window
    return layout.ring_rows * form.data_bytes, layout.ring_rows * form.scale_bytes


def _trunk_rows(
    config: ModelConfig, layout: CacheLayout, weights: dict[tuple[bool, int], int]
) -> Iterable[LayerRow]:
    ends = [source.main_offset for source in layout.sources[1:]] + [layout.block_bytes]
    sources = {s.layer: (s, end) for s, end in zip(layout.sources, ends, strict=True)}
    ring_data, ring_scale = _ring(layout)
    for spec in config.layers:
        source = sources.get(spec.index)
        main_data, main_scale, index_data, index_scale, padding, alignment = (
            _source_bytes(layout, *source) if source else (0, 0, 0, 0, 0, 0)
        )
        tails = layout.layer_tails(spec.index)
        yield LayerRow(
            layer=spec.index,
            is_drafter=False,
            kind=spec.kind,
            ratio=spec.ratio,
            kv_source=spec.kv_source,
            index_source=spec.index_source,
            main_data_bytes=main_data,
            main_scale_bytes=main_scale,
            index_data_bytes=index_data,
            index_scale_bytes=index_scale,
            alignment_bytes=alignment,
            padding_bytes=padding,
            ring_rows=layout.ring_rows,
            ring_data_bytes=ring_data,
            ring_scale_bytes=ring_scale,
            tail_rows=max((tail.rows for tail in tails), default=0),
            tail_bytes=sum(tail.n_values for tail in tails) * TAIL_VALUE_BYTES,
            weight_bytes=weights[False, spec.index],
        )


def _source_bytes(
    layout: CacheLayout, source: SourceLayout, end: int
) -> tuple[int, int, int, int, int, int]:
    """Main data and scale, index data and scale, padding and alignment of one source."""
    rows = source.rows_per_block
    main_data = rows * layout.formats.main.data_bytes
    main_scale = rows * source.main_row_bytes - main_data
    index_data, index_scale = rows * source.index_data_bytes, rows * source.index_scale_bytes
    used = main_data + main_scale + index_data + index_scale
    starts = (
        layout.block_bytes,  # the distance from block to block
        source.main_offset,
        source.index_data_offset,
        source.index_scale_offset,
    )
    union = 0
    for start in starts:
        union |= start
    padding = end - source.main_offset - used
    return main_data, main_scale, index_data, index_scale, padding, union & -union


def _drafter_rows(
    config: ModelConfig, layout: CacheLayout, weights: dict[tuple[bool, int], int]
) -> Iterable[LayerRow]:
    ring_data, ring_scale = _ring(layout)
    for stage in range(config.num_nextn_predict_layers):
        yield LayerRow(
            layer=stage,
            is_drafter=True,
            kind=LayerKind.SWA_ONLY,
            ratio=0,
            kv_source=None,
            index_source=None,
            main_data_bytes=0,
            main_scale_bytes=0,
            index_data_bytes=0,
            index_scale_bytes=0,
            alignment_bytes=0,
            padding_bytes=0,
            ring_rows=layout.ring_rows,
            ring_data_bytes=ring_data,
            ring_scale_bytes=ring_scale,
            tail_rows=0,
            tail_bytes=0,
            weight_bytes=weights[True, stage],
        )


def _handoffs(config: ModelConfig, layout: CacheLayout) -> tuple[HandoffSize, ...]:
    """The modes of the hand-off; what they hand over is defined in docs/architecture.md."""
    windows = config.num_hidden_layers * (config.sliding_window - 1)
    windows += config.num_nextn_predict_layers * config.sliding_window  # one row more than a layer
    tails = sum(tail.history_tokens * 2 * tail.width for tail in layout.tails)
    state = windows * layout.swa_row_bytes + tails * TAIL_VALUE_BYTES
    return (
        HandoffSize("exact", layout.block_bytes, layout.window_record_bytes),
        HandoffSize("replay", layout.block_bytes, 0),
        HandoffSize("state", layout.block_bytes, state),
    )


def _with_fits(report: LayoutReport, memory_bytes: int) -> LayoutReport:
    whole = frozenset(Part) - {Part.VISION}
    builds = [("decode", whole)]
    if report.config.n_decoder_layers:
        builds.append(("prefill", Selection.ENCODER.parts))
    fits = []
    for build, parts in builds:
        for on_device in (True, False) if Part.ENGRAM in report.weights else (True,):
            held = parts if on_device else parts - {Part.ENGRAM}
            weight_bytes = -(-report.weight_bytes(held) // report.tp)
            fits.append(_fit(report, build, on_device, weight_bytes, memory_bytes - weight_bytes))
    return replace(report, fits=tuple(fits))


def _fit(
    report: LayoutReport, build: str, engram_on_device: bool, weight_bytes: int, free_bytes: int
) -> Fit:
    block_bytes, usable = report.block_bytes, max(0, free_bytes)
    longest = report.config.max_position_embeddings
    contexts = sorted({*(c for c in _CONTEXTS if c < longest), longest})
    return Fit(
        build=build,
        engram_on_device=engram_on_device,
        weight_bytes=weight_bytes,
        free_bytes=free_bytes,
        tokens=usable // block_bytes * BLOCK_TOKENS if block_bytes else None,
        sequences={
            context: usable // (report.slot_bytes + report.layout.n_blocks(context) * block_bytes)
            for context in contexts
        },
    )
