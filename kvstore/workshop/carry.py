"""Chains out of a directory into a prefix file, and back into a directory that nobody serves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.kvstore.layout import (
    ALIGN_BYTES,
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    ObjectFacts,
    SegmentHeader,
    SlotHeader,
    checksum,
    slot_bytes,
)
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.segment_names import segment_name
from headrace.kvstore.settings import Kind
from headrace.kvstore.workshop.directory import SegmentFile, StoreDirectory, key_of
from headrace.kvstore.workshop.shipping import (
    FileRefused,
    PrefixFile,
    Progress,
    check_target,
    mark_of,
    read_objects,
    sizes_of,
    verify_file,
    write_file,
)
from headrace.kvstore.workshop.survey import path_to

Found = dict[bytes, tuple[DiskPlace, SlotHeader]]


def export_chains(
    directory: StoreDirectory,
    namespace: bytes,
    tips: Sequence[bytes],
    path: Path,
    progress: Progress,
    *,
    force: bool = False,
) -> PrefixFile:
    """Write whole chains of one namespace, with the window records on them, into a new file, or
    with `force` in place of an older one.

    Blocks that chains share stand once. Raises `FileRefused` for a tip whose chain is not whole,
    for an object that does not verify, and where no file may be written (`check_target`): a file is
    complete or not there."""
    check_target(path, force=force)
    wanted = _with_windows(directory.objects(), namespace, tips)
    payload_bytes = sum(header.facts.payload_bytes for _, header in wanted)
    about = PrefixFile(
        len(wanted), payload_bytes, int(time.time()), namespace, mark_of(directory.path)
    )

    def objects() -> Iterator[tuple[SlotHeader, bytearray]]:
        for place, header in wanted:
            payload = directory.payload(place, header.facts.payload_bytes)
            if payload is None or checksum(payload) != header.checksum:
                raise FileRefused(
                    f"the {header.facts.kind} object in segment {place.segment}, slot {place.slot}"
                    " does not verify; `headrace store scrub` removes it"
                )
            yield header, payload

    write_file(path, objects(), about, progress, force=force)
    return about


def _with_windows(
    found: Found, namespace: bytes, tips: Sequence[bytes]
) -> list[tuple[DiskPlace, SlotHeader]]:
    blocks = {
        (header.facts.namespace, bytes(header.facts.digest)): header.facts
        for _, header in found.values()
        if header.facts.kind is Kind.KV
    }
    wanted: dict[bytes, None] = {}  # digests, heads first
    for tip in tips:
        chain = path_to(tip, namespace, blocks)
        if chain is None:
            raise FileRefused(f"the chain that ends in {tip.hex()[:16]} is not stored as a whole")
        wanted.update((bytes(facts.digest), None) for facts in chain)
    mine = [item for item in found.values() if item[1].facts.namespace == namespace]
    of_blocks = {bytes(h.facts.digest): (place, h) for place, h in mine if h.facts.kind is Kind.KV}
    windows = [
        (place, header)
        for place, header in mine
        if header.facts.kind is Kind.SWA and bytes(header.facts.parent) in wanted
    ]
    return [of_blocks[digest] for digest in wanted] + windows


@dataclass(slots=True)
class Imported:
    """What an import did. `no_room`: tails that found no free slot; nothing is pushed out for an
    import. `unsaved`: what a running store keeps in memory only, since its disk failed or another
    store has just written it."""

    written: int = 0
    known: int = 0
    no_room: int = 0
    unsaved: int = 0
    payload_bytes: int = 0


def check_fits(about: PrefixFile, mark: bytes, namespaces: set[bytes], *, force: bool) -> None:
    """Raises `FileRefused` unless what a file holds could be found here. `force` lets a namespace
    in that no object of this store has; another salt is never let in, it could not be found."""
    if about.mark != mark:
        raise FileRefused(
            "the file was exported under another salt, so nothing in it could ever be found here:"
            " stores that exchange prefixes need the same `salt` file (copy it before first use)"
        )
    if namespaces and about.namespace not in namespaces and not force:
        raise FileRefused(
            f"the file's namespace {about.namespace.hex()[:16]} (model, weights, layout, numerics)"
            " is none of this store's; --new-namespace imports it all the same"
        )


def check_sizes(
    sizes: Mapping[Kind, int],
    most: Mapping[Kind, int],
    known: Mapping[Kind, set[int]],
    where: str,
) -> None:
    """Raises `FileRefused` for a kind whose payloads have more bytes than `most`, the bound of
    `where`, or another size than those of the namespace that are here, `known`."""
    for kind, size in sizes.items():
        if size > most[kind]:
            raise FileRefused(
                f"an object must have at most {most[kind]} bytes to stand {where}; those of"
                f" kind {kind.value} have {size}"
            )
        here = known.get(kind)
        if here and size not in here:
            raise FileRefused(
                f"objects of kind {kind.value} have {min(here)} bytes in this namespace"
                f" here, those of the file {size}"
            )


def _check_sizes_of(
    directory: StoreDirectory, namespace: bytes, path: Path, here: Iterable[ObjectFacts]
) -> None:
    longest = max((segment.size_bytes for segment in directory.segments), default=0)
    room = (longest - SEGMENT_HEADER_BYTES) // ALIGN_BYTES * ALIGN_BYTES - HEADER_BYTES
    known: dict[Kind, set[int]] = {}
    for facts in here:
        if facts.namespace == namespace:
            known.setdefault(facts.kind, set()).add(facts.payload_bytes)
    sizes = sizes_of(path)
    most = dict.fromkeys(sizes, room)
    check_sizes(sizes, most, known, "in a segment here (store.segment_bytes)")


def import_file(
    directory: StoreDirectory, path: Path, progress: Progress, *, force: bool = False
) -> Imported:
    """Verify a whole prefix file, then write what is missing into free slots and sync.

    Raises `FileRefused` before anything is written, and `OSError`."""
    short = [segment_name(s.number) for s in directory.segments if s.short]
    if short:
        raise FileRefused(
            f"{short[0]} in {directory.path} ends before its slots do: `headrace store scrub` first"
        )
    found = directory.objects()
    about = verify_file(path, lambda done, total: progress(done, 2 * total))
    namespaces = {header.facts.namespace for _, header in found.values()}
    check_fits(about, mark_of(directory.path), namespaces, force=force)
    facts_here = [header.facts for _, header in found.values()]
    _check_sizes_of(directory, about.namespace, path, facts_here)
    slots = _FreeSlots(directory)
    done = Imported()
    lost: set[bytes] = set()  # digests without room: what hangs on them is not written either
    for number, (header, payload) in enumerate(read_objects(path), 1):
        facts = header.facts
        progress(about.objects + number, 2 * about.objects)
        if key_of(header) in found:
            done.known += 1
            continue
        place = None if facts.parent in lost else slots.take(facts.kind, facts.payload_bytes)
        if place is None:
            lost.add(facts.digest)
            done.no_room += 1
            continue
        directory.write(place, header, payload)
        done.written += 1
        done.payload_bytes += len(payload)
    directory.sync()
    return done


class _FreeSlots:
    """Slots that no object stands in and that a store would write next: the rest of the newest
    segment of a kind, then segments that are free."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self._next: dict[Kind, tuple[SegmentFile, int]] = {}
        used: dict[int, int] = {}
        for place, header in directory.slots():
            if header is not None:
                used[place.segment] = place.slot + 1
        newest: dict[Kind, SegmentFile] = {}
        for segment in directory.segments:
            head = segment.header
            if head is None or head.kind is None:
                continue
            before = newest.get(head.kind)
            if before is None or before.header is None or head.sequence > before.header.sequence:
                newest[head.kind] = segment
        written = {segment.number for segment in newest.values()}
        self._free = [
            s
            for s in directory.segments
            if s.blank or (s.header and not (s.header.kind and s.number in {*used, *written}))
        ]
        for kind, segment in newest.items():
            self._next[kind] = (segment, used.get(segment.number, 0))

    def take(self, kind: Kind, payload_bytes: int) -> DiskPlace | None:
        """A place for such an object; begins a free segment if need be. Raises `OSError`."""
        segment, slot = self._next.get(kind, (None, 0))
        size = slot_bytes(payload_bytes)
        head = segment.header if segment is not None else None
        if segment is None or head is None or slot >= head.slots or size > head.slot_bytes:
            segment, slot = self._begin(kind, max(size, head.slot_bytes if head else 0)), 0
        if segment is None or segment.header is None:
            return None
        self._next[kind] = (segment, slot + 1)
        return DiskPlace(segment.number, slot, segment.header.generation)

    def _begin(self, kind: Kind, size: int) -> SegmentFile | None:
        fitting = (s for s in self._free if s.size_bytes >= SEGMENT_HEADER_BYTES + size)
        segment = next(fitting, None)
        if segment is None:
            return None
        self._free.remove(segment)
        headers = [s.header for s in self._directory.segments if s.header is not None]
        last = segment.header.generation if segment.header is not None else 0
        header = SegmentHeader(
            kind,
            size,
            (segment.size_bytes - SEGMENT_HEADER_BYTES) // size,
            segment.number,
            (last + 1) & 0xFFFF_FFFF,
            max((h.sequence for h in headers), default=0) + 1,
            next((h.uid for h in headers if any(h.uid)), os.urandom(8)),
        )
        self._directory.write_segment_header(segment, header)
        return segment
