"""Who gives way when the first in line finds no room: a pure policy.

Whoever waits for room stands in one line: new sequences from their arrival, parked ones from the
moment they were parked. Room goes to the first in line and to nobody else. What it lacks others
give up, by three rules:

1. Nobody gives way unless the first in line can go on by it.
2. A sequence that runs gives way after `park_after_tokens` tokens in its slot, not before.
3. Those who gave up their slot and kept their blocks give these up first, the last to arrive before
   others; of those who run the one that had its slot longest goes first.

So the first in line waits no longer than the ones who run need for `park_after_tokens` tokens (and
known rows before them), whoever comes later waits that long once for each before him, and between
two waits everybody makes `park_after_tokens` tokens: nobody starves and nothing runs in circles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.ids import JobKey


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence that may give way. `runs`: it decodes and has a slot; else it is parked with its
    blocks. `since_tokens`: tokens since it has its slot."""

    key: JobKey
    blocks: frozenset[int]
    runs: bool
    since_tokens: int


@dataclass(frozen=True, slots=True)
class Room:
    """What the first in line lacks, and who holds what, in order of arrival. `shared`: references
    of the blocks that have more than one: free when all who refer to them gave way."""

    missing_slots: int
    missing_blocks: int
    holders: tuple[Holder, ...]
    shared: Mapping[int, int]

    @property
    def suffices(self) -> bool:
        """Whether the first in line lacks nothing."""
        return not self.missing_slots and not self.missing_blocks


@dataclass(frozen=True, slots=True)
class Way:
    """What one sequence is to give up: its slot, if it has one, and its blocks too."""

    key: JobKey
    gives_blocks: bool


def give_way(room: Room, park_after_tokens: int) -> tuple[Way, ...]:
    """The fewest, by the rules above, who make room for the first in line; () when they lack
    nothing, or cannot be helped now. `park_after_tokens` 0: nobody is ever parked."""
    if room.suffices or park_after_tokens == 0:
        return ()
    by_arrival = list(enumerate(room.holders))
    parked = [h for _, h in reversed(by_arrival) if not h.runs]
    ready = [(i, h) for i, h in by_arrival if h.runs and h.since_tokens >= park_after_tokens]
    ready.sort(key=lambda each: (-each[1].since_tokens, -each[0]))
    running = [h for _, h in ready]
    chosen = _for_blocks(room, parked + running) if room.missing_blocks else []
    if chosen is None:
        return ()
    ways = [Way(holder.key, gives_blocks=True) for holder in chosen]
    lacking = room.missing_slots - sum(holder.runs for holder in chosen)
    more = [holder for holder in running if holder not in chosen][: max(0, lacking)]
    if len(more) < lacking:
        return ()
    return (*ways, *(Way(holder.key, gives_blocks=False) for holder in more))


def _for_blocks(room: Room, candidates: Sequence[Holder]) -> list[Holder] | None:
    """The first candidates whose blocks suffice, without those who add nothing."""
    chosen: list[Holder] = []
    for holder in candidates:
        chosen.append(holder)
        if _freed(room, chosen) >= room.missing_blocks:
            break
    else:
        return None
    for holder in tuple(chosen[:-1]):
        rest = [each for each in chosen if each is not holder]
        if _freed(room, rest) >= room.missing_blocks:
            chosen = rest
    return chosen


def _freed(room: Room, holders: Sequence[Holder]) -> int:
    """Blocks that nobody refers to once all of `holders` gave theirs up."""
    given = Counter(block for holder in holders for block in holder.blocks)
    return sum(count == room.shared.get(block, 1) for block, count in given.items())
