"""Arena slots that writers may fill: each ends by its seal, its abandonment or its time."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.clock import Clock
from headrace.core.ids import JobKey
from headrace.core.states import VISIBILITY_TABLE, VisibilityEvent
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.objects import Reservation, object_key
from headrace.kvstore.residents import Residents


class ReservationBook:
    """Reservations by number. Every slot that it holds goes back to `residents` or to the caller
    of `redeem`, exactly once."""

    def __init__(self, residents: Residents, clock: Clock, reserve_s: float) -> None:
        self._residents = residents
        self._clock = clock
        self._reserve_s = reserve_s
        self._open: dict[int, Reservation] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._open)

    def make(self, connection: int, facts: ObjectFacts, lease: JobKey | None) -> Reservation | None:
        """A slot for one writer; None when there is no room now. The object must fit its kind.

        Two writers of one object both get a slot; the first to seal wins."""
        slot = self._residents.take(facts.kind, facts.domain)
        if slot is None:
            return None
        self._numbers += 1
        key = object_key(facts.kind, facts.namespace, facts.digest)
        expires_s = self._clock.now_s() + self._reserve_s
        made = Reservation(self._numbers, connection, key, facts, slot, lease, expires_s)
        self._open[made.number] = made
        return made

    def redeem(self, connection: int, number: int) -> Reservation | None:
        """Take a reservation out, its slot with it; None if it is not this connection's any
        more."""
        made = self._open.get(number)
        if made is None or made.connection != connection:
            return None
        del self._open[number]
        return made

    def abandon(self, connection: int, numbers: Iterable[int]) -> int:
        """Give reservations back unsealed; how many of them were this connection's."""
        found = (self._open.get(number) for number in numbers)
        return self._cancel(made for made in found if made and made.connection == connection)

    def close_connection(self, connection: int) -> int:
        """Free everything a connection reserved; how many slots that were."""
        return self._cancel(made for made in self._open.values() if made.connection == connection)

    def expire(self) -> int:
        """End those whose time is over."""
        now_s = self._clock.now_s()
        return self._cancel(made for made in self._open.values() if made.expires_s <= now_s)

    def _cancel(self, ending: Iterable[Reservation]) -> int:
        made = tuple(dict.fromkeys(ending))
        for one in made:
            step = VISIBILITY_TABLE.step(one.visibility, VisibilityEvent.DROP, one.number)
            one.visibility = step.state
            del self._open[one.number]
            self._residents.give(one.facts.kind, one.slot, one.facts.domain)
        return len(made)
