"""Copies of independent objects: open, read and verify in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.core.ids import Digest, JobKey
from headrace.core.messages import Place
from headrace.kvstore.client import StoreClient
from headrace.kvstore.settings import Kind


async def read_objects(
    client: StoreClient, kind: Kind, digests: Sequence[Digest], lease: JobKey | None
) -> dict[Digest, bytes]:
    """Verified copies of those of `digests` that the store has, each once, leased for `lease`.

    What is missing, damaged (the store is told) or out of reach is left out; nothing is raised.
    Copies are made in a thread."""
    wanted = tuple(dict.fromkeys(digests))
    places = await client.open_objects(kind, wanted, lease)
    found = [(d, place) for d, place in zip(wanted, places, strict=True) if place is not None]
    if not found:
        return {}
    return await asyncio.to_thread(_copies, client, found)


def _copies(client: StoreClient, found: Sequence[tuple[Digest, Place]]) -> dict[Digest, bytes]:
    out: dict[Digest, bytes] = {}
    for digest, place in found:
        buffer = bytearray(place.payload_bytes)
        if client.read_into(place, digest, buffer):
            out[digest] = bytes(buffer)
    return out
