"""A breaker: what failed several times in a row is left alone for a while."""

from __future__ import annotations

from headrace.core.clock import Clock


class Breaker:
    """Opens after `failures` in a row, for `rest_s`; then lets one call through to try."""

    def __init__(self, clock: Clock, failures: int = 3, rest_s: float = 1.0) -> None:
        self._clock = clock
        self._failures = failures
        self._rest_s = rest_s
        self._in_a_row = 0
        self._closed_again_at_s = 0.0

    def admits(self) -> bool:
        """Whether a call may be made now. The first one after the rest is the trial: until it
        succeeds, all others are refused for another rest."""
        if self._in_a_row < self._failures:
            return True
        now_s = self._clock.now_s()
        if now_s < self._closed_again_at_s:
            return False
        self._closed_again_at_s = now_s + self._rest_s
        return True

    def success(self) -> None:
        self._in_a_row = 0

    def failure(self) -> None:
        self._in_a_row += 1
        if self._in_a_row >= self._failures:
            self._closed_again_at_s = self._clock.now_s() + self._rest_s
