"""Reading everything back, blanking what is damaged, and cleaning up, in a directory that nobody
serves."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.kvstore.layout import (
    HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    SlotHeader,
    checksum,
)
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.pins import Pin, read_pins, write_pins
from headrace.kvstore.settings import Kind
from headrace.kvstore.workshop.directory import SegmentFile, StoreDirectory, key_of
from headrace.kvstore.workshop.garbage import Flaw, Stored, Wishes, judge
from headrace.kvstore.workshop.survey import path_to

Progress = Callable[[int, int], None]  # done, of all


@dataclass(slots=True)
class Findings:
    """What a walk through a directory found. `flaws` names places with what is wrong there."""

    read: int = 0  # slots that hold something; free ones are passed over
    objects: int = 0
    payload_bytes: int = 0  # read and verified
    damaged_segments: tuple[int, ...] = ()
    short_segments: tuple[int, ...] = ()  # the file ends before the slots that it should have
    flaws: list[tuple[DiskPlace, Flaw, int]] = field(default_factory=list)  # place, what, bytes

    @property
    def damaged(self) -> bool:
        bad = (Flaw.PAYLOAD, Flaw.UNREADABLE)
        segments = self.damaged_segments or self.short_segments
        return bool(segments) or any(flaw in bad for _, flaw, _ in self.flaws)

    def counts(self) -> dict[str, int]:
        return dict(Counter(flaw.value for _, flaw, _ in self.flaws))


def verify(directory: StoreDirectory, progress: Progress) -> Findings:
    """Read every object back and compare it with its header. Changes nothing."""
    found = Findings(damaged_segments=_damaged(directory), short_segments=_short(directory))
    total = directory.n_slots
    for done, (place, header) in enumerate(directory.slots(), 1):
        progress(done, total)
        if header is None:
            continue
        found.read += 1
        size = header.facts.payload_bytes
        payload = directory.payload(place, size)
        if payload is None:
            found.flaws.append((place, Flaw.UNREADABLE, size))
        elif checksum(payload) != header.checksum:
            found.flaws.append((place, Flaw.PAYLOAD, size))
        else:
            found.objects += 1
            found.payload_bytes += size
    return found


def scrub(directory: StoreDirectory, progress: Progress) -> Findings:
    """`verify`, blank what does not verify, so that it is an ordinary miss from then on, and give
    segments that end too soon their length. Raises `OSError`."""
    found = verify(directory, progress)
    erase(directory, found)
    lengthen(directory)
    return found


def lengthen(directory: StoreDirectory) -> None:
    """Give every file that ends too soon the length that its header or, unused, most others say.
    Raises `OSError`."""
    lengths = Counter(s.size_bytes for s in directory.segments if not s.short)
    usual = lengths.most_common(1)[0][0] if lengths else 0
    for segment in directory.segments:
        if segment.short:
            directory.lengthen(segment, max(segment.least_bytes, usual))


def erase(directory: StoreDirectory, found: Findings) -> None:
    """Blank every place that `found` names, and sync. Raises `OSError`."""
    for place, _, _ in found.flaws:
        directory.erase(place)
    if found.flaws:
        directory.sync()


def find_garbage(directory: StoreDirectory, wishes: Wishes, progress: Progress) -> Findings:
    """What nobody can reach, and what is wished away with all that hangs on it. Changes nothing."""
    found = Findings(damaged_segments=_damaged(directory), short_segments=_short(directory))
    objects: dict[bytes, tuple[DiskPlace, SlotHeader]] = {}
    total = directory.n_slots
    for done, (place, header) in enumerate(directory.slots(), 1):
        progress(done, total)
        if header is None:
            continue
        found.read += 1
        older = objects.get(key_of(header))
        if older is not None:
            found.flaws.append((older[0], Flaw.DUPLICATE, older[1].facts.payload_bytes))
        objects[key_of(header)] = (place, header)
    held = pinned_digests(directory)
    known = {
        key: Stored(h.facts, h.written_at_s, (h.facts.namespace, h.facts.digest) in held)
        for key, (_, h) in objects.items()
    }
    for key, flaw in judge(known, wishes):
        place, header = objects[key]
        if flaw is not None:
            found.flaws.append((place, flaw, header.facts.payload_bytes))
            continue
        found.objects += 1
        found.payload_bytes += header.facts.payload_bytes
    return found


def pinned_digests(directory: StoreDirectory) -> set[tuple[bytes, bytes]]:
    """(namespace, digest) of every block that a pin holds."""
    pins = read_pins(directory.path)
    if not pins:
        return set()
    blocks = {
        (header.facts.namespace, bytes(header.facts.digest)): header.facts
        for _, header in directory.objects().values()
        if header.facts.kind is Kind.KV
    }
    held = set()
    for pin in pins:
        namespace = bytes.fromhex(pin.namespace)
        for facts in path_to(bytes.fromhex(pin.tip), namespace, blocks) or ():
            held.add((namespace, bytes(facts.digest)))
    return held


def end_pins(path: Path, now_s: float, *, dry_run: bool = False) -> tuple[Pin, ...]:
    """Take the pins whose time is over out of the directory's list, unless `dry_run`; which they
    are."""
    pins = read_pins(path)
    over = tuple(pin for pin in pins if pin.expires_at_s <= now_s)
    if over and not dry_run:
        write_pins(path, [pin for pin in pins if pin not in over])
    return over


def rebuild_headers(directory: StoreDirectory, progress: Progress) -> dict[int, int]:
    """Give segments with a damaged header theirs back, made from the headers of their slots:
    {number of the segment: objects found}. One without any sound slot becomes unused, and files
    that end too soon get their length. Raises `OSError`."""
    damaged = _damaged(directory)
    heads = [s.header for s in directory.segments if s.header is not None]
    uid = next((h.uid for h in heads if any(h.uid)), os.urandom(8))
    newest = max((s.header.sequence for s in directory.segments if s.header is not None), default=0)
    made: dict[int, int] = {}
    for done, number in enumerate(damaged, 1):
        segment = next(s for s in directory.segments if s.number == number)
        remade = _remade(directory, segment, uid, newest + 1)
        if remade is None:
            directory.blank(segment)
        else:
            newest += 1
            directory.write_segment_header(segment, remade[0])
        made[number] = remade[1] if remade else 0
        progress(done, len(damaged))
    lengthen(directory)
    return made


def _remade(
    directory: StoreDirectory, segment: SegmentFile, uid: bytes, sequence: int
) -> tuple[SegmentHeader, int] | None:
    loose = list(directory.loose_headers(segment))
    if not loose:
        return None
    generation = max(header.generation for _, header in loose)
    alive = [(end, header) for end, header in loose if header.generation == generation]
    sizes = Counter((end - SEGMENT_HEADER_BYTES) // (header.slot + 1) for end, header in alive)
    size, _ = sizes.most_common(1)[0]
    kind = Counter(header.facts.kind for _, header in alive).most_common(1)[0][0]
    slots = (segment.size_bytes - SEGMENT_HEADER_BYTES) // size if size > HEADER_BYTES else 0
    if not slots:  # free, and newer than all that stands in it
        return SegmentHeader(None, 0, 0, segment.number, generation, 0, uid), 0
    header = SegmentHeader(kind, size, slots, segment.number, generation, sequence, uid)
    return header, len(alive)


def _short(directory: StoreDirectory) -> tuple[int, ...]:
    return tuple(s.number for s in directory.segments if s.short)


def _damaged(directory: StoreDirectory) -> tuple[int, ...]:
    return tuple(s.number for s in directory.segments if s.header is None and not s.blank)
