"""Whether hits paid."""

from __future__ import annotations

import pytest

from headrace.core.economics import Economics, of_records, rows_not_run
from headrace.core.records import RequestRecord


def record(
    rows: int = 0, hits: dict[str, int] | None = None, saved: int = 0, **stages: float
) -> RequestRecord:
    made = RequestRecord(
        "r", "t", "d", "chat", 0.0, prefill_rows=rows, hit_tokens=hits or {}, saved_rows=saved
    )
    for name, seconds in stages.items():
        made.stage(name, seconds)
    return made


def test_saved_rows_times_row_time_less_what_was_paid():
    account = Economics(
        hits=3,
        found_tokens=1200,
        saved_rows=1000,
        again_rows=250,
        row_s=0.002,
        load_s=0.25,
        verify_s=0.125,
    )
    assert account.saved_s == 2.0 and account.replay_s == 0.5 and account.net_s == 1.125
    assert Economics(1, 128, 10, 0, 0.002, 0.25, 0.0).net_s == pytest.approx(-0.23)


def test_found_tokens_that_were_replayed_are_not_saved():
    """A short prompt: its block was found, and all its rows ran all the same."""
    account = of_records(
        [
            record(100, prefill_s=0.5),
            record(0, {"host": 128}, saved=0, load_s=0.25, replay_s=9.0),
            record(0, {"host": 128}, saved=0, load_s=0.25, replay_s=9.0),
        ]
    )
    assert account == Economics(2, 256, 0, 0, 0.005, 0.5, 0.0)
    assert (account.saved_s, account.replay_s, account.net_s) == (0.0, 0.0, -0.5)


def test_a_rows_time_is_measured_and_costs_count_where_something_was_found():
    records = [
        record(1000, saved=-140, prefill_s=2.0, load_s=9.0),  # cold: the hand-off's cost, no hit's
        record(0, {"host": 1024, "ssd": 256}, saved=1200, load_s=0.25),
        record(500, {"host": 128}, saved=-24, prefill_s=1.0, load_s=0.125),  # 24 ran twice
    ]
    account = of_records(records, verify_s=0.0625)
    assert account == Economics(2, 1024 + 256 + 128, 1200, 24, 3.0 / 1500, 0.375, 0.0625)
    assert account.net_s == pytest.approx((1200 - 24) * 0.002 - 0.4375)


@pytest.mark.parametrize(
    ("hits", "saved", "expected"),
    [
        ({"resident": 384}, 300, 0),  # nothing of it came from the store
        ({"resident": 256, "host": 128}, 300, 44),
        ({"resident": 256, "host": 128}, 200, 0),  # what the store had was replayed
        ({"resident": 256, "host": 128}, -12, -12),
        ({"ssd": 384}, 300, 300),
        ({}, 300, 0),
        ({}, -140, 0),
    ],
)
def test_what_was_resident_is_not_the_stores_merit(hits, saved, expected):
    assert rows_not_run(record(0, hits, saved)) == expected


def test_without_a_row_that_was_timed_nothing_is_claimed():
    account = of_records([record(0, {"ssd": 128}, saved=128, load_s=0.25)])
    assert account.row_s is None and account.saved_s == 0.0 and account.net_s == -0.25
    assert of_records([]) == Economics(0, 0, 0, 0, None, 0.0, 0.0)
