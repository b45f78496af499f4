"""Ledger: counted at dispatch, released once, reports by number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import FakeClock
from headrace.core.messages import LoadReport
from headrace.router.ledger import Charge, Ledger

IDLE = LoadReport(0, 0, 0, 0, 0, 0, 64, 8, 0.0, 0)


def test_a_dispatch_counts_before_any_report() -> None:
    ledger = Ledger(FakeClock())
    ledger.open("d", rows=100, tokens=256)
    load = ledger.load("d")
    assert (load.requests, load.tokens, load.backlog_rows) == (1, 256, 100)
    assert ledger.load("other").requests == 0


def test_release_is_idempotent_and_never_negative() -> None:
    ledger = Ledger(FakeClock())
    charge = ledger.open("d", 100, 256)
    ledger.close(charge)
    ledger.close(charge)
    assert ledger.open_charges == 0
    load = ledger.load("d")
    assert (load.requests, load.tokens, load.backlog_rows) == (0, 0, 0)
    ledger.report("d", replace(IDLE, last_dispatch=charge.dispatch), 0)
    ledger.close(charge)
    assert ledger.load("d").requests == 0


def test_a_report_covers_up_to_its_number_and_no_further() -> None:
    ledger = Ledger(FakeClock())
    first = ledger.open("d", 100, 256)
    second = ledger.open("d", 50, 128)
    seen = replace(IDLE, last_dispatch=first.dispatch, running_requests=1, backlog_rows=70)
    ledger.report("d", seen, held_tokens=256)
    load = ledger.load("d")
    assert (load.requests, load.tokens, load.backlog_rows) == (2, 384, 120)
    # The first ends, the report that still has it stands.
    ledger.close(first)
    assert (ledger.load("d").requests, ledger.load("d").tokens) == (1, 128)
    ledger.close(second)
    assert (ledger.load("d").requests, ledger.load("d").tokens) == (0, 0)


def test_a_report_holds_the_load_of_other_routers_too() -> None:
    ledger = Ledger(FakeClock())
    ledger.report("d", replace(IDLE, running_requests=5, waiting_requests=2), held_tokens=1024)
    ledger.open("d", 10, 128)
    load = ledger.load("d")
    assert (load.requests, load.tokens) == (8, 1152)


def test_backlog_decays_while_reports_are_fresh_and_stands_when_they_stop() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.report("p", replace(IDLE, backlog_rows=1000, rows_per_s=1000.0), 0)
    clock.advance(0.4)
    assert ledger.load("p").backlog_rows == pytest.approx(600)
    clock.advance(1.4)  # more than three intervals: it may be stuck
    load = ledger.load("p")
    assert load.stale and load.backlog_rows == 1000


def test_jobs_that_wait_for_room_count_although_they_hold_nothing() -> None:
    ledger = Ledger(FakeClock())
    charges = [ledger.open("d", 10, 512) for _ in range(4)]
    report = replace(IDLE, last_dispatch=charges[-1].dispatch, running_requests=1)
    ledger.report("d", report, held_tokens=512)
    assert ledger.load("d").tokens == 2048
    assert ledger.load("d").requests == 4


def test_a_replica_that_left_counts_no_more_and_its_charges_close() -> None:
    ledger = Ledger(FakeClock())
    charge = ledger.open("d", 10, 512)
    ledger.forget("d")
    assert ledger.open_charges == 0
    ledger.close(charge)
    assert ledger.load("d").requests == 0


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "report"]), st.integers(0, 9))))
def test_any_history_ends_at_zero(history: list[tuple[str, int]]) -> None:
    ledger = Ledger(FakeClock())
    charges: list[Charge] = []
    for what, n in history:
        if what == "open":
            charges.append(ledger.open("d", n, 128 * n))
        elif what == "close" and charges:
            ledger.close(charges[n % len(charges)])
        elif what == "report":
            last = charges[n % len(charges)].dispatch if charges else 0
            ledger.report("d", replace(IDLE, last_dispatch=last, running_requests=n), 128 * n)
        load = ledger.load("d")
        still = [c for c in charges if not c.closed]
        assert load.requests >= len(still) and load.tokens >= sum(c.tokens for c in still)
        assert load.backlog_rows >= 0
    for charge in charges:
        ledger.close(charge)
    assert ledger.open_charges == 0 and ledger.own("d") == (0, 0)


def test_a_wait_is_predicted_from_how_long_one_stays() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    pool = ["a", "b"]
    assert ledger.wait_s(pool, 10) == 0.0
    charges = [ledger.open(key, 0, 128) for key in pool for _ in range(4)]
    clock.advance(2.0)
    assert ledger.wait_s(pool, 10) == 0.0  # none has ended yet: nothing is known
    ledger.close(charges[0])
    charges.append(ledger.open("a", 0, 128))
    # Eight stay two seconds each: four places a second.
    assert ledger.wait_s(pool, 1) == pytest.approx(0.25)
    assert ledger.wait_s(pool, 10) == pytest.approx(2.5)
    # Nobody ends for a minute: the mean age, (7 * 62 + 60) / 8 seconds, is the better guess.
    clock.advance(60.0)
    assert ledger.wait_s(pool, 8) == pytest.approx((7 * 62 + 60) / 8)
    for charge in charges:
        ledger.close(charge)
    assert ledger.wait_s(pool, 0) == 0.0
    ledger.forget("a")
    ledger.forget("b")
    assert ledger.wait_s(pool, 10) == 0.0


def test_the_mean_stay_forgets() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    for stay_s in (1.0, *[3.0] * 60):
        charge = ledger.open("a", 0, 128)
        clock.advance(stay_s)
        ledger.close(charge)
    ledger.open("a", 0, 128)
    assert ledger.wait_s(["a"], 1) == pytest.approx(3.0, abs=0.01)


def test_requests_of_other_routers_leave_room_too() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    charge = ledger.open("a", 0, 128)
    clock.advance(4.0)
    ledger.close(charge)
    seen = replace(IDLE, last_dispatch=charge.dispatch, running_requests=8)
    ledger.report("a", seen, held_tokens=1024)
    assert ledger.wait_s(["a"], 2) == pytest.approx(1.0)
