"""Two stores that share an index, as two hosts do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

# On a busy machine Redis may take longer than its 50 ms, and a block more than a tenth of a second.
PATIENT = {"absent_s": 0.0, "recompute_tokens_per_s": 50.0, "index_deadline_s": 3.0}


class Pair:
    """Stores `a` and `b`, each in its own folder; `peers(x)` is what x asks others with."""

    def __init__(self, new_rig, home: str, redis_url: str, wait_until) -> None:
        import os

        self.rigs = []
        for name in ("a", "b"):
            os.makedirs(f"{home}/{name}")
            rig = new_rig(f"{home}/{name}", redis_url, peer_listen="tcp://127.0.0.1:0")
            rig.settings = _with(rig.settings, directory=f"{home}/{name}/store")
            self.rigs.append(rig)
        self.a, self.b = self.rigs
        self._wait_until = wait_until

    async def start(self, **changes: Any) -> None:
        for rig in self.rigs:
            await rig.start(**{**PATIENT, **changes})

    async def clients(self, **options: Any):
        return [await rig.client(**options) for rig in self.rigs]

    async def listed(self, client) -> None:
        async def told() -> bool:
            stat = await client.stat()
            return stat.index == "ok" and not stat.index_unlisted and not stat.pending

        await self._wait_until(told, "an index that is told everything")

    async def close(self) -> None:
        for rig in self.rigs:
            await rig.close()


def _with(settings: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(settings, **changes)


@pytest_asyncio.fixture
async def pair(new_rig, home, valkey, wait_until) -> AsyncIterator[Pair]:
    made = Pair(new_rig, home, valkey.url, wait_until)
    yield made
    await made.close()
    await asyncio.sleep(0)
