"""Slots on their way between memory and a segment file: whole 4 KiB pages, several slots a call.

Every transfer begins and ends at a multiple of 4 KiB in memory and in the file, so one code serves
files opened with O_DIRECT and those that cannot be. Slots that follow each other in the file go in
one call, each straight from or into its own place in memory. What is written passes its last page
through one of the thread's own: there stands the header, which says where the slot lies. Blocking;
threads may use one file at once, for different slots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.core import faults
from headrace.kvstore.files import FileCalls, aligned_buffer
from headrace.kvstore.layout import ALIGN_BYTES, HEADER_BYTES, Buffer, SlotHeader
from headrace.kvstore.objects import DiskPlace

log = logging.getLogger(__name__)
_SPAN_SLOTS = 256  # of one call: two buffers each, and IOV_MAX is 1024


class _Own(threading.local):
    """Last pages of the slots that a thread is moving."""

    def __init__(self) -> None:
        self.tails = aligned_buffer(_SPAN_SLOTS * ALIGN_BYTES)


_own = _Own()


class SlotMove(NamedTuple):
    """One slot: its place on disk, and its whole memory, which begins at a multiple of 4 KiB."""

    place: DiskPlace
    memory: memoryview

    @property
    def body(self) -> memoryview:
        return self.memory[:-ALIGN_BYTES]


def write_slots(
    calls: FileCalls,
    descriptor: int,
    begin: int,
    moves: Sequence[SlotMove],
    headers: Sequence[bytes],
) -> None:
    """Write slots that follow each other, at most `_SPAN_SLOTS`, the first at byte `begin`; a
    header is the last thing of its slot. Not synced. Raises `OSError`."""
    tails, buffers = _own.tails, list[Buffer]()
    for number, (move, header) in enumerate(zip(moves, headers, strict=True)):
        tail = tails[number * ALIGN_BYTES : (number + 1) * ALIGN_BYTES]
        tail[:] = move.memory[-ALIGN_BYTES:]
        tail[-HEADER_BYTES:] = header
        body = move.body
        if faults.hit("store.segment_write") == "flip":  # a torn slot under a sound header
            flipped = aligned_buffer(len(move.memory))
            flipped[:] = move.memory
            flipped[0] ^= 1
            body = flipped[:-ALIGN_BYTES]
            if not body:
                tail[0] ^= 1
        if body:
            buffers.append(body)
        buffers.append(tail)
    write_buffers(calls, descriptor, buffers, begin)


def read_slots(
    calls: FileCalls, descriptor: int, begin: int, moves: Sequence[SlotMove]
) -> list[bytes | None]:
    """Read slots that follow each other into their memory, header and all; the 512 bytes of each
    header, None where the slot could not be read. Nothing is verified. Raises nothing."""
    try:
        if not read_buffers(calls, descriptor, [move.memory for move in moves], begin):
            raise OSError("the file ends before")
    except OSError as error:
        if len(moves) > 1:  # one bad sector must cost one slot
            size = len(moves[0].memory)
            return [
                read_slots(calls, descriptor, begin + number * size, [move])[0]
                for number, move in enumerate(moves)
            ]
        segment = moves[0].place.segment
        log.warning("a slot of segment %d could not be read: %s", segment, error.strerror or error)
        return [None]
    return [bytes(move.memory[-HEADER_BYTES:]) for move in moves]


def erase_slot(calls: FileCalls, descriptor: int, end: int) -> None:
    """Blank the last page of the slot that ends at byte `end`, so that it has no header. Raises
    `OSError`."""
    write_tail(calls, descriptor, bytes(ALIGN_BYTES), end - ALIGN_BYTES)


def write_tail(calls: FileCalls, descriptor: int, data: bytes, offset: int) -> None:
    """Write 4 KiB that lie anywhere in memory. Raises `OSError`."""
    tail = _own.tails[:ALIGN_BYTES]
    tail[:] = data
    write_buffers(calls, descriptor, [tail], offset)


def write_buffers(
    calls: FileCalls, descriptor: int, buffers: Sequence[Buffer], offset: int
) -> None:
    """Write all of `buffers`, whole pages each, in as many calls as it takes. Raises `OSError`."""
    rest: Sequence[Buffer] = buffers
    while rest:
        written = calls.pwritev(descriptor, list(rest), offset)
        written -= written % ALIGN_BYTES  # the next write begins at a whole page again
        if written <= 0:
            raise OSError("a write took nothing")
        rest, offset = _behind(rest, written), offset + written


def read_buffers(
    calls: FileCalls, descriptor: int, buffers: Sequence[memoryview], offset: int
) -> bool:
    """Fill all of `buffers`, whole pages each; False where the file ends before. Raises
    `OSError`."""
    rest: Sequence[memoryview] = buffers
    while rest:
        got = calls.preadv(descriptor, list(rest), offset)
        got -= got % ALIGN_BYTES
        if got <= 0:
            return False
        rest, offset = _behind(rest, got), offset + got
    return True


def _behind(buffers: Sequence[Buffer], count: int) -> list[memoryview]:
    out = []
    for buffer in buffers:
        if count < len(buffer):
            out.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return out


def spans(places: Sequence[DiskPlace], slots: int) -> Iterator[range]:
    """Which of `places` follow each other in one use of one segment: ranges of their numbers, each
    of at most `slots`."""
    most = min(slots, _SPAN_SLOTS)
    begin, follows = 0, None
    for number, (segment, slot, generation) in enumerate(places):
        if (segment, slot, generation) != follows and number or number - begin == most:
            yield range(begin, number)
            begin = number
        follows = (segment, slot + 1, generation)
    if begin < len(places):
        yield range(begin, len(places))


def stands_at(header: SlotHeader, place: DiskPlace) -> bool:
    """Whether a header is that of the place where it was found."""
    return (header.segment, header.slot, header.generation) == (
        place.segment,
        place.slot,
        place.generation,
    )
