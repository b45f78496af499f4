"""Segments of another store in a folder that this host has mounted: read here, owned there.

One store owns a directory (its lock) and writes it; readers need neither its process nor its host,
only the index. A reader trusts nothing that may change under it: the segment's header is read
before and after the slot, and what was read counts only if both name the generation of the record.
Files are opened for every read: a network file system looks for changes when a file is opened.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.kvstore.files import FileCalls, read_all
from headrace.kvstore.layout import (
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    SlotHeader,
    checksum,
)
from headrace.kvstore.records import IndexRecord
from headrace.kvstore.segment_names import segment_name, segment_paths

log = logging.getLogger(__name__)


def uid_epoch(uid: bytes) -> int:
    """What stands for the boot epoch in a record of tier shared: it outlives its owner."""
    return int.from_bytes(uid[:4], "little")


class SharedFolder:
    """Another store's directory, as this host sees it. Blocking; used from I/O threads.

    `look` finds out whose it is; nothing can be read before that.
    Raises `ConfigError` when `path` is no directory."""

    def __init__(self, path: str, calls: FileCalls | None = None) -> None:
        self._path = Path(path)
        self._calls = calls or FileCalls()
        self._uid = b""
        if not self._path.is_dir():
            raise ConfigError(f"shared_directories: {path} is no directory that can be read")

    @property
    def name(self) -> str:
        """What transfers from here are grouped by."""
        return f"shared://{self._path}"

    def look(self) -> bytes:
        """The id of the store that owns it now; empty while it has written nothing. Raises
        `OSError` when the folder cannot be read."""
        paths = segment_paths(self._path)
        if not paths and not self._path.is_dir():
            raise FileNotFoundError(str(self._path))
        for path in paths:
            with contextlib.suppress(OSError), self._opened(path) as descriptor:
                header = self._segment_header(descriptor)
                if header is not None:
                    self._uid = header.uid
                    return self._uid
        return b""

    def header(self, record: IndexRecord) -> SlotHeader | None:
        """The header of the slot that a record names; None unless it is that slot in that use."""
        try:
            with self._opened(self._path / segment_name(record.segment)) as descriptor:
                segment = self._current(descriptor, record)
                if segment is None:
                    return None
                data = memoryview(bytearray(HEADER_BYTES))
                end = SEGMENT_HEADER_BYTES + (record.slot + 1) * segment.slot_bytes
                if not read_all(self._calls, descriptor, data, end - HEADER_BYTES):
                    return None
        except OSError as error:
            log.warning("a shared segment could not be read: %s", error.strerror)
            return None
        header = SlotHeader.unpack(data)
        place = (record.segment, record.slot, record.generation)
        if header is None or (header.segment, header.slot, header.generation) != place:
            return None
        return header

    def read(self, record: IndexRecord, dest: memoryview) -> int:
        """Read the payload of a record into `dest`, as long as it is: its checksum. -1 when it
        could not be read, or the segment was reused meanwhile."""
        try:
            with self._opened(self._path / segment_name(record.segment)) as descriptor:
                segment = self._current(descriptor, record)
                if segment is None:
                    return -1
                begin = SEGMENT_HEADER_BYTES + record.slot * segment.slot_bytes
                if not read_all(self._calls, descriptor, dest, begin):
                    return -1
                total = checksum(dest)
                return total if self._current(descriptor, record) == segment else -1
        except OSError as error:
            log.warning("a shared segment could not be read: %s", error.strerror)
            return -1

    def _current(self, descriptor: int, record: IndexRecord) -> SegmentHeader | None:
        header = self._segment_header(descriptor)
        if (
            header is None
            or header.uid != self._uid
            or header.segment != record.segment
            or header.generation != record.generation
            or record.slot >= header.slots
        ):
            return None
        return header

    def _segment_header(self, descriptor: int) -> SegmentHeader | None:
        data = memoryview(bytearray(SEGMENT_HEADER_BYTES))
        if not read_all(self._calls, descriptor, data, 0):
            return None
        header = SegmentHeader.unpack(data)
        return header if isinstance(header, SegmentHeader) else None

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        descriptor = self._calls.open(path, read_only=True)
        try:
            yield descriptor
        finally:
            self._calls.close(descriptor)
