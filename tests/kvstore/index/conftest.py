"""Readers of the shared Valkey, and waiting for what the store has to tell it."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import redis

from headrace.core.ids import Digest
from headrace.kvstore import Hits, IndexReader


@pytest_asyncio.fixture
async def reader_for():
    made: list[IndexReader] = []

    def make(url: str, **options) -> IndexReader:
        made.append(IndexReader(url, **{"deadline_s": 1.0, **options}))
        return made[-1]

    yield make
    for reader in made:
        await reader.close()


@pytest.fixture
def plain(valkey):
    client = redis.Redis.from_url(valkey.url)
    yield client
    client.close()


async def _listed(client, wait_until) -> None:
    """Wait until the store has told the index everything."""

    async def told() -> bool:
        stat = await client.stat()
        return stat.index == "ok" and stat.index_unlisted == 0 and stat.pending == 0

    await wait_until(told, "an index that is told everything")


async def _answer(reader, namespace, digests) -> Hits:
    """A look-up that Redis answered: on a busy machine 50 ms may pass without that."""
    for _ in range(100):
        hits = await reader.hit_blocks(namespace, digests)
        if reader.healthy:
            return hits
        await asyncio.sleep(0.1)
    raise AssertionError("Redis did not answer")


def _chain(things, count: int) -> list[Digest]:
    return [things.digest(number) for number in range(count)]


@pytest.fixture
def listed():
    return _listed


@pytest.fixture
def answer():
    return _answer


@pytest.fixture
def chain():
    return _chain
