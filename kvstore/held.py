"""What a client of the store holds in leases, by its own account."""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.core.ids import JobKey


class HeldLeases:
    """Leases taken or renewed through one client and neither ended through it nor expired since.

    An owner that is over is remembered for as long as the store does: the answer to what was asked
    in its name before the end may come after it, and the store has leased nothing for it then."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock, self._lease_s = clock, lease_s
        self._until_s: dict[JobKey, float] = {}
        self._over_until_s: dict[JobKey, float] = {}  # the oldest first
        self._lapsed = 0

    def __len__(self) -> int:
        now_s, before = self._clock.now_s(), len(self._until_s)
        self._until_s = {key: end_s for key, end_s in self._until_s.items() if end_s > now_s}
        self._lapsed += before - len(self._until_s)
        return len(self._until_s)

    @property
    def lapsed(self) -> int:
        """How many ended by their time so far."""
        len(self)
        return self._lapsed

    def note(self, lease: JobKey | None, taken: bool) -> None:
        """An answer of the store: whether it leases something to this owner from now on."""
        if lease is not None and taken and lease not in self._over_until_s:
            self._until_s[lease] = self._clock.now_s() + self._lease_s

    def end(self, lease: JobKey) -> None:
        """The owner is over: it holds nothing, whatever answers still come."""
        now_s, over = self._clock.now_s(), self._over_until_s
        self._until_s.pop(lease, None)
        over.pop(lease, None)
        over[lease] = now_s + self._lease_s
        while next(iter(over.values())) <= now_s:
            del over[next(iter(over))]

    def clear(self) -> None:
        """All ended with the store that gave them."""
        self._until_s.clear()
        self._over_until_s.clear()
