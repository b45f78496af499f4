"""What waits to be written to disk, and whether a new object does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.objects import Entry, Saving
from headrace.kvstore.policy import window_pays
from headrace.kvstore.settings import Kind

if TYPE_CHECKING:
    from headrace.kvstore.state import StoreState


def first_saving(facts: ObjectFacts, state: StoreState, cost_share: float) -> Saving:
    """How the saving of a new object begins. The block that a window record hangs on says how large
    blocks are, if it is known; else the largest is taken."""
    if facts.kind is Kind.STATE:
        return Saving.GIVEN_UP
    if facts.kind is Kind.SWA:
        head = state.find(Kind.KV, facts.namespace, facts.parent)
        block = state.residents.regions.get(Kind.KV)
        size = head.facts.payload_bytes if head else block.payload_bytes if block else 0
        if not window_pays(facts.payload_bytes, facts.block, size, cost_share):
            return Saving.HELD_BACK
    return Saving.WAITING


class SaveQueue:
    """Objects whose saving is `WAITING`, in the order in which they are to be written. What was
    dropped or given up meanwhile is passed over."""

    def __init__(self) -> None:
        self._queue: deque[Entry] = deque()
        self.waiting_bytes = 0  # of the queue, what will be passed over included

    def add(self, entry: Entry, *, first: bool) -> None:
        """Mutates `entry.saving`."""
        entry.saving = Saving.WAITING
        self.waiting_bytes += entry.facts.payload_bytes
        if first:
            self._queue.appendleft(entry)
        else:
            self._queue.append(entry)

    def extend(self, entries: Sequence[Entry]) -> None:
        """As `add` behind all others, for new objects that are `WAITING` already."""
        self._queue.extend(entries)
        self.waiting_bytes += sum([entry.facts.payload_bytes for entry in entries])

    def take(self, limit_bytes: int) -> list[Entry]:
        """The first of them, at least one and about `limit_bytes`; they are `WRITING` now."""
        taken: list[Entry] = []
        total = 0
        while self._queue and (not taken or total < limit_bytes):
            entry = self._queue.popleft()
            self.waiting_bytes -= entry.facts.payload_bytes
            if entry.dropped or entry.saving is not Saving.WAITING:
                continue
            entry.saving = Saving.WRITING
            taken.append(entry)
            total += entry.facts.payload_bytes
        return taken
