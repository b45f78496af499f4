"""What is done about a copy on disk that does not verify; `StoreState.doom` is for the arena's."""

from __future__ import annotations

from headrace.kvstore.arena import Reading
from headrace.kvstore.objects import Entry
from headrace.kvstore.state import StoreState


def damaged_on_disk(state: StoreState, entry: Entry) -> bool:
    """Count it and forget that copy. True if the arena's verifies: it is written anew. Else the
    object is gone for everybody."""
    state.count.damaged += 1
    place, disk, read = state.place(entry), entry.disk, state.residents.arena.read
    about = (entry.facts.namespace, entry.facts.digest)
    if place is None or read(place, *about, None) is not Reading.GOOD:
        state.drop(entry, erase=True)
        return False
    if disk is not None:  # else another reader of that copy was faster
        state.disks.leave(entry)
        state.disks.to_erase.append(disk)
        state.to_save(entry, first=True)
        state.residents.settle(entry)
    return True
