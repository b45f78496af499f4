"""What the store's state knows of its disk: who lies in which segment, and what a reuse costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.kvstore.eviction import Guarantees, RecyclePlan, plan_recycle
from headrace.kvstore.kin import Kin
from headrace.kvstore.layout import slot_bytes
from headrace.kvstore.objects import DiskPlace, Entry
from headrace.kvstore.policy import COMMON, MUST_STAY_MOST, StorePolicy


class DiskBook:
    """Objects by segment, and bytes of slots by group of domains. Mutated by `StoreState` alone.

    `ssd_bytes` is what shares are shares of; 0 gives no guarantees."""

    def __init__(self, policy: StorePolicy, ssd_bytes: int, group_of: Callable[[bytes], int]):
        self.by_segment: dict[int, set[Entry]] = {}
        self.to_erase: list[DiskPlace] = []  # damaged or orphaned slots, to be blanked on disk
        self.used_bytes: dict[int, int] = {}  # by group
        self.payload_bytes = 0
        self.objects = 0
        self.must_stay: Callable[[Entry], bool] = lambda entry: False
        self._policy = policy
        self._ssd_bytes = ssd_bytes
        self._group_of = group_of

    def put(self, places: Sequence[tuple[Entry, DiskPlace]]) -> None:
        """These objects lie there now, written and synced; former places of theirs are free."""
        alike: dict[tuple[bytes, int], int] = {}  # how many of a domain and size
        for entry, disk in places:
            self.leave(entry)
            entry.disk = disk
            entry.touched = False
            self.by_segment.setdefault(disk.segment, set()).add(entry)
            facts = entry.facts
            key = facts.domain, facts.payload_bytes
            alike[key] = alike.get(key, 0) + 1
        for (domain, size), count in alike.items():
            self._count(domain, size, count)

    def leave(self, entry: Entry) -> None:
        if entry.disk is not None:
            self.by_segment[entry.disk.segment].discard(entry)
            entry.disk = None
            self._count(entry.facts.domain, entry.facts.payload_bytes, -1)

    def _count(self, domain: bytes, size: int, count: int) -> None:
        group = self._group_of(domain)
        self.used_bytes[group] = self.used_bytes.get(group, 0) + count * slot_bytes(size)
        self.payload_bytes += count * size
        self.objects += count

    def plan(self, segment: int, kin: Kin, slots: int, room: int) -> RecyclePlan | None:
        """What a segment of `slots` keeps when it is reused, if there are `room` slots for what it
        keeps; None when it must not be reused now."""
        policy = self._policy

        def group_of(entry: Entry) -> int:
            return self._group_of(entry.facts.domain)

        entries = self.by_segment.get(segment, set())
        size = max((slot_bytes(entry.facts.payload_bytes) for entry in entries), default=0)
        guarantees = Guarantees(
            {
                number: max(
                    0, self.used_bytes.get(number, 0) - int(share.guaranteed * self._ssd_bytes)
                )
                for number, share in enumerate(policy.domain_shares, COMMON + 1)
            }
        )
        return plan_recycle(
            entries,
            kin.children,
            must_stay=self.must_stay,
            returns=lambda entry: entry.touched and not self.over_most(group_of(entry)),
            group_of=group_of,
            guarantees=guarantees,
            slot_bytes=size,
            must_room=min(room, int(slots * MUST_STAY_MOST)),
            room=min(room, int(slots * policy.second_chance_share)),
        )

    def over_most(self, group: int) -> bool:
        """Whether a group has more of the disk than it may: then it gets no second chances."""
        shares = self._policy.domain_shares
        most = shares[group - 1].most if group else 1.0
        return self._ssd_bytes > 0 and self.used_bytes.get(group, 0) > most * self._ssd_bytes
