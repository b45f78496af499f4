"""A request that stands in a decode replica's line, its blocks on disk alone: from the moment when
the slot comes free to its first token, with and without the prefetch.

    .venv/bin/python bench/handoff/queued.py                      T1, 8 prompts of 3,000 tokens
    .venv/bin/python bench/handoff/queued.py --read-ms 20         every read takes 20 ms

One process: a store and a decode replica with one slot. The prompts are run once and stored; then
store and replica are started anew, so that neither arena nor engine has anything. In each round
another stream has the slot, the prompt is sent, half a second later the stream is cancelled.
`prefetch_share` 0 is how it was before; the two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from headrace.core.card import Role
from headrace.core.chain import as_token_ids, block_digests, root_digest
from headrace.core.deployment import Deployment
from headrace.core.ids import BootId, JobKey, new_request_id
from headrace.core.limits import WireLimits
from headrace.core.messages import Cancel, DecodeJob, Hello, LoadReport, TokenBatch
from headrace.core.peers import Peer, introduce
from headrace.core.request import GenRequest, HandoffMode, Sampling
from headrace.core.role import RoleSettings
from headrace.decode import DecodeReplica
from headrace.engine import EngineSettings
from headrace.kvstore import StoreSettings, embedded_valkey, run_store
from headrace.kvstore.files import FileCalls

TOKEN = "a token of a measurement, 32 chars"
LINE_S = 0.5  # in which the prefetch may happen


class Slow(FileCalls):
    """Reads of segments that take longer."""

    def __init__(self, read_s: float) -> None:
        self.read_s, self.began, self._segments = read_s, False, set()

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        if path.suffix == ".seg":
            self._segments.add(descriptor)
        return descriptor

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        if self.began and descriptor in self._segments:
            time.sleep(self.read_s)
        return super().preadv(descriptor, buffers, offset)


class Bench:
    """One life of store and replica."""

    def __init__(self, replica: DecodeReplica, peer: Peer) -> None:
        self.replica, self.peer = replica, peer
        self.first: dict[JobKey, asyncio.Future[float]] = {}
        self.ended: dict[JobKey, asyncio.Future[Any]] = {}
        self.text: dict[JobKey, list[int]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.peer.link:
            if isinstance(message, LoadReport):
                continue
            if not isinstance(message, TokenBatch):
                raise SystemExit(f"the replica said {message}")
            for item in message.items:
                self.text[item.key] += item.token_ids
                if not self.first[item.key].done():
                    self.first[item.key].set_result(time.perf_counter())
                if item.times is not None:
                    self.ended[item.key].set_result(item.times)

    async def send(self, ids: list[int], max_tokens: int) -> JobKey:
        card = self.replica.shell.card
        root, tokens = root_digest(card.namespace().digest(), bytes(32)), as_token_ids(ids)
        request = GenRequest(
            request_id=new_request_id(),
            epoch=0,
            token_ids=tokens,
            chain_root=root,
            digests=block_digests(root, tokens),
            keep_tokens=card.window_tokens + 12,
            max_tokens=max_tokens,
            sampling=Sampling(),
            stop_token_ids=(),
            mode=HandoffMode.EXACT,
            domain="bench",
            deadline_s=120.0,
        )
        loop = asyncio.get_running_loop()
        self.first[request.key], self.ended[request.key] = (
            loop.create_future(),
            loop.create_future(),
        )
        self.text[request.key] = []
        await self.peer.link.send(DecodeJob(request, as_token_ids([]), False, "", 1))
        return request.key

    async def close(self) -> None:
        self._reader.cancel()
        self.peer.link.abort()


@contextlib.asynccontextmanager
async def life(
    home: str, redis_url: str, model: str, calls: Slow, **store: Any
) -> AsyncIterator[Bench]:
    """A store on `home` and a replica with one slot; the store's last words are printed."""
    address = f"unix://{home}/s"

    def role(name: str, listen: str) -> RoleSettings:
        deployment = Deployment(model=model)
        return RoleSettings(name, listen, TOKEN, redis_url, address, home, "bench", deployment)

    engine = EngineSettings(n_blocks=96, n_slots=1, max_rows_per_step=256, park_after_tokens=0)
    replica = DecodeReplica(role("decode-0", "tcp://127.0.0.1:0"), engine)
    settings = StoreSettings(
        directory=f"{home}/store",
        arena_bytes=256 << 20,
        ssd_bytes=256 << 20,
        segment_bytes=16 << 20,
        window_cost_share=1.0,
        **store,
    )
    up, stop = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        run_store(
            role("store", address), settings, ready=lambda _: up.set(), stop=stop, calls=calls
        )
    )
    await asyncio.wait({serving, asyncio.create_task(up.wait())}, return_when="FIRST_COMPLETED")
    await replica.start()
    hello = Hello(Role.ROUTER, "router-0", BootId("router-0"), "bench", None)
    bench = Bench(replica, await introduce(replica.shell.address, hello, TOKEN, WireLimits()))
    try:
        yield bench
    finally:
        await bench.close()
        await replica.close()
        stop.set()
        await serving


@contextlib.contextmanager
def valkey(home: str) -> Iterator[str]:
    server = embedded_valkey(home)
    yield server.url
    server.stop()


async def measure(args: argparse.Namespace) -> None:
    from headrace.engine import Half, load_engine

    probe = load_engine(
        Deployment(model=args.model), EngineSettings(n_blocks=8, n_slots=1), Half.FULL
    )
    card = probe.card(args.model)
    sizes = {"block_bytes": card.block_bytes, "window_bytes": card.window_record_bytes}
    draw = random.Random("queued")
    prompts = [[draw.randrange(300, 900) for _ in range(args.tokens)] for _ in range(args.prompts)]
    calls, texts = Slow(args.read_ms / 1000), {}
    with tempfile.TemporaryDirectory(prefix="hr-queued-") as home, valkey(home) as args.redis_url:
        async with life(home, args.redis_url, args.model, calls, **sizes) as bench:
            for number, ids in enumerate(prompts):
                key = await bench.send(ids, 2)
                await bench.ended[key]
                texts[number] = tuple(bench.text[key])
            await bench.replica.work.committer.flush(30.0)
        calls.began = True
        print(
            f"{args.model}, {args.tokens} tokens: {args.tokens // 128} blocks of"
            f" {card.block_bytes} B, a window record of {card.window_record_bytes} B;"
            f" a read takes {args.read_ms} ms longer"
        )
        for share in (0.0, 0.25) * args.rounds:
            await one(home, args, calls, prompts, texts, share, sizes)


async def one(home, args, calls, prompts, texts, share, sizes) -> None:
    ttft_ms, load_ms = [], []
    async with life(
        home, args.redis_url, args.model, calls, prefetch_share=share, **sizes
    ) as bench:
        for number, ids in enumerate(prompts):
            other = await bench.send([5, 6, 7 + number], 1500)
            await bench.first[other]
            key = await bench.send(ids, 2)
            await asyncio.sleep(LINE_S)
            free_s = time.perf_counter()
            await bench.peer.link.send(Cancel(other, "bench"))
            ttft_ms.append(1000 * (await bench.first[key] - free_s))
            times = await bench.ended[key]
            load_ms.append(1000 * times.load_s)
            assert tuple(bench.text[key]) == texts[number], "another text"
            assert times.hit_tokens == args.tokens // 128 * 128, times
        stat = await bench.replica.store.stat()
    print(
        f"prefetch_share {share:<5} first token {statistics.median(ttft_ms):7.1f} ms after the turn"
        f" (median; {min(ttft_ms):.1f} to {max(ttft_ms):.1f}), read from disk {stat.loads},"
        f" of these before the turn {stat.prefetched}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="t1")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--read-ms", type=float, default=0.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
