"""Policy: pure functions; every choice can be computed by hand."""

from __future__ import annotations

import pytest

from headrace.core.request import HandoffBind
from headrace.core.rows import Geometry
from headrace.router.ledger import Load
from headrace.router.policy import (
    Candidate,
    Reason,
    choose_decode,
    choose_prefill,
    prefill_ms,
    route,
    size_up,
)

GEOMETRY = Geometry(window_tokens=8, n_encoder_layers=2, n_decoder_layers=2)
KEEP = 20


def work(
    n: int, *, hit: int = 0, windows: tuple[int, ...] = (), local: int = 512, answer: int = 16
):
    return size_up(n, answer, hit, windows, KEEP, GEOMETRY, local)


def candidate(key: str, requests: int = 0, tokens: int = 0, **more: float) -> Candidate:
    load = Load(requests, tokens, more.get("backlog", 0.0), more.get("rate", 0.0))
    return Candidate(key, load, int(more.get("capacity", 10_000)), int(more.get("slots", 8)))


def test_a_cold_long_prompt_wants_prefill_and_a_stored_one_does_not() -> None:
    assert work(4000).wants_prefill
    stored = work(4000, hit=31, windows=(3968,))
    # R = N - keep = 3980, the record at 3968 is used, rows [3968, 4000) run.
    assert not stored.wants_prefill and stored.plan.encoder_rows == 32
    assert stored.hit_tokens == 3968
    # The same without a record: exact replay of 2 * 7 rows before R = 3968, still local.
    replay = work(4000, hit=31)
    assert replay.plan.encoder_rows == 32 + 14 and not replay.wants_prefill


def test_a_prompt_below_keep_and_a_grain_gains_nothing_from_prefill() -> None:
    assert not work(KEEP + 127, local=0).wants_prefill
    assert work(KEEP + 128, local=0).wants_prefill


def test_an_index_that_says_too_much_is_cut_to_whole_blocks() -> None:
    assert work(300, hit=9).hit_tokens == 256


def test_decode_takes_the_smallest_use_then_the_fewest_requests() -> None:
    chosen = choose_decode([candidate("a", 1, 5000), candidate("b", 7, 1000)], 100, 4, 0)
    assert chosen is not None and chosen.key == "b" and chosen.reason is Reason.LEAST
    # 1,100 and 1,300 of 10,000 lie in one bucket of 5 %: the requests decide.
    chosen = choose_decode([candidate("a", 3, 1000), candidate("b", 1, 1200)], 100, 4, 0)
    assert chosen is not None and chosen.key == "b"


def test_ties_rotate() -> None:
    pool = [candidate(name) for name in "abc"]
    keys = [choose_decode(pool, 100, 4, turn) for turn in range(6)]
    assert [c.key for c in keys if c] == ["a", "b", "c", "a", "b", "c"]
    assert {c.reason for c in keys if c} == {Reason.TIE}


def test_a_full_replica_is_passed_over_and_a_full_pool_is_none() -> None:
    full, free = candidate("full", 1, 9450), candidate("free", 7, 9000)
    chosen = choose_decode([full, free], 128, 4, 0)  # 9,578 > 95 % of 10,000
    assert chosen is not None and chosen.key == "free"
    assert choose_decode([full], 128, 4, 0) is None
    assert choose_decode([candidate("a", 12, 0)], 128, 4, 0) is None  # 8 slots and 4 ahead
    assert choose_decode([candidate("a", 11, 0)], 128, 4, 0) is not None


def test_a_request_as_large_as_a_replica_fits_when_nothing_else_runs() -> None:
    assert choose_decode([candidate("a")], 10_000, 4, 0) is not None
    assert choose_decode([candidate("a")], 10_001, 4, 0) is None


def test_prefill_takes_the_least_predicted_time() -> None:
    job = work(4096)
    assert prefill_ms(job, 1000.0) == pytest.approx(4096.0)
    slow_idle = candidate("slow", rate=1000.0)  # 0 + 4,096 ms
    fast_busy = candidate("fast", rate=4000.0, backlog=8000.0)  # 2,000 + 1,024 ms
    chosen = choose_prefill([slow_idle, fast_busy], job, 2000.0, 0)
    assert chosen is not None and chosen.key == "fast" and chosen.score == pytest.approx(3024.0)


def test_prefill_ties_go_to_fewer_tokens_then_rotate() -> None:
    job = work(4096)
    near = [candidate("a", tokens=900, rate=1000.0), candidate("b", tokens=100, rate=1001.0)]
    chosen = choose_prefill(near, job, 2000.0, 0)
    assert chosen is not None and chosen.key == "b"
    same = [candidate(name, rate=1000.0) for name in "ab"]
    assert [choose_prefill(same, job, 2000.0, turn).key for turn in range(3)] == ["a", "b", "a"]


def test_the_whole_route_and_its_reasons() -> None:
    decodes, prefills = [candidate("d/1")], [candidate("p/1", rate=2000.0)]
    options = {"queue_ahead": 4, "start_rows_per_s": 2000.0, "turn": 0, "bind": HandoffBind.EARLY}
    cold = route(work(4000), decodes, prefills, **options)
    assert cold is not None and cold.prefill is not None and cold.prefill.key == "p/1"
    assert cold.why.startswith("4000 rows, hit 0 of 4000; p/1: 1984 ms")
    warm = route(work(4000, hit=31, windows=(3968,)), decodes, prefills, **options)
    assert warm is not None and warm.prefill is None and "; local; " in warm.why
    alone = route(work(4000), decodes, [], **options)
    assert alone is not None and alone.prefill is None and "no prefill replica" in alone.why
    assert route(work(4000), [], prefills, **options) is None


def test_bound_late_prefill_is_chosen_alone_and_has_room_of_its_own() -> None:
    options = {"queue_ahead": 4, "start_rows_per_s": 2000.0, "turn": 0, "bind": HandoffBind.LATE}
    full, prefills = [candidate("d/1", 12)], [candidate("p/1", 11, rate=2000.0)]
    found = route(work(4000), full, prefills, **options)
    assert found is not None and found.decode is None
    assert found.prefill is not None and found.prefill.key == "p/1"
    # 8 slots and 4 ahead: the next one waits, whatever decode has free.
    assert route(work(4000), [candidate("d/1")], [candidate("p/1", 12)], **options) is None
    # What needs no prefill, or finds none, goes by the room on decode.
    assert route(work(100), full, prefills, **options) is None
    assert route(work(4000), full, [], **options) is None
    local = route(work(4000), [candidate("d/1")], [], **options)
    assert local is not None and local.decode is not None and local.prefill is None
