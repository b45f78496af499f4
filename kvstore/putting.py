"""One batch of a put: room, copies into the arena, seal. Two questions however many objects."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.ids import DIGEST_BYTES, Digest, JobKey
from headrace.core.messages import Place
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

ANSWER_S = 10.0  # longest wait for an answer that may need I/O


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
    given back when this ends, however it ends. `parent` and `first_block` as in `Reserve`."""
    nothing: tuple[Place | None, ...] = (None,) * len(batch)
    sources = [memoryview(payload).cast("B") for _, payload in batch]
    digests = joined([digest for digest, _ in batch])
    sizes = pack_sizes([min(source.nbytes, 0xFFFF_FFFF) for source in sources])
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


def joined(digests: Sequence[Digest]) -> bytes:
    """Raises `ValueError` for a digest of another length."""
    packed = b"".join(digests)
    if len(packed) != DIGEST_BYTES * len(digests):
        raise ValueError(f"digests have {DIGEST_BYTES} bytes each")
    return packed
