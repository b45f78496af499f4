"""A layout report as a picture of three stacked bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.model.checkpoint.names import Selection
from headrace.model.errors import ConfigError
from headrace.model.report import LayerRow, LayoutReport
from headrace.model.report_views import exact, layer_name, part_name, show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEADROOM = 0.08  # of an axis beyond its longest bar


def draw_png(report: LayoutReport, path: str | Path) -> None:
    """Write `figure` into a file. Needs matplotlib; raises ConfigError saying how to get it."""
    figure(report).savefig(path, dpi=110)


def figure(report: LayoutReport) -> Figure:
    """Three stacked bars: a token of context, a state slot by layer, the weights by part. Raises
    ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: install headrace[plot]"
        ) from None
    drawn = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(drawn)
    context, slot, weights = drawn.subplots(3, 1, height_ratios=[3, 3, 2])
    _draw_context(context, report)
    _draw_slot(slot, report)
    _draw_weights(weights, report)
    return drawn


def _stack(
    axes: Axes, names: list[str], rows: list[LayerRow], fields: dict[str, str], divisor: int = 1
) -> None:
    """A bar for each row; what weighs nothing in every row gets no entry of the legend."""
    places, bottom = list(range(len(rows))), [0.0] * len(rows)
    for label, field in fields.items():
        heights = [getattr(row, field) / divisor for row in rows]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, names, fontsize="x-small")
    axes.set_xlim(-0.6, max(len(rows), 1) - 0.4)
    axes.set_ylim(0, max(bottom, default=0) * (1 + _HEADROOM) or 1)
    if any(bottom):
        _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")  # beside the bars


def _draw_context(axes: Axes, report: LayoutReport) -> None:
    sources = [row for row in report.rows if row.block_bytes]
    fields = {
        "main data": "main_data_bytes",
        "main scales": "main_scale_bytes",
        "index data": "index_data_bytes",
        "index scales": "index_scale_bytes",
        "padding": "padding_bytes",
    }
    names = [f"{row.layer}\n{row.ratio}" for row in sources]
    _stack(axes, names, sources, fields, report.layout.block_tokens)
    axes.set_xlabel("source layer, below it its ratio")
    axes.set_ylabel("bytes a token")
    axes.set_title(f"Global KV: {exact(report.bytes_per_token)} B a token of context")


def _draw_slot(axes: Axes, report: LayoutReport) -> None:
    fields = {
        "window ring, data": "ring_data_bytes",
        "window ring, scales": "ring_scale_bytes",
        "compressor tail": "tail_bytes",
    }
    names = [layer_name(row).replace("draft ", "d") for row in report.rows]
    _stack(axes, names, list(report.rows), fields)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("bytes")
    drafts = any(row.is_drafter for row in report.rows)
    axes.set_xlabel("layer (d = drafter stage)" if drafts else "layer")
    axes.set_title(f"State slot: {show_bytes(report.slot_bytes)} a sequence")


def _draw_weights(axes: Axes, report: LayoutReport) -> None:
    kinds = {"whole": frozenset(report.weights)}
    if report.config.n_decoder_layers:
        kinds["encoder only"] = Selection.ENCODER.parts
    whole = report.weight_bytes(report.weights)
    unit, divisor = ("GB", 1e9) if whole >= 1e9 else ("MB", 1e6)
    left = [0.0] * len(kinds)
    for part, total in report.weights.items():
        widths = [total.n_bytes / divisor * (part in held) for held in kinds.values()]
        axes.barh(list(kinds), widths, left=left, label=part_name(part, report.config))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlim(0, max(left) * (1 + _HEADROOM))
    axes.set_xlabel(unit)
    with_engram, without = report.encoder_share(True), report.encoder_share(False)
    title = f"Weights: {show_bytes(whole)}"
    if with_engram is not None and without is not None:
        title += f"; encoder only {with_engram:.0%}, without Engram {without:.0%}"
    axes.set_title(title)
    _legend(axes)
