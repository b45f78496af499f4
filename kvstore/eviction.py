"""What a segment that is about to be reused keeps, and what goes with it.

Segments go oldest first. An object that was used since it was written gets a second chance: it
moves to the open segment. A chain loses its tail before its head, as far as whole segments allow:
what a kept object hangs on is kept too, and with a block that goes, everything that hangs on it
goes, wherever it lies, because nobody can reach it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    members = sorted(set(entries), key=lambda e: (e.facts.block, e.facts.digest))
    if any(in_use(entry) for entry in members):
        return None
    needed = _needed_by(members, children, lambda e: in_use(e) or must_stay(e))
    wanted = _needed_by(members, children, returns)
    kept = set(members)

    def let_go(candidates: set[Entry], least: int) -> None:
        for entry in reversed(members):  # tails first
            if len(kept) <= least:
                return
            if entry in candidates and guarantees.may_go(group_of(entry), slot_bytes):
                kept.discard(entry)

    let_go(kept - needed - wanted, 0)
    let_go((kept & wanted) - needed, room)
    kept = _needed_by(members, children, lambda e: e in kept)  # a guarantee may have split a chain
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


def _needed_by(
    members: Sequence[Entry], children: Children, wanted: Callable[[Entry], bool]
) -> set[Entry]:
    """Those of `members` that are wanted, or that something wanted hangs on, near or far."""
    memory: dict[Entry, bool] = {}
    return {entry for entry in members if _is_needed(entry, children, wanted, memory)}


def _is_needed(
    entry: Entry, children: Children, wanted: Callable[[Entry], bool], memory: dict[Entry, bool]
) -> bool:
    # Depth first without recursion: a chain may have thousands of blocks.
    if entry in memory:
        return memory[entry]
    memory[entry] = wanted(entry)
    path = [(entry, iter(children(entry)))]
    while path:
        top, rest = path[-1]
        child = None if memory[top] else next(iter(rest), None)
        if child is None:
            path.pop()
            if path and memory[top]:
                memory[path[-1][0]] = True
        elif child not in memory:
            memory[child] = wanted(child)
            path.append((child, iter(children(child))))
        elif memory[child]:
            memory[top] = True
    return memory[entry]
