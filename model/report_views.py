"""A layout report for people and programs: tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich import box
from rich.table import Table

from headrace.model.checkpoint.names import Part
from headrace.model.config import ModelConfig
from headrace.model.report import RECORD_SPACING_TOKENS, Fit, LayerRow, LayoutReport


def show_bytes(n_bytes: float) -> str:
    """Bytes in decimal units, three digits: 3.13 MB."""
    value, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:  # three digits would not round to a thousand
            break
        value, unit = value / 1000, larger
    return f"{value:,.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"


def exact(n: float) -> str:
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


def tables(
    report: LayoutReport, has_room: Callable[[Table], bool] = lambda table: True
) -> Iterator[Table]:
    """Layers, totals, weights and, if a memory size was given, what fits.

    A table of layers that `has_room` says no to comes as two: blocks, then slots and weights."""
    whole = _layer_table(report, "Layers: bytes of one block, of one slot, of the weights")
    if has_room(whole):
        yield whole
    else:
        yield _layer_table(report, "Layers: bytes of one block", (_KINDS, _BLOCK))
        yield _layer_table(report, "Layers: bytes of one slot, of the weights", (_SLOT, _WEIGHTS))
    yield _total_table(report)
    yield _weight_table(report)
    if report.fits:
        yield _fit_table(report)


def _number(n: int | None) -> str:
    return "·" if n is None else str(n)


# Columns of the layers, as groups of a colour and (head, cell). Heads break where they are told to.
_Group = tuple[str, tuple[tuple[str, Callable[[LayerRow], str]], ...]]
_KINDS: _Group = (
    "",
    (
        ("kind", lambda row: row.kind.value.replace("_", "-")),
        ("ratio", lambda row: _count(row.ratio)),
        ("KV\nof", lambda row: _number(row.kv_source)),
        ("index\nof", lambda row: _number(row.index_source)),
    ),
)
_BLOCK: _Group = (
    "cyan",
    (
        ("main", lambda row: _count(row.main_data_bytes)),
        ("main\nscale", lambda row: _count(row.main_scale_bytes)),
        ("index", lambda row: _count(row.index_data_bytes)),
        ("index\nscale", lambda row: _count(row.index_scale_bytes)),
        ("align", lambda row: _count(row.alignment_bytes)),
        ("pad", lambda row: _count(row.padding_bytes)),
    ),
)
_SLOT: _Group = (
    "green",
    (
        ("ring\nrows", lambda row: _count(row.ring_rows)),
        ("ring", lambda row: _count(row.ring_data_bytes)),
        ("ring\nscale", lambda row: _count(row.ring_scale_bytes)),
        ("tail\nrows", lambda row: _count(row.tail_rows)),
        ("tail", lambda row: _count(row.tail_bytes)),
    ),
)
_WEIGHTS: _Group = ("yellow", (("weights", lambda row: show_bytes(row.weight_bytes)),))


def _layer_table(
    report: LayoutReport,
    title: str,
    groups: Iterable[_Group] = (_KINDS, _BLOCK, _SLOT, _WEIGHTS),
) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right", no_wrap=True)
    columns = [(style, *column) for style, group in groups for column in group]
    for style, head, _ in columns:
        table.add_column(
            head, justify="left" if head == "kind" else "right", style=style, no_wrap=True
        )
    border = report.config.first_decoder_layer
    for row in report.rows:
        starts_half = not row.is_drafter and row.layer == border
        if starts_half or (row.is_drafter and row.layer == 0):
            table.add_section()
        table.add_row(layer_name(row), *(cell(row) for _, _, cell in columns))
    return table


def _total_table(report: LayoutReport) -> Table:
    layout, config = report.layout, report.config
    table = Table(title="Totals", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")  # folds in a narrow window

    def add(name: str, n_bytes: float, note: str = "") -> None:
        table.add_row(name, f"{exact(n_bytes)} B", note)

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
        note = f"once, + {exact(handoff.per_block_bytes)} B a complete block"
        add(f"a hand-off, {handoff.mode}", handoff.fixed_bytes, note)
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
    """A column for each build, so that its width does not grow with the lengths asked for."""
    assert report.memory_bytes is not None
    exactly = f"{report.memory_bytes:,} bytes"
    title = f"Fits into {show_bytes(report.memory_bytes)} ({exactly}) a device, tp {report.tp}"
    table = Table(title=title, caption="Activations, graphs and buffers are not counted.")
    table.add_column("build", no_wrap=True)
    for fit in report.fits:
        table.add_column(fit.build, justify="right", no_wrap=True)

    def add(name: str, cell: Callable[[Fit], str]) -> None:
        table.add_row(name, *(cell(fit) for fit in report.fits))

    def left(fit: Fit) -> str:
        lacks = fit.free_bytes < 0
        shown = show_bytes(abs(fit.free_bytes))
        return f"[red]lacks {shown}[/red]" if lacks else shown

    add("Engram", lambda fit: "device" if fit.engram_on_device else "host")
    add("weights", lambda fit: show_bytes(fit.weight_bytes))
    add("left", left)
    add("tokens", lambda fit: "no bound" if fit.tokens is None else f"{fit.tokens:,}")
    for context in report.fits[0].sequences:
        add(f"seqs of {context:,}", lambda fit, n=context: f"{fit.sequences[n]:,}")  # type: ignore[misc]
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
