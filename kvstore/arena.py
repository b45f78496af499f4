"""The arena: shared memory of one host, cut into slots of a fixed size a kind.

The store creates it (`memfd`, so it has no name and nothing is left after a crash) and hands its
descriptor to every client. All of them may write: what a reader believes rests on checksums.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.errors import ConfigError
from headrace.core.ids import Digest
from headrace.core.messages import Place
from headrace.kvstore.layout import (
    HEADER_BYTES,
    SLOT_PLACE,
    SLOT_STARTS,
    Buffer,
    SlotHeader,
    checksum,
    header_is_whole,
    slot_bytes,
)
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind, StoreSettings

_BLANK = bytes(HEADER_BYTES)


class Reading(StrEnum):
    """What a reader found at a place."""

    GOOD = "good"
    STALE = "stale"  # another object's slot, or nobody's, by now: an ordinary miss
    DAMAGED = "damaged"  # a header or payload that does not verify; the store should look


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive slots of one kind: `slots` of `slot_bytes` from byte `start` of the arena."""

    kind: Kind
    start: int
    slot_bytes: int
    slots: int

    @property
    def end(self) -> int:
        return self.start + self.slots * self.slot_bytes

    @property
    def payload_bytes(self) -> int:
        """The largest payload that fits a slot."""
        return self.slot_bytes - HEADER_BYTES

    def offset(self, slot: int) -> int:
        return self.start + slot * self.slot_bytes


def plan_regions(settings: StoreSettings) -> tuple[Region, ...]:
    """The regions that `arena_bytes` is cut into. Raises `ConfigError` when a kind gets none."""
    sizes = {kind: slot_bytes(size) for kind, size in settings.payload_bytes().items()}
    if settings.share(Kind.KV) <= 0:
        raise ConfigError("the shares of windows, pictures and states must leave room for blocks")
    slots: dict[Kind, int] = {
        kind: int(settings.arena_bytes * settings.share(kind)) // size
        for kind, size in sizes.items()
        if kind is not Kind.KV
    }
    left = settings.arena_bytes - sum(count * sizes[kind] for kind, count in slots.items())
    slots = {Kind.KV: left // sizes[Kind.KV], **slots}
    if not all(slots.values()):
        least = max(size / settings.share(kind) for kind, size in sizes.items())
        raise ConfigError(
            f"arena_bytes must be at least {int(least) + 1} for one object of each kind"
            f" ({', '.join(sizes)}), got {settings.arena_bytes}"
        )
    regions: list[Region] = []
    for kind, count in slots.items():
        regions.append(Region(kind, regions[-1].end if regions else 0, sizes[kind], count))
    return tuple(regions)


class Arena:
    """One process's mapping. Dropping the last reference unmaps it; a reader that still copies
    keeps it, whatever became of the store."""

    def __init__(self, descriptor: int, regions: tuple[Region, ...]) -> None:
        """Map an open descriptor (which stays the caller's); half a second a GB. Raises
        `ConfigError` when it is shorter than its regions, which would end a reader with SIGBUS."""
        size = max(region.end for region in regions)
        if os.fstat(descriptor).st_size < size:
            raise ConfigError(f"an arena of {size} bytes was announced, the descriptor is shorter")
        self.regions = regions
        self._spans = tuple((region.start, region.end, region) for region in regions)
        # Populated at once: a first touch of each 4 KiB by a copy costs more than the copy.
        self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = memoryview(self._map)

    @property
    def view(self) -> memoryview:
        """All of it, writable; whoever holds it keeps the mapping."""
        return self._bytes

    def region(self, kind: Kind) -> Region | None:
        return next((region for region in self.regions if region.kind is kind), None)

    def locate(self, offset: int) -> tuple[Region, int] | None:
        """The slot that begins at `offset`, if one does."""
        for start, end, region in self._spans:
            if start <= offset < end:
                slot, rest = divmod(offset - start, region.slot_bytes)
                return None if rest else (region, slot)
        return None

    def payload(self, region: Region, slot: int, payload_bytes: int) -> memoryview:
        """A writable view of a slot's payload; whoever holds it keeps the mapping."""
        begin = region.offset(slot)
        return self._bytes[begin : begin + payload_bytes]

    def slot(self, region: Region, slot: int) -> memoryview:
        """A writable view of a whole slot, which begins at a multiple of 4 KiB in memory."""
        begin = region.offset(slot)
        return self._bytes[begin : begin + region.slot_bytes]

    def bytes_at(self, place: Place) -> memoryview:
        """The payload bytes at a place that was read; nothing is verified here."""
        return self._bytes[place.offset : place.offset + place.payload_bytes]

    def header(self, region: Region, slot: int) -> memoryview:
        end = region.offset(slot) + region.slot_bytes
        return self._bytes[end - HEADER_BYTES : end]

    def blank_header(self, region: Region, slot: int) -> None:
        """From here on no reader believes what lies in this slot."""
        self.header(region, slot)[:] = _BLANK

    def shows(self, place: Place, namespace: bytes, digest: Digest) -> bool:
        """Whether the header at `place` is whole and tells of this object there: then `read`
        believes it, if the payload verifies."""
        found = self.locate(place.offset)
        if found is None:
            return False
        header = self.header(*found).tobytes()
        return _is(header, *found, place, namespace, digest) and header_is_whole(header)

    def read(self, place: Place, namespace: bytes, digest: Digest, dest: Buffer | None) -> Reading:
        """Verify the object at `place` and copy it into `dest` (None: verify only).

        Compared before and after the copy: the whole header, its generation, length, digest and
        namespace; then the checksum of what was copied. Unless GOOD, `dest` holds garbage."""
        offset, length = place.offset, place.payload_bytes
        found = self.locate(offset)
        if found is None or not 0 < length <= found[0].payload_bytes:
            return Reading.STALE
        region, slot = found
        end = offset + region.slot_bytes
        view = self._bytes[end - HEADER_BYTES : end]
        before = view.tobytes()
        if not _is(before, region, slot, place, namespace, digest):
            header = SlotHeader.unpack(before)
            sound = before == _BLANK if header is None else not _is_older(header, place)
            return Reading.STALE if sound else Reading.DAMAGED
        if not header_is_whole(before):
            return Reading.DAMAGED
        target = self._bytes[offset : offset + length]
        if dest is not None:
            target = _copied(target, dest)
        total = checksum(target)  # of the copy: what lies in the slot may change meanwhile
        if view.tobytes() != before:
            return Reading.STALE
        return Reading.GOOD if total == place.checksum else Reading.DAMAGED


def _copied(source: memoryview, dest: Buffer) -> memoryview:
    """Where `source` lies in `dest` now. Raises `ValueError` for too short a destination."""
    length = len(source)
    target = memoryview(dest)
    if target.format != "B" or target.ndim != 1:
        target = target.cast("B")
    if len(target) != length:
        target = target[:length]
        if len(target) < length:
            raise ValueError(f"the destination holds {len(target)} bytes, {length} are needed")
    target[:] = source
    return target


def _is_older(header: SlotHeader, place: Place) -> bool:
    """Whether a header is of an earlier use of the slot than a place: its writer came too late and
    wrote over what the store has given to another."""
    return 0 < (place.generation - header.generation) & 0xFFFF_FFFF < 1 << 31


def _is(
    header: bytes, region: Region, slot: int, place: Place, namespace: bytes, digest: Digest
) -> bool:
    # Bytes are compared with bytes: a header is unpacked only where it is not what was asked for.
    try:
        return (
            header[48:112] == namespace + digest
            and header[16:40]
            == SLOT_PLACE.pack(
                ARENA_SEGMENT, slot, place.generation, place.payload_bytes, place.checksum
            )
            and header[:12] == SLOT_STARTS[region.kind]
        )
    except struct.error:  # a place with numbers that no header can hold
        return False


def create_arena(regions: tuple[Region, ...]) -> tuple[int, Arena]:
    """Make the memory and map it: (descriptor, arena). The descriptor is the caller's to close.

    All of it is taken now: a host that has not enough says so at start, with `ConfigError`,
    instead of killing a process at its first touch. Sealed against shrinking and growing, so no
    client can take bytes away from under another."""
    size = max(region.end for region in regions)
    descriptor = os.memfd_create("headrace-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor, Arena(descriptor, regions)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"arena_bytes: {size} bytes of memory could not be taken ({error.strerror})"
        ) from None
