"""What one I/O thread does of a batch: looks whether the bytes are right, and writes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.kvstore.layout import HEADER_BYTES, PackHeader, checksum, header_packer
from headrace.kvstore.objects import DiskPlace, Entry
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.slot_io import SlotMove
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_JOB_BYTES = 4 << 20  # of one write; several are under way


class Outcome(StrEnum):
    WRITTEN = "written"
    FAILED = "failed"
    DAMAGED = "damaged"  # in the arena, before anything was written


class Write(NamedTuple):
    entry: Entry
    place: DiskPlace


def cut_jobs(writes: Sequence[Write]) -> list[list[Write]]:
    """Cut a batch, in order, into what one thread writes."""
    jobs: list[list[Write]] = [[]]
    total = 0
    for write in writes:
        if total >= _JOB_BYTES:
            jobs.append([])
            total = 0
        jobs[-1].append(write)
        total += write.entry.facts.payload_bytes
    return jobs


def write_job(state: StoreState, files: SegmentFiles, writes: Sequence[Write]) -> list[Outcome]:
    """Write objects of the arena to their places on disk; what became of each. Not synced.

    The entries are pinned, so their slots stay; a client that wrote over one nevertheless must not
    get its bytes to disk under a checksum that they have."""
    out = [Outcome.DAMAGED] * len(writes)
    moves, headers, numbers = [], [], []
    packers: dict[tuple[Any, ...], PackHeader] = {}
    residents = state.residents
    for number, (entry, place) in enumerate(writes):
        facts, total, slot = entry.facts, entry.checksum, entry.slot
        if slot is None:
            out[number] = Outcome.FAILED
            continue
        memory = residents.arena.slot(residents.regions[facts.kind], slot)
        if checksum(memory[: facts.payload_bytes]) != total:
            continue
        common = facts.kind, facts.namespace, facts.domain, entry.written_at_s
        pack = packers.get(common) or packers.setdefault(common, header_packer(*common))
        told, size = (facts.digest, facts.parent, facts.block), facts.payload_bytes
        own = pack(*told, ARENA_SEGMENT, slot, entry.generation, size, total)
        if memory[-HEADER_BYTES:].tobytes() != own:
            _mend(state, entry, slot)
        headers.append(pack(*told, *place, size, total))
        moves.append(SlotMove(place, memory))
        numbers.append(number)
    for number, error in zip(numbers, files.write_moves(moves, headers), strict=True):
        out[number] = Outcome.WRITTEN if error is None else Outcome.FAILED
        if error is not None:
            log.warning("an object was not written: %s", type(error).__name__)
    return out


def _mend(state: StoreState, entry: Entry, slot: int) -> None:
    """Write a header anew that nobody believes: its client wrote another than it told, so nobody
    could read the object, nor put it anew. One that a client wrote in another second is good."""
    place = state.place(entry)
    shows = state.residents.arena.shows
    if place is not None and not shows(place, entry.facts.namespace, entry.facts.digest):
        state.residents.show(entry, slot)
