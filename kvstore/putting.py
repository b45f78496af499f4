"""One batch of a put: room, copies into the arena, seal. Two questions however many objects, and
none for blocks for which there is room in advance."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.ids import DIGEST_BYTES, Digest, JobKey
from headrace.core.messages import Place
from headrace.kvstore.arena import Region
from headrace.kvstore.connection import Connection, StoreGone
from headrace.kvstore.layout import Buffer
from headrace.kvstore.messages import (
    Abandon,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    pack_pairs,
    pack_sizes,
)
from headrace.kvstore.settings import Kind

_BATCH = 256  # objects of one reserve and seal
_BATCH_BYTES = 8 << 20
ANSWER_S = 10.0  # longest wait for an answer that may need I/O


def next_batch(
    region: Region | None, items: Sequence[tuple[Digest, Buffer]], begin: int
) -> Sequence[tuple[Digest, Buffer]]:
    """As many items as are copied in one go: not so many that the loop stands still, nor that a
    batch waits for room which its own first part has reserved."""
    most = min(_BATCH, max(1, region.slots // 4)) if region is not None else _BATCH
    end, total = begin, 0
    while end < len(items) and end - begin < most and total < _BATCH_BYTES:
        payload = items[end][1]
        total += len(payload) if isinstance(payload, bytes) else memoryview(payload).nbytes
        end += 1
    return items[begin:end]


async def put_batch(
    connection: Connection,
    reserved: set[int],
    kind: Kind,
    batch: Sequence[tuple[Digest, Buffer]],
    parent: Digest,
    first_block: int,
    domain: bytes,
    lease: JobKey | None,
    wait_s: float,
) -> Sequence[Place | None]:
    """A place or None for each object of `batch`, in order; all None when the store goes away.

    `reserved` holds the numbers of reservations that are open meanwhile; all of them are sealed or
    given back when this ends, however it ends. `parent` and `first_block` as in `Reserve`. Raises
    `ValueError` for what no header can hold."""
    nothing: tuple[Place | None, ...] = (None,) * len(batch)
    sources, digests = _checked(batch, parent, first_block, domain)
    ahead, region = connection.ahead, connection.arena.region(kind)
    lengths = list(map(len, sources))
    fits = region is not None and min(lengths) > 0 and max(lengths) <= region.payload_bytes
    if fits and await ahead.ready(kind, domain, len(batch)):
        told = ahead.put(digests, sources, parent, first_block, lease)
        await ahead.turn(len(batch))
        return told
    sizes = pack_sizes([min(length, 0xFFFF_FFFF) for length in lengths])
    unsealed: set[int] = set()
    try:
        answer = await connection.ask(
            lambda call: Reserve(
                call, kind, digests, sizes, parent, first_block, domain, lease, wait_s
            ),
            Reserved,
            wait_s + ANSWER_S,
        )
        grants = connection.pairs(answer.grants)
        unsealed = {number for number, _ in grants if number}
        reserved |= unsealed
        places = list(connection.places(answer.places)) or list(nothing)
        ahead.answered(known=bool(answer.places))
        if len(grants) != len(batch) or len(places) != len(batch):
            connection.abort()
            return nothing
        if unsealed:
            granted = [index for index, (number, _) in enumerate(grants) if number]
            written = pack_pairs(
                [(grants[i][0], connection.fill(grants[i][1], sources[i])) for i in granted]
            )
            sealed = await connection.ask(lambda call: Seal(call, written), Sealed, ANSWER_S)
            reserved -= unsealed
            unsealed = set()
            for i, place in zip(granted, connection.places(sealed.places), strict=False):
                places[i] = place
        return places
    except StoreGone:
        return nothing
    finally:
        if unsealed:  # the store went away, or the caller was cancelled
            reserved -= unsealed
            connection.post(Abandon(tuple(unsealed)))


def _checked(
    batch: Sequence[tuple[Digest, Buffer]], parent: Digest, first_block: int, domain: bytes
) -> tuple[list[Buffer], bytes]:
    """The payloads, bytes each, and the digests joined."""
    if len(parent) != DIGEST_BYTES or len(domain) != 16:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes and a domain tag 16")
    if not 0 <= first_block < (1 << 32) - len(batch):
        raise ValueError(f"a block number has 32 bits, got {first_block} and {len(batch)} blocks")
    sources: list[Buffer] = [
        payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
        for _, payload in batch
    ]
    return sources, joined([digest for digest, _ in batch])


def joined(digests: Sequence[Digest]) -> bytes:
    """Raises `ValueError` for a digest of another length."""
    packed = b"".join(digests)
    if len(packed) != DIGEST_BYTES * len(digests):
        raise ValueError(f"digests have {DIGEST_BYTES} bytes each")
    return packed
