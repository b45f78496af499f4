"""Capacity arithmetic against the published figures and against what is allocated."""

from __future__ import annotations

import io
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from headrace.model import CacheLayout, ConfigError, KvState, LayerKind, ModelConfig, Numerics
from headrace.model.checkpoint import Part, Quantisation, tensor_table
from headrace.model.report import LayerRow, LayoutReport, layout_report
from headrace.model.report_picture import draw_png, figure
from headrace.model.report_views import as_json, show_bytes, tables

MODELS = ["toy", "t1", "t2", "flash", "v4-toy", "v4-flash"]


@pytest.fixture(scope="module")
def flash() -> LayoutReport:
    return layout_report(ModelConfig.load("flash"), memory_bytes=141 * 10**9, tp=4)


def test_flash_has_the_published_figures(flash: LayoutReport) -> None:
    assert flash.bytes_per_token == 890
    assert flash.block_bytes == 113_920
    assert flash.window_record_bytes == 1_341_120
    assert flash.slot_bytes == 43 * 70_752 + 86_016
    assert show_bytes(flash.slot_bytes) == "3.13 MB"
    shares = [flash.encoder_share(with_engram) for with_engram in (True, False)]
    assert [f"{share:.0%}" for share in shares if share is not None] == ["69%", "49%"]
    assert flash.exact_keep_tokens == 2541
    # A record every 8,192 tokens adds 18 %.
    assert round(flash.persisted_bytes_per_token / 890, 2) == 1.18
    assert {h.mode: h.fixed_bytes for h in flash.handoffs} == {
        "exact": 1_341_120,
        "replay": 0,
        "state": 40 * 127 * 528 + 3 * 128 * 528 + 3 * 1 * 2 * 512 * 4,
    }
    assert flash.handoffs[0].of(131_072) == 1024 * 113_920 + 1_341_120


def test_flash_layer_by_layer(flash: LayoutReport) -> None:
    rows = flash.rows
    assert [row.layer for row in rows] == [*range(40), 0, 1, 2]
    assert [row.is_drafter for row in rows] == [False] * 40 + [True] * 3
    by_kind = {kind: [r.layer for r in rows if r.kind is kind] for kind in LayerKind}
    assert by_kind[LayerKind.FULL] == [2, 8, 14, 20]
    assert by_kind[LayerKind.REINDEX] == [24, 28, 32, 36]
    assert by_kind[LayerKind.SWA_ONLY] == [0, 1, 0, 1, 2]
    assert (rows[19].kv_source, rows[19].index_source) == (14, 14)
    assert (rows[31].kv_source, rows[31].index_source) == (20, 28)
    half, whole = rows[8], rows[20]
    assert (half.main_data_bytes, half.main_scale_bytes) == (64 * 256, 64 * 32)
    assert (half.index_data_bytes, half.index_scale_bytes) == (64 * 64, 64 * 4)
    assert (whole.block_bytes, half.block_bytes) == (128 * 356, 64 * 356)
    assert {row.padding_bytes for row in rows} == {0}
    assert {row.alignment_bytes for row in rows if row.block_bytes} == {256}
    assert {(row.ring_rows, row.ring_data_bytes, row.ring_scale_bytes) for row in rows} == {
        (134, 134 * 512, 134 * 16)
    }
    assert [row.layer for row in rows if row.tail_rows] == [2, 8, 14]
    assert half.tail_bytes == 7 * 2 * 512 * 4


def allocated(config: ModelConfig, layout: CacheLayout) -> tuple[KvState, list[int], list[int]]:
    """A state of two slots and two blocks, and one slot's bytes by ring: rings, tails."""
    state = KvState(config, layout, 2, 2, Numerics.FAST)
    rings = [ring.numel() for ring in state.rings[0]]
    tails = [0] * (config.num_hidden_layers + config.num_nextn_predict_layers)
    for t in layout.tails:
        tail = state.tail(t)[0]
        tails[t.layer] += tail.numel() * tail.element_size()
    return state, rings, tails


def check_against_allocation(config: ModelConfig, backtrack_rows: int) -> None:
    report = layout_report(config, backtrack_rows=backtrack_rows)
    state, rings, tails = allocated(config, report.layout)
    assert [row.ring_data_bytes + row.ring_scale_bytes for row in report.rows] == rings
    assert [row.tail_bytes for row in report.rows] == tails
    assert report.slot_bytes == report.layout.slot_bytes == state.slot_bytes
    total = state.rings.numel() + state.tails.numel() * state.tails.element_size()
    assert 2 * report.layout.slot_bytes == total
    assert report.block_bytes == state.blocks.shape[1]
    assert report.block_bytes == sum(r.block_bytes for r in report.rows if not r.is_drafter)
    assert report.window_record_bytes == len(state.read_window(0, 4096))
    exported = state.export_slot(0, 4096)
    drafter = config.num_nextn_predict_layers * config.sliding_window * report.layout.swa_row_bytes
    assert drafter == len(exported.drafter)
    handed_over = {h.mode: h.fixed_bytes for h in report.handoffs}
    assert handed_over["state"] == len(exported.swa) + len(exported.tails) + drafter


@pytest.mark.parametrize("name", MODELS)
def test_layout_equals_the_allocation_layer_by_layer(name: str) -> None:
    check_against_allocation(ModelConfig.load(name), 6)


@given(
    st.sampled_from([32, 64, 96, 160]),
    st.sampled_from([32, 64, 96]),
    st.integers(2, 200),
    st.integers(1, 12),
)
def test_layout_equals_the_allocation_for_other_shapes(
    head_dim: int, index_head_dim: int, window: int, backtrack_rows: int
) -> None:
    config = replace(
        ModelConfig.load("toy"),
        head_dim=head_dim,
        index_head_dim=index_head_dim,
        sliding_window=window,
    )
    check_against_allocation(config, backtrack_rows)


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_the_rows_and_parts_are_the_table_s(name: str) -> None:
    config = ModelConfig.load(name)
    for quantisation in (Quantisation(), None)[: 1 if "flash" in name else 2]:
        report = layout_report(config, quantisation=quantisation)
        table = tensor_table(config, quantisation)
        assert report.weight_bytes(Part) == sum(entry.n_bytes for entry in table)
        layered = sum(entry.n_bytes for entry in table if entry.layer is not None)
        assert sum(row.weight_bytes for row in report.rows) == layered
        encoder = sum(
            e.n_bytes
            for e in table
            if e.part in (Part.EMBEDDING, Part.ENGRAM, Part.ENCODER, Part.KV_SOURCE)
        )
        share = encoder / report.weight_bytes(Part) if config.n_decoder_layers else None
        assert report.encoder_share(True) == share


def test_what_fits_is_the_most_that_fits(flash: LayoutReport) -> None:
    assert flash.memory_bytes is not None
    assert [(fit.build, fit.engram_on_device) for fit in flash.fits] == [
        ("decode", True),
        ("decode", False),
        ("prefill", True),
        ("prefill", False),
    ]
    whole = flash.weight_bytes(Part) - flash.weight_bytes([Part.VISION])
    assert flash.fits[0].weight_bytes == -(-whole // 4)
    # Engram on the host leaves about 72 M tokens of context beside a quarter of the other weights.
    for fit in flash.fits:
        free = flash.memory_bytes - fit.weight_bytes
        assert fit.free_bytes == free
        assert fit.tokens is not None
        blocks = fit.tokens // 128
        assert blocks * flash.block_bytes <= free < (blocks + 1) * flash.block_bytes
        assert list(fit.sequences) == [1024, 8192, 32_768, 131_072, 1_048_576]
        for context, count in fit.sequences.items():
            one = flash.slot_bytes + context // 128 * flash.block_bytes
            assert count * one <= free < (count + 1) * one


@pytest.mark.parametrize("name", ["flash", "v4-flash"])
def test_what_fits_is_allocated_on_the_meta_device(name: str) -> None:
    """All sequences that fit of one length, in one state: its bytes are the ones that are left."""
    config, context = ModelConfig.load(name), 131_072
    report = layout_report(config, memory_bytes=141 * 10**9, tp=8)
    for fit in report.fits:
        count = fit.sequences[context]
        n_blocks = count * (context // 128)
        state = KvState(config, report.layout, n_blocks, count, Numerics.FAST, "meta")
        held = state.blocks.nbytes + state.rings.nbytes + state.tails.nbytes
        one = report.slot_bytes + context // 128 * report.block_bytes
        assert count > 0 and fit.free_bytes - one < held <= fit.free_bytes
        assert held == count * one


def test_weights_that_do_not_fit_leave_nothing() -> None:
    report = layout_report(ModelConfig.load("flash"), memory_bytes=80 * 10**9)
    first = report.fits[0]
    assert first.free_bytes < 0
    assert first.tokens == 0
    assert set(first.sequences.values()) == {0}
    assert "lacks 429 GB" in text_of(report)


def test_limits_are_named_with_bound_and_value() -> None:
    config = ModelConfig.load("flash")
    with pytest.raises(
        ConfigError, match=r"keep_tokens must be at least the window \(128\), got 1"
    ):
        layout_report(config, keep_tokens=127)
    assert layout_report(config, keep_tokens=128).keep_tokens == 128
    with pytest.raises(ConfigError, match=r"backtrack_rows: found 0, wanted in 1\.\.1024"):
        layout_report(config, backtrack_rows=0)
    with pytest.raises(ConfigError, match=r"tp: found 0, wanted in 1\.\.4096"):
        layout_report(config, tp=0)
    with pytest.raises(ConfigError, match="memory_bytes: found 0, wanted in 1"):
        layout_report(config, memory_bytes=0)


def test_model_without_decoder_half_has_no_encoder_share() -> None:
    config = replace(ModelConfig.load("toy"), compress_ratios=(0, 2, 2, 2, 0))
    report = layout_report(config, memory_bytes=10**9)
    assert report.encoder_share(True) is None
    assert [fit.build for fit in report.fits] == ["decode", "decode"]
    assert "encoder-only" not in text_of(report)


def test_a_model_without_decoder_half_is_not_told_of_an_encoder(tmp_path: Path) -> None:
    report = layout_report(ModelConfig.load("v4-flash"), memory_bytes=10**12)
    text = text_of(report)
    assert "rows of all layers that rebuild every window without a record" in text
    assert "encoder" not in text and "prefill" not in text
    draw_png(report, tmp_path / "v4.png")
    assert (tmp_path / "v4.png").stat().st_size > 10_000
    halves = text_of(layout_report(ModelConfig.load("flash")))
    assert "encoder rows that rebuild every window without a record" in halves


# ---- views ---------------------------------------------------------------------------------


def text_of(report: LayoutReport) -> str:
    console = Console(width=220, file=io.StringIO())
    with console.capture() as captured:
        for table in tables(report):
            console.print(table)
    return captured.get()


def test_tables_show_the_figures(flash: LayoutReport) -> None:
    text = text_of(flash)
    lines = text.splitlines()
    for shown in ("890 B", "113,920 B", "1,341,120 B", "3,128,352 B", "3.13 MB"):
        assert any(shown in line for line in lines), shown
    assert "An encoder-only build holds 69% with Engram, 49% without." in text
    assert "96,085" in text
    assert sum(line.count("reuse") for line in lines) == 30
    assert sum(line.lstrip().startswith("draft ") for line in lines) == 3


def test_keep_is_the_models_unless_told() -> None:
    """The one that a deployment of it would have: window + 12; V4 keeps the last row alone."""
    kept = {n: layout_report(ModelConfig.load(n)).keep_tokens for n in (*MODELS, "demo")}
    windows = {"toy": 32, "t1": 32, "t2": 128, "flash": 128, "demo": 64}
    assert kept == {n: w + 12 for n, w in windows.items()} | {"v4-toy": 1, "v4-flash": 1}
    assert layout_report(ModelConfig.load("demo"), keep_tokens=64).keep_tokens == 64
    assert "76 tokens" in text_of(layout_report(ModelConfig.load("demo")))
    with pytest.raises(ConfigError, match="keep_tokens must be 1 for a model without a decoder"):
        layout_report(ModelConfig.load("v4-flash"), keep_tokens=140)


@pytest.mark.parametrize("name", ["flash", "v4-flash", "t1", "demo"])
def test_a_narrow_window_gets_every_figure(name: str) -> None:
    memory_bytes = 141 * 10**9 if "flash" in name else 10**9
    report = layout_report(ModelConfig.load(name), memory_bytes, tp=4)
    console = Console(width=80, file=io.StringIO())
    wide = console.options.update(width=10_000)

    def has_room(table: Table) -> bool:
        return console.measure(table, options=wide).minimum <= 80

    shown = list(tables(report, has_room))
    assert len(shown) == 5 and all(has_room(table) for table in shown)  # layers came as two
    with console.capture() as captured:
        console.print(*shown)
    text = captured.get()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    figures = {f"{row.main_data_bytes:,}" for row in report.rows if row.main_data_bytes}
    figures |= {f"{row.ring_data_bytes:,}" for row in report.rows}
    figures |= {f"{fit.tokens:,}" for fit in report.fits}
    assert all(figure in text.split() for figure in figures), figures - set(text.split())


def test_json_holds_every_row_and_total(flash: LayoutReport) -> None:
    value = json.loads(json.dumps(as_json(flash)))
    assert value["bytes_per_token"] == 890
    assert value["encoder_share"] == {
        "with_engram": flash.encoder_share(True),
        "without_engram": flash.encoder_share(False),
    }
    assert len(value["layers"]) == 43
    assert sum(row["block_bytes"] for row in value["layers"]) == value["block_bytes"]
    assert sum(row["slot_bytes"] for row in value["layers"]) == value["slot_bytes"]
    assert {*LayerRow.__slots__} <= value["layers"][0].keys()
    assert value["fits"][1]["sequences"]["131072"] == flash.fits[1].sequences[131_072]
    assert sum(part["tensors"] for part in value["weights"].values()) == 96_085


def test_picture_is_drawn_and_says_how_where_it_cannot(
    flash: LayoutReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    path = tmp_path / "bars.png"
    draw_png(flash, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*install headrace\[plot\]"):
        draw_png(flash, tmp_path / "other.png")


@pytest.mark.parametrize("name", ["flash", "v4-flash", "t1", "demo"])
def test_nothing_of_the_picture_lies_on_something_else(name: str) -> None:
    report = layout_report(ModelConfig.load(name))
    drawn = figure(report)
    drawn.canvas.draw()
    slot = drawn.axes[1]
    assert ("drafter" in slot.get_xlabel()) == any(row.is_drafter for row in report.rows)
    for axes in drawn.axes:
        labels = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(labels))
        legend, frame = axes.get_legend(), axes.get_window_extent()
        assert legend is not None and legend.get_window_extent().x0 >= frame.x1
        bars = [bar.get_window_extent() for bar in axes.patches]
        assert len(bars) > 2
        assert max(bar.y1 for bar in bars) < frame.y1 - 2
        assert max(bar.x1 for bar in bars) < frame.x1 - 2


def test_sizes_are_shown_in_decimal_units() -> None:
    shown = [show_bytes(n) for n in (0, 999, 1000, 3_128_352, 10**9, 109_000_000_000, 2 * 10**12)]
    assert shown == ["0 B", "999 B", "1 kB", "3.13 MB", "1 GB", "109 GB", "2 TB"]
    assert show_bytes(999_600) == "1 MB"
