"""Content addresses: framing, typed fields and agreement with a second way of computing them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chain import (
    Namespace,
    as_token_ids,
    block_digests,
    domain_salt,
    next_digest,
    root_digest,
    window_digest,
)

NS = Namespace("t1", "w0", b"\x01" * 32, "invariant-fp64", "exact")
SALT = b"\x07" * 32


def test_chain_equals_the_formula_written_out() -> None:
    ids = as_token_ids(range(300))
    root = root_digest(NS.digest(), SALT)
    assert root == hashlib.sha256(b"root" + NS.digest() + struct.pack("<I", 32) + SALT).digest()
    one = hashlib.sha256(
        b"blk" + root + struct.pack("<I", 128) + struct.pack("<128I", *range(128)) + b"\0\0\0\0"
    ).digest()
    two = hashlib.sha256(
        b"blk" + one + struct.pack("<I", 128) + struct.pack("<128I", *range(128, 256)) + b"\0\0\0\0"
    ).digest()
    assert block_digests(root, ids) == (one, two)
    assert window_digest(two) == hashlib.sha256(b"swa" + two).digest()


@pytest.mark.parametrize(
    "other",
    [
        replace(NS, model="t2"),
        replace(NS, weights="w1"),
        replace(NS, layout_id=b"\x02" * 32),
        replace(NS, numerics="fast-fp32"),
        replace(NS, exactness="replayed"),
        replace(NS, model="t1w", weights="0"),  # the same letters, another border
    ],
)
def test_every_field_of_a_namespace_counts(other: Namespace) -> None:
    assert other.digest() != NS.digest()


@given(st.text(max_size=20), st.text(max_size=20))
def test_domains_never_share_a_salt(a: str, b: str) -> None:
    assert (domain_salt(SALT, a) == domain_salt(SALT, b)) == (a == b)


@given(st.integers(0, 700), st.integers(0, 700), st.integers(1, 4095))
def test_equal_digests_mean_equal_prefixes(length: int, change: int, delta: int) -> None:
    ids = as_token_ids([(7 * i) % 4096 for i in range(length)])
    other = as_token_ids(ids.tobytes())
    if change < length:
        other[change] = (other[change] + delta) % 4096
    root = root_digest(NS.digest(), SALT)
    ours, theirs = block_digests(root, ids), block_digests(root, other)
    for block, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert (x == y) == (change >= min(length, (block + 1) * 128))


def test_a_chain_can_be_continued_from_its_middle() -> None:
    ids = as_token_ids(range(1000))
    root = root_digest(NS.digest(), SALT)
    whole = block_digests(root, ids)
    assert block_digests(root, ids, 3, whole[2]) == whole[3:]
    with pytest.raises(ValueError, match="parent digest"):
        block_digests(root, ids, 3)


def test_extras_are_framed() -> None:
    block = bytes(512)
    assert next_digest(SALT, block, b"a") != next_digest(SALT, block, b"")
    assert next_digest(SALT, block, b"a") != next_digest(SALT, block + b"a", b"")
