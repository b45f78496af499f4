"""Which slots of one arena region are free, and how often each was used."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """The slots of one region. Every slot is free, reserved (a writer or a load fills it) or
    resident (holds an object); `free + reserved + resident == total` at any moment.

    A slot's generation grows with every use, so a place that names an older one is stale."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self.resident = 0
        self._free: deque[int] = deque(range(total))
        self._generations = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def take(self) -> int | None:
        """Reserve the slot that was freed longest ago (so a stale reader has the best chance to
        be done with it); None when there is none."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._generations[slot] = (self._generations[slot] + 1) & 0xFFFF_FFFF
        self.reserved += 1
        return slot

    def take_all(self, count: int) -> list[int]:
        """As `take`, so many of the free ones."""
        slots = [self._free.popleft() for _ in range(count)]
        for slot in slots:
            self._generations[slot] = (self._generations[slot] + 1) & 0xFFFF_FFFF
        self.reserved += count
        return slots

    def fill(self, count: int) -> None:
        """So many reserved slots hold their objects now."""
        self.reserved -= count
        self.resident += count

    def give_reserved(self, slot: int) -> None:
        self.reserved -= 1
        self._free.append(slot)

    def give_resident(self, slot: int) -> None:
        self.resident -= 1
        self._free.append(slot)

    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free)
