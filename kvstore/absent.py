"""What the index was asked for a moment ago and did not have: not asked for again at once."""

from __future__ import annotations

from collections import OrderedDict

from headrace.core.clock import Clock


class AbsentKeys:
    """At most `most` keys, each believed absent for `life_s`; 0 of either believes nothing.

    A key that is listed meanwhile is found up to `life_s` later: a miss, and nothing worse."""

    def __init__(self, clock: Clock, life_s: float, most: int) -> None:
        self._clock = clock
        self._life_s = life_s
        self._most = most if life_s > 0 else 0
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, key: bytes) -> None:
        if self._most:
            self._until_s[key] = self._clock.now_s() + self._life_s
            self._until_s.move_to_end(key)
            while len(self._until_s) > self._most:
                self._until_s.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._until_s.pop(key, None)

    def __contains__(self, key: bytes) -> bool:
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if until_s > self._clock.now_s():
            return True
        del self._until_s[key]
        return False
