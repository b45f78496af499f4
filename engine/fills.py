"""Who may write into a reserved block from outside, and until when.

Blocks that a sequence loads are written by other threads while the engine's thread goes on, and a
sequence may be released in the middle. Every fill names a ticket. Once the ticket is closed no new
write begins, and a block with a writer inside is not handed out again until the writer left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class FillGuard:
    """Thread-safe. Tickets are opened and closed by the engine's thread; `enter`, `leave` and
    `complete` belong to the writers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_ticket = 1
        self._expected: dict[int, set[int]] = {}
        self._complete: dict[int, set[int]] = {}
        self._inside: Counter[int] = Counter()
        self._left: list[int] = []

    def open(self, blocks: Iterable[int]) -> int:
        """A fresh ticket for writing these blocks."""
        with self._lock:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._expected[ticket] = set(blocks)
            self._complete[ticket] = set()
            return ticket

    def enter(self, ticket: int, block: int) -> bool:
        """Whether the write may begin. After True, `leave(block)` must follow."""
        with self._lock:
            if block not in self._expected.get(ticket, ()):
                return False
            self._inside[block] += 1
            # A second write of the same block makes it incomplete until that one ends well.
            self._complete[ticket].discard(block)
            return True

    def leave(self, ticket: int, block: int, *, complete: bool) -> bool:
        """The write ended; `complete`: all bytes are there and good. Returns whether the ticket
        is still open, that is, whether the bytes count for anything."""
        with self._lock:
            self._inside[block] -= 1
            if self._inside[block] == 0:
                del self._inside[block]
                self._left.append(block)
            done = self._complete.get(ticket)
            if done is not None and complete:
                done.add(block)
            return done is not None

    def look(self, ticket: int) -> tuple[frozenset[int], bool]:
        """(blocks of an open ticket whose bytes are all there, whether a writer is inside one)."""
        with self._lock:
            inside = any(block in self._inside for block in self._expected.get(ticket, ()))
            return frozenset(self._complete.get(ticket, ())), inside

    def close(self, ticket: int) -> frozenset[int]:
        """No write begins under this ticket any more. Returns its blocks with a writer inside.
        Closing twice is harmless: the second time returns nothing."""
        with self._lock:
            blocks = self._expected.pop(ticket, set())
            self._complete.pop(ticket, None)
            return frozenset(block for block in blocks if block in self._inside)

    def take_left(self) -> list[int]:
        """Blocks whose last writer left since the last call."""
        with self._lock:
            left, self._left = self._left, []
            return [block for block in left if block not in self._inside]
