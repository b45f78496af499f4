"""A line of those who wait for room: who came first looks first, and who has begun before
others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Line:
    """One event loop. Those who have begun (a bind, a further attempt) stand before those who have
    not; within each, first come, first served."""

    def __init__(self) -> None:
        self._begun: deque[asyncio.Event] = deque()
        self._new: deque[asyncio.Event] = deque()

    def __len__(self) -> int:
        return len(self._begun) + len(self._new)

    def kick(self) -> None:
        """Something may have made room: the first in line looks."""
        if (first := self._first()) is not None:
            first.set()

    async def wait(self, look: Callable[[], T | None], *, begun: bool) -> T:
        """What `look` finds when its turn has come; it is asked on every kick until then. What it
        raises ends the wait."""
        turn, side = asyncio.Event(), self._begun if begun else self._new
        side.append(turn)
        try:
            while True:
                await turn.wait()
                turn.clear()
                if self._first() is turn and (found := look()) is not None:
                    return found
        finally:
            side.remove(turn)
            self.kick()

    def _first(self) -> asyncio.Event | None:
        side = self._begun or self._new
        return side[0] if side else None
