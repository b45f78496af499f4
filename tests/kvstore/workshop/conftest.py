"""A directory with two chains that share a head, as a store left it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.chain import window_digest
from headrace.kvstore import Kind

A = (0, 1, 2, 3, 4)
B = (0, 1, 10, 11)


async def fill(rig, things, when_idle) -> None:
    """Chain A with a window record after its five blocks, chain B, a picture-less store."""
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*A), domain="gold")
    await client.put(
        Kind.KV, things.blocks(*B[2:]), parent=things.digest(1), first_block=2, domain="gold"
    )
    record = [(window_digest(things.digest(4)), things.payload(4, 7000))]
    await client.put(Kind.SWA, record, parent=things.digest(4), first_block=0, domain="gold")
    await when_idle(client)


@pytest.fixture
async def filled(rig, things, when_idle) -> Path:
    """The directory of a store that has ended in order."""
    await rig.start()
    await fill(rig, things, when_idle)
    await rig.stop()
    return Path(rig.settings.directory)


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    def flip_bit(path: Path, offset: int) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 4]))

    return flip_bit


@pytest.fixture
def no_progress() -> Callable[[int, int], None]:
    return lambda done, total: None


@pytest.fixture
def now_s() -> float:
    return time.time()
