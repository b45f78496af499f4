"""Who holds which objects, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.core.ids import JobKey
from headrace.kvstore.objects import Entry
from headrace.kvstore.settings import Kind


@dataclass(slots=True)
class _Lease:
    alone: frozenset[JobKey]  # what an object has that no other lease holds: one for all of them
    expires_s: float = 0.0
    entries: set[Entry] = field(default_factory=set)


class LeaseBook:
    """Leases by owner. Prefill and decode share the owner (one attempt at one request), so either
    renews and either releases; a dead owner's lease ends by expiry.

    An owner that was released as a whole is over: what still arrives in its name (a put under way,
    a late open) is served without a lease and counted in `late`, so nothing is held for an end that
    comes no more. Memory of that lasts one lease time."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._leases: dict[JobKey, _Lease] = {}
        self._over: OrderedDict[JobKey, float] = OrderedDict()
        self.late = 0
        self.lapsed = 0  # leases that ended by their time, not by a release
        self.held = 0  # objects that any lease holds

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, owner: object) -> bool:
        return owner in self._leases

    def owners(self) -> tuple[JobKey, ...]:
        return tuple(self._leases)

    def entries(self, owner: JobKey) -> frozenset[Entry]:
        lease = self._leases.get(owner)
        return frozenset(lease.entries) if lease else frozenset()

    def hold(self, owner: JobKey, entry: Entry) -> bool:
        """As `hold_all` for one object."""
        return self.hold_all(owner, (entry,))

    def hold_all(self, owner: JobKey, entries: Sequence[Entry]) -> bool:
        """Add objects to a lease, made if need be and renewed. False for an owner that is over.

        Mutates `leases` of the entries; the caller settles those that nobody held before."""
        if owner in self._over:
            self.late += len(entries)
            return False
        lease = self._renewed(owner)
        lease.entries.update(entries)
        for entry in entries:
            self.held += not entry.leases
            entry.leases = entry.leases | lease.alone if entry.leases else lease.alone
        return True

    def _renewed(self, owner: JobKey) -> _Lease:
        """The owner's lease, made if need be, good for its time from now on."""
        lease = self._leases.get(owner)
        if lease is None:
            lease = self._leases[owner] = _Lease(frozenset((owner,)))
        lease.expires_s = self._clock.now_s() + self._lease_s
        return lease

    def renew(self, owner: JobKey) -> bool:
        lease = self._leases.get(owner)
        if lease is None:
            return False
        lease.expires_s = self._clock.now_s() + self._lease_s
        return True

    def release(self, owner: JobKey, kind: Kind | None) -> tuple[Entry, ...]:
        """End a lease (kind None) or its part on one kind; the entries it no longer holds.

        Idempotent. A lease left without objects is gone, but its owner is over only with None."""
        if kind is None:
            self._over[owner] = self._clock.now_s() + self._lease_s
            self._over.move_to_end(owner)
        lease = self._leases.get(owner)
        if lease is None:
            return ()
        freed = tuple(e for e in lease.entries if kind is None or e.kind is kind)
        return self._let_go(owner, lease, freed)

    def forget(self, entry: Entry) -> None:
        """The object is gone: take it out of all leases."""
        for owner in tuple(entry.leases):
            self._let_go(owner, self._leases[owner], (entry,))

    def expire(self) -> tuple[Entry, ...]:
        """End every lease whose time is over; the entries they held."""
        now_s = self._clock.now_s()
        freed: list[Entry] = []
        for owner, lease in [(o, le) for o, le in self._leases.items() if le.expires_s <= now_s]:
            self.lapsed += 1
            freed += self._let_go(owner, lease, tuple(lease.entries))
        while self._over and next(iter(self._over.values())) <= now_s:
            self._over.popitem(last=False)
        return tuple(freed)

    def _let_go(
        self, owner: JobKey, lease: _Lease, entries: tuple[Entry, ...]
    ) -> tuple[Entry, ...]:
        for entry in entries:
            lease.entries.discard(entry)
            if entry.leases:
                entry.leases -= lease.alone
                self.held -= not entry.leases
        if not lease.entries:
            self._leases.pop(owner, None)
        return entries
