"""A whole chain's records at once say what one value at a time says."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest

from headrace.core.ids import Digest
from headrace.kvstore.chain_records import ChainRecords
from headrace.kvstore.records import (
    IndexRecord,
    digest_tail,
    packed_key,
    packed_keys,
    record_key,
    usable_tiers,
)
from headrace.kvstore.settings import Kind, Tier

EPOCHS = {1: 10, 2: 20, 7: 70}
FOLDER = 99  # mounted somewhere


def digests(count: int) -> list[Digest]:
    return [Digest(hashlib.sha256(b"%d" % n).digest()) for n in range(count)]


def made_up(source: random.Random, digest: Digest, trouble: float) -> bytes | None:
    """A value: mostly right, sometimes of a dead store, another object, or noise."""

    def odd(right: int, *wrong: int) -> int:
        return source.choice(wrong) if source.random() < trouble else right

    if source.random() < trouble / 2:
        return source.choice([None, b"", b"x" * 39, source.randbytes(40), bytes(40)])
    out = b""
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        store = source.choice([1, 2, 7])
        tier = source.choice([Tier.HOST, Tier.SSD, Tier.SHARED])
        record = IndexRecord(
            odd(store, 3, 65_535),
            tier,
            Kind.KV if source.random() > trouble else source.choice([Kind.SWA, Kind.MM]),
            odd(FOLDER if tier is Tier.SHARED else EPOCHS[store], 0, FOLDER, EPOCHS[store]),
            *(source.randrange(1 << 32) for _ in range(4)),
            source.randrange(1 << 64),
            0,
            odd(digest_tail(digest), 0, 1),
            window_too=source.random() < 0.1,
        ).pack()
        out += record[:2] + struct.pack("B", odd(record[2], 0, 9, 255)) + record[3:]
    return out


def one_at_a_time(values, keys) -> tuple[int, dict[Tier, int], set[int]]:
    blocks, by_tier, windows = 0, {}, set()
    for number, (value, key) in enumerate(zip(values, keys, strict=True)):
        tiers = usable_tiers(value, Kind.KV, key, EPOCHS, (FOLDER,))
        if not tiers:
            break
        blocks += 1
        tier = next(t for t in (Tier.HOST, Tier.SSD, Tier.SHARED) if t in tiers)
        by_tier[tier] = by_tier.get(tier, 0) + 1
        for begin in range(0, len(value), 40):
            record = value[begin : begin + 40]
            alone = usable_tiers(record, Kind.KV, key, EPOCHS, (FOLDER,))
            if alone and record[3] & 0x80:
                windows.add(number)
    return blocks, by_tier, windows


@pytest.mark.parametrize("trouble", [0.0, 0.002, 0.02, 0.3])
def test_a_chain_at_once_is_what_its_values_say_one_by_one(trouble):
    source = random.Random(int(trouble * 1000))
    lengths = []
    for _ in range(60):
        keys = digests(source.choice([1, 2, 17, 200]))
        values = [made_up(source, key, trouble) for key in keys]
        found = ChainRecords(values, b"".join(keys)).hits(EPOCHS, {FOLDER})
        assert (found.blocks, dict(found.by_tier), set(found.windows)) == one_at_a_time(
            values, keys
        )
        lengths.append(found.blocks)
    assert max(lengths) >= 2 and (trouble == 0.0 or min(lengths) < max(lengths))


def test_packed_keys_are_the_keys():
    keys, namespace = digests(5), bytes(range(32))
    for kind in Kind:
        plain = [record_key(kind, namespace, key) for key in keys]
        assert packed_keys(kind, namespace, b"".join(keys)) == b"".join(map(packed_key, plain))
    assert packed_key(b"kv:store:7") == b"$10\r\nkv:store:7\r\n"
    assert packed_keys(Kind.KV, namespace, b"") == b""
