"""Byte layout of a slot and of a segment file (docs/kv-format.md).

    slot     payload | zero padding | header (the last 512 bytes: one disk sector)
    segment  header (4 KiB) | slot 0 | slot 1 | ...

A slot looks the same in the arena and on disk; only the three numbers that say where it lies
differ. Each header carries a checksum of its own bytes and one of the payload, so that a header is
believed without reading the payload and a payload never without its checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import xxhash

from headrace.core.ids import Digest
from headrace.kvstore.records import KIND_CODES, KINDS_BY_CODE
from headrace.kvstore.settings import Kind

Buffer: TypeAlias = bytes | bytearray | memoryview

VERSION = 1
ALIGN_BYTES = 4096
HEADER_BYTES = 512
SEGMENT_HEADER_BYTES = 4096
NO_DIGEST = Digest(bytes(32))

# magic | version | kind | flags | header bytes | block | segment | slot | generation |
# payload bytes | checksum | written at | namespace | digest | parent digest | domain
_SLOT = struct.Struct("<4sHBBIIIIIIQQ32s32s32s16s")
_SLOT_MAGIC = b"HRSL"
# The same 504 bytes in the parts that `header_packer` tells apart: start | block | segment | slot |
# generation | payload bytes | checksum | written at, namespace | digest | parent | domain and zeros
_SLOT_PARTS = struct.Struct("<12sIIIIIQ40s32s32s360s")
# magic | version | kind | flags | slot bytes | slots | segment | generation | sequence | store uid
_SEGMENT = struct.Struct("<4sHBBIIIIQ8s")
_SEGMENT_MAGIC = b"HRSG"
_SUM = struct.Struct("<Q")
# What a reader compares of a header: all before the block | segment | slot | generation |
# payload bytes | checksum of the payload | namespace | digest | checksum of the header.
SLOT_PROOF = struct.Struct("<12s4xIIIIQ8x32s32s392xQ")
# As it is compared with what the store knows: its block, parent and domain too.
_TOLD = struct.Struct("<12sIIIIIQ8x32s32s32s16s344xQ")
_AT = struct.Struct("<III")  # bytes 16 to 27: where the slot lies
_AT_BYTE = 16
SLOT_STARTS: dict[Kind, bytes] = {
    kind: struct.pack("<4sHBBI", _SLOT_MAGIC, VERSION, code, 0, HEADER_BYTES)
    for kind, code in KIND_CODES.items()
}


# xxh3-64 of the bytes: 2 us a block of 114 kB. Detects damage, proves no origin. No function around
# it: what is called twice a block that is read would cost half of what it does.
checksum: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest


def header_checksum(header: bytes) -> int:
    """What a header of 512 bytes carries as the checksum of all before."""
    return checksum(header[: -_SUM.size])


def slot_bytes(payload_bytes: int) -> int:
    """Size of a slot for payloads up to `payload_bytes`: with its header, 4 KiB aligned."""
    return -(-(payload_bytes + HEADER_BYTES) // ALIGN_BYTES) * ALIGN_BYTES


def domain_tag(domain: str) -> bytes:
    """16 bytes that tell cache domains apart in a header, for shares and statistics."""
    name = domain.encode()
    framed = b"domain" + struct.pack("<I", len(name)) + name
    return hashlib.sha256(framed).digest()[:16]


# Tuples, since one is made for every block that is put, read or found at start: half the cost.


class ObjectFacts(NamedTuple):
    """What a writer says of an object; the part of a header that does not depend on its place."""

    kind: Kind
    namespace: bytes  # 32 bytes
    digest: Digest
    parent: Digest
    block: int  # number of the block in its chain; of the last block covered for a window record
    domain: bytes  # 16 bytes
    payload_bytes: int


class SlotHeader(NamedTuple):
    """The header of one slot. `segment` is `records.ARENA_SEGMENT` in the arena."""

    facts: ObjectFacts
    checksum: int
    segment: int
    slot: int
    generation: int
    written_at_s: int

    def pack(self) -> bytes:
        at = (self.segment, self.slot, self.generation)
        return pack_slot_header(self.facts, self.checksum, *at, self.written_at_s)

    @staticmethod
    def unpack(data: Buffer) -> SlotHeader | None:
        """The header in 512 bytes; None when there is none, or it is damaged or of another
        version."""
        if len(data) != HEADER_BYTES or data[:4] != _SLOT_MAGIC:
            return None
        header = bytes(data)
        if header[-_SUM.size :] != _SUM.pack(header_checksum(header)):
            return None
        fields = _SLOT.unpack_from(header)
        _, version, kind_code, flags, header_bytes, block, segment, slot, generation = fields[:9]
        kind = KINDS_BY_CODE.get(kind_code)
        if version != VERSION or flags or header_bytes != HEADER_BYTES or kind is None:
            return None
        payload_bytes, payload_sum, written_at_s, namespace, digest, parent, domain = fields[9:]
        facts = ObjectFacts(kind, namespace, digest, parent, block, domain, payload_bytes)
        return SlotHeader(facts, payload_sum, segment, slot, generation, written_at_s)


# digest, parent, block, segment, slot, generation, payload bytes, checksum of the payload
PackHeader: TypeAlias = Callable[[Digest, Digest, int, int, int, int, int, int], bytes]


def header_packer(kind: Kind, namespace: bytes, domain: bytes, written_at_s: int) -> PackHeader:
    """Makes the 512 bytes of a header, its own checksum last, of objects that have these four in
    common: half the cost of each."""
    start, pack, pack_sum = SLOT_STARTS[kind], _SLOT_PARTS.pack, _SUM.pack
    common = pack_sum(written_at_s) + namespace

    def pack_header(
        digest: Digest,
        parent: Digest,
        block: int,
        segment: int,
        slot: int,
        generation: int,
        payload_bytes: int,
        total: int,
    ) -> bytes:
        at = (segment, slot, generation, payload_bytes, total)
        body = pack(start, block, *at, common, digest, parent, domain)
        return body + pack_sum(checksum(body))

    return pack_header


def header_tells(
    header: bytes, facts: ObjectFacts, payload_sum: int, at: tuple[int, int, int]
) -> bool:
    """Whether 512 bytes are the whole header of that object in slot `at` (segment, slot,
    generation), whenever it was written there."""
    kind, namespace, digest, parent, block, domain, size = facts
    known = (namespace, digest, parent, domain, header_checksum(header))
    return _TOLD.unpack(header) == (SLOT_STARTS[kind], block, *at, size, payload_sum, *known)


def header_elsewhere(header: bytes, segment: int, slot: int, generation: int) -> bytes:
    """The header of the same object in another slot."""
    body = bytearray(header[: -_SUM.size])
    _AT.pack_into(body, _AT_BYTE, segment, slot, generation)
    return bytes(body) + _SUM.pack(checksum(body))


def pack_slot_header(
    facts: ObjectFacts,
    payload_sum: int,
    segment: int,
    slot: int,
    generation: int,
    written_at_s: int,
) -> bytes:
    """The 512 bytes of one header, its own checksum last."""
    pack = header_packer(facts.kind, facts.namespace, facts.domain, written_at_s)
    at = (segment, slot, generation, facts.payload_bytes, payload_sum)
    return pack(facts.digest, facts.parent, facts.block, *at)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first 4 KiB of a segment file. `sequence` grows with every (re)use of any segment, so it
    orders them by age; 0 and kind None stand for a segment that is free."""

    kind: Kind | None
    slot_bytes: int
    slots: int
    segment: int
    generation: int
    sequence: int
    uid: bytes  # of the store's directory: a file copied in from elsewhere is not ours

    def pack(self) -> bytes:
        body = _SEGMENT.pack(
            _SEGMENT_MAGIC,
            VERSION,
            KIND_CODES[self.kind] if self.kind else 0,
            0,
            self.slot_bytes,
            self.slots,
            self.segment,
            self.generation,
            self.sequence,
            self.uid,
        ).ljust(SEGMENT_HEADER_BYTES - _SUM.size, b"\0")
        return body + _SUM.pack(checksum(body))

    @staticmethod
    def unpack(data: Buffer) -> SegmentHeader | int | None:
        """The header; an int is the version of a sound header that this build cannot read; None
        means damaged, or never written."""
        if len(data) != SEGMENT_HEADER_BYTES or data[:4] != _SEGMENT_MAGIC:
            return None
        body = bytes(data[: -_SUM.size])
        if _SUM.unpack(data[-_SUM.size :])[0] != checksum(body):
            return None
        _, version, kind_code, flags, *numbers = _SEGMENT.unpack_from(body)
        if version != VERSION:
            return int(version)
        if flags or (kind_code and kind_code not in KINDS_BY_CODE):
            return None
        return SegmentHeader(KINDS_BY_CODE.get(kind_code), *numbers)
