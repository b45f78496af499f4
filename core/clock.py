"""Time as an argument: leases, deadlines and backlogs take a `Clock`, so tests can advance it.

`now_s` is monotonic and compares only within one process; `wall_s` is Unix time for records.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Unix seconds, for records that people read."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 1000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_offset_s = wall_s - now_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds} s")
        self._now_s += seconds


SYSTEM_CLOCK = SystemClock()
