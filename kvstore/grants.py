"""Arena slots that clients hold in advance, so that a put asks for nothing before it copies.

A slot is granted for blocks of one domain. The client writes payload and header by itself and then
commits; what it does not use it gives back, or its connection's end or `reserve_s` does. A second
writer's copy of a block that was put for a lease stays as a *twin* for as long as that lease: its
place was promised before anybody knew of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.ids import JobKey
from headrace.core.states import GRANT_TABLE, Grant, GrantEvent
from headrace.kvstore.residents import Residents
from headrace.kvstore.settings import Kind

SHARE = 16  # of the slots for blocks, one in so many may be granted or hold a twin;
# of those that a domain may have at most, one in so many may be granted

_FILLED = GRANT_TABLE.step(Grant.HELD, GrantEvent.COMMIT).state


@dataclass(slots=True, eq=False)
class GrantedSlot:
    """Mutable: `state` moves by `GRANT_TABLE`."""

    number: int
    connection: int
    domain: bytes
    slot: int
    expires_s: float
    state: Grant = Grant.HELD


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
        self._held: dict[int, GrantedSlot] = {}
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

    def make(self, connection: int, domain: bytes, count: int, least: int = 1) -> list[GrantedSlot]:
        """Up to `count` further slots for a client, as far as its own bound, that of its domain and
        of all clients, and the arena allow; none if that is fewer than `least`."""
        own, group = self._by_connection.get(connection, 0), self._residents.group(domain)
        left = self.most_in_all - len(self._held) - self.twins
        most = self._residents.orders[Kind.KV].groups[group].most // SHARE
        count = min(count, self._most - own, left, most - self._by_group[group])
        if self.closed or count < least:  # nothing leaves the arena for what nobody could use
            return []
        expires_s = self._clock.now_s() + self.reserve_s
        made: list[GrantedSlot] = []
        while len(made) < count:
            slot = self._residents.take(Kind.KV, domain)
            if slot is None:
                break
            self._numbers += 1
            granted = GrantedSlot(self._numbers, connection, domain, slot, expires_s)
            self._held[granted.number] = granted
            made.append(granted)
        if made:
            self._by_connection[connection] = own + len(made)
            self._by_group[group] += len(made)
        if len(made) < least:
            self._end(made, GrantEvent.GIVE_BACK)
            return []
        return made

    def redeem(self, connection: int, numbers: Iterable[int], domain: bytes) -> list[int | None]:
        """The slots of grants that were written for this domain; they are the caller's now. None
        for a grant that is not this connection's any more, or another domain's."""
        slots: list[int | None] = []
        for number in numbers:
            granted = self._held.get(number)
            if granted is None or granted.connection != connection or granted.domain != domain:
                slots.append(None)
                continue
            granted.state = _FILLED
            del self._held[number]
            self._by_group[self._residents.group(domain)] -= 1
            slots.append(granted.slot)
        self._fewer(connection, len(slots) - slots.count(None))
        return slots

    def give_back(self, connection: int, numbers: Iterable[int]) -> int:
        """A client does not need these; how many of them it held."""
        found = [self._held[number] for number in numbers if number in self._held]
        return self._end((g for g in found if g.connection == connection), GrantEvent.GIVE_BACK)

    def close_connection(self, connection: int) -> int:
        """Free everything that a connection was granted; how many slots that were."""
        if connection not in self._by_connection:
            return 0
        mine = [g for g in self._held.values() if g.connection == connection]
        return self._end(mine, GrantEvent.CLOSE)

    def expire(self) -> int:
        """End those whose time is over."""
        now_s = self._clock.now_s()
        late = [g for g in self._held.values() if g.expires_s <= now_s]
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
        return [granted.slot for granted in self._held.values()] + twins

    def domains(self) -> list[bytes]:
        """The domain of every slot that is granted or holds a twin."""
        twins = [domain for kept in self._twins.values() for _, domain in kept]
        return [granted.domain for granted in self._held.values()] + twins

    def _end(self, ending: Iterable[GrantedSlot], event: GrantEvent) -> int:
        gone = list(dict.fromkeys(ending))
        for granted in gone:
            self._out(granted, event)
            self.free(granted.slot, granted.domain)
        return len(gone)

    def _out(self, granted: GrantedSlot, event: GrantEvent) -> None:
        GRANT_TABLE.move(granted, event, granted.number)
        del self._held[granted.number]
        self._by_group[self._residents.group(granted.domain)] -= 1
        self._fewer(granted.connection, 1)

    def _fewer(self, connection: int, count: int) -> None:
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
