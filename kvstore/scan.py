"""Headers of whole segments, read at start: several segments at once, megabytes a call.

Payloads come along where slots are small, since a disk reads them sooner than it skips them.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.kvstore.files import FileCalls, aligned_buffer
from headrace.kvstore.layout import (
    ALIGN_BYTES,
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SLOT_STARTS,
    SegmentHeader,
)
from headrace.kvstore.slot_io import read_buffers

log = logging.getLogger(__name__)
_THREADS = 4
_RUN_BYTES = 2 << 20  # of one read
_SKIP_BYTES = 64 << 10  # from this size of a slot on, only its last page is read


def scan_headers(
    calls: FileCalls, segments: Sequence[tuple[int, SegmentHeader]]
) -> Iterator[list[tuple[int, bytes]]]:
    """For each of `segments` (descriptor, header, of some kind), in order: slot numbers and headers
    that its present use wrote. Their own checksums are still to be verified."""
    waiting: deque[Future[list[tuple[int, bytes]]]] = deque()
    with ThreadPoolExecutor(_THREADS, "store-scan") as pool:
        for segment in segments:
            waiting.append(pool.submit(_headers, calls, *segment))
            if len(waiting) > 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _headers(calls: FileCalls, descriptor: int, header: SegmentHeader) -> list[tuple[int, bytes]]:
    size = header.slot_bytes
    piece = ALIGN_BYTES if size >= _SKIP_BYTES else size
    most = 1 if piece != size else max(1, _RUN_BYTES // size)
    memory = aligned_buffer(most * piece)
    out: list[tuple[int, bytes]] = []
    for first in range(0, header.slots, most):
        count = min(most, header.slots - first)
        end = SEGMENT_HEADER_BYTES + (first + count) * size
        for slot in range(first, first + count):
            begin = (slot - first) * piece
            memory[begin + piece - HEADER_BYTES : begin + piece - HEADER_BYTES + 4] = bytes(4)
        if not _read(calls, descriptor, memory[: count * piece], end - count * piece, header):
            for slot in range(first, first + count):  # one bad sector costs one object
                tail = memory[(slot - first + 1) * piece - ALIGN_BYTES :][:ALIGN_BYTES]
                at = SEGMENT_HEADER_BYTES + (slot + 1) * size - ALIGN_BYTES
                if not _read(calls, descriptor, tail, at, header):
                    tail[:] = bytes(ALIGN_BYTES)
        for slot in range(first, first + count):
            begin = (slot - first + 1) * piece - HEADER_BYTES
            data = memory[begin : begin + HEADER_BYTES].tobytes()
            if _is_of(data, header, slot):
                out.append((slot, data))
    return out


def _is_of(data: bytes, header: SegmentHeader, slot: int) -> bool:
    return (
        header.kind is not None
        and data[:12] == SLOT_STARTS[header.kind]
        and data[16:28] == struct.pack("<III", header.segment, slot, header.generation)
    )


def _read(
    calls: FileCalls, descriptor: int, dest: memoryview, offset: int, header: SegmentHeader
) -> bool:
    try:
        return read_buffers(calls, descriptor, [dest], offset)
    except OSError as error:
        log.warning("segment %d: a slot: %s", header.segment, error.strerror)
        return False
