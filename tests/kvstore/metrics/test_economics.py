"""Whether hits paid."""

from __future__ import annotations

import pytest

from headrace.core.economics import Economics, of_records
from headrace.core.records import RequestRecord


def record(rows: int = 0, hits: dict[str, int] | None = None, **stages: float) -> RequestRecord:
    made = RequestRecord("r", "t", "d", "chat", 0.0, prefill_rows=rows, hit_tokens=hits or {})
    for name, seconds in stages.items():
        made.stage(name, seconds)
    return made


def test_saved_rows_times_row_time_less_what_was_paid():
    account = Economics(saved_rows=1000, row_s=0.002, load_s=0.25, verify_s=0.125, replay_s=0.5)
    assert account.saved_s == 2.0 and account.net_s == 1.125
    assert Economics(10, 0.002, 0.25, 0.0, 0.0).net_s == pytest.approx(-0.23)


def test_a_rows_time_is_measured_and_costs_count_where_something_was_found():
    records = [
        record(1000, prefill_s=2.0, load_s=9.0, replay_s=9.0),  # cold: its load saved nothing
        record(0, {"host": 1024, "ssd": 256}, load_s=0.25, replay_s=0.5),
        record(500, {"host": 128, "resident": 384}, prefill_s=1.0, load_s=0.125),
    ]
    account = of_records(records, verify_s=0.0625)
    assert account == Economics(1024 + 256 + 128, 3.0 / 1500, 0.375, 0.0625, 0.5)
    assert account.net_s == pytest.approx(1408 * 0.002 - 0.9375)


def test_without_a_row_that_was_run_nothing_is_claimed():
    account = of_records([record(0, {"ssd": 128}, load_s=0.25)])
    assert account.row_s == 0.0 and account.saved_s == 0.0 and account.net_s == -0.25
    assert of_records([]) == Economics(0, 0.0, 0.0, 0.0, 0.0)
