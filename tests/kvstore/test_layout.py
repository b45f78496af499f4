"""The bytes of a slot, of a segment's header and of an index record, fixed for ever."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest

from headrace.core.ids import Digest
from headrace.kvstore.layout import (
    HEADER_BYTES,
    ObjectFacts,
    SegmentHeader,
    SlotHeader,
    checksum,
    domain_tag,
    slot_bytes,
)
from headrace.kvstore.records import IndexRecord, LiveStore, unpack_records, usable_tiers
from headrace.kvstore.settings import Kind, Tier

FACTS = ObjectFacts(
    kind=Kind.KV,
    namespace=bytes(range(32)),
    digest=Digest(bytes(range(32, 64))),
    parent=Digest(bytes(range(64, 96))),
    block=7,
    domain=bytes(range(96, 112)),
    payload_bytes=113_920,
)
HEADER = SlotHeader(
    FACTS, checksum=0x0123456789ABCDEF, segment=3, slot=11, generation=5, written_at_s=1_700_000_000
)
SEGMENT = SegmentHeader(Kind.SWA, 1_343_488, 9, 4, 6, 17, b"uid-uid-")
RECORD = IndexRecord(513, Tier.SSD, Kind.KV, 2**32 - 1, 3, 11, 5, 113_920, 2**64 - 1, 9, 2**31)


def test_the_bytes_are_the_documented_ones():
    """Golden: a change here is another format version (docs/kv-format.md)."""
    data = HEADER.pack()
    assert len(data) == HEADER_BYTES == 512
    assert data[:48].hex() == (
        "4852534c"
        "0100"
        "01"
        "00"
        "00020000"
        "07000000"
        "03000000"
        "0b000000"
        "05000000"
        "00bd0100"
        "efcdab8967452301"
        "00f1536500000000"
    )
    assert data[48:160] == bytes(range(112))
    assert data[160:504] == bytes(344)
    assert int.from_bytes(data[504:], "little") == checksum(data[:504])
    data = SEGMENT.pack()
    assert len(data) == 4096
    assert data[:40].hex() == (
        "4852534701000200008014000900000004000000060000001100000000000000" + b"uid-uid-".hex()
    )
    assert not any(data[40:4088])
    assert RECORD.pack().hex() == (
        "01020201ffffffff030000000b0000000500000000bd0100ffffffffffffffff0900000000000080"
    )


def test_headers_come_back_as_they_were():
    assert SlotHeader.unpack(HEADER.pack()) == HEADER
    assert SegmentHeader.unpack(SEGMENT.pack()) == SEGMENT
    free = replace(SEGMENT, kind=None)
    assert SegmentHeader.unpack(free.pack()) == free
    assert unpack_records(RECORD.pack() * 3) == (RECORD,) * 3


@pytest.mark.parametrize("make", [HEADER.pack, SEGMENT.pack], ids=["slot", "segment"])
def test_every_flipped_bit_of_a_header_is_noticed(make):
    data = bytearray(make())
    unpack = SlotHeader.unpack if len(data) == 512 else SegmentHeader.unpack
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert unpack(data) is None, bit
        data[bit // 8] ^= 1 << bit % 8
    assert unpack(data) is not None


def test_what_is_no_header_is_none():
    assert SlotHeader.unpack(bytes(512)) is None
    assert SlotHeader.unpack(HEADER.pack()[:511]) is None
    assert SegmentHeader.unpack(bytes(4096)) is None
    source = random.Random(1)
    assert all(SlotHeader.unpack(source.randbytes(512)) is None for _ in range(200))


def _sealed(body: bytes) -> bytes:
    return body[:-8] + checksum(body[:-8]).to_bytes(8, "little")


def test_another_version_is_refused_by_name_or_passed_over():
    data = bytearray(SEGMENT.pack())
    data[4:6] = (2).to_bytes(2, "little")
    assert SegmentHeader.unpack(_sealed(bytes(data))) == 2
    data = bytearray(HEADER.pack())
    data[4:6] = (2).to_bytes(2, "little")
    assert SlotHeader.unpack(_sealed(bytes(data))) is None
    data = bytearray(HEADER.pack())
    data[6] = 77  # a kind that nobody knows
    assert SlotHeader.unpack(_sealed(bytes(data))) is None


def test_slots_hold_payload_and_header_at_4_kib():
    assert slot_bytes(113_920) == 114_688 == 28 * 4096  # kvstore's figure for Flash
    assert slot_bytes(4096 - 512) == 4096 and slot_bytes(4096 - 511) == 8192
    assert slot_bytes(1) == 4096
    assert slot_bytes(1_341_120) - 1_341_120 >= 512


def test_domain_tags_are_framed():
    tags = {domain_tag(name) for name in ("", "a", "b", "ab", "a\0b")}
    assert len(tags) == 5 and {len(tag) for tag in tags} == {16}


def test_a_record_counts_only_whole_live_and_of_this_object():
    digest = Digest(hashlib.sha256(b"x").digest())
    tail = int.from_bytes(digest[28:], "little")
    ssd = replace(RECORD, digest_tail=tail)
    host = replace(ssd, tier=Tier.HOST)
    live = {513: 2**32 - 1}
    both = frozenset((Tier.HOST, Tier.SSD))
    value = ssd.pack() + host.pack()
    assert usable_tiers(value, Kind.KV, digest, live, ()) == both
    assert usable_tiers(value, Kind.SWA, digest, live, ()) == frozenset()
    assert usable_tiers(value, Kind.KV, Digest(bytes(32)), live, ()) == frozenset()
    assert usable_tiers(value, Kind.KV, digest, {513: 1}, ()) == frozenset()  # an earlier life
    assert usable_tiers(value, Kind.KV, digest, {}, ()) == frozenset()
    assert usable_tiers(value[:-1], Kind.KV, digest, live, ()) == frozenset()
    assert usable_tiers(value + b"x" * 40, Kind.KV, digest, live, ()) == frozenset()
    assert usable_tiers(None, Kind.KV, digest, live, ()) == frozenset()
    other = replace(ssd, store=9, epoch=4).pack()
    assert usable_tiers(other + host.pack(), Kind.KV, digest, live, ()) == {Tier.HOST}


def test_live_records_come_back_or_are_none():
    live = LiveStore(7, 2**40, b"12345678")
    assert len(live.pack()) == 20 and LiveStore.unpack(live.pack()) == live
    served = LiveStore(7, 2**40, b"12345678", "tcp://10.0.0.1:7")
    assert served.pack() == live.pack() + b"tcp://10.0.0.1:7"
    assert LiveStore.unpack(served.pack()) == served
    odd = [b"x", b"tcp://\xff", b"tcp://" + b"a" * 300]
    for value in (None, b"", live.pack()[:-1], *(live.pack() + more for more in odd)):
        assert LiveStore.unpack(value) is None
