"""Configuration refusals, cache-layout arithmetic against published figures, state bytes."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import numpy as np
import pytest
import torch

from headrace.model import (
    CacheLayout,
    ConfigError,
    KvState,
    LayerKind,
    ModelConfig,
    Numerics,
    StateError,
)

NAMES = ("t1", "t2", "toy", "flash")


def raw(name: str) -> dict:
    path = resources.files("headrace.configs") / "models" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "block_bytes", "record_bytes", "per_token", "swa_row"),
    [
        ("flash", 113_920, 1_341_120, 890, 528),
        ("t1", 140 * 128, 6 * 31 * 66, 140, 66),
        ("t2", 140 * 128, 6 * 127 * 66, 140, 66),
        ("toy", 6_720, 2 * 31 * 33, 52.5, 33),
    ],
)
def test_sizes(name, block_bytes, record_bytes, per_token, swa_row):
    layout = CacheLayout.of(ModelConfig.load(name))
    assert layout.block_bytes == block_bytes
    assert layout.window_record_bytes == record_bytes
    assert layout.bytes_per_token == per_token
    assert layout.swa_row_bytes == swa_row
    assert layout.block_tokens == 128


def test_flash_offsets_follow_the_sections():
    layout = CacheLayout.of(ModelConfig.load("flash"))
    assert [(s.layer, s.ratio) for s in layout.sources] == [(2, 2), (8, 2), (14, 2), (20, 1)]
    at = 0
    for s in layout.sources:
        rows = 128 // s.ratio
        assert (s.rows_per_block, s.main_row_bytes) == (rows, 288)
        assert (s.index_data_bytes, s.index_scale_bytes) == (64, 4)
        assert s.main_offset == at
        assert s.index_data_offset == at + rows * 288
        assert s.index_scale_offset == at + rows * (288 + 64)
        at += rows * 356
    assert at == layout.block_bytes
    assert layout.ring_rows == 134 and {t.rows for t in layout.tails} == {7}
    assert layout.slot_bytes == 43 * 70_752 + 86_016 == 3_128_352


def test_backtrack_enters_neither_record_nor_layout_id():
    config = ModelConfig.load("t1")
    a, b = CacheLayout.of(config, 6), CacheLayout.of(config, 9)
    assert (a.ring_rows, b.ring_rows) == (38, 41)
    assert a.layout_id == b.layout_id and len(a.layout_id) == 32
    assert a.window_record_bytes == b.window_record_bytes and a.block_bytes == b.block_bytes
    with pytest.raises(ConfigError, match="backtrack_rows"):
        CacheLayout.of(config, 0)


def test_layout_ids_differ_where_bytes_mean_something_else():
    t1 = ModelConfig.load("t1")
    ids = {CacheLayout.of(ModelConfig.load(name)).layout_id for name in NAMES}
    assert len(ids) == 4
    for change in ({"sliding_window": 33}, {"qk_rope_head_dim": 30}, {"head_dim": 96}):
        other = CacheLayout.of(dataclasses.replace(t1, **change))
        assert other.layout_id != CacheLayout.of(t1).layout_id
    same = dataclasses.replace(t1, n_routed_experts=4, max_position_embeddings=99)
    assert CacheLayout.of(same).layout_id == CacheLayout.of(t1).layout_id


def test_flash_layer_kinds():
    config = ModelConfig.load("flash")
    kinds = {kind: [s.index for s in config.layers if s.kind is kind] for kind in LayerKind}
    assert kinds[LayerKind.SWA_ONLY] == [0, 1]
    assert kinds[LayerKind.FULL] == [2, 8, 14, 20]
    assert kinds[LayerKind.REINDEX] == [24, 28, 32, 36]
    assert len(kinds[LayerKind.REUSE]) == 30
    assert [config.layer(i).kv_source for i in (1, 7, 8, 13, 39)] == [None, 2, 8, 8, 20]
    assert [config.layer(i).index_source for i in (7, 23, 24, 39)] == [2, 20, 24, 36]
    assert config.first_decoder_layer == config.n_encoder_layers == config.n_decoder_layers == 20
    assert config.exact_keep_tokens == 2541 and config.replay_reach_rows == 2540


def test_tiny_halves():
    assert ModelConfig.load("t1").exact_keep_tokens == 187
    assert ModelConfig.load("t2").exact_keep_tokens == 763
    assert ModelConfig.load("toy").exact_keep_tokens == 63


REFUSALS = [
    ("num_key_value_heads", 2, "num_key_value_heads"),
    ("attention_bias", True, "attention_bias"),
    ("hidden_act", "gelu", "hidden_act"),
    ("scoring_func", "softmax", "scoring_func"),
    ("use_fp4_sparse_kv", False, "use_fp4_sparse_kv"),
    ("head_dim", 72, "head_dim"),
    ("index_head_dim", 40, "index_head_dim"),
    ("qk_rope_head_dim", 31, "qk_rope_head_dim"),
    ("o_groups", 3, "o_groups"),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 4, 0, 0, 0], r"compress_ratios\[11\]"),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 2, 0, 0, 0], r"compress_ratios\[11\]"),
    ("compress_ratios", [0, 0, 2], "compress_ratios"),
    ("kv_source_layer_ids", [2, 4, 6, 8], "kv_source_layer_ids"),
    ("kv_source_layer_ids", [2, 4], "compress_ratios"),
    ("kv_source_layer_ids", [1, 2, 4, 6], "kv_source_layer_ids"),
    ("index_source_layer_ids", [2, 6, 8, 10], "index_source_layer_ids"),
    ("candidate_source_layer_id", 7, "candidate_source_layer_id"),
    ("candidate_source_layer_id", 2, "candidate_source_layer_id"),
    ("candidate_block_size", 12, "candidate_block_size"),
    ("candidate_topk_blocks", 6, "candidate_topk_blocks"),
    ("index_topk", 33, "index_topk"),
    ("engram_layer_ids", [1, 8], "engram_layer_ids"),
    ("engram_num_embeddings", [6090, 6297], "engram_num_embeddings"),
    ("sliding_window", 1, "sliding_window"),
    ("vocab_size", "4096", "vocab_size"),
    ("vocab_size", True, "vocab_size"),
    ("num_experts_per_tok", 9, "num_experts_per_tok"),
    ("rope_scaling", {"rope_type": "linear"}, "rope_scaling"),
    ("an_unknown_key", 1, "an_unknown_key"),
]


@pytest.mark.parametrize(("key", "value", "named"), REFUSALS)
def test_refusals_name_the_key(key, value, named):
    data = raw("t1")
    data["text_config"][key] = value
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(data)


def test_missing_and_misplaced_keys_are_refused(tmp_path):
    data = raw("t1")
    del data["text_config"]["hidden_size"]
    with pytest.raises(ConfigError, match="hidden_size"):
        ModelConfig.from_dict(data)
    with pytest.raises(ConfigError, match="surprise"):
        ModelConfig.from_dict(raw("t1") | {"surprise": 1})
    with pytest.raises(ConfigError, match="text_config"):
        ModelConfig.from_dict({})
    with pytest.raises(ConfigError, match="t1, t2"):
        ModelConfig.load("t3")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw("toy")))
    assert ModelConfig.load(path) == ModelConfig.load("toy")


def test_window_records_pad_at_the_front():
    config = ModelConfig.load("t1")
    layout = CacheLayout.of(config)
    state = KvState(config, layout, 1, 2, Numerics.FAST)
    state.rings.copy_(torch.randint(1, 255, state.rings.shape, dtype=torch.uint8))
    for position in (1, 31, 32, 38, 100):
        record = np.frombuffer(state.read_window(1, position), np.uint8).reshape(6, 31, 66)
        for back in range(1, 32):
            at = position - back
            row = record[:, 31 - back]
            if at < 0:
                assert (row == 0).all()
            else:
                assert (row == state.rings[1, :6, at % 38].numpy()).all()
        state.poison_slot(0)
        state.write_window(0, position, record.tobytes())
        assert state.read_window(0, position) == record.tobytes()
        written = min(31, position)
        assert int((state.rings[0, :6] != 0xFF).any(-1).sum()) == 6 * written
        assert (state.rings[0, 6:] == 0xFF).all()


def test_blocks_are_reached_without_copies_and_checked_for_size():
    config = ModelConfig.load("t1")
    layout = CacheLayout.of(config)
    state = KvState(config, layout, 3, 1, Numerics.FAST)
    view = state.block_view(1)
    assert view.nbytes == layout.block_bytes and not view.readonly
    view[5] = 77
    assert state.blocks[1, 5] == 77
    payload = bytes(range(256)) * (layout.block_bytes // 256)
    state.write_block(2, memoryview(payload))
    assert state.read_block(2) == payload and state.read_block(0) == bytes(layout.block_bytes)
    state.poison_block(0)
    assert (state.blocks[0] == 0xFF).all() and not (state.blocks[1] == 0xFF).any()
    with pytest.raises(StateError, match="found 3, wanted 17920"):
        state.write_block(0, b"abc")
    with pytest.raises(StateError, match="wanted 12276"):
        state.write_window(0, 40, b"abc")
