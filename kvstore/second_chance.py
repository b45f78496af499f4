"""The next life of a segment: what it keeps is carried over, the rest goes.

    plan -> read what is kept -> plan again, forget -> raise the generation, sync
    -> drop the records -> write the kept

A process that dies in between has lost what was carried, and nothing else: a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.kvstore.counters import Eviction
from headrace.kvstore.layout import SlotHeader, checksum
from headrace.kvstore.objects import DiskPlace, Entry, object_key
from headrace.kvstore.segments import Segment, SegmentFiles
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
_TRIES = 3  # somebody may open objects of the segment while it is read


@dataclass(frozen=True, slots=True)
class Moved:
    """One object that was written into the next life of a segment, not yet synced."""

    header: SlotHeader
    place: DiskPlace

    @property
    def key(self) -> bytes:
        facts = self.header.facts
        return object_key(facts.kind, facts.namespace, facts.digest)


@dataclass(frozen=True, slots=True)
class Reused:
    """`moved` waits for its sync."""

    moved: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class _Lifted:
    entry: Entry
    payload: bytes


async def reuse(
    state: StoreState,
    files: SegmentFiles,
    segment: Segment,
    kind: Kind,
    in_thread: InThread,
    publish: Callable[[Sequence[bytes]], Awaitable[Any]],
) -> Reused | None:
    """Give a segment its next life with slots of `kind`; None when that must not be now. What lay
    there is told to `publish` by key before any slot is written again.

    Holds at most `policy.MUST_STAY_MOST` of a segment in memory. Raises `OSError` or
    `HeadraceError` when the segment could not be begun anew; what it held is forgotten by then, and
    its old slots are on disk."""
    header = segment.header
    lifted: dict[Entry, _Lifted] = {}
    for _ in range(_TRIES):
        same = header.kind is kind
        room = header.slots if same or header.kind is None else files.left(header.kind)
        plan = state.plan_recycle(segment.number, header.slots, room)
        if plan is None:
            return None
        missing = [e for e in plan.keep if e.slot is None and e not in lifted]
        if not missing:
            break
        lifted |= await _lift(state, files, missing, in_thread)
        lost = [entry for entry in missing if entry not in lifted]
        for entry in lost:
            if not entry.dropped:
                state.count.evict(Eviction.MISLAID)
                state.count.damaged += 1
                state.drop(entry, erase=False)
    else:
        return None
    keys = state.recycle(segment.number, plan)
    await in_thread(partial(files.recycle, segment, kind))
    if keys:
        await publish(keys)  # if not now, later: readers verify
    carried = [lifted[entry] for entry in plan.keep if entry in lifted and entry.slot is None]
    moved = await in_thread(partial(_write, files, carried))
    state.count.evict(Eviction.MISLAID, len(carried) - len(moved))
    return Reused(tuple(moved))


async def _lift(
    state: StoreState, files: SegmentFiles, entries: Sequence[Entry], in_thread: InThread
) -> dict[Entry, _Lifted]:
    """Verified payloads of objects that lie on disk only; without those that do not verify."""
    for entry in entries:
        state.pin(entry)
    try:
        read: list[_Lifted | None] = await in_thread(lambda: [_read(files, e) for e in entries])
    finally:
        for entry in entries:
            state.unpin(entry)
    return {one.entry: one for one in read if one is not None}


def _read(files: SegmentFiles, entry: Entry) -> _Lifted | None:
    payload = bytearray(entry.facts.payload_bytes)
    header = None if entry.disk is None else files.read(entry.disk, memoryview(payload))
    if header is None or header.facts != entry.facts or checksum(payload) != entry.checksum:
        return None
    return _Lifted(entry, bytes(payload))


def is_sound(files: SegmentFiles, entry: Entry) -> bool:
    """Whether the bytes on disk are the object's. The entry must be pinned."""
    return _read(files, entry) is not None


def _write(files: SegmentFiles, carried: Sequence[_Lifted]) -> list[Moved]:
    moved: list[Moved] = []
    for one in carried:
        entry = one.entry
        place = files.next_place(entry.kind)
        if place is None:
            break
        header = SlotHeader(entry.facts, entry.checksum, 0, 0, 0, entry.written_at_s)
        try:
            files.write(place, one.payload, header)
        except Exception as error:  # of whatever sort: it costs this object alone
            log.warning("an object that was kept is lost: %r", error)
            continue
        moved.append(Moved(header, place))
    return moved
