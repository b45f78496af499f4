"""Getting objects from another host's store, against what loopback TCP gives in the same run.

    .venv/bin/python bench/kvstore/bench_peers.py [--json] [--block-bytes 113920]

Two stores with their own arenas, index in an embedded Valkey, one or four clients at the second
store, each with a part of the blocks. The first has all blocks in its arena; the second fetches
them, `--batch` at a time for a client that waits, and a client's part as one chain; some other
blocks before, not counted, so that both know each other. Received in place, every checksum
verified. The limit is the same blocks sent between two processes by the same calls and verified by
nobody; the ceiling is that with the checksums and from memory as large as the run. Both over 1, 2
and 4 connections: the best of them. Best of `--rounds`.
CPU a block: both ends of these together, the store that sends, the one that asks, the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from headrace.core.deployment import Deployment
from headrace.core.ids import Digest
from headrace.core.loops import new_event_loop
from headrace.core.role import RoleSettings
from headrace.kvstore import Kind, StoreClient, StoreSettings, embedded_valkey, run_store
from headrace.kvstore.files import aligned_buffer
from headrace.kvstore.layout import checksum, slot_bytes

T = TypeVar("T")
TOKEN = "a token of a bench, nobody else's"
NAMESPACE = hashlib.sha256(b"bench").digest()
BAR = 0.7
WARM = 16  # blocks fetched before the clock runs
# Name, clients, and whether each asks for its part in one question.
CASES = (
    ("1 client, a batch and wait", 1, False),
    ("4 clients, a batch and wait", 4, False),
    ("1 client, one chain", 1, True),
    ("4 clients, a chain each", 4, True),
)


def serve(told: dict[str, Any]) -> None:
    role = RoleSettings(
        name=told["name"],
        listen=f"unix://{told['home']}/{told['name']}.sock",
        token=TOKEN,
        redis_url=told["redis_url"],
        store_address=f"unix://{told['home']}/{told['name']}.sock",
        run_dir=told["home"],
        build="bench",
        deployment=Deployment(),
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(
            run_store(
                role, StoreSettings(**told["settings"]), ready=lambda _: print("ready", flush=True)
            )
        )


class StoreProcess:
    """A store in a process of its own; `cpu_s` is what it used so far."""

    def __init__(self, home: str, name: str, redis_url: str, settings: StoreSettings) -> None:
        told = {
            "home": home,
            "name": name,
            "redis_url": redis_url,
            "settings": asdict(settings),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", json.dumps(told)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit(f"the store {name} did not start")

    def cpu_s(self) -> float:
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


# the limit ---------------------------------------------------------------------------------------


class Streams(NamedTuple):
    """Blocks from processes to this one, `each` over each connection, one after another: from a
    source of so many blocks, received so many in a row, through socket buffers of such a size."""

    block_bytes: int
    each: int
    connections: int
    source_blocks: int
    in_a_row: int
    buffer_bytes: int
    verified: bool

    @property
    def blocks(self) -> int:
        return self.each * self.connections


def limit_streams(block_bytes: int, count: int, batch: int, connections: int) -> Streams:
    """What TCP gives at best: from memory that the caches hold, and verified by nobody."""
    each = count // connections // batch * batch
    return Streams(block_bytes, each, connections, batch, 1, 4 << 20, verified=False)


def ceiling_streams(block_bytes: int, count: int, batch: int, connections: int) -> Streams:
    """What no store can do without: from memory as large as the run, every checksum computed."""
    each, in_a_row = count // connections, max(1, (8 << 20) // slot_bytes(block_bytes))
    return Streams(block_bytes, each, connections, each, in_a_row, 256 << 10, verified=True)


def _behind(views: list[Any], moved: int) -> list[Any]:
    """What is left of `views` after `moved` bytes."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []


def _cut(area: Any, streams: Streams, first: int, count: int) -> list[Any]:
    slot = slot_bytes(streams.block_bytes)
    return [area[n * slot :][: streams.block_bytes] for n in range(first, first + count)]


def _send(port: int, streams: Streams, used_s: Any) -> None:
    area = aligned_buffer(streams.source_blocks * slot_bytes(streams.block_bytes))
    noise = random.Random(1).randbytes(1 << 20)
    for at in range(0, len(area), len(noise)):
        area[at : at + len(noise)] = noise[: len(area) - at]
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, streams.buffer_bytes)
        sock.recv(1)  # nothing is under way before the clock runs
        before_s = time.process_time()
        row = min(64, streams.source_blocks)
        for begin in range(0, streams.each, row):
            count = min(row, streams.each - begin)
            left = _cut(area, streams, begin % streams.source_blocks, count)
            while left:
                left = _behind(left, sock.sendmsg(left))
        used_s.put(time.process_time() - before_s)


def stream(streams: Streams) -> tuple[float, float]:
    """Bytes a second, and seconds of CPU a block of all processes."""
    arena = aligned_buffer(streams.blocks * slot_bytes(streams.block_bytes))
    for at in range(0, len(arena), 4096):
        arena[at] = 1  # touched before, as an arena is
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    used_s = context.Queue()
    senders = [
        context.Process(target=_send, args=(port, streams, used_s))
        for _ in range(streams.connections)
    ]
    for sender in senders:
        sender.start()
    socks = [listening.accept()[0] for _ in senders]
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, streams.buffer_bytes)

    def take(number: int) -> None:
        socks[number].send(b"!")
        first, row = number * streams.each, streams.in_a_row
        for begin in range(0, streams.each, row):
            views = _cut(arena, streams, first + begin, min(row, streams.each - begin))
            left = views
            while left:
                part = socks[number].recvmsg_into(left[:512], 0, socket.MSG_WAITALL)[0]
                if not part:
                    return  # the sender ended early
                left = _behind(left, part)
            if streams.verified:
                for view in views:
                    checksum(view)
        whole.append(number)

    whole: list[int] = []
    began_s, before_s = time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=take, args=(n,)) for n in range(streams.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - before_s
    for sock in socks:
        sock.close()
    listening.close()
    if len(whole) < len(socks):
        raise SystemExit("a sender ended early")
    for sender in senders:
        sender.join()
        cpu_s += used_s.get()
    return streams.blocks * streams.block_bytes / took_s, cpu_s / streams.blocks


# the stores --------------------------------------------------------------------------------------


def digest_of(number: int) -> Digest:
    return Digest(hashlib.sha256(b"bench %d" % number).digest())


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a loop as a role has it. What earlier stores have left here is let go of first: to unmap
    an arena costs as much as to fetch it."""
    gc.collect()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


async def fill(address: str, block_bytes: int, count: int) -> None:
    client = StoreClient(address, TOKEN, NAMESPACE)
    assert await client.connect(20)
    payload = bytearray(random.Random(2).randbytes(block_bytes))
    for begin in range(0, count, 16):
        items = []
        for number in range(begin, min(begin + 16, count)):
            payload[:8] = number.to_bytes(8, "little")
            items.append((digest_of(number), bytes(payload)))
        places = await client.put(Kind.KV, items)
        assert None not in places
    while True:
        stat = await client.stat()
        if stat and stat.index == "ok" and not stat.index_unlisted and not stat.pending:
            break
        await asyncio.sleep(0.05)
    await client.close()


async def fetch(
    address: str, block_bytes: int, count: int, batch: int, clients: int
) -> tuple[float, float]:
    """Seconds until all blocks are in the second store's arena, each compared afterwards; and of
    CPU here meanwhile."""
    asking = [StoreClient(address, TOKEN, NAMESPACE) for _ in range(clients)]
    assert all([await client.connect(20) for client in asking])
    before = [digest_of(number) for number in range(count, count + WARM)]
    assert len(await asking[0].open_prefix(before, None)) == WARM
    await asyncio.sleep(0.3)
    places: dict[int, Any] = {}
    all_digests = [digest_of(number) for number in range(count)]

    async def one(client: StoreClient, part: range) -> None:
        for begin in part[::batch]:
            digests = all_digests[begin : min(begin + batch, part.stop)]
            found = await client.open_prefix(digests, None)
            assert len(found) == len(digests), f"{len(found)} of {len(digests)} came"
            places.update(enumerate(found, begin))

    each = -(-count // clients)
    parts = [range(begin, min(begin + each, count)) for begin in range(0, count, each)]
    began_s, before_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, asking, parts))
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - before_s
    dest = bytearray(block_bytes)
    for number, place in places.items():
        assert asking[0].read_into(place, digest_of(number), dest)
        assert dest[:8] == number.to_bytes(8, "little")
    stat = await asking[0].stat()
    assert stat is not None and stat.peer_fetched == count + WARM and not stat.peer_failed
    for client in asking:
        await client.close()
    return took_s, cpu_s


def measure(arguments: argparse.Namespace, home: str, say: Any) -> dict[str, Any]:
    block_bytes, count, batch = arguments.block_bytes, arguments.count, arguments.batch
    room = int(count * slot_bytes(block_bytes) * 1.6) + (8 << 20)
    valkey = embedded_valkey(home)
    best: dict[str, float] = {}

    def settings(name: str) -> StoreSettings:
        return StoreSettings(
            directory=f"{home}/{name}",
            arena_bytes=room,
            ssd_bytes=room + (64 << 20),
            segment_bytes=32 << 20,
            block_bytes=block_bytes,
            window_bytes=block_bytes,
            window_share=0.01 if count > 200 else 0.2,
            claim_s=0.1,
            peer_listen="tcp://127.0.0.1:0",
            peer_least_s=30.0,
            index_deadline_s=1.0,  # what is measured is not the patience with Redis
        )

    stores = [StoreProcess(home, "a", valkey.url, settings("a"))]
    try:
        run(fill(f"unix://{home}/a.sock", block_bytes, count + WARM))
        for round_ in range(arguments.rounds):
            for connections in (1, 2, 4):
                for name, made in (("tcp", limit_streams), ("ceiling", ceiling_streams)):
                    rate, cpu_s = stream(made(block_bytes, count, batch, connections))
                    if rate > best.get(name, 0.0):
                        best[name], best[f"{name}: us a block"] = rate, cpu_s * 1e6
            for name, clients, chain in CASES:
                say(f"round {round_ + 1} of {arguments.rounds}: {name}")
                stores.append(StoreProcess(home, "b", valkey.url, settings("b")))
                time.sleep(1.2)  # a beat: both know each other
                before = [store.cpu_s() for store in (stores[0], stores[-1])]
                size = count if chain else batch
                took_s, client_s = run(
                    fetch(f"unix://{home}/b.sock", block_bytes, count, size, clients)
                )
                used = [
                    store.cpu_s() - was
                    for store, was in zip((stores[0], stores[-1]), before, strict=True)
                ]
                if count * block_bytes / took_s > best.get(name, 0.0):
                    best[name] = count * block_bytes / took_s
                    best[f"{name}: owner us a block"] = used[0] / count * 1e6
                    best[f"{name}: asking us a block"] = used[1] / count * 1e6
                    best[f"{name}: clients us a block"] = client_s / count * 1e6
                stores.pop().stop()
                shutil.rmtree(f"{home}/b")
    finally:
        for store in stores:
            store.stop()
        valkey.stop()
    return {"block_bytes": block_bytes, "count": count, "batch": batch, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--block-bytes", type=int, default=113_920)
    parser.add_argument("--count", type=int, default=2048, help="blocks in all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    home = tempfile.mkdtemp(prefix="hb-", dir="/tmp")
    try:
        found = measure(
            arguments, home, lambda text: None if arguments.json else print(text, file=sys.stderr)
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    limit = found["tcp"]
    print(
        f"{found['count']} blocks of {found['block_bytes']} B; loopback TCP {limit / 1e9:.2f} GB/s,"
        f" CPU of both its ends {found['tcp: us a block']:.0f} us a block"
    )
    print(
        f"{'ceiling: copy and checksum':28s} {found['ceiling'] / 1e9:5.2f} GB/s "
        f" {found['ceiling'] / limit:4.2f} of TCP; CPU of both ends"
        f" {found['ceiling: us a block']:.0f} us a block"
    )
    for name, *_ in CASES:
        ratio = found[name] / limit
        used = [found[f"{name}: {who} us a block"] for who in ("owner", "asking", "clients")]
        print(
            f"{name:28s} {found[name] / 1e9:5.2f} GB/s  {ratio:4.2f} of TCP"
            f" (bar {BAR}{'' if ratio >= BAR else ': missed'}); CPU a block: owner {used[0]:.0f},"
            f" asking store {used[1]:.0f}, clients {used[2]:.0f} us"
        )


if __name__ == "__main__":
    main()
