"""End-to-end figures of whole clusters: requests/s, time to first token, time between tokens.

    .venv/bin/python bench/end_to_end/run.py                      both shipped configurations
    .venv/bin/python bench/end_to_end/run.py --json out.json      the same, and the raw figures

For every configuration a cluster of its own is brought up (any free port, a home of its own) and
ended again. Each round sends the same seeded prompts (token ids to /v1/completions, streamed):

    cold    prompts that no store has seen
    warm    the same prompts again: their blocks are loaded, a bounded suffix is replayed
    turn    each prompt with 64 more tokens behind it, as in a second turn

Times are taken at the client, which runs on the same machine. Prints a table; keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).parent / "headrace"
CONFIGS = ("local.yaml", "one-process.yaml")
TURN_TOKENS = 64
ORDINARY_IDS = range(300, 4000)  # of the 4,096-id tokenizer: no special token among them


@dataclass
class Shot:
    """One request as its client saw it, in seconds."""

    started_s: float
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    cached_tokens: int = 0
    answer_ids: int = 0
    error: str = ""


@dataclass
class Row:
    """One line of the result."""

    config: str
    round: str
    concurrency: int
    requests: int
    failed: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    cached_tokens_mean: float


class Cluster:
    """A cluster of one configuration, for the length of a `with`."""

    def __init__(self, source: Path, home: Path, model: str) -> None:
        values = yaml.safe_load(source.read_text())
        values["cluster"] = "bench"
        values.setdefault("deployment", {})["model"] = model
        values.setdefault("router", {})["port"] = 0
        self._file = home / "bench.yaml"
        self._file.write_text(yaml.safe_dump(values))
        self._environment = {**os.environ, "HEADRACE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._home = home
        self.start_s = 0.0
        self.url = self.key = self.model = ""

    def __enter__(self) -> Cluster:
        began = time.perf_counter()
        subprocess.run([HEADRACE, "up", self._file], env=self._environment, check=True)
        self.start_s = time.perf_counter() - began
        run = self._home / "bench"
        state = json.loads((run / "state.json").read_text())
        self.url, self.model = state["url"], state["model"]
        self.key = (run / "api_key").read_text().strip()
        return self

    def __exit__(self, *ended: object) -> None:
        subprocess.run([HEADRACE, "down", "--name", "bench"], env=self._environment, check=True)


async def shoot(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> Shot:
    """Stream one completion. A stream that breaks off or carries an error is a failed shot."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    shot = Shot(time.perf_counter())
    done, last_s = False, 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            shot.error = f"{answer.status_code} {(await answer.aread())[:200]!r}"
            return shot
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            now_s = time.perf_counter()
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                shot.error = str(chunk["error"])
                return shot
            if usage := chunk.get("usage"):
                shot.answer_ids = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                shot.cached_tokens = details.get("cached_tokens", 0)
            if chunk.get("choices"):
                if last_s:
                    shot.gaps_s.append(now_s - last_s)
                else:
                    shot.first_s = now_s
                last_s = now_s
    shot.ended_s = time.perf_counter()
    if not done or not shot.first_s:
        shot.error = "the stream broke off"
    return shot


async def round_of(
    cluster: Cluster, prompts: list[list[int]], max_tokens: int, concurrency: int
) -> list[Shot]:
    """All prompts, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    headers = {"Authorization": f"Bearer {cluster.key}"}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=cluster.url, headers=headers, timeout=300.0, limits=limits, trust_env=False
    ) as client:

        async def one(prompt: list[int]) -> Shot:
            async with gate:
                return await shoot(client, cluster.model, prompt, max_tokens)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def summary(config: str, name: str, concurrency: int, shots: list[Shot]) -> Row:
    good = [shot for shot in shots if not shot.error]
    for shot in shots:
        if shot.error:
            print(f"failed: {shot.error}", file=sys.stderr)
    if not good:
        raise SystemExit(f"{config}: every request of round {name} failed")
    wall_s = max(shot.ended_s for shot in good) - min(shot.started_s for shot in good)
    ttft = [1000 * (shot.first_s - shot.started_s) for shot in good]
    gaps = [1000 * gap for shot in good for gap in shot.gaps_s]
    return Row(
        config=config,
        round=name,
        concurrency=concurrency,
        requests=len(shots),
        failed=len(shots) - len(good),
        requests_per_s=len(good) / wall_s,
        tokens_per_s=sum(shot.answer_ids for shot in good) / wall_s,
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p99_ms=quantile(ttft, 0.99),
        gap_p50_ms=quantile(gaps, 0.5),
        gap_p99_ms=quantile(gaps, 0.99),
        cached_tokens_mean=sum(shot.cached_tokens for shot in good) / len(good),
    )


def quantile(values: list[float], q: float) -> float:
    """The nearest-rank quantile; nan of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def measure(source: Path, options: argparse.Namespace) -> tuple[list[Row], float]:
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="hr-bench-") as home,
        Cluster(source, Path(home), options.model) as cluster,
    ):
        chance = random.Random(options.seed)

        def ids(count: int) -> list[int]:
            return [chance.choice(ORDINARY_IDS) for _ in range(count)]

        asyncio.run(round_of(cluster, [ids(200)] * 2, 4, 1))  # first calls compile and import
        for concurrency in options.concurrency:
            prompts = [ids(options.prompt_tokens) for _ in range(options.requests)]
            turns = [prompt + ids(TURN_TOKENS) for prompt in prompts]
            for name, batch in (("cold", prompts), ("warm", prompts), ("turn", turns)):
                shots = asyncio.run(round_of(cluster, batch, options.max_tokens, concurrency))
                rows.append(summary(source.name, name, concurrency, shots))
        return rows, cluster.start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="append", help="a file; default: both shipped ones")
    parser.add_argument("--model", default="t2")
    parser.add_argument("--requests", type=int, default=12, help="prompts a round")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    sources = [Path(name) for name in options.config or ()] or [
        ROOT / "configs" / "cluster" / name for name in CONFIGS
    ]
    rows: list[Row] = []
    starts: dict[str, float] = {}
    for source in sources:
        measured, starts[source.name] = measure(source, options)
        rows += measured
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["bench/end_to_end/run.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("headrace", "torch", "ray")},
        "python": platform.python_version(),
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "seconds_to_ready": {name: round(value, 1) for name, value in starts.items()},
    }
    show(rows, about)
    if options.json:
        options.json.write_text(
            json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


def show(rows: list[Row], about: dict[str, Any]) -> None:
    table = Table(title=json.dumps(about), title_justify="left")
    for column in ("configuration", "round", "clients", "ok", "req/s", "tok/s"):
        table.add_column(column)
    for column in ("TTFT p50 / p99 ms", "gap p50 / p99 ms", "cached tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.config,
            row.round,
            str(row.concurrency),
            f"{row.requests - row.failed}/{row.requests}",
            f"{row.requests_per_s:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.ttft_p50_ms:.0f} / {row.ttft_p99_ms:.0f}",
            f"{row.gap_p50_ms:.1f} / {row.gap_p99_ms:.1f}",
            f"{row.cached_tokens_mean:.0f}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
