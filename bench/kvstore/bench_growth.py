"""What the number of stored blocks costs: look-up, put, get, start and memory at 10^3, 10^5, 10^6.

    .venv/bin/python bench/kvstore/bench_growth.py [--json] [--blocks 1000 --blocks 100000 ...]

Blocks of the demo model (13,440 bytes; a slot is 16 KiB, so 10^6 take 16.4 GB of disk, which are
given back). The directory is filled through the store's own segment code; then a store starts on it
and one client measures: a look-up of a chain of 1,000 in the index, puts and gets of 2,000 blocks
in the arena, and 1,000 cold gets spread over everything stored. CPU of client and store a block
stands beside the time, since it says the same on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_store import TOKEN, Process, started_store
from client_process import BATCH, NAMESPACE, cpu_s, digest

from headrace.core.ids import JobKey, RequestId
from headrace.kvstore import IndexReader, Kind, StoreClient, StoreSettings, embedded_valkey
from headrace.kvstore.files import aligned_buffer
from headrace.kvstore.layout import (
    NO_DIGEST,
    SEGMENT_HEADER_BYTES,
    ObjectFacts,
    checksum,
    domain_tag,
    pack_slot_header,
    slot_bytes,
)
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.slot_io import SlotMove

BLOCK_BYTES = 13_440
SLOT_BYTES = slot_bytes(BLOCK_BYTES)
CHAIN = 1000  # blocks that follow each other; then a new chain begins
HOT = 2000
COLD = 1000
LEASE = JobKey(RequestId("growth"), 0)


def settings(home: str, blocks: int) -> StoreSettings:
    segment = SEGMENT_HEADER_BYTES + 4096 * SLOT_BYTES
    return StoreSettings(
        directory=f"{home}/store",
        arena_bytes=256 << 20,
        ssd_bytes=(-(-blocks // 4096) + 4) * segment,
        segment_bytes=segment,
        block_bytes=BLOCK_BYTES,
        window_bytes=4096,
        window_share=0.05,
    )


def fill(store: StoreSettings, blocks: int) -> None:
    """Write the blocks as a store would have: chains of 1,000, eight different payloads."""
    Path(store.directory).mkdir(parents=True)
    files = SegmentFiles(store)
    files.open()
    payloads = [random.Random(n).randbytes(BLOCK_BYTES) for n in range(8)]
    sums, tag = [checksum(payload) for payload in payloads], domain_tag("")
    memory = aligned_buffer(64 * SLOT_BYTES)
    slots = [memory[n * SLOT_BYTES : (n + 1) * SLOT_BYTES] for n in range(64)]
    for n, slot in enumerate(slots):
        slot[:BLOCK_BYTES] = payloads[n % 8]
    moves, headers, before = [], [], NO_DIGEST
    for number in range(blocks):
        place = files.next_place(Kind.KV)
        if place is None:
            files.recycle(next(iter(files.candidates(Kind.KV))), Kind.KV)
            place = files.next_place(Kind.KV)
        assert place is not None
        before = before if number % CHAIN else NO_DIGEST
        key = digest(0, 0, number)
        at = len(moves)
        facts = ObjectFacts(Kind.KV, NAMESPACE, key, before, number % CHAIN, tag, BLOCK_BYTES)
        moves.append(SlotMove(place, slots[at]))
        headers.append(pack_slot_header(facts, sums[at % 8], *place, 1))
        before = key
        if len(moves) == 64 or number == blocks - 1:
            assert files.write_moves(moves, headers) == [None] * len(moves)
            moves, headers = [], []
        if sys.stderr.isatty() and not number % 10_000:
            print(f"\r{number} blocks written", end="", file=sys.stderr)
    files.sync(range(len(files.segments)))
    files.close()


class Cost:
    """Microseconds a block: wall, CPU of this process, CPU of the store."""

    def __init__(self, pid: int, count: int) -> None:
        self._pid, self._count = pid, count
        self.us: dict[str, float] = {}

    def _now(self) -> tuple[float, float, float]:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
        return time.monotonic(), cpu_s(), ticks / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Cost:
        self._begin = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        spent = [b - a for a, b in zip(self._begin, self._now(), strict=True)]
        names = ("wall", "client_cpu", "store_cpu")
        self.us = {n: s / self._count * 1e6 for n, s in zip(names, spent, strict=True)}


async def puts(client: StoreClient, process: Process, round_: int) -> dict[str, float]:
    payloads = [random.Random(n).randbytes(BLOCK_BYTES) for n in range(8)]
    keys = [digest(1, round_, n) for n in range(HOT)]
    with Cost(process.process.pid, HOT) as cost:
        for begin in range(0, HOT, BATCH):
            part = keys[begin : begin + BATCH]
            items = [(key, payloads[n % 8]) for n, key in enumerate(part, begin)]
            if None in await client.put(Kind.KV, items, lease=LEASE, wait_s=30.0):
                raise SystemExit("a put was dropped")
    return cost.us


async def gets(client: StoreClient, process: Process, round_: int) -> dict[str, float]:
    keys, dest, good = [digest(1, round_, n) for n in range(HOT)], bytearray(BLOCK_BYTES), 0
    with Cost(process.process.pid, HOT) as cost:
        for begin in range(0, HOT, BATCH):
            part = keys[begin : begin + BATCH]
            for key, place in zip(part, await client.open_prefix(part, LEASE), strict=True):
                good += client.read_into(place, key, dest)
    if good != HOT:
        raise SystemExit(f"{HOT - good} reads missed")
    return cost.us


async def cold(client: StoreClient, process: Process, blocks: int) -> dict[str, float]:
    """Groups of 10 blocks out of everything on disk, in an order made up."""
    source, dest, good = random.Random(5), bytearray(BLOCK_BYTES), 0
    starts = [source.randrange(blocks // 10) * 10 for _ in range(COLD // 10)]
    with Cost(process.process.pid, COLD) as cost:
        for start in starts:
            part = [digest(0, 0, n) for n in range(start, start + 10)]
            places = await client.open_prefix(part, None)
            for key, place in zip(part, places, strict=False):
                good += client.read_into(place, key, dest)
    if good != COLD:
        raise SystemExit(f"{COLD - good} cold reads missed")
    return cost.us


async def look_up(url: str, blocks: int) -> float:
    """Best of 30, in ms, of a chain that lies in the middle of what is stored."""
    reader, best = IndexReader(url), float("inf")
    first = blocks // 2 // CHAIN * CHAIN
    chain = [digest(0, 0, n) for n in range(first, first + CHAIN)]
    for _ in range(30):
        began_s = time.perf_counter()
        hits = await reader.hit_blocks(NAMESPACE, chain)
        if hits.blocks == CHAIN:
            best = min(best, time.perf_counter() - began_s)
    await reader.close()
    return best * 1e3


def resident_bytes(pid: int) -> int:
    """Private memory of a process: without the arena, which is shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no RssAnon in /proc")


async def measure(home: str, url: str, blocks: int, say: Any) -> dict[str, Any]:
    store = settings(home, blocks)
    out: dict[str, Any] = {"blocks": blocks}
    began_s = time.monotonic()
    fill(store, blocks)
    say(f"{blocks} blocks written in {time.monotonic() - began_s:.1f} s")
    began_s = time.monotonic()
    with started_store(home, url, store) as process:
        out["start_s"] = time.monotonic() - began_s
        client = StoreClient(f"unix://{home}/store.sock", TOKEN, NAMESPACE)
        if not await client.connect(30.0):
            raise SystemExit("no store answered")
        out["memory_bytes"] = resident_bytes(process.process.pid)
        out["first_get_us"] = (await cold(client, process, blocks))["wall"]  # while it is listed
        while (stat := await client.stat()) is None or stat.index_unlisted:
            await asyncio.sleep(0.1)
        out["listed_s"] = time.monotonic() - began_s
        say(f"started in {out['start_s']:.1f} s, listed after {out['listed_s']:.1f} s")
        if stat.blocks != blocks:
            raise SystemExit(f"{stat.blocks} of {blocks} blocks were found")
        for round_ in range(3):
            for name, cost in (
                ("put", await puts(client, process, round_)),
                ("get", await gets(client, process, round_)),
                ("cold", await cold(client, process, blocks)),
            ):
                known = out.setdefault(name, cost)
                out[name] = {key: min(known[key], cost[key]) for key in cost}
            await client.release(LEASE)
        began_s = time.perf_counter()
        for _ in range(100):
            await client.stat()
        out["stat_us"] = (time.perf_counter() - began_s) / 100 * 1e6
        out["look_up_ms"] = await look_up(url, blocks)
        await client.close()
    shutil.rmtree(store.directory)
    return out


def report(results: list[dict[str, Any]]) -> None:
    least = results[0]
    print("   blocks  start s  listed s  bytes/block  look-up ms  stat us")
    for each in results:
        extra = (each["memory_bytes"] - least["memory_bytes"]) / max(1, each["blocks"])
        print(
            f"{each['blocks']:9,} {each['start_s']:8.2f} {each['listed_s']:9.2f} {extra:12.0f}"
            f" {each['look_up_ms']:11.2f} {each['stat_us']:8.0f}"
        )
    print("   us a block: wall, client's CPU, store's CPU")
    for each in results:
        parts = [
            f"{name} {each[name]['wall']:6.1f} {each[name]['client_cpu']:5.1f}"
            f" {each[name]['store_cpu']:5.1f}"
            for name in ("put", "get", "cold")
        ]
        print(f"{each['blocks']:9,}  " + "   ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, action="append", help="default: 1000, 10^5, 10^6")
    parser.add_argument("--directory", default=None, help="where the files go (default: temporary)")
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    results = []
    for blocks in arguments.blocks or (1000, 100_000, 1_000_000):
        home = tempfile.mkdtemp(prefix="hg-", dir=arguments.directory)
        server = embedded_valkey(home)
        try:
            results.append(asyncio.run(measure(home, server.url, blocks, say)))
        finally:
            server.stop()
            shutil.rmtree(home, ignore_errors=True)
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        report(results)


if __name__ == "__main__":
    main()
