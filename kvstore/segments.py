"""Segment files: where objects outlive the process. Blocking; called from I/O threads only.

A segment is one preallocated file with slots of one kind. All of them are taken at start, so a full
disk is an error at start and never later. A segment is used from its first slot to its last and
then reused as a whole, oldest first: its generation is raised on disk *before* any slot is written
again, and a slot whose header carries another generation is free.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError
from headrace.kvstore.files import FileCalls, aligned_buffer, taken_bytes
from headrace.kvstore.layout import (
    ALIGN_BYTES,
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    VERSION,
    Buffer,
    SegmentHeader,
    SlotHeader,
    pack_slot_header,
    slot_bytes,
)
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.scan import scan_headers
from headrace.kvstore.segment_names import MAX_SEGMENTS, segment_name, segment_paths
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.slot_io import (
    SlotMove,
    erase_slot,
    read_slots,
    spans,
    stands_at,
    write_slots,
    write_tail,
)

log = logging.getLogger(__name__)
_SCAN_BYTES = 1 << 20


class Segment:
    """One open file. `used` is the next slot to be written; `header` as it stands on disk."""

    def __init__(self, number: int, descriptor: int, header: SegmentHeader, size_bytes: int):
        self.number = number
        self.descriptor = descriptor
        self.header = header
        self.size_bytes = size_bytes
        self.used = 0

    @property
    def full(self) -> bool:
        return self.used >= self.header.slots

    def slot_begin(self, slot: int) -> int:
        return SEGMENT_HEADER_BYTES + slot * self.header.slot_bytes


class SegmentFiles:
    """All segments of one directory. The directory's lock must be held (`lock_directory`).

    Threads may read and write slots at once, each slot by one of them; places are given out, and
    segments reused, by one caller at a time. `direct` tells whether files pass the system's cache
    by (O_DIRECT), which is tried first."""

    def __init__(self, settings: StoreSettings, calls: FileCalls | None = None) -> None:
        self._settings = settings
        self._calls = calls or FileCalls()
        self._slot_bytes = {
            kind: slot_bytes(size) for kind, size in settings.payload_bytes().items()
        }
        self.uid = b""
        self.segments: list[Segment] = []
        self._open: dict[Kind, Segment] = {}
        self.damaged_headers = 0
        self.direct = True

    # start -----------------------------------------------------------------------------------

    def open(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Open or make all files and take their space. Raises `ConfigError` when the disk has not
        enough, or holds files that another version or another store wrote; then every file is as
        long as before and none is new."""
        size = self._settings.segment_bytes
        count = self._settings.ssd_bytes // size
        least = SEGMENT_HEADER_BYTES + max(self._slot_bytes.values())
        if size < least:
            raise ConfigError(f"segment_bytes must be at least {least} for one slot, got {size}")
        if count < 2:
            raise ConfigError(
                f"ssd_bytes must be at least {2 * size}, two segments of segment_bytes,"
                f" got {self._settings.ssd_bytes}"
            )
        if count > MAX_SEGMENTS:
            raise ConfigError(
                f"ssd_bytes must be at most {MAX_SEGMENTS * size}, {MAX_SEGMENTS} segments of"
                f" segment_bytes, got {self._settings.ssd_bytes}"
            )
        directory = Path(self._settings.directory)
        self._refuse_more_than_free(directory, count)
        paths = [directory / segment_name(number) for number in range(count)]
        before = {path: _length(path) for path in paths}
        try:
            for number, path in enumerate(before):
                try:
                    self.segments.append(self._open_file(path, number, size))
                except OSError as error:
                    raise ConfigError(
                        f"directory: segment {number} in {directory} cannot be opened or read"
                        f" ({error.strerror})"
                    ) from None
                if progress is not None:
                    progress(number + 1, count)
        except BaseException:
            self.close()
            _give_back(before)
            raise
        self._remove_surplus(directory, count)
        self.uid = self.uid or secrets.token_bytes(8)

    def _refuse_more_than_free(self, directory: Path, count: int) -> None:
        size = self._settings.segment_bytes
        last = segment_name(count - 1)
        there = [path for path in segment_paths(directory) if path.name <= last]
        missing = count * size - sum(min(size, taken_bytes(path)) for path in there)
        free = self._calls.free_bytes(directory)
        if missing > free:
            most = self._settings.ssd_bytes - missing + free
            raise ConfigError(
                f"ssd_bytes must be at most {max(0, most)}, what is free or already taken in"
                f" {directory}, got {self._settings.ssd_bytes}"
            )

    def _open_file(self, path: Path, number: int, size: int) -> Segment:
        descriptor = self._open_direct(path)
        try:
            header = self._read_segment_header(descriptor, number)
            known = self._calls.size_bytes(descriptor)
            if header.kind is None or known < size:
                try:
                    self._calls.allocate(descriptor, size)
                except OSError as error:
                    raise ConfigError(
                        f"ssd_bytes: {self._settings.ssd_bytes} bytes could not be taken"
                        f" ({error.strerror} at segment {number})"
                    ) from None
            return Segment(number, descriptor, header, max(size, known))
        except BaseException:
            self._calls.close(descriptor)
            raise

    def _open_direct(self, path: Path) -> int:
        if self.direct:
            try:
                return self._calls.open(path, create=True, direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                log.warning(
                    "%s has no O_DIRECT: segments go through the system's cache, which costs"
                    " memory and time and is no safer",
                    path.parent,
                )
        return self._calls.open(path, create=True)

    def _read_segment_header(self, descriptor: int, number: int) -> SegmentHeader:
        data = self._pread(descriptor, SEGMENT_HEADER_BYTES, 0)
        header = SegmentHeader.unpack(data)
        if isinstance(header, int):
            raise ConfigError(
                f"segment {number} has format version {header}, this build reads {VERSION}"
            )
        if header is None:
            if any(data):
                self.damaged_headers += 1
                log.warning("segment %d has a damaged header; what it held is lost", number)
            last = self._last_generation(descriptor, number) if any(data) else 0
            return SegmentHeader(None, 0, 0, number, last, 0, b"")
        if header.segment != number or (self.uid and header.uid != self.uid):
            raise ConfigError(f"segment {number} belongs to another store, or is another's copy")
        self.uid = header.uid
        return header

    def _last_generation(self, descriptor: int, number: int) -> int:
        # Without its header a segment's generation is known from its slots only. The next use must
        # be newer than all of them, or old slots would come to life again.
        last = 0
        size = self._calls.size_bytes(descriptor)
        for begin in range(0, size, _SCAN_BYTES):
            data = self._pread(descriptor, min(_SCAN_BYTES, size - begin), begin)
            for end in range(ALIGN_BYTES, len(data) + 1, ALIGN_BYTES):
                header = SlotHeader.unpack(data[end - HEADER_BYTES : end])
                if header is not None and header.segment == number:
                    last = max(last, header.generation)
        return last

    def _remove_surplus(self, directory: Path, count: int) -> None:
        for path in segment_paths(directory):
            if path.name not in {segment_name(number) for number in range(count)}:
                log.warning("removed %s: ssd_bytes became smaller", path.name)
                self._calls.unlink(path)

    def scan(self) -> Iterator[tuple[SlotHeader, DiskPlace]]:
        """Every object that the headers on disk name, oldest segment first. Payloads are not read:
        each is verified when it is used. Sets where writing goes on."""
        used = [s for s in self.segments if s.header.kind is not None]
        used.sort(key=lambda s: s.header.sequence)
        found = scan_headers(self._calls, [(s.descriptor, s.header) for s in used])
        for segment, headers in zip(used, found, strict=True):
            for slot, data in headers:
                header = SlotHeader.unpack(data)
                if header is not None:
                    segment.used = slot + 1
                    yield header, DiskPlace(segment.number, slot, segment.header.generation)
            kind = segment.header.kind
            if kind is not None and segment.header.slot_bytes == self._slot_bytes.get(kind):
                self._open[kind] = segment  # the newest one wins

    # writing ---------------------------------------------------------------------------------

    def next_place(self, kind: Kind) -> DiskPlace | None:
        """As `next_places`, one; None when there is none."""
        return next(iter(self.next_places(kind, 1)), None)

    def next_places(self, kind: Kind, count: int) -> list[DiskPlace]:
        """The next slots to write, up to so many: those that are left in the open segment of this
        kind. Touches no disk."""
        segment = self._open.get(kind)
        if segment is None:
            return []
        number, generation, first = segment.number, segment.header.generation, segment.used
        segment.used = max(first, min(first + count, segment.header.slots))
        return [DiskPlace(number, slot, generation) for slot in range(first, segment.used)]

    def left(self, kind: Kind) -> int:
        """Slots that are still to be written in the open segment of this kind."""
        segment = self._open.get(kind)
        return 0 if segment is None else segment.header.slots - segment.used

    def candidates(self, kind: Kind) -> Iterable[Segment]:
        """Segments that may be used next, best first: free ones, then the oldest."""
        busy = {segment.number for segment in self._open.values() if not segment.full}
        rest = [segment for segment in self.segments if segment.number not in busy]
        return sorted(rest, key=lambda s: s.header.sequence)

    def recycle(self, segment: Segment, kind: Kind) -> None:
        """Give a segment a new life for `kind`: raise its generation on disk, sync, then use it.

        The caller has dropped what it held. Raises `OSError`; the segment then stays as it is."""
        size = self._slot_bytes[kind]
        old = segment.header
        header = replace(
            old,
            kind=kind,
            slot_bytes=size,
            slots=(self._settings.segment_bytes - SEGMENT_HEADER_BYTES) // size,
            generation=(old.generation + 1) & 0xFFFF_FFFF,
            sequence=max(s.header.sequence for s in self.segments) + 1,
            uid=self.uid,
        )
        write_tail(self._calls, segment.descriptor, header.pack(), 0)
        self._calls.sync(segment.descriptor)
        segment.header = header
        segment.used = 0
        self._open[kind] = segment
        if segment.size_bytes > self._settings.segment_bytes:  # configured smaller than before
            self._calls.truncate(segment.descriptor, self._settings.segment_bytes)
            segment.size_bytes = self._settings.segment_bytes

    def write_moves(
        self, moves: Sequence[SlotMove], headers: Sequence[bytes]
    ) -> list[OSError | HeadraceError | None]:
        """Write slots with these headers, which name the places; what went wrong with each. Not
        synced."""
        out: list[OSError | HeadraceError | None] = [None] * len(moves)
        for span in spans([move.place for move in moves], len(moves)):
            first = moves[span[0]].place
            segment = self.segments[first.segment]
            begin = segment.slot_begin(first.slot)
            at = slice(span.start, span.stop)
            try:
                write_slots(self._calls, segment.descriptor, begin, moves[at], headers[at])
            except (OSError, HeadraceError) as error:
                out[at] = [error] * len(span)
        return out

    def write(self, place: DiskPlace, payload: Buffer, header: SlotHeader) -> None:
        """Write one slot from any memory; the header gets the place's numbers. Not synced. Raises
        `OSError`, `HeadraceError`."""
        memory = aligned_buffer(self.segments[place.segment].header.slot_bytes)
        memory[: len(payload)] = payload
        packed = pack_slot_header(header.facts, header.checksum, *place, header.written_at_s)
        (error,) = self.write_moves([SlotMove(place, memory)], [packed])
        if error is not None:
            raise error

    def sync(self, numbers: Iterable[int]) -> None:
        """Make the written slots of these segments durable. Raises `OSError`."""
        for number in sorted(set(numbers)):
            self._calls.sync(self.segments[number].descriptor)

    def erase(self, place: DiskPlace) -> None:
        """Blank a slot's header, if the slot still belongs to that use. Raises `OSError`."""
        segment = self.segments[place.segment]
        if segment.header.generation == place.generation and place.slot < segment.header.slots:
            end = segment.slot_begin(place.slot + 1)
            erase_slot(self._calls, segment.descriptor, end)

    # reading ---------------------------------------------------------------------------------

    def read_moves(self, moves: Sequence[SlotMove]) -> list[bytes | None]:
        """Read slots into their memory, as long as those of their segment, and return the 512 bytes
        of their headers; None for a slot that is not there or cannot be read. Nothing is
        verified."""
        out: list[bytes | None] = [None] * len(moves)
        for span in spans([move.place for move in moves], len(moves)):
            first, last = moves[span[0]].place, moves[span[-1]].place
            segment = self.segments[first.segment]
            if last.slot < segment.header.slots:
                begin = segment.slot_begin(first.slot)
                part = moves[span.start : span.stop]
                found = read_slots(self._calls, segment.descriptor, begin, part)
                out[span.start : span.stop] = found
        return out

    def read(self, place: DiskPlace, dest: memoryview) -> SlotHeader | None:
        """Read one slot's payload into `dest`, which is as long as it and lies anywhere in memory;
        its header, None for a slot that is not what its place says or cannot be read. The payload
        is not verified."""
        size = self.segments[place.segment].header.slot_bytes
        if not size:
            return None
        memory = aligned_buffer(size)
        (data,) = self.read_moves([SlotMove(place, memory)])
        header = None if data is None else SlotHeader.unpack(data)
        if header is None or not stands_at(header, place):
            return None
        if header.facts.payload_bytes != len(dest):
            return None
        dest[:] = memory[: len(dest)]
        return header

    def slot_bytes(self, segment: int) -> int:
        """Of the slots in a segment's present use; 0 while it is free."""
        return self.segments[segment].header.slot_bytes

    def _pread(self, descriptor: int, count: int, offset: int) -> bytes:
        """At most `count` bytes from a multiple of 4 KiB on, fewer at the end of the file. Raises
        `OSError`."""
        memory = aligned_buffer(-(-count // ALIGN_BYTES) * ALIGN_BYTES)
        got = 0
        while got < count:
            part = self._calls.preadv(descriptor, [memory[got:]], offset + got)
            if part <= 0:
                break
            got += part
            if got % ALIGN_BYTES:
                break  # the end of a file that is no whole number of pages long
        return bytes(memory[: min(got, count)])

    def close(self) -> None:
        for segment in self.segments:
            self._calls.close(segment.descriptor)
        self.segments.clear()


def _length(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _give_back(before: dict[Path, int | None]) -> None:
    for path, length in before.items():
        now = _length(path)
        if length is None:
            path.unlink(missing_ok=True)
        elif now is not None and now > length:
            os.truncate(path, length)
