"""Several streams on one decode replica that has not room for all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from headrace.core.request import Sampling
from headrace.engine import EngineSettings

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7)
# Prompt and answer; the third ends a block exactly with its prompt, three cross one in the answer.
STREAMS = ((40, 30), (125, 12), (256, 20), (250, 9), (300, 25), (377, 16))


async def until(condition: Any, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


class Streams:
    """Several streams on one decode replica, every other one seeded, half of them by hand-off."""

    def __init__(self, cluster: Any, yardstick: Any, number: int = 0) -> None:
        self.cluster, self.yardstick, self.number = cluster, yardstick, number
        self.calls: list[tuple[Any, list[int], int, Sampling]] = []
        self.before = replace(self.work.counts)
        stats = self.decode.driver.stats
        self.rows = (stats.encoder_rows_total, stats.decoder_rows_total)

    @property
    def decode(self) -> Any:
        return self.cluster.decodes[self.number]

    @property
    def work(self) -> Any:
        return self.decode.work

    @property
    def parked(self) -> list[Any]:
        return [job for job in self.work.jobs.values() if job.is_parked]

    @property
    def all_arrived(self) -> bool:
        """Whether decode has heard of each; none may have ended before that is asked."""
        return all(call.key in self.work.jobs or call.token_ids for call, *_ in self.calls)

    def counted(self, name: str) -> int:
        return getattr(self.work.counts, name) - getattr(self.before, name)

    async def begin(
        self, prompt: Any, seed: str, streams: Any = STREAMS, *, local: bool = False
    ) -> None:
        """The same prompts and texts whatever `seed`, which names a cache domain of their own."""
        for i, (n_tokens, max_tokens) in enumerate(streams):
            ids, sampling = prompt(n_tokens, f"stream {i}"), SEEDED if i % 2 else Sampling()
            request = self.cluster.request(ids, max_tokens, sampling=sampling, domain=seed)
            send = self.cluster.handoff if i % 3 and not local else self.cluster.local
            self.calls.append((await send(request, self.number), ids, max_tokens, sampling))

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """The engine makes no step before decode has heard of all that begin in here: they are in
        each other's way on a slow machine, too."""
        go_on = threading.Event()
        stopped = asyncio.create_task(self.decode.driver.call(go_on.wait))
        try:
            yield
            await until(lambda: self.all_arrived)
        finally:
            go_on.set()
            await stopped

    async def texts_are_those_of_streams_alone(self) -> None:
        for call, ids, max_tokens, sampling in self.calls:
            text = await self.yardstick.text(ids, max_tokens, None, sampling)
            assert await call.result() == text

    def no_row_ran_twice(self) -> None:
        """Rows before the first token as each call tells them, and one for every further token."""
        stats = self.decode.driver.stats
        more = sum(len(call.token_ids) - 1 for call, *_ in self.calls)
        encoder = sum(call.times.encoder_rows for call, *_ in self.calls) + more
        decoder = sum(call.times.decoder_rows for call, *_ in self.calls) + more
        ran = (stats.encoder_rows_total - self.rows[0], stats.decoder_rows_total - self.rows[1])
        assert ran == (encoder, decoder)

    @contextlib.asynccontextmanager
    async def stopped_with(self, n_parked: int) -> AsyncIterator[list[Any]]:
        """The engine makes no step as long as this lasts; so many streams are parked by then."""
        go_on = threading.Event()
        await until(lambda: len(self.parked) >= n_parked)
        stopped = asyncio.create_task(self.decode.driver.call(go_on.wait))
        try:
            steps = self.decode.driver.stats.steps
            await asyncio.sleep(0.05)
            assert self.decode.driver.stats.steps - steps <= 1
            assert len(self.parked) >= n_parked
            yield self.parked
        finally:
            go_on.set()
            await stopped


@pytest.fixture
def streams(yardstick: Any) -> Callable[..., Streams]:
    """`streams(cluster, number)`: none yet, on the decode replica of that number."""
    return lambda cluster, number=0: Streams(cluster, yardstick, number)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Awaitable[None]]:
    """`await wait_until(condition)`, for at most 60 s."""
    return until


@pytest_asyncio.fixture(loop_scope="module")
async def join(cluster: Any, new_decode: Any) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """`await join(settings)`: a further decode replica, as one of the cluster's; its number."""
    before = len(cluster.decodes)

    async def make(settings: EngineSettings) -> int:
        number = len(cluster.decodes)
        cluster.decodes.append(await new_decode(f"decode-{number}", settings))
        cluster.to_decode.append(await cluster.router.connect(cluster.decodes[-1].shell.address))
        return number

    yield make
    del cluster.decodes[before:], cluster.to_decode[before:]
