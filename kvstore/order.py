"""In what order objects leave the arena: probation before proven, within the shares of domains.

One `LeaveOrder` a kind. An object that only one request ever used stands in *probation*; a second
request makes it *proven*. While those in probation hold more than their share of the slots the
longest unused of them goes first, so a stream of one-time prompts washes out itself and not what
others come back for. What comes back before as many others have left as there are slots was let go
too early: it is proven at once (bench/kvstore/replay_trace.py compares this with plain orders).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.core.clock import Clock
from headrace.kvstore.policy import Allowance, may_lose

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Standing:
    group: int
    proven: bool
    waits: bool = False  # stands in the queue of its group and standing
    turn: int = 0  # counts uses: orders queues among each other
    used_at_s: float = 0.0


class LeaveOrder(Generic[T]):
    """Objects resident in `slots` slots. Mutable; compares nothing but identity of objects.

    `taken` counts slots by group, those that are still being filled included; of residents the
    evictable ones stand in queues. `victim` is pure: it changes nothing."""

    def __init__(
        self, slots: int, groups: tuple[Allowance, ...], probation_share: float, clock: Clock
    ) -> None:
        self.groups = groups
        self.taken = [0] * len(groups)
        self.in_probation = 0  # residents that only one request used, evictable or not
        self.departures = 0  # how many objects have left
        self._slots = slots
        self._probation_slots = int(slots * probation_share)
        self._standing: dict[T, _Standing] = {}
        self._queues: dict[tuple[int, bool], OrderedDict[T, None]] = {}
        self._clock = clock
        self._turns = 0

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, item: object) -> bool:
        """Whether it is resident and may leave."""
        standing = self._standing.get(item)  # type: ignore[arg-type]
        return standing is not None and standing.waits

    def may_leave(self) -> frozenset[T]:
        """Everything that stands in a queue."""
        return frozenset(item for queue in self._queues.values() for item in queue)

    def full_for(self, group: int) -> bool:
        """Whether a group has all that it may ever have."""
        return self.taken[group] >= self.groups[group].most

    def room(self, group: int) -> int:
        """How many slots more it may have, were they free."""
        return max(0, self.groups[group].most - self.taken[group])

    # residents -------------------------------------------------------------------------------

    def enter(self, item: T, group: int, *, proven: bool) -> None:
        """A slot that the group had taken holds this object now. It may not leave yet."""
        self._standing[item] = _Standing(group, proven)
        self.in_probation += not proven

    def enter_all(self, items: Iterable[T], group: int) -> None:
        """As `enter`, for objects that only one request has used."""
        before = len(self._standing)
        self._standing.update([(item, _Standing(group, False)) for item in items])
        self.in_probation += len(self._standing) - before

    def leave(self, item: T) -> None:
        """The object has no slot any more; its group has one less."""
        standing = self._standing.pop(item)
        self._take_out(item, standing)
        self.taken[standing.group] -= 1
        self.in_probation -= not standing.proven
        self.departures += 1

    def left_lately(self, departure: int) -> bool:
        """Whether what was the `departure`-th to leave has done so within the last `slots`."""
        return departure > 0 and self.departures - departure < self._slots

    def allow(self, item: T) -> bool:
        """The object may leave from now on, last of its queue; False if it could already."""
        standing = self._standing[item]
        if standing.waits:
            return False
        self._put(item, standing)
        return True

    def allow_all(self, items: Iterable[T]) -> bool:
        """As `allow`, one after another; whether any could not leave before."""
        turn, now_s = self._turns, self._clock.now_s()
        for item in items:
            standing = self._standing[item]
            if not standing.waits:
                turn += 1
                standing.turn, standing.used_at_s, standing.waits = turn, now_s, True
                self._queue(standing)[item] = None
        changed, self._turns = turn > self._turns, turn
        return changed

    def forbid(self, item: T) -> None:
        """The object is held or in use. For one that is no resident this does nothing."""
        standing = self._standing.get(item)
        if standing is not None:
            self._take_out(item, standing)

    def use(self, item: T, *, again: bool) -> None:
        """The object was used: it leaves after others. `again`: by a further request."""
        standing = self._standing.get(item)
        if standing is None:
            return
        waits = standing.waits and self._take_out(item, standing)
        if again and not standing.proven:
            standing.proven = True
            self.in_probation -= 1
        if waits:
            self._put(item, standing)

    # choice ----------------------------------------------------------------------------------

    def victim(self, group: int) -> T | None:
        """What goes so that `group` may have its slot; None when nothing may."""
        allowed = may_lose(self.groups, self.taken, group)
        first = self.in_probation <= self._probation_slots  # proven, or in probation
        for proven in (first, not first):
            found = self._oldest(allowed, proven)
            if found is not None:
                return found
        # A group below its guarantee whose borrowers are all held: its own, then.
        found = self._oldest((group,), first)
        return self._oldest((group,), not first) if found is None else found

    def unused_since(self, before_s: float) -> Iterator[T]:
        """What may leave and was last used, or let go, before this moment; longest first in each
        queue. The caller may make them leave meanwhile."""
        for queue in tuple(self._queues.values()):
            while queue:
                item = next(iter(queue))
                if self._standing[item].used_at_s >= before_s:
                    break
                yield item
                if item in queue:  # it stayed: the rest of this queue waits for the next time
                    break

    def _oldest(self, groups: tuple[int, ...], proven: bool) -> T | None:
        heads = [
            (self._standing[item].turn, item)
            for group in groups
            if (queue := self._queues.get((group, proven)))
            for item in (next(iter(queue)),)
        ]
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def _queue(self, standing: _Standing) -> OrderedDict[T, None]:
        key = (standing.group, standing.proven)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = OrderedDict()
        return queue

    def _put(self, item: T, standing: _Standing) -> None:
        self._turns += 1
        standing.turn = self._turns
        standing.used_at_s = self._clock.now_s()
        standing.waits = True
        self._queue(standing)[item] = None

    def _take_out(self, item: T, standing: _Standing) -> bool:
        """Out of its queue, if it stands in one; whether it did."""
        if not standing.waits:
            return False
        standing.waits = False
        del self._queue(standing)[item]
        return True
