"""Arena slots that clients hold in advance, so that a put asks for nothing before it copies.

A slot is granted for blocks of one domain. The client writes payload and header by itself and then
commits; what it does not use it gives back, or its connection's end or `reserve_s` does. A second
writer's copy of a block that was put for a lease stays as a *twin* for as long as that lease: its
place was promised before anybody knew of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from headrace.core.clock import Clock
from headrace.core.ids import JobKey
from headrace.core.states import GRANT_TABLE, Grant, GrantEvent
from headrace.kvstore.residents import Residents
from headrace.kvstore.settings import Kind

SHARE = 16  # of the slots for blocks, one in so many may be granted or hold a twin;
# of those that a domain may have at most, one in so many may be granted

# A grant is HELD while it stands in the book, and where it goes then the table says.
_NEXT = {event: GRANT_TABLE.step(Grant.HELD, event).state for event in GrantEvent}


class GrantRange(NamedTuple):
    """Slots granted by one answer; their grants are numbered from `first` on."""

    first: int
    slots: list[int]
    connection: int
    domain: bytes
    expires_s: float

    def slot(self, number: int) -> int:
        return self.slots[number - self.first]


class GrantBook:
    """Slots of the arena's blocks that are granted, by number, and twins by lease. Every slot goes
    back to `residents` or to the caller of `redeem`, exactly once.

    One client holds at most `most` at a time; grants and twins together are at most a sixteenth of
    the slots, so that whatever was granted finds room as a twin."""

    def __init__(self, residents: Residents, clock: Clock, reserve_s: float, most: int) -> None:
        self._residents = residents
        self._clock = clock
        self.reserve_s = reserve_s
        self.closed = False  # the store is ending: it grants nothing more
        self._most = most
        self._held: dict[int, GrantRange] = {}
        self._by_connection: dict[int, int] = {}
        self._by_group: Counter[int] = Counter()  # grants alone, by the group of their domain
        self._twins: dict[JobKey, list[tuple[int, bytes]]] = {}  # slot and domain
        self._numbers = 0
        self.twins = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def most_in_all(self) -> int:
        return self._residents.regions[Kind.KV].slots // SHARE

    def make(self, connection: int, domain: bytes, count: int, least: int = 1) -> GrantRange | None:
        """Up to `count` further slots for a client, as far as its own bound, that of its domain and
        of all clients, and the arena allow; None if that is fewer than `least`, or none."""
        own, group = self._by_connection.get(connection, 0), self._residents.group(domain)
        left = self.most_in_all - len(self._held) - self.twins
        most = self._residents.orders[Kind.KV].groups[group].most // SHARE
        count = min(count, self._most - own, left, most - self._by_group[group])
        if self.closed or count < least:  # nothing leaves the arena for what nobody could use
            return None
        slots = self._residents.take_all(Kind.KV, domain, count)
        if len(slots) < max(1, least):
            for slot in slots:
                self._residents.give(Kind.KV, slot, domain)
            return None
        first, end = self._numbers + 1, self._numbers + 1 + len(slots)
        granted = GrantRange(first, slots, connection, domain, self._clock.now_s() + self.reserve_s)
        self._numbers = end - 1
        self._held |= dict.fromkeys(range(first, end), granted)
        self._by_connection[connection] = own + len(slots)
        self._by_group[group] += len(slots)
        return granted

    def redeem(self, connection: int, numbers: Iterable[int], domain: bytes) -> list[int | None]:
        """The slots of grants that were written for this domain; they are the caller's now. None
        for a grant that is not this connection's any more, or another domain's."""
        slots: list[int | None] = []
        for number in numbers:
            granted = self._held.get(number)
            if granted is None or granted.connection != connection or granted.domain != domain:
                slots.append(None)
                continue
            del self._held[number]
            slots.append(granted.slot(number))
        self._fewer(connection, domain, len(slots) - slots.count(None))
        return slots

    def give_back(self, connection: int, numbers: Iterable[int]) -> int:
        """A client does not need these; how many of them it held."""
        held = self._held
        mine = [n for n in numbers if n in held and held[n].connection == connection]
        return self._end(mine, GrantEvent.GIVE_BACK)

    def close_connection(self, connection: int) -> int:
        """Free everything that a connection was granted; how many slots that were."""
        if connection not in self._by_connection:
            return 0
        mine = [n for n, granted in self._held.items() if granted.connection == connection]
        return self._end(mine, GrantEvent.CLOSE)

    def expire(self) -> int:
        """End those whose time is over."""
        now_s = self._clock.now_s()
        late = [n for n, granted in self._held.items() if granted.expires_s <= now_s]
        return self._end(late, GrantEvent.EXPIRE)

    def keep_twin(self, owner: JobKey, slot: int, domain: bytes) -> None:
        """Leave a second copy, in a slot that was redeemed, readable until `free_twins` of its
        lease."""
        self._twins.setdefault(owner, []).append((slot, domain))
        self.twins += 1

    def free_twins(self, alive: Callable[[JobKey], bool]) -> None:
        """Free the twins of leases that are no more."""
        for owner in [owner for owner in self._twins if not alive(owner)]:
            gone = self._twins.pop(owner)
            self.twins -= len(gone)
            for slot, domain in gone:
                self.free(slot, domain)

    def slots(self) -> Collection[int]:
        """All slots that are granted or hold a twin."""
        twins = [slot for kept in self._twins.values() for slot, _ in kept]
        return [granted.slot(number) for number, granted in self._held.items()] + twins

    def domains(self) -> list[bytes]:
        """The domain of every slot that is granted or holds a twin."""
        twins = [domain for kept in self._twins.values() for _, domain in kept]
        return [granted.domain for granted in self._held.values()] + twins

    def _end(self, numbers: Iterable[int], event: GrantEvent) -> int:
        assert _NEXT[event] is Grant.ENDED
        gone = dict.fromkeys(numbers)
        for number in gone:
            granted = self._held.pop(number)
            self._fewer(granted.connection, granted.domain, 1)
            self.free(granted.slot(number), granted.domain)
        return len(gone)

    def _fewer(self, connection: int, domain: bytes, count: int) -> None:
        self._by_group[self._residents.group(domain)] -= count
        left = self._by_connection.get(connection, 0) - count
        if left:
            self._by_connection[connection] = left
        else:
            self._by_connection.pop(connection, None)

    def free(self, slot: int, domain: bytes) -> None:
        """A slot that was redeemed, or is a grant's or a twin's no more, is the arena's again."""
        # Blank first: the client may have written a header that readers would believe.
        residents = self._residents
        residents.arena.blank_header(residents.regions[Kind.KV], slot)
        residents.give(Kind.KV, slot, domain)
