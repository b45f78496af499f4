"""What the store saves and what that costs, in seconds of compute: a hit rate does not say whether
hits paid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Economics:
    """Seconds. `saved_s` is what the rows not run would have taken; the rest is what was paid for
    that."""

    saved_rows: int
    row_s: float
    load_s: float
    verify_s: float
    replay_s: float

    @property
    def saved_s(self) -> float:
        return self.saved_rows * self.row_s

    @property
    def net_s(self) -> float:
        """Saved rows x row time, minus load, verify and replay. Below 0: the hits did not pay."""
        return self.saved_s - self.load_s - self.verify_s - self.replay_s


def rows_not_run(record: RequestRecord) -> int:
    """Rows of the prompt that a run without a store would have computed and this request found
    there. What was still in the replica's own memory is not the store's merit."""
    return sum(n for tier, n in record.hit_tokens.items() if tier != "resident")


def of_records(records: Iterable[RequestRecord], verify_s: float = 0.0) -> Economics:
    """The account of requests that ended.

    A row's time is measured where rows were run: seconds of prefill by rows of prefill, of all
    these requests; without any it is 0 and nothing is claimed to be saved. Load and replay count
    for requests with hits only, and in full, also what a cold hand-off would have paid too: the
    account errs on the side of the store's cost. A replica verifies while it loads, so `load_s`
    holds that; `verify_s` is what the store itself spent on bytes from disk, if known."""
    sums = Sums()
    for record in records:
        sums.add(record)
    return sums.economics(verify_s)


@dataclass(slots=True)
class Sums:
    """What `of_records` adds up, for somebody who sees one record after the other."""

    run_rows: int = 0
    run_s: float = 0.0
    saved_rows: int = 0
    load_s: float = 0.0
    replay_s: float = 0.0

    def add(self, record: RequestRecord) -> None:
        """Count one ended request."""
        if record.prefill_rows:
            self.run_rows += record.prefill_rows
            self.run_s += record.stages.get("prefill_s", 0.0)
        saved = rows_not_run(record)
        if saved:
            self.saved_rows += saved
            self.load_s += record.stages.get("load_s", 0.0)
            self.replay_s += record.stages.get("replay_s", 0.0)

    def economics(self, verify_s: float = 0.0) -> Economics:
        row_s = self.run_s / self.run_rows if self.run_rows else 0.0
        return Economics(self.saved_rows, row_s, self.load_s, verify_s, self.replay_s)
