"""How many attempts a router may make beyond the first of each request (docs/decisions/0016).

Without a bound, a pool that fails under load is given its load several times over.
"""

from __future__ import annotations

from headrace.core.errors import HeadraceError, Unavailable

RETRY_BURST = 10.0
EARN_BACK_S = 10.0  # told to a client that is refused for it; the credit comes back by requests


class RetryBudgetSpent(Unavailable):
    """A further attempt would be possible, and the router has made too many of late."""

    code = "retry_budget_spent"


class RetryBudget:
    """At most a share of all requests may be tried again, with a small allowance to begin with."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = RETRY_BURST if share else 0.0

    def earn(self) -> None:
        self._credit = min(RETRY_BURST, self._credit + self._share)

    def take(self) -> bool:
        """Whether another attempt is allowed now; uses one up."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def refusal(self, error: HeadraceError) -> HeadraceError:
        """What to tell a client whose attempt ended by `error` and gets no other: that the budget
        is spent. Where nothing is ever tried again, `error` itself."""
        if not self._share:
            return error
        return RetryBudgetSpent(
            f"{error.message}; it could be tried again, but the router's retry budget is used up"
            f" (retry_share is {self._share:g} of all requests)",
            retry_after_s=EARN_BACK_S,
        )


class Loss:
    """The loss of one replica, shared by all requests that it had: together they cost one further
    attempt, taken when the first of them needs it. Mutable; ask on the router's loop."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._allowed: bool | None = None

    def take(self) -> bool:
        """Whether those who lost this replica are tried again: the same answer for all of them."""
        if self._allowed is None:
            self._allowed = self._budget.take()
        return self._allowed
