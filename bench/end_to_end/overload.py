"""Far more requests than a cluster can take: what is refused, how soon, what becomes of the rest.

    .venv/bin/python bench/end_to_end/overload.py --seconds 30 --times 20

The roles of a small cluster run as plain processes without Ray. A closed loop of a few clients
measures what it can take; then requests arrive at `--times` that rate, evenly, whether or not
former ones were answered. When the last has arrived, requests are sent one after another until one
is answered: the recovery. Times are taken at the client, which runs on the same machine; prints a
table; keeps nothing. tests/faults/live uses this file too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import yaml

from headrace.cluster.config import load_config
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import RunDir
from headrace.core.card import Role
from headrace.core.states import ReplicaState
from headrace.kvstore import MemberBoard, embedded_valkey

HEADRACE = Path(sys.executable).parent / "headrace"
ORDINARY_IDS = range(300, 4000)  # of the 4,096-id tokenizer: no special token among them
PROMPT_TOKENS, ANSWER_TOKENS = 64, 16
LOOK_EVERY_S = 0.25


@dataclass
class Shot:
    """One request as its client saw it. Times by the loop's clock."""

    prompt: int  # which of the prompts
    sent_s: float
    ended_s: float = 0.0
    status: int = 0  # 0: the connection failed
    text: str = ""
    retry_after: str = ""

    @property
    def took_ms(self) -> float:
        return (self.ended_s - self.sent_s) * 1e3


@dataclass
class Report:
    """What an overload did. `looks` are what `look` said during it."""

    capacity_per_s: float
    offered_per_s: float
    shots: list[Shot] = field(default_factory=list)
    looks: list[dict[str, float]] = field(default_factory=list)
    recovery_s: float = 0.0  # from the last arrival to the first answer of a request sent after it

    @property
    def refused(self) -> list[Shot]:
        return [shot for shot in self.shots if shot.status in (429, 503)]

    @property
    def answered(self) -> list[Shot]:
        return [shot for shot in self.shots if shot.status == 200]

    def refusal_ms(self) -> dict[str, float]:
        """p50, p99 and max of the time until a refusal had arrived, and the share within 100 ms."""
        times = sorted(shot.took_ms for shot in self.refused)
        return {
            "p50": statistics.median(times),
            "p99": times[int(0.99 * (len(times) - 1))],
            "max": times[-1],
            "within_100": sum(ms <= 100 for ms in times) / len(times),
        }

    def most(self, name: str) -> float:
        return max(look[name] for look in self.looks)


def small_prompts(n: int) -> list[list[int]]:
    chance = random.Random("overload")
    return [[chance.choice(ORDINARY_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(n)]


async def overload(
    url: str,
    key: str,
    prompts: Sequence[Sequence[int]],
    *,
    model: str = "t1",
    seconds: float,
    times: float = 20.0,
    clients: int = 6,
    measure_s: float = 5.0,
    look: Callable[[], dict[str, float]] = dict,
) -> Report:
    """Measure, overload, recover. `look` is called now and then meanwhile, off the loop."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=120.0,
        limits=limits,
        trust_env=False,
    ) as client:
        loop, gun = asyncio.get_running_loop(), _Gun(client, model, prompts)
        capacity = await gun.closed_loop(clients, measure_s)
        report = Report(capacity, capacity * times)
        looking = asyncio.create_task(_keep_looking(look, report.looks))
        shots = await gun.open_loop(report.offered_per_s, seconds)
        looking.cancel()
        over_s = loop.time()
        while (await gun.fire()).status != 200:
            await asyncio.sleep(0.1)
        report.recovery_s = loop.time() - over_s
        report.shots = await asyncio.gather(*shots)
        return report


class _Gun:
    def __init__(
        self, client: httpx.AsyncClient, model: str, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        common = {"model": model, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        bodies = [json.dumps({**common, "prompt": list(prompt)}).encode() for prompt in prompts]
        self._next = cycle(enumerate(bodies))

    async def fire(self) -> Shot:
        number, body = next(self._next)
        shot = Shot(number, self._loop.time())
        try:
            answer = await self._client.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
        except httpx.HTTPError:
            return shot
        finally:
            shot.ended_s = self._loop.time()
        shot.status = answer.status_code
        shot.retry_after = answer.headers.get("retry-after", "")
        if answer.status_code == 200:
            shot.text = answer.json()["choices"][0]["text"]
        return shot

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Answers a second, with so many clients that each wait for theirs. The first answers of
        all warm it up and do not count."""
        await asyncio.gather(*(self.fire() for _ in range(clients)))
        begun_s = self._loop.time()
        counts = await asyncio.gather(*(self._client_for(seconds) for _ in range(clients)))
        return sum(counts) / (self._loop.time() - begun_s)

    async def _client_for(self, seconds: float) -> int:
        until_s, n = self._loop.time() + seconds, 0
        while self._loop.time() < until_s:
            n += (await self.fire()).status == 200
        return n

    async def open_loop(self, per_s: float, seconds: float) -> list[asyncio.Task[Shot]]:
        """Requests at even distances, however many of the former ones are still open."""
        begun_s = self._loop.time()
        shots: list[asyncio.Task[Shot]] = []
        while (now_s := self._loop.time()) < begun_s + seconds:
            due = int((now_s - begun_s) * per_s) + 1
            while len(shots) < due:
                shots.append(asyncio.create_task(self.fire()))
            await asyncio.sleep(max(0.0, begun_s + len(shots) / per_s - self._loop.time()))
        return shots


async def _keep_looking(
    look: Callable[[], dict[str, float]], looks: list[dict[str, float]]
) -> None:
    while True:
        looks.append(await asyncio.to_thread(look))
        await asyncio.sleep(LOOK_EVERY_S)


def resident_bytes(pid: int) -> float:
    """Memory of a process that is in RAM now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    return 0.0


# ---- a cluster of plain processes ------------------------------------------------------------

ROLES = ("store-0", "decode-0", "router-0")


def small_cluster(model: str) -> dict[str, Any]:
    """One decode replica of four slots, four requests in line; no prefill: prompts are short."""
    return {
        "cluster": "overload",
        "deployment": {"model": model, "edge": {"queued_requests": 4}},
        "engine": {"n_blocks": 64, "n_slots": 4},
        "store": {"arena_bytes": 32 << 20, "ssd_bytes": 64 << 20, "segment_bytes": 8 << 20},
        "router": {"port": 0, "queue_ahead": 0},
    }


@contextlib.contextmanager
def running(home: Path, model: str) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Its URL, its key, and its processes by name."""
    file = home / "overload.yaml"
    file.write_text(yaml.safe_dump(small_cluster(model)))
    run = RunDir(home, "overload")
    run.create()
    valkey = embedded_valkey(str(run.sockets))
    environment = {**os.environ, "HEADRACE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in ROLES:
            command = [str(HEADRACE), "role", name.partition("-")[0], "--config", str(file)]
            started[name] = subprocess.Popen([*command, "--name", name], env=environment)
        board = MemberBoard.of(role_settings(load_config(file), run, Role.SUPERVISOR, "bench"))
        address = asyncio.run(_router_address(board))
        url = address.replace("tcp://", "http://")
        while httpx.get(f"{url}/ready", trust_env=False).status_code != 200:
            time.sleep(0.1)
        yield url, run.api_key("local"), {name: one.pid for name, one in started.items()}
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(60.0)
        valkey.stop()


async def _router_address(board: MemberBoard) -> str:
    try:
        async with asyncio.timeout(180.0):
            while True:
                ready = {m.name: m for m in await board.members() if m.state is ReplicaState.READY}
                if ready.keys() >= set(ROLES):
                    return ready["router-0"].address
                await asyncio.sleep(0.2)
    finally:
        await board.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="t1")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--times", type=float, default=20.0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="hr-") as folder,
        running(Path(folder), arguments.model) as (url, key, pids),
    ):
        before = {name: resident_bytes(pid) for name, pid in pids.items()}
        report = asyncio.run(
            overload(
                url,
                key,
                small_prompts(8),
                model=arguments.model,
                seconds=arguments.seconds,
                times=arguments.times,
                look=lambda: {name: resident_bytes(pid) for name, pid in pids.items()},
            )
        )
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f},"
        f" Python {platform.python_version()}, headrace {version('headrace')}"
    )
    for line in lines(report, before):
        print(line)


def lines(report: Report, before: dict[str, float]) -> list[str]:
    """The figures as a table."""
    counts = Counter(str(shot.status) for shot in report.shots)
    refusal = report.refusal_ms()
    answers = sorted(shot.took_ms for shot in report.answered)
    figures = {
        "capacity, answers/s": f"{report.capacity_per_s:.2f}",
        "offered, requests/s": f"{report.offered_per_s:.1f}",
        "requests, by status": ", ".join(f"{k}: {n}" for k, n in sorted(counts.items())),
        "refusal, ms, p50 / p99 / max": " / ".join(
            f"{refusal[name]:.1f}" for name in ("p50", "p99", "max")
        ),
        "refused within 100 ms": f"{refusal['within_100']:.1%}",
        "answer, ms, p50 / max": f"{statistics.median(answers):.0f} / {answers[-1]:.0f}",
        "recovery, s": f"{report.recovery_s:.2f}",
        **{
            f"memory of {name}, MB, before / most": f"{n / 1e6:.1f} / {report.most(name) / 1e6:.1f}"
            for name, n in before.items()
        },
    }
    return ["| figure | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in figures.items())]


if __name__ == "__main__":
    main()
