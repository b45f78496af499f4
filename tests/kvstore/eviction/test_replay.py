"""The replay bench on a trace small enough to be counted by hand."""

from __future__ import annotations

import json

import pytest
from headrace_tests import module

from headrace.kvstore.policy import StorePolicy


@pytest.fixture(scope="module")
def bench():
    return module("bench/kvstore/replay_trace.py")


def test_a_trace_becomes_complete_blocks(bench, tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [0]},
        {"timestamp": 2, "input_length": 100, "output_length": 1, "hash_ids": [7]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    # 700 tokens are five blocks and a rest
    assert bench.read_trace(path) == [[0, 1, 2, 3, 4], [0, 1, 2, 3], []]
    assert bench.read_trace(path, 1) == [[0, 1, 2, 3, 4]]


# One hot prompt between one-time prompts. Asked for: 4 x 2 + 3 x 2 = 14 blocks.
HOT = [[1, 2], [1, 2], [10, 11], [1, 2], [20, 21], [1, 2], [30, 31]]


def test_hits_of_every_policy_counted_by_hand(bench):
    def hits(cache) -> float:
        return bench.hit_rate(HOT, cache) * 14

    # three blocks: lru loses 2 when 10 and 11 come; of the next hot prompt 1 alone is a hit, and
    # so on: 2 + 1 + 1
    assert hits(bench.Queue(3, recency=True)) == pytest.approx(4)
    # fifo: 10 and 11 push out 1 and 2 in the end; 1 is never the newest
    assert hits(bench.Queue(3, recency=False)) == pytest.approx(2)
    # of four slots one is for what only one request used: 1 and 2 are proven and stay
    assert hits(bench.ArenaCache(4, StorePolicy())) == pytest.approx(6)
    assert bench.ideal_rate(HOT, 2) * 14 == pytest.approx(6)
    assert bench.ideal_rate(HOT, 1) * 14 == pytest.approx(3)


def test_segments_give_what_was_used_a_second_chance(bench):
    # two segments of two slots: 1 and 10 lie in the first; 1 is used, and moves when 40 needs room
    cache = bench.SegmentCache(4, StorePolicy(second_chance_share=0.5), 2)
    trace = [[1], [1], [10], [20], [30], [40], [1]]
    assert bench.hit_rate(trace, cache) * 7 == pytest.approx(2)
    assert (cache.written, cache.moved) == (5, 1)
    # without second chances it is a FIFO
    cache = bench.SegmentCache(4, StorePolicy(second_chance_share=0.0), 2)
    assert bench.hit_rate(trace, cache) * 7 == pytest.approx(1)
    assert (cache.written, cache.moved) == (6, 0)


def test_no_policy_beats_the_ideal_and_a_large_cache_is_ideal(bench):
    rows = [bench.replay(HOT, room, 2) for room in (1, 2, 3, 4, 8)]
    for row in rows:
        assert max(row[name] for name in ("arena", "segments", "lru", "fifo")) <= row["ideal"]
    assert rows[-1]["lru"] == rows[-1]["ideal"] == pytest.approx(6 / 14)
