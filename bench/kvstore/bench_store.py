"""Put, get and look-up of the store against memcpy, a bare file and a bare MGET of the same run.

    .venv/bin/python bench/kvstore/bench_store.py [--json] [--blocks 1024] [--block-bytes 113920]

A store in a process of its own, one client, batches of 16; best of `--rounds`, ratios store :
baseline. The bare file is preallocated, has the same slots, is written with one `pwrite` a block
and synced once, and read with its part of the system's cache dropped, as are the store's segments.
Nothing here is a test: what a machine's disk does varies more than what we do.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from headrace.core.deployment import Deployment
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.role import RoleSettings
from headrace.kvstore import (
    IndexReader,
    Kind,
    StoreClient,
    StoreSettings,
    embedded_valkey,
    run_store,
)
from headrace.kvstore.layout import slot_bytes
from headrace.kvstore.records import record_key

TOKEN = "bench"
BATCH = 16
NAMESPACE = hashlib.sha256(b"bench").digest()
WINDOW_BYTES = 4096
CHAIN = 1000


def digest(number: int, round_: int) -> Digest:
    return Digest(hashlib.sha256(b"%d/%d" % (round_, number)).digest())


def role(home: str, redis_url: str) -> RoleSettings:
    address = f"unix://{home}/store.sock"
    return RoleSettings("store-0", address, TOKEN, redis_url, address, home, "bench", Deployment())


def settings(home: str, block_bytes: int, blocks: int) -> StoreSettings:
    """Room for all blocks of one round in the arena, and for two rounds on disk."""
    whole = slot_bytes(block_bytes) * (blocks + 64)
    return StoreSettings(
        directory=f"{home}/store",
        arena_bytes=int(whole * 1.1),
        ssd_bytes=whole * 3,
        segment_bytes=max(whole // 8, 2 * slot_bytes(block_bytes)),
        block_bytes=block_bytes,
        window_bytes=WINDOW_BYTES,
        window_share=0.05,
    )


def serve(told: dict[str, Any]) -> None:
    def ready(_: object) -> None:
        print("ready", flush=True)

    asyncio.run(
        run_store(role(told["home"], told["redis"]), StoreSettings(**told["settings"]), ready=ready)
    )


class StoreProcess:
    def __init__(self, home: str, redis_url: str, store: StoreSettings) -> None:
        told = {"home": home, "redis": redis_url, "settings": asdict(store)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", json.dumps(told)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit("the store did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Timer:
    """Wall and own CPU seconds of a block of code."""

    def __enter__(self) -> Timer:
        self.wall_s, self.cpu_s = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter()
        self.cpu_s += time.process_time()


def memcpy(payloads: list[bytes], count: int) -> float:
    """Bytes a second of copies into memory that was touched before."""
    size = len(payloads[0])
    target = bytearray(size * 64)
    target[:] = bytes(len(target))
    view = memoryview(target)
    with Timer() as timer:
        for number in range(count):
            begin = number % 64 * size
            view[begin : begin + size] = payloads[number % len(payloads)]
    return count * size / timer.wall_s


def bare_file(home: str, payloads: list[bytes], count: int) -> tuple[float, float]:
    """(put, cold get) bytes a second of a preallocated file with the store's slots."""
    size, slot = len(payloads[0]), slot_bytes(len(payloads[0]))
    path = Path(home, "bare")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, slot * count)
        with Timer() as put:
            for number in range(count):
                os.pwrite(descriptor, payloads[number % len(payloads)], number * slot)
            os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        target = memoryview(bytearray(size))
        with Timer() as get:
            for number in range(count):
                os.preadv(descriptor, [target], number * slot)
        return count * size / put.wall_s, count * size / get.wall_s
    finally:
        os.close(descriptor)
        path.unlink()


def drop_cache(directory: str) -> None:
    for path in Path(directory).glob("segment-*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def attach(home: str) -> StoreClient:
    client = StoreClient(f"unix://{home}/store.sock", TOKEN, NAMESPACE)
    if not await client.connect(30.0):
        raise SystemExit("no store answered")
    return client


async def host_tier(
    client: StoreClient, payloads: list[bytes], count: int, round_: int
) -> dict[str, float]:
    size = len(payloads[0])
    lease = JobKey(RequestId(f"r{round_}"), 0)
    items = [(digest(n, round_), payloads[n % len(payloads)]) for n in range(count)]
    places = []
    with Timer() as put:
        for begin in range(0, count, BATCH):
            places += await client.put(
                Kind.KV, items[begin : begin + BATCH], lease=lease, wait_s=30.0
            )
    if None in places:
        raise SystemExit("a put was dropped: the arena is too small for this run")
    target = bytearray(size)
    with Timer() as get:
        good = [
            client.read_into(place, key, target)
            for place, (key, _) in zip(places, items, strict=True)
            if place is not None
        ]
    if not all(good):
        raise SystemExit("a read missed")
    with Timer() as durable:
        while (stat := await client.stat()) is None or stat.pending:
            await asyncio.sleep(0.002)
    await client.release(lease)
    return {
        "host_put": count * size / put.wall_s,
        "host_get": count * size / get.wall_s,
        "put_cpu_us": put.cpu_s / count * 1e6,
        "get_cpu_us": get.cpu_s / count * 1e6,
        "ssd_put": count * size / (put.wall_s + get.wall_s + durable.wall_s),
    }


async def cold_get(home: str, payloads: list[bytes], count: int, round_: int) -> dict[str, float]:
    """Everything from SSD into the arena and out of it, verified twice on the way."""
    client = await attach(home)
    size = len(payloads[0])
    target = bytearray(size)
    lease = JobKey(RequestId("cold"), 0)
    with Timer() as get:
        for begin in range(0, count, BATCH):
            digests = [digest(n, round_) for n in range(begin, min(begin + BATCH, count))]
            places = await client.open_prefix(digests, lease)
            if len(places) != len(digests):
                raise SystemExit(f"{len(digests) - len(places)} blocks were not found on disk")
            for place, key in zip(places, digests, strict=True):
                if not client.read_into(place, key, target):
                    raise SystemExit("a read missed")
    await client.close()
    return {"ssd_get": count * size / get.wall_s}


async def look_up(url: str, rounds: int) -> dict[str, float]:
    """A chain of 1,000 blocks that are all stored: ours, and the bare MGET of its keys."""
    reader, plain = IndexReader(url), redis.Redis.from_url(url)
    digests = [digest(number, 0) for number in range(CHAIN)]
    keys = [record_key(Kind.KV, NAMESPACE, key) for key in digests]
    ours, bare = [], []
    for _ in range(10 * rounds):
        with Timer() as timer:
            hits = await reader.hit_blocks(NAMESPACE, digests)
        if hits.blocks == CHAIN:
            ours.append(timer.wall_s)
        with Timer() as timer:
            plain.mget(keys)
        bare.append(timer.wall_s)
    await reader.close()
    plain.close()
    return {"look_up_ms": min(ours, default=float("nan")) * 1e3, "mget_ms": min(bare) * 1e3}


async def measure(home: str, url: str, arguments: argparse.Namespace) -> dict[str, float]:
    source = random.Random(0)
    payloads = [source.randbytes(arguments.block_bytes) for _ in range(64)]
    count, best = arguments.blocks, dict[str, float]()

    def keep(values: dict[str, float]) -> None:
        for name, value in values.items():
            better = min if name.endswith(("_us", "_ms")) else max
            best[name] = better(best.get(name, value), value)

    for round_ in range(arguments.rounds):
        shutil.rmtree(f"{home}/store", ignore_errors=True)
        store = settings(home, arguments.block_bytes, count)
        keep({"memcpy": memcpy(payloads, count)})
        put, get = bare_file(home, payloads, count)
        keep({"bare_put": put, "bare_get": get})
        process = StoreProcess(home, url, store)
        client = await attach(home)
        keep(await host_tier(client, payloads, count, round_))
        if round_ == 0 and count >= CHAIN:
            while (stat := await client.stat()) is None or stat.index_unlisted:
                await asyncio.sleep(0.05)
            keep(await look_up(url, arguments.rounds))
        await client.close()
        process.stop()
        drop_cache(store.directory)
        process = StoreProcess(home, url, store)
        keep(await cold_get(home, payloads, count, round_))
        process.stop()
    return best


def report(best: dict[str, float], arguments: argparse.Namespace) -> None:
    ratios = {
        "host put : memcpy": best["host_put"] / best["memcpy"],
        "host get : memcpy": best["host_get"] / best["memcpy"],
        "ssd put : bare file": best["ssd_put"] / best["bare_put"],
        "ssd cold get : bare file": best["ssd_get"] / best["bare_get"],
    }
    if "mget_ms" in best:
        ratios["bare MGET : look-up"] = best["mget_ms"] / best["look_up_ms"]
    if arguments.json:
        shown = {"block_bytes": arguments.block_bytes, "blocks": arguments.blocks}
        print(json.dumps({**shown, "best": best, "ratios": ratios}, indent=1))
        return
    print(f"{arguments.blocks} blocks of {arguments.block_bytes} bytes, best of {arguments.rounds}")
    for name in ("memcpy", "host_put", "host_get", "bare_put", "ssd_put", "bare_get", "ssd_get"):
        print(f"  {name:10} {best[name] / 1e9:7.2f} GB/s")
    for name in ("put_cpu_us", "get_cpu_us", "look_up_ms", "mget_ms"):
        if name in best:
            print(f"  {name:10} {best[name]:7.2f}")
    for name, ratio in ratios.items():
        print(f"  {name:26} {ratio:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--block-bytes", type=int, default=113_920)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where the files go (default: temporary)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    home = tempfile.mkdtemp(prefix="hb-", dir=arguments.directory)
    server = embedded_valkey(home)
    try:
        report(asyncio.run(measure(home, server.url, arguments)), arguments)
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
