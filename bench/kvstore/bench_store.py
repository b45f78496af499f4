"""Put, get and look-up of the store against memory, a bare disk file and loopback, in one run.

    .venv/bin/python bench/kvstore/bench_store.py [--json] [--size demo|flash|large] [--rounds 3]

A store and its clients as processes of their own; batches of 16 blocks; best of `--rounds`, except
the CPU a block, which is of the same round; the store's is of all phases of puts until they are
listed, and of all cold gets. The arena has 3 GiB: a burst of a thousand blocks may run ahead of the
store there. A get is verified (header before and after, length,
digest, generation, checksum) and copied out unless it says `in place`. `one chain`: all blocks in
one question, as a role asks for a prompt's. A host put
ends when its caller has the places, `known` when the store has read all of it. Baselines:

  memcpy     the same payloads copied into, and out of, private memory as large as the run
  ceiling    the same and a checksum of each: what Python reaches that asks nobody anything;
             and with two questions to the store a batch, as a put without slots in advance has
  bare file  preallocated, O_DIRECT, the same slots, one call a slot, one sync at the end; one
             file and one process a client
  TCP        one stream on loopback, 1 MiB at a time
  MGET       redis-py's, of the same keys; sha256: hashlib's, of 512 bytes

Nothing here is a test: what a machine's disk does varies more than what we do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis

from headrace.core.deployment import Deployment
from headrace.core.loops import new_event_loop
from headrace.core.role import RoleSettings
from headrace.kvstore import StoreSettings, embedded_valkey, run_store
from headrace.kvstore.layout import SEGMENT_HEADER_BYTES, slot_bytes

HERE = Path(__file__).parent
TOKEN = "bench"
BATCH = 16
CHAIN = 1000
WINDOW_BYTES = 4096
# Block bytes, and blocks a phase and round over all clients; as `headrace layout` prints them.
SIZES = {"demo": (13_440, 4096), "flash": (113_920, 1024), "large": (1 << 20, 128)}
ARENA_BYTES = 3 << 30  # at least
DISK_PHASE = 4  # times as many blocks: a group is synced after 64 MiB or 200 ms
BARS = {
    "host put : memcpy": 0.8,
    "host get : memcpy": 0.8,
    "host get in place : memcpy": 0.8,
    "ssd put : bare file": 0.9,
    "ssd cold get : bare file": 0.9,
    "hash chain : sha256": 0.8,
}


@dataclass(frozen=True)
class Case:
    size: str
    block_bytes: int
    count: int  # blocks of a phase in memory
    clients: int

    @property
    def disk_count(self) -> int:
        return self.count * DISK_PHASE


def settings(home: str, case: Case) -> StoreSettings:
    """Room for the two phases of one round on disk, and an arena as hosts have it: what a client
    may hold in advance is a share of it."""
    slots = case.count + case.disk_count + 256
    whole = slot_bytes(case.block_bytes) * slots
    segment = SEGMENT_HEADER_BYTES + slot_bytes(case.block_bytes) * max(8, slots // 12)
    return StoreSettings(
        directory=f"{home}/store",
        arena_bytes=max(int(whole / 0.95) + (1 << 20), ARENA_BYTES),
        ssd_bytes=segment * 16,
        segment_bytes=segment,
        block_bytes=case.block_bytes,
        window_bytes=WINDOW_BYTES,
        window_share=0.05,
    )


def serve(told: dict[str, Any]) -> None:
    def ready(_: object) -> None:
        print("ready", flush=True)

    home = told["home"]
    address = f"unix://{home}/store.sock"
    role = RoleSettings(
        "store-0", address, TOKEN, told["redis"], address, home, "bench", Deployment()
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run_store(role, StoreSettings(**told["settings"]), ready=ready))


class Process:
    """A child that answers each line with a line."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process of the bench ended")
        return line

    def cpu_s(self) -> float:
        """What the process has used so far, all its threads."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def started_store(home: str, redis_url: str, store: StoreSettings) -> Iterator[Process]:
    told = {"home": home, "redis": redis_url, "settings": asdict(store)}
    process = Process(str(HERE / "bench_store.py"), "--serve", json.dumps(told))
    try:
        process.answer()
        yield process
    finally:
        process.stop()


class Clients:
    """All client processes of one case; an order goes to each, to be begun at one moment."""

    def __init__(self, home: str, redis_url: str, case: Case) -> None:
        self._case = case
        self.told: list[dict[str, float]] = []  # what each said of the last phase
        self._all = [
            Process(
                str(HERE / "client_process.py"),
                json.dumps(
                    {
                        "number": number,
                        "home": home,
                        "redis_url": redis_url,
                        "block_bytes": case.block_bytes,
                        "count": case.count // case.clients,
                    }
                ),
            )
            for number in range(case.clients)
        ]
        for process in self._all:
            process.answer()

    def each(self, do: str, **order: Any) -> list[dict[str, float]]:
        for process in self._all:
            process.tell(do=do, **order)
        return [json.loads(process.answer()) for process in self._all]

    def first(self, do: str, **order: Any) -> dict[str, float]:
        self._all[0].tell(do=do, **order)
        return dict(json.loads(self._all[0].answer()))

    def timed(
        self, do: str, count: int, order: dict[str, Any] | None = None
    ) -> tuple[float, float, float]:
        """(bytes a second of `count` blocks together, CPU us a block, when the first began)."""
        told = self.told = self.each(do, at_s=time.monotonic() + 0.02, **(order or {}))
        begin_s = min(each["begin_s"] for each in told)
        wall_s = max(each["end_s"] for each in told) - begin_s
        cpu_us = sum(each["cpu_s"] for each in told) / count * 1e6
        return self._case.block_bytes * count / wall_s, cpu_us, begin_s

    def stop(self) -> None:
        for process in self._all:
            process.stop()


def one_round(home: str, redis_url: str, case: Case, clients: Clients, round_: int, tries: int):
    """Everything once: baselines between the store's own phases, so that they share the weather."""
    out: dict[str, float] = {}
    shutil.rmtree(f"{home}/store", ignore_errors=True)
    with redis.Redis.from_url(redis_url) as index:
        index.flushall()  # claims of the store before, which had the same keys
    store = settings(home, case)
    few, many = case.count, case.disk_count
    each = many // case.clients
    clients.each("bare_make", count=each)
    out["memcpy_in"], _, _ = clients.timed("memcpy_in", few)
    out["memcpy_out"], _, _ = clients.timed("memcpy_out", few)
    out["ceiling_in"], _, _ = clients.timed("ceiling_in", few)
    out["ceiling_out"], _, _ = clients.timed("ceiling_out", few)
    out["bare_put"], _, _ = clients.timed("bare_put", many, order={"count": each})
    out["bare_get"], _, _ = clients.timed("bare_get", many, order={"count": each})
    plain, piped = 2 * round_, 2 * round_ + 1
    with started_store(home, redis_url, store) as process:
        clients.each("connect")
        began_cpu_s = process.cpu_s()
        one = {"round_": plain, "count": few // case.clients, "in_flight": 1}
        out["host_put"], out["put_cpu_us"], _ = clients.timed("put", few, order=one)
        took_s = max(e["known_s"] for e in clients.told) - min(e["begin_s"] for e in clients.told)
        out["host_put_known"] = case.block_bytes * few / took_s
        clients.first("durable")
        four = {"round_": piped, "count": each, "in_flight": 4}
        out["host_put_piped"], out["put_piped_cpu_us"], begin_s = clients.timed(
            "put", many, order=four
        )
        end_s = clients.first("durable")["end_s"]
        out["ssd_put"] = case.block_bytes * many / (end_s - begin_s)
        clients.first("listed")
        out["store_put_cpu_us"] = (process.cpu_s() - began_cpu_s) / (few + many) * 1e6
        n_questions = 500 * case.clients
        bytes_a_second, _, _ = clients.timed("questions", n_questions, order={"count": 500})
        out["question_us"] = case.block_bytes / bytes_a_second * 1e6
        get = {"round_": plain, "copy": True}
        out["host_get"], out["get_cpu_us"], _ = clients.timed("get", few, order=get)
        get = {"round_": piped, "copy": False}
        out["host_get_in_place"], _, _ = clients.timed("get", few, order=get)
        if tries and few // case.clients >= CHAIN:
            out |= clients.first("look_up", round_=plain, tries=tries)
        clients.each("release")
        clients.each("disconnect")
    with started_store(home, redis_url, store) as process:
        clients.each("connect")
        began_cpu_s = process.cpu_s()
        cold = {"round_": piped, "count": each // 2, "in_flight": 1}
        out["ssd_get"], out["cold_cpu_us"], _ = clients.timed("cold", many // 2, order=cold)
        cold = {"round_": plain, "count": few // case.clients, "in_flight": 2}
        out["ssd_get_piped"], _, _ = clients.timed("cold", few, order=cold)
        out["store_cold_cpu_us"] = (process.cpu_s() - began_cpu_s) / (few + many // 2) * 1e6
        chain = {"round_": piped, "first": each // 2, "count": each, "in_flight": 1, "batch": each}
        out["ssd_get_chain"], _, _ = clients.timed("cold", many - many // 2, order=chain)
        wrong = sum(each["wrong"] for each in clients.each("wrong", round_=piped))
        if wrong:
            raise SystemExit(f"{wrong:.0f} blocks are not the bytes that were put")
        clients.each("disconnect")
    return out


def measure(home: str, redis_url: str, case: Case, rounds: int, say: Any) -> dict[str, Any]:
    best: dict[str, float] = {}
    clients = Clients(home, redis_url, case)
    try:
        if case.clients == 1 and case.size == "flash":
            best |= clients.first("hash_chain")
        for round_ in range(rounds):
            say(f"{case.size}, {case.clients} client(s), round {round_ + 1} of {rounds}")
            for name, value in one_round(
                home, redis_url, case, clients, round_, 30 if case.clients == 1 else 0
            ).items():
                better = min if name.endswith(("_us", "_ms")) else max
                best[name] = better(best.get(name, value), value)
    finally:
        clients.stop()
    return {**asdict(case), "best": best, "ratios": ratios(best, case.block_bytes)}


def ratios(best: dict[str, float], block_bytes: int) -> dict[str, float]:
    block_us = 1e6 * block_bytes / best["ceiling_in"] + 2 * best["question_us"] / BATCH
    with_questions = 1e6 * block_bytes / block_us
    out = {
        "host put : memcpy": best["host_put"] / best["memcpy_in"],
        "host put, until known : memcpy": best["host_put_known"] / best["memcpy_in"],
        "host put, 4 batches in flight : memcpy": best["host_put_piped"] / best["memcpy_in"],
        "ceiling of a put: copy and checksum": best["ceiling_in"] / best["memcpy_in"],
        "the same, and two questions a batch": with_questions / best["memcpy_in"],
        "host get : memcpy": best["host_get"] / best["memcpy_out"],
        "ceiling of a get: copy and checksum": best["ceiling_out"] / best["memcpy_out"],
        "host get in place : memcpy": best["host_get_in_place"] / best["memcpy_out"],
        "ssd put : bare file": best["ssd_put"] / best["bare_put"],
        "ssd cold get : bare file": best["ssd_get"] / best["bare_get"],
        "ssd cold get, 2 in flight : bare file": best["ssd_get_piped"] / best["bare_get"],
        "ssd cold get, one chain : bare file": best["ssd_get_chain"] / best["bare_get"],
    }
    if "chain" in best:
        out["hash chain : sha256"] = best["chain"] / best["sha256"]
    if "mget_ms" in best:
        out["bare MGET : look-up"] = best["mget_ms"] / best["look_up_ms"]
    return out


def tcp_bytes_a_second(total: int = 2 << 30) -> float:
    """One stream on loopback: what a store on another node could send at best."""
    server = socket.create_server(("127.0.0.1", 0))
    block = bytes(1 << 20)

    def send() -> None:
        with socket.create_connection(server.getsockname()) as sock:
            for _ in range(total >> 20):
                sock.sendall(block)

    sender = threading.Thread(target=send)
    began_s = time.monotonic()
    sender.start()
    peer, _ = server.accept()
    target, got = memoryview(bytearray(1 << 20)), 0
    while count := peer.recv_into(target):
        got += count
    wall_s = time.monotonic() - began_s
    sender.join()
    peer.close()
    server.close()
    return got / wall_s


def report(results: list[dict[str, Any]], tcp: float, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps({"tcp": tcp, "results": results}, indent=1))
        return
    print(f"loopback TCP {tcp / 1e9:.2f} GB/s; best of {arguments.rounds}; a miss of a bar: *")
    for result in results:
        best = result["best"]
        print(
            f"\n{result['size']}: {result['count']} blocks of {result['block_bytes']} bytes,"
            f" {result['clients']} client(s)"
        )
        for name, value in best.items():
            if name.endswith(("_us", "_ms")):
                print(f"  {name:18} {value:9.2f}")
            else:
                unit = "M/s" if name in ("chain", "sha256") else "GB/s"
                print(f"  {name:18} {value / (1e6 if unit == 'M/s' else 1e9):9.2f} {unit}")
        for name, ratio in result["ratios"].items():
            missed = "*" if ratio < BARS.get(name, 0.0) else ""
            print(f"  {name:40} {ratio:6.2f} {missed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all three")
    parser.add_argument("--clients", type=int, choices=(1, 4), action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where the files go (default: temporary)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    home = tempfile.mkdtemp(prefix="hb-", dir=arguments.directory)
    server = embedded_valkey(home)
    try:
        results = [
            measure(home, server.url, Case(size, *SIZES[size], clients), arguments.rounds, say)
            for size in arguments.size or SIZES
            for clients in arguments.clients or (1, 4)
        ]
        report(results, tcp_bytes_a_second(), arguments)
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
