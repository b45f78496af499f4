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

    def take(self, count: int) -> list[int]:
        """Reserve up to so many slots, those that were freed longest ago (so a stale reader has the
        best chance to be done with them)."""
        free, generations = self._free, self._generations
        taken = [free.popleft() for _ in range(min(count, len(free)))]
        for slot in taken:
            generations[slot] = (generations[slot] + 1) & 0xFFFF_FFFF
        self.reserved += len(taken)
        return taken

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

    def free_uses(self) -> dict[int, int]:
        """The free slots, with the generation of the use that has ended: a slot that is filled
        later has another."""
        return {slot: self._generations[slot] for slot in self._free}
