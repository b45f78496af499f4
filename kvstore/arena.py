"""The arena: shared memory of one host, cut into slots of a fixed size a kind.

The store creates it (`memfd`, so it has no name and nothing is left after a crash) and hands its
descriptor to every client. All of them may write: what a reader believes rests on checksums.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.ids import Digest
from headrace.core.messages import Place
from headrace.kvstore.layout import (
    HEADER_BYTES,
    SLOT_PROOF,
    SLOT_STARTS,
    Buffer,
    SlotHeader,
    checksum,
    header_checksum,
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


GOOD = Reading.GOOD  # looked up for every block that is read


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
        self._spans = tuple(
            (r.start, r.end, r.slot_bytes, r.payload_bytes, SLOT_STARTS[r.kind]) for r in regions
        )
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
        for region in self.regions:
            if region.start <= offset < region.end:
                slot, rest = divmod(offset - region.start, region.slot_bytes)
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
        return self._proof(place, namespace, digest)[0] is GOOD

    def read(self, place: Place, namespace: bytes, digest: Digest, dest: Buffer | None) -> Reading:
        """Verify the object at `place` and copy it into `dest` (None: verify only).

        Compared before and after the copy: the whole header, its generation, length, digest and
        namespace; then the checksum of what was copied. Unless GOOD, `dest` holds garbage."""
        found, header, begin = self._proof(place, namespace, digest)
        if found is not GOOD:
            return found
        offset = place.offset
        target = self._bytes[offset : offset + place.payload_bytes]
        if dest is not None:
            target = _copied(target, dest)
        total = checksum(target)  # of the copy: what lies in the slot may change meanwhile
        if self._map[begin : begin + HEADER_BYTES] != header:
            return Reading.STALE
        return GOOD if total == place.checksum else Reading.DAMAGED

    def _proof(self, place: Place, namespace: bytes, digest: Digest) -> tuple[Reading, bytes, int]:
        """GOOD, the header at `place` and where in the arena it begins, if it is whole and tells of
        this object there; else why not."""
        offset = place.offset
        for start, end, size, most, begins in self._spans:
            if not start <= offset < end:
                continue
            slot, rest = divmod(offset - start, size)
            if rest or not 0 < place.payload_bytes <= most:
                break
            begin = offset + size - HEADER_BYTES
            header = self._map[begin : begin + HEADER_BYTES]
            told = SLOT_PROOF.unpack(header)
            wanted = (
                begins,
                ARENA_SEGMENT,
                slot,
                place.generation,
                place.payload_bytes,
                place.checksum,
                namespace,
                digest,
                header_checksum(header),
            )
            good = told == wanted
            return GOOD if good else _other(header, told, wanted, place), header, begin
        return Reading.STALE, b"", 0


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


def _other(header: bytes, told: tuple[Any, ...], wanted: tuple[Any, ...], place: Place) -> Reading:
    """What a header is that does not prove what was asked for."""
    if told[:-1] == wanted[:-1]:
        return Reading.DAMAGED  # it is that object's, but not whole
    found = SlotHeader.unpack(header)
    sound = header == _BLANK if found is None else not _is_older(found, place)
    return Reading.STALE if sound else Reading.DAMAGED


def _is_older(header: SlotHeader, place: Place) -> bool:
    """Whether a header is of an earlier use of the slot than a place: its writer came too late and
    wrote over what the store has given to another. One of the disk's belongs to a load that is
    being verified."""
    return (
        header.segment == ARENA_SEGMENT
        and 0 < (place.generation - header.generation) & 0xFFFF_FFFF < 1 << 31
    )


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
