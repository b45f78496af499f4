"""Write-behind: in order, in batches of one chain, bounded, and never in anybody's way."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from headrace.core.ids import BootId, Digest
from headrace.core.messages import Place
from headrace.decode.commit import BATCH, Commit, Committer
from headrace.decode.handoff import Counts
from headrace.kvstore import Kind


def digest(number: int, chain: str = "a") -> Digest:
    return Digest(hashlib.sha256(f"{chain} {number}".encode()).digest())


def block(number: int, chain: str = "a", size: int = 100, domain: str = "d") -> Commit:
    return Commit(
        Kind.KV, digest(number, chain), bytes(size), digest(number - 1, chain), number, domain
    )


def window(number: int) -> Commit:
    return Commit(Kind.SWA, digest(number, "w"), bytes(10), digest(number), number, "d")


class SlowStore:
    """Takes puts one by one when `gate` is open; refuses the digests in `full`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.puts: list[tuple[Kind, list[Digest], dict[str, Any]]] = []
        self.full: set[Digest] = set()

    async def put(self, kind, items, **options):
        await self.gate.wait()
        self.puts.append((kind, [d for d, _ in items], options))
        place = Place(BootId("b"), 0, 1, 1, 1)
        return tuple(None if d in self.full else place for d, _ in items)


@pytest.fixture
async def behind():
    store, counts = SlowStore(), Counts()
    committer = Committer(store, counts, max_bytes=10_000)
    task = asyncio.create_task(committer.run())
    yield store, counts, committer
    task.cancel()


async def test_blocks_of_one_chain_leave_together_and_in_order(behind) -> None:
    store, counts, committer = behind
    for number in range(1, BATCH + 4):
        assert committer.offer(block(number))
    committer.offer(block(1, "b"))  # another chain
    committer.offer(window(1))
    committer.offer(block(2, "b"))
    store.gate.set()
    assert await committer.flush(5)
    assert [(kind, len(digests)) for kind, digests, _ in store.puts] == [
        (Kind.KV, BATCH),
        (Kind.KV, 3),
        (Kind.KV, 1),
        (Kind.SWA, 1),
        (Kind.KV, 1),
    ]
    assert store.puts[0][1] == [digest(n) for n in range(1, BATCH + 1)]
    first, second = store.puts[0][2], store.puts[1][2]
    assert (first["first_block"], first["parent"]) == (1, digest(0))
    assert (second["first_block"], second["parent"]) == (BATCH + 1, digest(BATCH))
    assert "lease" not in first  # never a reason to keep anything from being evicted
    assert counts.committed_blocks == BATCH + 5 and counts.commits_dropped == 0


async def test_blocks_of_two_domains_are_never_one_put(behind) -> None:
    store, _, committer = behind
    committer.offer(block(1))
    committer.offer(block(2, domain="other"))
    store.gate.set()
    assert await committer.flush(5)
    assert [options["domain"] for _, _, options in store.puts] == ["d", "other"]


async def test_what_finds_no_room_is_dropped_and_counted(behind) -> None:
    store, counts, committer = behind
    taken = [committer.offer(block(n, str(n), size=3000)) for n in range(5)]
    # Three fit into 10,000 bytes; nothing was written yet, so none made room.
    assert taken == [True, True, True, False, False]
    assert counts.commits_dropped == 2
    store.full = {digest(1, "1")}
    store.gate.set()
    assert await committer.flush(5)
    assert counts.commits_dropped == 3 and counts.committed_blocks == 2
    assert committer.offer(block(9, "x", size=9000))  # room again


async def test_flush_gives_up_on_a_store_that_does_not_answer(behind) -> None:
    _, _, committer = behind
    committer.offer(block(1))
    assert not await committer.flush(0.05)
    assert not committer.idle
