"""J5: bytes that change between the arena and the engine. Every change is seen, nothing else is
taken for one, and the text is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.core import faults
from headrace.decode.load import load_blocks
from headrace.engine import BlockWriter

MODEL = "toy"
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]
LOADS = 1000


async def test_a_thousand_healthy_loads_and_then_some_that_are_not(
    service: Any, prompt: Any
) -> None:
    """The real arena and the real copying; a place to write to that counts what it gets."""
    cluster, decode = service.cluster, service.cluster.decodes[0]
    request = cluster.request(prompt(1290, "a thousand"))
    await (await cluster.local(request, decode=1)).result()
    await cluster.at_rest(5.0)
    await cluster.written()
    places = await cluster.prefill.store.open_prefix(request.digests, None)
    items = list(zip(range(10), places, request.digests, strict=True)) * (LOADS // 10)
    good: dict[int, bytes] = {}
    wrong: list[int] = []

    @contextmanager
    def filling(index: int) -> Iterator[BlockWriter]:
        writer = BlockWriter(memoryview(bytearray(cluster.card.block_bytes)))
        yield writer
        if writer.complete and good.setdefault(index, bytes(writer.view)) != writer.view:
            wrong.append(index)

    healthy = await asyncio.to_thread(load_blocks, decode.store, items, filling)
    assert healthy == [True] * LOADS and not wrong
    for share, seed, least, most in ((0.01, 20261130, 1, 30), (1.0, 1, LOADS, LOADS)):
        faults.arm(f"decode.load=flip%{share}/{seed}")
        done = await asyncio.to_thread(load_blocks, decode.store, items, filling)
        assert least <= done.count(False) == faults.fired("decode.load") <= most
        assert not wrong


@pytest.mark.parametrize("share", ["1.0", "0.01", pytest.param("0.2", marks=pytest.mark.slow)])
async def test_texts_are_right_whatever_is_damaged(
    service: Any, prompt: Any, kinds: Any, share: str
) -> None:
    prompts = [prompt(600 + i, f"corrupt {i}") for i in range(4)]
    for ids in prompts:
        await service.expected(ids)
    decodes = service.cluster.decodes
    before = sum(decode.work.counts.damaged for decode in decodes)

    async def load() -> None:
        for _ in range(4 if share == "0.01" else 1):
            await asyncio.gather(*(service.check(ids) for ids in prompts))

    fault = kinds.at_point(f"decode.load=flip%{share}/30")
    await kinds.Scenario(load, [fault], [], within_s=150.0).run()
    fired = faults.fired("decode.load")
    assert sum(decode.work.counts.damaged for decode in decodes) == before + fired
    faults.disarm()
    await service.pulse()
