"""A layout report for people and programs: tables, JSON, a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from headrace.model.checkpoint.names import Part, Selection
from headrace.model.config import ModelConfig
from headrace.model.errors import ConfigError
from headrace.model.report import RECORD_SPACING_TOKENS, LayerRow, LayoutReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def show_bytes(n_bytes: float) -> str:
    """Bytes in decimal units, three digits: 3.13 MB."""
    value, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:  # three digits would not round to a thousand
            break
        value, unit = value / 1000, larger
    return f"{value:,.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"


def _exact(n: float) -> str:
    return f"{n:,.0f}" if n == int(n) else f"{n:,.2f}"


def _count(n: int) -> str:
    return f"{n:,}" if n else "·"


def part_name(part: Part, config: ModelConfig) -> str:
    """A model without a decoder half has layers, and no encoder."""
    if part is Part.ENCODER and config.n_decoder_layers == 0:
        return "layers"
    return part.value.replace("_", " ")


def layer_name(row: LayerRow) -> str:
    return f"draft {row.layer}" if row.is_drafter else str(row.layer)


def tables(report: LayoutReport) -> Iterator[Table]:
    """Layers, totals, weights and, if a memory size was given, what fits."""
    yield _layer_table(report)
    yield _total_table(report)
    yield _weight_table(report)
    if report.fits:
        yield _fit_table(report)


def _layer_table(report: LayoutReport) -> Table:
    table = Table(title="Layers: bytes of one block, of one slot, of the weights")
    for head in ("layer", "kind", "ratio", "KV of", "index of"):
        table.add_column(head, justify="right" if head != "kind" else "left")
    for head in ("main", "main scale", "index", "index scale", "align", "pad"):
        table.add_column(head, justify="right", style="cyan")
    for head in ("ring rows", "ring", "ring scale", "tail rows", "tail"):
        table.add_column(head, justify="right", style="green")
    table.add_column("weights", justify="right", style="yellow")
    border = report.config.first_decoder_layer
    for row in report.rows:
        starts_half = not row.is_drafter and row.layer == border
        if starts_half or (row.is_drafter and row.layer == 0):
            table.add_section()
        cells = (
            row.main_data_bytes,
            row.main_scale_bytes,
            row.index_data_bytes,
            row.index_scale_bytes,
            row.alignment_bytes,
            row.padding_bytes,
            row.ring_rows,
            row.ring_data_bytes,
            row.ring_scale_bytes,
            row.tail_rows,
            row.tail_bytes,
        )
        table.add_row(
            layer_name(row),
            row.kind.value.replace("_", "-"),
            _count(row.ratio),
            "·" if row.kv_source is None else str(row.kv_source),
            "·" if row.index_source is None else str(row.index_source),
            *(_count(cell) for cell in cells),
            show_bytes(row.weight_bytes),
        )
    return table


def _total_table(report: LayoutReport) -> Table:
    layout, config = report.layout, report.config
    table = Table(title="Totals", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")

    def add(name: str, n_bytes: float, note: str = "") -> None:
        table.add_row(name, f"{_exact(n_bytes)} B", note)

    add("a token of context", report.bytes_per_token, "global KV of all source layers")
    add("a block", report.block_bytes, f"{layout.block_tokens} tokens")
    halves = config.n_decoder_layers > 0
    layers = f"{layout.n_encoder_layers} {'encoder ' if halves else ''}layers"
    rows = f"{layout.window_record_rows} rows of {layers}"
    if carried := sum(tail.carried_bytes for tail in layout.tails):
        rows += f"; {carried:,} B that groups carry over a grain"
    add("a window record", report.window_record_bytes, rows)
    rings = f"{layout.ring_rows} rows = window {config.sliding_window} + {report.backtrack_rows}"
    add("a state slot", report.slot_bytes, f"{show_bytes(report.slot_bytes)}; rings of {rings}")
    spacing = f"with a window record every {RECORD_SPACING_TOKENS:,} tokens"
    add("persisted a token", report.persisted_bytes_per_token, spacing)
    for handoff in report.handoffs:
        note = f"+ {_exact(handoff.per_block_bytes)} B a complete block"
        add(f"handed over once, {handoff.mode}", handoff.fixed_bytes, note)
    keep = f"decoder rows of a prefill; as if untruncated from {report.exact_keep_tokens:,}"
    if halves:
        table.add_row("keep", f"{report.keep_tokens:,} tokens", keep)
    else:
        table.add_row("keep", "1 token", "no decoder half: all layers run every row")
    run = "encoder rows" if halves else "rows of all layers"
    replay = f"{run} that rebuild every window without a record"
    table.add_row("exact replay", f"{config.replay_reach_rows:,} rows", replay)
    return table


def _weight_table(report: LayoutReport) -> Table:
    table = Table(title="Weights as a checkpoint stores them")
    table.add_column("part")
    for head in ("tensors", "parameters", "bytes"):
        table.add_column(head, justify="right")
    for part, total in report.weights.items():
        table.add_row(
            part_name(part, report.config),
            f"{total.n_tensors:,}",
            f"{total.n_parameters:,}",
            f"{total.n_bytes:,}",
        )
    table.add_section()
    totals = report.weights.values()
    table.add_row(
        "all",
        f"{sum(t.n_tensors for t in totals):,}",
        f"{sum(t.n_parameters for t in totals):,}",
        f"{sum(t.n_bytes for t in totals):,}",
    )
    with_engram, without = report.encoder_share(True), report.encoder_share(False)
    if with_engram is not None and without is not None:
        shares = f"{with_engram:.0%} with Engram, {without:.0%} without"
        table.caption = f"An encoder-only build holds {shares}."
    return table


def _fit_table(report: LayoutReport) -> Table:
    assert report.memory_bytes is not None
    title = f"Fits into {show_bytes(report.memory_bytes)} a device, tp {report.tp}"
    table = Table(title=title, caption="Activations, graphs and buffers are not counted.")
    table.add_column("build")
    table.add_column("Engram")
    for head in ("weights", "left", "tokens"):
        table.add_column(head, justify="right")
    for context in report.fits[0].sequences:
        table.add_column(f"seqs of {context:,}", justify="right")
    for fit in report.fits:
        left = show_bytes(fit.free_bytes)
        table.add_row(
            fit.build,
            "device" if fit.engram_on_device else "host",
            show_bytes(fit.weight_bytes),
            left if fit.free_bytes >= 0 else f"[red]lacks {show_bytes(-fit.free_bytes)}[/red]",
            "no bound" if fit.tokens is None else f"{fit.tokens:,}",
            *(f"{count:,}" for count in fit.sequences.values()),
        )
    return table


def as_json(report: LayoutReport) -> dict[str, Any]:
    """Plain values under the names of the report's fields; bytes unless a name says otherwise."""
    return {
        "tp": report.tp,
        "memory_bytes": report.memory_bytes,
        "backtrack_rows": report.backtrack_rows,
        "keep_tokens": report.keep_tokens,
        "exact_keep_tokens": report.exact_keep_tokens,
        "replay_reach_rows": report.config.replay_reach_rows,
        "layout_id": report.layout.layout_id.hex(),
        "bytes_per_token": report.bytes_per_token,
        "block_bytes": report.block_bytes,
        "slot_bytes": report.slot_bytes,
        "window_record_bytes": report.window_record_bytes,
        "persisted_bytes_per_token": report.persisted_bytes_per_token,
        "handoffs": [
            {
                "mode": h.mode,
                "per_block_bytes": h.per_block_bytes,
                "fixed_bytes": h.fixed_bytes,
            }
            for h in report.handoffs
        ],
        "encoder_share": {
            "with_engram": report.encoder_share(True),
            "without_engram": report.encoder_share(False),
        },
        "weights": {
            part.value: {
                "tensors": total.n_tensors,
                "parameters": total.n_parameters,
                "bytes": total.n_bytes,
            }
            for part, total in report.weights.items()
        },
        "layers": [_row_json(row) for row in report.rows],
        "fits": [
            {
                "build": fit.build,
                "engram": "device" if fit.engram_on_device else "host",
                "weight_bytes": fit.weight_bytes,
                "free_bytes": fit.free_bytes,
                "tokens": fit.tokens,
                "sequences": {str(c): n for c, n in fit.sequences.items()},
            }
            for fit in report.fits
        ],
    }


def _row_json(row: LayerRow) -> dict[str, Any]:
    names = [name for name in LayerRow.__slots__ if name != "kind"]
    values = {name: getattr(row, name) for name in names}
    sums = {"block_bytes": row.block_bytes, "slot_bytes": row.slot_bytes}
    return {"kind": row.kind.value} | values | sums


def draw_png(report: LayoutReport, path: str | Path) -> None:
    """Three stacked bars: a token of context, a state slot by layer, the weights by part.

    Needs matplotlib; raises ConfigError saying how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: install headrace[plot]"
        ) from None
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    context, slot, weights = figure.subplots(3, 1, height_ratios=[3, 3, 2])
    _draw_context(context, report)
    _draw_slot(slot, report)
    _draw_weights(weights, report)
    figure.savefig(path, dpi=110)


def _draw_context(axes: Axes, report: LayoutReport) -> None:
    sources = [row for row in report.rows if row.block_bytes]
    names = [f"layer {row.layer}\nratio {row.ratio}" for row in sources]
    bottom = [0.0] * len(sources)
    for label, field in (
        ("main data", "main_data_bytes"),
        ("main scales", "main_scale_bytes"),
        ("index data", "index_data_bytes"),
        ("index scales", "index_scale_bytes"),
        ("padding", "padding_bytes"),
    ):
        heights = [getattr(row, field) / report.layout.block_tokens for row in sources]
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylabel("bytes a token")
    axes.set_title(f"Global KV: {_exact(report.bytes_per_token)} B a token of context")
    axes.legend(loc="upper left", fontsize="small")


def _draw_slot(axes: Axes, report: LayoutReport) -> None:
    names = [layer_name(row).replace("draft ", "d") for row in report.rows]
    bottom = [0] * len(report.rows)
    for label, field in (
        ("window ring, data", "ring_data_bytes"),
        ("window ring, scales", "ring_scale_bytes"),
        ("compressor tail", "tail_bytes"),
    ):
        heights = [getattr(row, field) for row in report.rows]
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylabel("bytes")
    axes.set_xlabel("layer (d = drafter stage)")
    axes.set_title(f"State slot: {show_bytes(report.slot_bytes)} a sequence")
    axes.tick_params(axis="x", labelsize="x-small")
    axes.legend(loc="lower left", fontsize="small")


def _draw_weights(axes: Axes, report: LayoutReport) -> None:
    kinds = {"whole": frozenset(report.weights)}
    if report.config.n_decoder_layers:
        kinds["encoder only"] = Selection.ENCODER.parts
    left = [0.0] * len(kinds)
    for part, total in report.weights.items():
        widths = [total.n_bytes / 1e9 * (part in held) for held in kinds.values()]
        axes.barh(list(kinds), widths, left=left, label=part_name(part, report.config))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("GB")
    with_engram, without = report.encoder_share(True), report.encoder_share(False)
    title = "Weights"
    if with_engram is not None and without is not None:
        title += f": encoder only {with_engram:.0%}, without Engram {without:.0%}"
    axes.set_title(title)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
