"""Reading back what a running store has on disk, segment by segment, while serving goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from headrace.kvstore.damage import damaged_on_disk
from headrace.kvstore.io_threads import in_thread
from headrace.kvstore.objects import Entry
from headrace.kvstore.second_chance import is_sound
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.state import StoreState

_BATCH = 16  # read in one go of an I/O thread; loads of requests come in between


async def scrub_segment(
    state: StoreState, files: SegmentFiles, threads: ThreadPoolExecutor, segment: int, drop: bool
) -> dict[str, Any]:
    """Read every object of one segment back: how many are there, sound and damaged, and how many
    segments there are in all. With `drop` the damaged ones are gone for everybody, as if a reader
    had met them, or written anew from the arena. An object is pinned while it is read."""
    entries = sorted(
        state.disks.by_segment.get(segment, ()), key=lambda e: e.disk.slot if e.disk else 0
    )
    sound = sound_bytes = damaged = 0
    for begin in range(0, len(entries), _BATCH):
        batch = [e for e in entries[begin : begin + _BATCH] if e.disk and not e.dropped]
        for entry in batch:
            state.pin(entry)
        try:
            good = await in_thread(threads, partial(_read, files, batch))
        finally:
            for entry in batch:
                state.unpin(entry)
        for entry, fine in zip(batch, good, strict=True):
            sound += fine
            sound_bytes += entry.facts.payload_bytes * fine
            if not fine and not entry.dropped:  # a reader may have been faster
                damaged += 1
                if drop:
                    damaged_on_disk(state, entry)
    return {
        "sound": sound,
        "sound_bytes": sound_bytes,
        "damaged": damaged,
        "segments": len(files.segments),
    }


def _read(files: SegmentFiles, batch: list[Entry]) -> list[bool]:
    return [is_sound(files, entry) for entry in batch]
