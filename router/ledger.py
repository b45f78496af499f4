"""What each replica has been given and how far that has gone: the truth behind every choice.

A dispatch is counted before it is sent and released exactly once, on whichever way its request
ends. Replicas report their own load with the number of the last dispatch of this router that their
figures cover; only newer dispatches are added on top, so nothing is counted twice and a report
never overwrites what is still on its way. Several routers need not agree: a report covers them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.messages import LoadReport

REPORT_INTERVAL_S = 0.5
STALE_REPORTS = 3  # intervals without a report after which the last one is only a lower bound
STAY_SHARE = 0.1  # of the newest dispatch in the mean time that one is open


@dataclass(eq=False, slots=True)
class Charge:
    """One dispatch. `rows` are still to run, `tokens` will be resident when it ends."""

    replica: str
    dispatch: int
    rows: int
    tokens: int
    opened_at_s: float
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """A replica's load as of now. Nothing here is negative.

    `rows_per_s` is 0 while the replica has reported none; `backlog_rows` is already lowered by what
    it should have run since its report."""

    requests: int = 0
    tokens: int = 0
    backlog_rows: float = 0.0
    rows_per_s: float = 0.0
    stale: bool = False


@dataclass(slots=True)
class _Account:
    open: dict[int, Charge] = field(default_factory=dict)
    report: LoadReport | None = None
    held_tokens: int = 0
    reported_at_s: float = 0.0
    # Closed since the report, though the report still covers them.
    ended_requests: int = 0
    ended_tokens: int = 0
    stay_s: float | None = None  # how long a dispatch was open, newest weighted most


class Ledger:
    """Charges and reports of all replicas, by replica key. Owned by the router's loop."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._last_dispatch = 0

    @property
    def open_charges(self) -> int:
        """Dispatches not yet released, over all replicas. 0 when nothing runs."""
        return sum(len(account.open) for account in self._accounts.values())

    def open(self, replica: str, rows: int, tokens: int) -> Charge:
        """Count a dispatch; call it before sending. The charge's number goes into the job."""
        self._last_dispatch += 1
        charge = Charge(replica, self._last_dispatch, rows, tokens, self._clock.now_s())
        self._account(replica).open[charge.dispatch] = charge
        return charge

    def close(self, charge: Charge) -> None:
        """Release a dispatch. Idempotent, and legal after the replica is gone."""
        if charge.closed:
            return
        charge.closed = True
        account = self._accounts.get(charge.replica)
        if account is None or account.open.pop(charge.dispatch, None) is None:
            return
        stay_s = self._clock.now_s() - charge.opened_at_s
        before_s = stay_s if account.stay_s is None else account.stay_s
        account.stay_s = before_s + STAY_SHARE * (stay_s - before_s)
        if account.report is not None and charge.dispatch <= account.report.last_dispatch:
            account.ended_requests += 1
            account.ended_tokens += charge.tokens

    def report(self, replica: str, report: LoadReport, held_tokens: int) -> None:
        """Take a replica's own figures; what they cover counts by them from now on.

        `held_tokens`: what its running sequences have reserved, in tokens of whole blocks."""
        account = self._account(replica)
        account.report = report
        account.held_tokens = held_tokens
        account.reported_at_s = self._clock.now_s()
        account.ended_requests = account.ended_tokens = 0

    def forget(self, replica: str) -> None:
        """Drop the account of a replica that is gone; its open charges count no more."""
        self._accounts.pop(replica, None)

    def own(self, replica: str) -> tuple[int, int]:
        """(requests, tokens) that this router alone has open there."""
        account = self._accounts.get(replica)
        if account is None:
            return 0, 0
        return len(account.open), sum(charge.tokens for charge in account.open.values())

    def last_report(self, replica: str) -> LoadReport | None:
        """The replica's own last words, for gauges."""
        account = self._accounts.get(replica)
        return account.report if account is not None else None

    def load(self, replica: str) -> Load:
        """The load to decide by: the last report, and every dispatch that it cannot know."""
        account = self._accounts.get(replica, _Account())
        report = account.report
        if report is None:
            charges = list(account.open.values())
            return Load(
                len(charges), sum(c.tokens for c in charges), float(sum(c.rows for c in charges))
            )
        age_s = self._clock.now_s() - account.reported_at_s
        stale = age_s > STALE_REPORTS * REPORT_INTERVAL_S
        newer = [c for c in account.open.values() if c.dispatch > report.last_dispatch]
        requests = report.waiting_requests + report.running_requests - account.ended_requests
        tokens = account.held_tokens - account.ended_tokens
        # A silent replica may be stuck: nothing is assumed to have run since.
        run = 0.0 if stale else age_s * report.rows_per_s
        backlog = max(0.0, report.backlog_rows - run)
        # Never below what we know to have open there ourselves: jobs that wait for room hold
        # nothing yet, and after a silence the report is a lower bound only.
        own_requests, own_tokens = self.own(replica)
        return Load(
            max(own_requests, max(0, requests) + len(newer)),
            max(own_tokens, max(0, tokens) + sum(c.tokens for c in newer)),
            backlog + sum(c.rows for c in newer),
            report.rows_per_s,
            stale,
        )

    def wait_s(self, replicas: Sequence[str], n_before: int) -> float:
        """How long it takes until these replicas, which have no room now, have let `n_before`
        requests in: by Little's law, from how many they have and how long one stays. What is open
        for longer than one stays counts by its age. 0 while none of them has ended any."""
        accounts = [self._accounts[key] for key in replicas if key in self._accounts]
        stays_s = [account.stay_s for account in accounts if account.stay_s is not None]
        if not stays_s:
            return 0.0
        now_s = self._clock.now_s()
        ages_s = [now_s - c.opened_at_s for account in accounts for c in account.open.values()]
        stay_s = max(sum(stays_s) / len(stays_s), sum(ages_s) / max(1, len(ages_s)))
        return n_before * stay_s / max(1, sum(self.load(key).requests for key in replicas))

    def _account(self, replica: str) -> _Account:
        return self._accounts.setdefault(replica, _Account())
