"""A history of a store under four clients, kills and damage; what every get returned is checked.

    .venv/bin/python tests/kvstore/history/history.py --seed 7 --seconds 60

The seed decides what each process does and what is done to it, and is printed; how the processes
interleave is the machine's. Every get that answers True is written down with a hash of its bytes,
and compared here with what that key's bytes are. Afterwards the index must be what is on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis

from headrace.kvstore import EmbeddedRedis, Kind, StoreClient, StoreSettings, embedded_valkey
from headrace.kvstore.layout import checksum

STORE = Path(__file__).resolve().parent.parent / "store_process.py"
WORKER = Path(__file__).with_name("worker.py")
_spec = importlib.util.spec_from_file_location("headrace_tests_kvstore_history_worker", WORKER)
assert _spec is not None and _spec.loader is not None
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


# the conductor -----------------------------------------------------------------------------------


@dataclass
class Report:
    """What happened; `wrong` must be empty."""

    seed: int
    seconds: float
    words: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    objects: int = 0
    from_others: int = 0

    def text(self) -> str:
        return (
            f"seed {self.seed}, {self.seconds:g} s: {dict(self.words)}, done to it"
            f" {dict(self.deeds)}, {self.objects} objects on disk and in the index,"
            f" {self.from_others} came from the other store since its last start,"
            f" {len(self.wrong)} wrong"
        )


class Conductor:
    """Starts stores and workers, does harm to them, and judges. Everything is ended by `close`."""

    def __init__(
        self, seed: int, seconds: float, *, n_stores: int = 1, n_workers: int = 4, lie: bool = False
    ) -> None:
        self.draw = random.Random(seed)
        self.report = Report(seed, seconds)
        self.lie = lie
        self.home = tempfile.mkdtemp(prefix="hh-", dir="/tmp")
        self.valkey: EmbeddedRedis = embedded_valkey(self.home)
        self.plain = redis.Redis.from_url(self.valkey.url)
        self.stores: list[subprocess.Popen[bytes] | None] = [None] * n_stores
        self.workers: list[subprocess.Popen[bytes] | None] = [None] * n_workers
        self.runs = 0
        self.end_s = time.monotonic() + seconds

    def folder(self, store: int) -> str:
        return f"{self.home}/{store}"

    def settings(self, store: int) -> StoreSettings:
        return StoreSettings(
            directory=f"{self.folder(store)}/store",
            arena_bytes=800_000,
            ssd_bytes=10 * (128 << 10),
            segment_bytes=128 << 10,
            block_bytes=worker.SIZES[Kind.KV],
            window_bytes=worker.SIZES[Kind.SWA],
            group_s=0.02,
            peer_listen="tcp://127.0.0.1:0" if len(self.stores) > 1 else "",
            absent_s=0.05,
        )

    def start_store(self, number: int) -> None:
        Path(self.folder(number)).mkdir(exist_ok=True)
        told = {
            "home": self.folder(number),
            "name": f"store-{number}",
            "redis_url": self.valkey.url,
            "settings": asdict(self.settings(number)),
        }
        with open(f"{self.home}/store-{number}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", str(STORE), "store", json.dumps(told)],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None and process.stdout.readline(), "a store did not start"
        self.stores[number] = process

    def start_worker(self, number: int) -> None:
        self.runs += 1
        told = {
            "address": f"unix://{self.folder(number % len(self.stores))}/store.sock",
            "seed": f"{self.report.seed}/{number}/{self.runs}",
            "name": f"w{number}",
            "seconds": max(0.1, self.end_s - time.monotonic()),
            "log": f"{self.home}/worker-{number}.txt",
            "lie": self.lie,
        }
        with open(f"{self.home}/worker-{number}.log", "ab") as log:
            self.workers[number] = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), json.dumps(told)], stderr=log
            )

    def run(self) -> Report:
        for number in range(len(self.stores)):
            self.start_store(number)
        self.end_s = time.monotonic() + self.report.seconds
        for number in range(len(self.workers)):
            self.start_worker(number)
        time.sleep(min(1.0, self.report.seconds / 4))
        while time.monotonic() < self.end_s - 0.5:
            deed = self.draw.choices(
                (self.kill_store, self.kill_worker, self.stop_store, self.flush, self.freeze),
                (4, 2, 1, 1, 1),
            )[0]
            deed()
            time.sleep(0.2 + self.draw.random())
        for process in self.workers:
            if process is not None and process.wait(60) != 0:
                self.report.wrong.append(f"a worker ended with {process.returncode}")
        self.read_logs()
        asyncio.run(self.compare())
        return self.report

    # harm

    def kill_store(self) -> None:
        number = self.draw.randrange(len(self.stores))
        self._kill(self.stores[number])
        self.start_store(number)
        self.report.deeds["store killed"] += 1

    def kill_worker(self) -> None:
        number = self.draw.randrange(len(self.workers))
        process = self.workers[number]
        if process is None or process.poll() is not None:
            return
        self._kill(process)
        self.start_worker(number)
        self.report.deeds["client killed"] += 1

    def stop_store(self) -> None:
        process = self.draw.choice(self.stores)
        assert process is not None
        self._stopped(process.pid, 0.3)
        self.report.deeds["store stopped"] += 1

    def freeze(self) -> None:
        self._stopped(self.valkey.process.pid, 0.4)
        self.report.deeds["Redis frozen"] += 1

    def flush(self) -> None:
        self.plain.flushall()
        self.report.deeds["Redis flushed"] += 1

    @staticmethod
    def _kill(process: subprocess.Popen[bytes] | None) -> None:
        assert process is not None
        process.kill()
        process.wait(10)
        assert process.returncode == -signal.SIGKILL, "a kill had no effect"

    @staticmethod
    def _stopped(pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(200):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state == "T":
                    break
                time.sleep(0.01)
            assert state == "T", f"a stop had no effect: {state}"
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    # judgement

    def read_logs(self) -> None:
        right = {
            (kind.value, str(number)): worker.hash_of(worker.payload_of(kind, number))
            for kind, count in worker.NUMBERS.items()
            for number in range(count)
        }
        for number in range(len(self.workers)):
            for line in Path(f"{self.home}/worker-{number}.txt").read_text().splitlines():
                words = line.split()
                self.report.words[words[0]] += 1
                if words[0] == "got" and words[3:] != [right[words[1], words[2]]]:
                    self.report.wrong.append(f"worker {number}: {line}")

    async def compare(self) -> None:
        """When all is calm: the account adds up, and the index is what is on disk."""
        for number in range(len(self.stores)):
            address = f"unix://{self.folder(number)}/store.sock"
            client = StoreClient(address, worker.TOKEN, worker.NAMESPACE)
            if not await client.connect(20.0):
                self.report.wrong.append("the store is away at the end")
                continue
            deadline_s = time.monotonic() + 60
            while True:
                stat = await client.stat()
                calm = stat is not None and not (
                    stat.pending or stat.arena_reserved or stat.index_unlisted
                )
                if calm and stat is not None and stat.index == "ok":
                    break
                if time.monotonic() > deadline_s:
                    self.report.wrong.append(f"store {number} does not come to rest: {stat}")
                    break
                await asyncio.sleep(0.05)
            if stat is not None:
                self.report.from_others += stat.peer_fetched
                sums = (stat.arena_free + stat.arena_resident, stat.reservations)
                if sums != (stat.arena_slots, 0):
                    self.report.wrong.append(f"slots do not add up: {stat}")
            await client.close()
            self._compare_disk(number)

    def _compare_disk(self, number: int) -> None:
        on_disk, uid = sound_headers(Path(self.settings(number).directory))
        mine = next(
            (
                int(key.rpartition(b":")[2])
                for key in self.plain.keys("kv:store:*")
                if (self.plain.get(key) or b"")[12:20] == uid
            ),
            None,
        )
        listed: dict[bytes, set[tuple[int, int, int]]] = {}
        for kind in Kind:
            for key in self.plain.keys(f"{kind.value}:*"):
                if key.startswith(b"kv:store:"):
                    continue
                value = self.plain.get(key) or b""
                for at in range(0, len(value), 40):
                    store, tier = struct.unpack_from("<HB", value, at)
                    if store == mine and tier == 2:
                        place = struct.unpack_from("<III", value, at + 8)
                        listed.setdefault(kind.value.encode() + key[-16:], set()).add(place)
        self.report.objects += len(listed)
        if listed.keys() != on_disk.keys():
            only = (listed.keys() - on_disk.keys(), on_disk.keys() - listed.keys())
            self.report.wrong.append(
                f"store {number}: {len(only[0])} only in the index, {len(only[1])} only on disk"
            )
        for key in listed.keys() & on_disk.keys():
            if not listed[key] <= on_disk[key]:
                self.report.wrong.append(f"store {number}: a record names another place")

    def close(self) -> None:
        for process in (*self.workers, *self.stores):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(10)
            if process is not None and process.stdout is not None:
                process.stdout.close()
        self.plain.close()
        self.valkey.stop()
        if not self.report.wrong or self.lie:
            shutil.rmtree(self.home, ignore_errors=True)
        else:
            print(f"kept for a look: {self.home}")


def sound_headers(directory: Path) -> tuple[dict[bytes, set[tuple[int, int, int]]], bytes]:
    """Places by kind and 16 bytes of the digest, read as docs/kv-format.md says; the store's id."""
    out: dict[bytes, set[tuple[int, int, int]]] = {}
    uid = b""
    for path in sorted(directory.glob("segment-*.seg")):
        data = path.read_bytes()
        if data[:4] != b"HRSG" or not data[6]:
            continue
        slot_bytes, slots, number, generation = struct.unpack_from("<IIII", data, 8)
        uid = data[32:40]
        for slot in range(slots):
            end = 4096 + (slot + 1) * slot_bytes
            head = data[end - 512 : end]
            if head[:4] == b"HRSL" and struct.unpack_from("<Q", head, 504)[0] == checksum(
                head[:504]
            ):
                place = struct.unpack_from("<III", head, 16)
                if place == (number, slot, generation):
                    kind = {1: b"kv", 2: b"swa"}[head[6]]
                    out.setdefault(kind + head[80:96], set()).add(place)
    return out, uid


def play(seed: int, seconds: float, **options: Any) -> Report:
    conductor = Conductor(seed, seconds, **options)
    try:
        return conductor.run()
    finally:
        conductor.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--stores", type=int, default=1, help="hosts, each with its own store")
    told = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    report = play(seed, told.seconds, n_stores=told.stores)
    print(report.text())
    for line in report.wrong[:20]:
        print("wrong:", line)
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
