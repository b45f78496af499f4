"""What the store saves and what that costs, in seconds of compute: a hit rate does not say whether
hits paid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Economics:
    """What the requests that found something in the store got from it. Seconds are of compute.

    `row_s` is None while no row of prefill was timed: then no rows have a price, and nothing is
    claimed to be saved."""

    hits: int  # requests that found something
    found_tokens: int  # of their prompts, in the store; those that were replayed included
    saved_rows: int  # of these, rows that were really not run
    again_rows: int  # rows that such requests ran beyond those of one cold engine
    row_s: float | None
    load_s: float
    verify_s: float

    @property
    def saved_s(self) -> float:
        """What the rows not run would have taken."""
        return self.saved_rows * (self.row_s or 0.0)

    @property
    def replay_s(self) -> float:
        """What rows that ran twice took. Other replayed rows cost nothing: they ran in place of
        themselves, and are not counted as saved."""
        return self.again_rows * (self.row_s or 0.0)

    @property
    def net_s(self) -> float:
        """Saved less load, verify and replay. Below 0: the hits did not pay."""
        return self.saved_s - self.load_s - self.verify_s - self.replay_s


def found_in_store(record: RequestRecord) -> int:
    """Tokens of the prompt that the store had. What was still in the replica's own memory is not
    the store's merit."""
    return sum(n for tier, n in record.hit_tokens.items() if tier != "resident")


def rows_not_run(record: RequestRecord) -> int:
    """Rows of a cold run that this request did not run because the store had them; below 0, rows
    that ran twice. 0 without a hit in the store.

    The record counts rows as they were run, replayed ones too. What is resident is the head of the
    prompt: its rows are taken off first."""
    if not found_in_store(record):
        return 0
    saved = record.saved_rows
    return saved if saved < 0 else max(0, saved - record.hit_tokens.get("resident", 0))


def of_records(records: Iterable[RequestRecord], verify_s: float = 0.0) -> Economics:
    """The account of requests that ended.

    A row's time is measured where rows were run: seconds of prefill by rows of prefill, of all
    these requests. Loads count for requests with hits only, and in full, also what a cold hand-off
    would have paid too: the account errs on the side of the store's cost. A replica verifies while
    it loads, so `load_s` holds that; `verify_s` is what the store itself spent on bytes from disk,
    if known."""
    sums = Sums()
    for record in records:
        sums.add(record)
    return sums.economics(verify_s)


@dataclass(slots=True)
class Sums:
    """What `of_records` adds up, for somebody who sees one record after the other."""

    run_rows: int = 0
    run_s: float = 0.0
    hits: int = 0
    found_tokens: int = 0
    saved_rows: int = 0
    again_rows: int = 0
    load_s: float = 0.0

    def add(self, record: RequestRecord) -> None:
        """Count one ended request."""
        if record.prefill_rows:
            self.run_rows += record.prefill_rows
            self.run_s += record.stages.get("prefill_s", 0.0)
        found = found_in_store(record)
        if found:
            saved = rows_not_run(record)
            self.hits += 1
            self.found_tokens += found
            self.saved_rows += max(0, saved)
            self.again_rows += max(0, -saved)
            self.load_s += record.stages.get("load_s", 0.0)

    def economics(self, verify_s: float = 0.0) -> Economics:
        row_s = self.run_s / self.run_rows if self.run_rows else None
        return Economics(
            self.hits,
            self.found_tokens,
            self.saved_rows,
            self.again_rows,
            row_s,
            self.load_s,
            verify_s,
        )
