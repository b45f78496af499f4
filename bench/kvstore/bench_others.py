"""Durable puts and cold gets of our store beside LMCache's file store, in one run on one disk.

    pip download --no-deps lmcache && unzip lmcache-*.whl 'lmcache/*.so' -d others
    .venv/bin/python bench/kvstore/bench_others.py others/lmcache/lmcache_fs*.so [--size flash]

LMCache's native file client (C++, four I/O threads a client) is loaded from its wheel and called as
its adapter calls it: batches of 16 keys and page-aligned buffers, one file a key; once with
O_DIRECT and the length rounded up to whole pages, once through the page cache, from which the files
are dropped before the gets. Both stores keep as many batches in flight. What the figures include:

  ours     checksum, header and lease; the puts end when the last group is synced and can be found;
           a get reads into the arena, verifies and copies out, or verifies again in place, in the
           memory that store and client share
  LMCache  write and rename; no sync, no checksum, no verification, no index; a get ends with the
           bytes in the client's buffer, from which an engine copies them

Afterwards bytes on disk are changed in three ways and read again: what each store answers as good.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_store import SIZES, Case, Clients, Process, settings, started_store
from other_process import IN_FLIGHT

from headrace.kvstore import embedded_valkey

HERE = Path(__file__).parent


class Others:
    """The client processes of one case, on one folder."""

    def __init__(self, module: str, folder: str, case: Case, direct: bool) -> None:
        self._case = case
        self._all = []
        for number in range(case.clients):
            told = {"module": module, "folder": folder, "number": number, "direct": direct}
            told["block_bytes"] = case.block_bytes
            self._all.append(Process(str(HERE / "other_process.py"), json.dumps(told)))
        for process in self._all:
            process.answer()

    def each(self, do: str, **order: Any) -> list[dict[str, Any]]:
        for process in self._all:
            process.tell(do=do, **order)
        return [json.loads(process.answer()) for process in self._all]

    def timed(self, do: str, count: int) -> float:
        """Bytes a second of `count` blocks together."""
        told = self.each(do, at_s=time.monotonic() + 0.05, count=count // self._case.clients)
        wall_s = max(one["end_s"] for one in told) - min(one["begin_s"] for one in told)
        return self._case.block_bytes * count / wall_s

    def stop(self) -> None:
        for process in self._all:
            process.stop()


def ours(home: str, redis_url: str, clients: Clients, case: Case, round_: int) -> dict[str, float]:
    """Put until synced and listed; then a fresh store on the same files, and cold gets."""
    shutil.rmtree(f"{home}/store", ignore_errors=True)
    store, count = settings(home, case), case.disk_count
    each = count // case.clients
    out = {}
    with started_store(home, redis_url, store):
        clients.each("connect")
        order = {"round_": round_, "count": each, "in_flight": IN_FLIGHT["put"]}
        _, _, begin_s = clients.timed("put", count, order=order)
        end_s = clients.first("durable")["end_s"]
        out["put"] = case.block_bytes * count / (end_s - begin_s)
        clients.first("listed")
        clients.each("release")
        clients.each("disconnect")
    with started_store(home, redis_url, store):
        clients.each("connect")
        order = {"round_": round_, "count": each // 2, "in_flight": IN_FLIGHT["get"]}
        out["get"], _, _ = clients.timed("cold", count // 2, order=order)
        order = order | {"first": each // 2, "count": each, "copy": False}
        out["get in place"], _, _ = clients.timed("cold", count - count // 2, order=order)
        if sum(told["wrong"] for told in clients.each("wrong", round_=round_)):
            raise SystemExit("our own store answered wrong bytes")
        clients.each("disconnect")
    return out


def theirs(module: str, home: str, case: Case, direct: bool, damage: bool) -> dict[str, Any]:
    folder = f"{home}/others"
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir()
    others = Others(module, folder, case, direct)
    try:
        out: dict[str, Any] = {"put": others.timed("put", case.disk_count)}
        others._all[0].tell(do="drop")
        others._all[0].answer()
        out["get"] = others.timed("get", case.disk_count // 2)
        if damage:
            others._all[0].tell(do="damage")
            out["damage"] = json.loads(others._all[0].answer())
        return out
    finally:
        others.stop()


def measure(module: str, home: str, redis_url: str, case: Case, rounds: int) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {"ours": {}, "LMCache fs": {}, "LMCache fs, O_DIRECT": {}}
    clients = Clients(home, redis_url, case)
    try:
        for round_ in range(rounds):
            print(f"{case.size}, {case.clients} client(s), round {round_ + 1}", file=sys.stderr)
            seen = {
                "ours": ours(home, redis_url, clients, case, round_),
                "LMCache fs": theirs(module, home, case, False, round_ == 0),
                "LMCache fs, O_DIRECT": theirs(module, home, case, True, round_ == 0),
            }
            for name, row in seen.items():
                for key, value in row.items():
                    old = rows[name].get(key)
                    better = old is None or (key != "damage" and value > old)
                    rows[name][key] = value if better else old
    finally:
        clients.stop()
    return {"size": case.size, "clients": case.clients, "blocks": case.disk_count, "rows": rows}


def report(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"\n{result['size']}, {result['clients']} client(s), {result['blocks']} blocks, GB/s")
        mine = result["rows"]["ours"]
        for name, row in result["rows"].items():
            put, get = (mine[key] / row[key] for key in ("put", "get"))
            in_place = mine["get in place"] / row["get"]
            print(
                f"  {name:22} put {row['put'] / 1e9:5.2f} (ours is {put:4.2f} of it)"
                f"  get {row['get'] / 1e9:5.2f} ({get:4.2f}, in place {in_place:4.2f})"
            )
            for what, answer in row.get("damage", {}).items():
                print(f"      {what:28} {answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", help="lmcache_fs*.so out of LMCache's wheel")
    parser.add_argument("--size", choices=SIZES, default="flash")
    parser.add_argument("--clients", type=int, choices=(1, 4), action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", default=None, help="where the files go (default: temporary)")
    arguments = parser.parse_args()
    home = tempfile.mkdtemp(prefix="hb-", dir=arguments.directory)
    server = embedded_valkey(home)
    try:
        results = [
            measure(
                arguments.module,
                home,
                server.url,
                Case(arguments.size, *SIZES[arguments.size], clients),
                arguments.rounds,
            )
            for clients in arguments.clients or (1, 4)
        ]
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        report(results)


if __name__ == "__main__":
    main()
