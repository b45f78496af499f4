"""What a segment that is about to be reused keeps, and what goes with it.

Segments go oldest first. An object that was used since it was written gets a second chance: it
moves to the open segment. A chain loses its tail before its head, as far as whole segments allow:
what a kept object hangs on is kept too, and with a block that goes, everything that hangs on it
goes, wherever it lies, because nobody can reach it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.kvstore.objects import Entry

Children = Callable[[Entry], Iterable[Entry]]


@dataclass(frozen=True, slots=True)
class RecyclePlan:
    """`keep` moves, heads first; `drop` is forgotten: the rest of the segment, and what hangs on
    it in other segments and in the arena."""

    keep: tuple[Entry, ...]
    drop: tuple[Entry, ...]


@dataclass(slots=True)
class Guarantees:
    """How many bytes of disk each group may still lose; consumed while planning. Groups that are
    not in it may lose everything."""

    left_bytes: dict[int, int]

    def may_go(self, group: int, slot_bytes: int) -> bool:
        """Whether the group can lose this much; if so it is counted as lost."""
        left = self.left_bytes.get(group)
        if left is None:
            return True
        if left < slot_bytes:
            return False
        self.left_bytes[group] = left - slot_bytes
        return True


def in_use(entry: Entry) -> bool:
    """Whether somebody holds the object, or reads or writes its bytes, at this moment."""
    return bool(entry.leases or entry.pins)


def plan_recycle(
    entries: Iterable[Entry],
    children: Children,
    *,
    must_stay: Callable[[Entry], bool],
    returns: Callable[[Entry], bool],
    group_of: Callable[[Entry], int],
    guarantees: Guarantees,
    slot_bytes: int,
    must_room: int,
    room: int,
) -> RecyclePlan | None:
    """What becomes of one segment's objects; None when the segment must not be reused now.

    `must_stay` names objects that may not go (pins of people), `returns` those that were used
    since they were written; up to `room` slots are kept for these. What may not go takes
    `must_room` at most. None if anything of the segment is in use, or if more must stay. Pure but
    for `guarantees`, which it consumes."""
    unsorted = set(entries)
    if any(in_use(entry) for entry in unsorted):
        return None
    members = sorted(unsorted, key=lambda e: (e.facts.block, e.facts.digest))
    tails_first = members[::-1]
    marks = _marks(
        tails_first,
        children,
        lambda e: _NEEDED * (in_use(e) or must_stay(e)) | _WANTED * returns(e),
    )
    kept = set(members)
    refused = False

    def let_go(mark: int, least: int) -> None:
        nonlocal refused
        for entry in tails_first:
            if len(kept) <= least:
                return
            if marks[entry] == mark and entry in kept:
                if guarantees.may_go(group_of(entry), slot_bytes):
                    kept.discard(entry)
                else:
                    refused = True

    let_go(0, 0)
    let_go(_WANTED, room)
    if refused:  # a guarantee may have split a chain
        held = _marks(tails_first, children, lambda e: int(e in kept))
        kept = {entry for entry in members if held[entry]}
    if len(kept) > must_room:
        return None
    gone = [entry for entry in members if entry not in kept]
    return RecyclePlan(
        tuple(entry for entry in members if entry in kept),
        tuple(with_descendants(gone, children)),
    )


def with_descendants(entries: Iterable[Entry], children: Children) -> list[Entry]:
    """These and everything that hangs on them, each once, heads before tails."""
    found: dict[Entry, None] = {}
    waiting = list(entries)
    while waiting:
        entry = waiting.pop()
        if entry not in found:
            found[entry] = None
            waiting.extend(children(entry))
    return sorted(found, key=lambda e: (e.facts.block, e.facts.kind))


_NEEDED, _WANTED = 1, 2


def _marks(
    entries: Iterable[Entry], children: Children, own: Callable[[Entry], int]
) -> dict[Entry, int]:
    """Marks of these objects, joined with those of all that hangs on them. Cheapest tails first."""
    # Depth first without recursion: a chain may have thousands of blocks.
    found: dict[Entry, int] = {}
    for entry in entries:
        if entry in found:
            continue
        found[entry] = own(entry)
        path = [(entry, iter(children(entry)))]
        while path:
            top, rest = path[-1]
            child = next(rest, None)
            if child is None:
                path.pop()
                if path:
                    found[path[-1][0]] |= found[top]
            elif child in found:
                found[top] |= found[child]
            else:
                found[child] = own(child)
                path.append((child, iter(children(child))))
    return found
