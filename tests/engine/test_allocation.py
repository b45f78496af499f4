"""What `headrace layout` tells of a model is what a started engine holds, layer by layer."""

from __future__ import annotations

import pytest
import torch

from headrace.core.deployment import Deployment
from headrace.engine import EngineSettings, Half, load_engine
from headrace.model import ModelConfig
from headrace.model.report import layout_report

N_BLOCKS, N_SLOTS = 5, 3
MODELS = ("toy", "t1", "t2", "v4-toy", "demo")


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("half", list(Half))
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_holds_what_the_layout_tells(name: str, half: Half, numerics: str) -> None:
    torch.set_num_threads(1)
    config = ModelConfig.load(name)
    report = layout_report(config)
    settings = EngineSettings(n_blocks=N_BLOCKS, n_slots=N_SLOTS)
    engine = load_engine(Deployment(model=name, numerics=numerics), settings, half)
    state = engine.state
    # An encoder's slots have no rings of decoder layers and stages; blocks and tails are the same.
    whole = half is Half.FULL or config.n_decoder_layers == 0
    n_rings = len(report.rows) if whole else config.n_encoder_layers
    assert state.ring_layers == n_rings
    for row, rings in zip(report.rows[:n_rings], state.rings.unbind(1), strict=True):
        assert rings.shape[:2] == (N_SLOTS, row.ring_rows)
        assert rings.nbytes == N_SLOTS * (row.ring_data_bytes + row.ring_scale_bytes)
    for row in report.rows:
        tails = [] if row.is_drafter else state.layout.layer_tails(row.layer)
        held = sum(state.tail(tail).nbytes for tail in tails)
        # The layout counts values of 4 bytes; V4.1's tails have 8 where nothing may round.
        width = 2 if numerics == "invariant" and not config.is_v4 else 1
        assert held == N_SLOTS * width * row.tail_bytes
        assert {tail.rows for tail in tails} <= {row.tail_rows}
    # Of a block's bytes every layer's section is where the engine's sources lie.
    begins = [source.main_offset for source in state.layout.sources]
    owners = [row for row in report.rows if row.block_bytes]
    assert [source.layer for source in state.layout.sources] == [row.layer for row in owners]
    ends = [*begins[1:], state.blocks.shape[1]]
    for row, begin, end in zip(owners, begins, ends, strict=True):
        assert end - begin == row.block_bytes
    assert state.blocks.nbytes == N_BLOCKS * report.block_bytes
    assert len(engine.block_view(0)) == report.block_bytes
    assert len(state.read_window(0, 4096)) == report.window_record_bytes
    if whole and numerics == "fast":
        assert state.slot_bytes == report.slot_bytes
        assert state.rings.nbytes + state.tails.nbytes == N_SLOTS * report.slot_bytes
