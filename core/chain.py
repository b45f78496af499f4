"""Content addresses: the namespace digest and the chain of block digests of a token sequence.

    ns   = SHA-256(canonical msgpack of the namespace's fields)
    h_0  = SHA-256("root" | ns | len | domain salt)
    h_i  = SHA-256("blk" | h_{i-1} | u32 count | 128 x u32le ids | typed extras)
    swa  = SHA-256("swa" | h_i)            the window record at position 128 i

Every field is framed by a tag or a length, so that no two different inputs share bytes. A block's
digest covers everything its bytes depend on: all tokens before its end, the model and its weights,
the formats, the numerics and the exactness class, and the cache domain. No rank, no `keep`, and
no ring size enters: the bytes do not depend on them.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgpack

from headrace.core.ids import Digest, JobKey

BLOCK_TOKENS = 128
SCHEMA = 1
_BLOCK_BYTES = BLOCK_TOKENS * 4
_COUNT = struct.pack("<I", BLOCK_TOKENS)
_NO_EXTRAS = struct.pack("<I", 0)
TOKEN_TYPE = "I"  # array typecode of token ids: unsigned 32 bit

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # Python 3.11 cannot subscript it at run time

assert array(TOKEN_TYPE).itemsize == 4, "token ids need a 32-bit array type"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything outside the text that decides what stored bytes mean.

    `layout_id` (32 bytes) covers formats, layer map, dimensions and order; `numerics` is `fast` or
    `invariant` with its compute type (`invariant-fp64`); `exactness` is `exact` or `replayed`."""

    model: str
    weights: str
    layout_id: bytes
    numerics: str
    exactness: str

    def digest(self) -> Digest:
        fields = {**asdict(self), "schema": SCHEMA, "block": BLOCK_TOKENS, "byteorder": "little"}
        canonical = msgpack.packb([[key, fields[key]] for key in sorted(fields)], use_bin_type=True)
        return Digest(hashlib.sha256(canonical).digest())


def domain_salt(master_salt: bytes, domain: str) -> bytes:
    """The 32-byte salt of a cache domain, derived from the 32 random bytes kept beside the store.

    SHA-256 over framed fields keyed by the secret master: a client that knows a domain's name can
    neither compute nor steer its keys."""
    if len(master_salt) != 32:
        raise ValueError(f"the master salt has 32 bytes, got {len(master_salt)}")
    name = domain.encode()
    return hashlib.sha256(b"salt" + master_salt + struct.pack("<I", len(name)) + name).digest()


def root_digest(namespace: Digest, salt: bytes) -> Digest:
    """h_0: where the chains of one namespace and one cache domain begin."""
    return Digest(
        hashlib.sha256(b"root" + namespace + struct.pack("<I", len(salt)) + salt).digest()
    )


def next_digest(parent: bytes, block: bytes | memoryview, extras: bytes = b"") -> Digest:
    """h_i from h_{i-1} and one whole block of ids as 512 little-endian bytes.

    `extras`: canonical bytes for what else the block's content depends on (an adapter, the digest
    of an image and its offset in the block); empty for plain text."""
    head = hashlib.sha256(b"blk" + parent + struct.pack("<I", BLOCK_TOKENS))
    head.update(block)
    head.update(struct.pack("<I", len(extras)))
    head.update(extras)
    return Digest(head.digest())


def block_digests(
    root: bytes,
    token_ids: TokenIds,
    start_block: int = 0,
    parent: bytes | None = None,
    extras: Mapping[int, bytes] | None = None,
) -> tuple[Digest, ...]:
    """Digests of the complete blocks of `token_ids` from `start_block` on.

    `parent` is the digest of block `start_block - 1` (the root if that is None and start_block is
    0). `extras` by block number as in `next_digest`; blocks without an entry have none. O(length);
    ids must be an `array("I")`, a list would cost three times as much."""
    if start_block and parent is None:
        raise ValueError("a chain that does not begin at block 0 needs its parent digest")
    view = memoryview(token_ids).cast("B")
    digest = parent if parent is not None else root
    begun, out = hashlib.sha256(b"blk"), list[Digest]()
    for begin in range(start_block * _BLOCK_BYTES, len(view) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        extra = extras.get(begin // _BLOCK_BYTES, b"") if extras else b""
        tail = _NO_EXTRAS if not extra else struct.pack("<I", len(extra)) + extra
        hashed = begun.copy()  # a new hash looks its function up, which costs as much as 200 bytes
        hashed.update(digest + _COUNT)
        hashed.update(view[begin : begin + _BLOCK_BYTES])
        hashed.update(tail)
        digest = hashed.digest()
        out.append(digest)  # type: ignore[arg-type]  # Digest is bytes; the call costs a tenth
    return tuple(out)


def window_digest(block_digest: bytes) -> Digest:
    """The key of the window record at the end of the block with this digest."""
    return Digest(hashlib.sha256(b"swa" + block_digest).digest())


def state_digest(key: JobKey) -> Digest:
    """The key of the state that one attempt hands over; good for nobody else."""
    name = key.request_id.encode()
    framed = struct.pack("<IQ", len(name), key.epoch) + name
    return Digest(hashlib.sha256(b"state" + framed).digest())


def parked_digest(key: JobKey, length_tokens: int) -> Digest:
    """The key of the state that one attempt is parked with after `length_tokens` rows; good for
    nobody else, and for no other moment of it."""
    length = struct.pack("<Q", length_tokens)
    return Digest(hashlib.sha256(b"parked" + state_digest(key) + length).digest())


def as_token_ids(ids: Sequence[int] | bytes) -> TokenIds:
    """Token ids as the array type used everywhere; from a sequence or from wire bytes (u32le).

    Raises `ValueError`/`OverflowError` on ids outside u32 or on a torn byte string."""
    out = array(TOKEN_TYPE)
    if isinstance(ids, bytes | bytearray | memoryview):
        out.frombytes(bytes(ids))
        return out
    out.extend(ids)
    return out
