"""The files of a store that no process serves, read without its settings: they describe
themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError
from headrace.kvstore.files import FileCalls, lock_directory, read_all, write_all
from headrace.kvstore.layout import (
    ALIGN_BYTES,
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    VERSION,
    Buffer,
    SegmentHeader,
    SlotHeader,
)
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.segment_names import segment_name, segment_paths


class DirectoryBusy(HeadraceError):
    """A store serves this directory now."""

    code = "directory_busy"


@dataclass(slots=True)
class SegmentFile:
    """One file. `header` None: damaged, or never written (`blank`)."""

    number: int
    descriptor: int
    size_bytes: int
    header: SegmentHeader | None
    blank: bool

    def begin(self, slot: int) -> int:
        assert self.header is not None
        return SEGMENT_HEADER_BYTES + slot * self.header.slot_bytes

    @property
    def least_bytes(self) -> int:
        """What the file must have: all slots that its header counts; unused, one slot."""
        if self.header is None or self.header.kind is None:
            return SEGMENT_HEADER_BYTES + ALIGN_BYTES
        return self.begin(self.header.slots)

    @property
    def short(self) -> bool:
        return self.size_bytes < self.least_bytes


class StoreDirectory:
    """Opens a directory and holds its lock until `close`; a context manager. Blocking.

    Raises `ConfigError` for a folder that holds no store or a store of another format version,
    `DirectoryBusy` while a store serves it. Nothing is written but by the verbs that say so."""

    def __init__(self, path: Path, calls: FileCalls | None = None) -> None:
        self.path = path
        self._calls = calls or FileCalls()
        names = segment_paths(path)
        if not names:
            raise ConfigError(f"there is no store in {path}: no file like {segment_name(0)}")
        try:
            self._lock = lock_directory(str(path), self._calls)
        except ConfigError as error:
            raise DirectoryBusy(
                f"{path} is served by a running store ({error.message}); stop it (`headrace down`),"
                " or leave the directory out to ask the running store"
            ) from None
        self.segments: list[SegmentFile] = []
        try:
            for name in names:
                self.segments.append(self._open(name))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> SegmentFile:
        number = int(path.stem.partition("-")[2])
        descriptor = self._calls.open(path)
        data = bytearray(SEGMENT_HEADER_BYTES)
        read_all(self._calls, descriptor, memoryview(data), 0)
        header = SegmentHeader.unpack(memoryview(data))
        if isinstance(header, int):
            self._calls.close(descriptor)
            raise ConfigError(
                f"{path.name} has format version {header}, this build reads {VERSION}: use the"
                " build that wrote it"
            )
        if header is not None and header.segment != number:
            self._calls.close(descriptor)
            raise ConfigError(f"{path.name} says that it is segment {header.segment}: a copy?")
        size = self._calls.size_bytes(descriptor)
        return SegmentFile(number, descriptor, size, header, not any(data))

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for segment in self.segments:
            self._calls.close(segment.descriptor)
        self.segments = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # reading ---------------------------------------------------------------------------------

    @property
    def n_slots(self) -> int:
        return sum(s.header.slots for s in self.segments if s.header is not None and s.header.kind)

    def slots(self) -> Iterator[tuple[DiskPlace, SlotHeader | None]]:
        """Every slot of every segment in use, oldest segment first; None for one that is free. Of
        two slots with one key the later is the object."""
        used = [s for s in self.segments if s.header is not None and s.header.kind is not None]
        for segment in sorted(used, key=lambda s: s.header.sequence if s.header else 0):
            assert segment.header is not None
            for slot in range(segment.header.slots):
                place = DiskPlace(segment.number, slot, segment.header.generation)
                yield place, self._slot_header(segment, place)

    def objects(self) -> dict[bytes, tuple[DiskPlace, SlotHeader]]:
        """Objects by key (namespace, digest and kind), as a store would find them."""
        found: dict[bytes, tuple[DiskPlace, SlotHeader]] = {}
        for place, header in self.slots():
            if header is not None:
                found[key_of(header)] = (place, header)
        return found

    def payload(self, place: DiskPlace, payload_bytes: int) -> bytearray | None:
        """A slot's payload, not verified; None where the file ends or cannot be read."""
        segment = self._segment(place.segment)
        data = bytearray(payload_bytes)
        try:
            if read_all(
                self._calls, segment.descriptor, memoryview(data), segment.begin(place.slot)
            ):
                return data
        except OSError:
            pass
        return None

    def _slot_header(self, segment: SegmentFile, place: DiskPlace) -> SlotHeader | None:
        data = bytearray(HEADER_BYTES)
        end = segment.begin(place.slot + 1)
        try:
            read_all(self._calls, segment.descriptor, memoryview(data), end - HEADER_BYTES)
        except OSError:
            return None
        header = SlotHeader.unpack(memoryview(data))
        if header is None or segment.header is None or header.facts.kind is not segment.header.kind:
            return None
        at = (header.segment, header.slot, header.generation)
        return header if at == (place.segment, place.slot, place.generation) else None

    def _segment(self, number: int) -> SegmentFile:
        return next(segment for segment in self.segments if segment.number == number)

    # writing ---------------------------------------------------------------------------------

    def erase(self, place: DiskPlace) -> None:
        """Blank a slot's header. Raises `OSError`; durable after `sync`."""
        segment = self._segment(place.segment)
        end = segment.begin(place.slot + 1)
        write_all(self._calls, segment.descriptor, bytes(HEADER_BYTES), end - HEADER_BYTES)

    def write(self, place: DiskPlace, header: SlotHeader, payload: Buffer) -> None:
        """Write a slot, its header last. Raises `OSError`; durable after `sync`."""
        segment = self._segment(place.segment)
        write_all(self._calls, segment.descriptor, payload, segment.begin(place.slot))
        placed = header._replace(
            segment=place.segment, slot=place.slot, generation=place.generation
        )
        end = segment.begin(place.slot + 1)
        write_all(self._calls, segment.descriptor, placed.pack(), end - HEADER_BYTES)

    def write_segment_header(self, segment: SegmentFile, header: SegmentHeader) -> None:
        """Write and sync a segment's header. Raises `OSError`."""
        write_all(self._calls, segment.descriptor, header.pack(), 0)
        self._calls.sync(segment.descriptor)
        segment.header, segment.blank = header, False

    def blank(self, segment: SegmentFile) -> None:
        """Make a segment one that was never written: no sound slot may stand in it. Raises
        `OSError`."""
        write_all(self._calls, segment.descriptor, bytes(SEGMENT_HEADER_BYTES), 0)
        self._calls.sync(segment.descriptor)
        segment.header, segment.blank = None, True

    def lengthen(self, segment: SegmentFile, size_bytes: int) -> None:
        """Give a file that ends too soon its length; the slots there are free. Raises `OSError`."""
        self._calls.allocate(segment.descriptor, size_bytes)
        self._calls.sync(segment.descriptor)
        segment.size_bytes = self._calls.size_bytes(segment.descriptor)

    def sync(self) -> None:
        """Make everything durable. Raises `OSError`."""
        for segment in self.segments:
            self._calls.sync(segment.descriptor)

    def loose_headers(self, segment: SegmentFile) -> Iterator[tuple[int, SlotHeader]]:
        """Slot headers of a segment whose own header is lost, with the offset where each ends."""
        data = bytearray(HEADER_BYTES)
        for end in range(2 * ALIGN_BYTES, segment.size_bytes + 1, ALIGN_BYTES):
            try:
                read_all(self._calls, segment.descriptor, memoryview(data), end - HEADER_BYTES)
            except OSError:
                continue
            header = SlotHeader.unpack(memoryview(data))
            if header is not None and header.segment == segment.number:
                yield end, header


def key_of(header: SlotHeader) -> bytes:
    """What tells objects apart: kind, namespace and digest."""
    facts = header.facts
    return facts.kind.value.encode() + facts.namespace + facts.digest
