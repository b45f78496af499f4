"""The three hand-off modes side by side on the same prompts: bytes, rows, time to the first token.

    .venv/bin/python bench/handoff/modes.py                 T2, three prompt lengths
    .venv/bin/python bench/handoff/modes.py --model t1 --json out.json

For every mode a one-process cluster is brought up (a home of its own, any free port) with
`local_prefill_rows: 0`, so that every prompt is handed over. Each prompt is sent cold, then once
more with 64 tokens behind it; `--repeats` prompts of a length. One request is under way at a time,
and the modes take turns prompt by prompt, so that what else the machine does meets them alike. Rows
and bytes are those of the requests' records, the same for all prompts of a length; times are the
client's, the median of the repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).parent / "headrace"
MODES = ("exact", "replay", "state")
TURN_TOKENS, MAX_TOKENS = 64, 8


@dataclass
class Row:
    """One request of one mode."""

    mode: str
    round: str
    prompt_tokens: int
    start_kind: str
    exactness: str
    moved_bytes: int
    prefill_rows: int
    prefill_decoder_rows: int
    decode_encoder_rows: int
    decode_decoder_rows: int
    ttft_ms: float


class Cluster:
    """A one-process cluster in one mode, for the length of a `with`."""

    def __init__(self, home: Path, model: str, mode: str) -> None:
        values = yaml.safe_load((ROOT / "configs/cluster/one-process.yaml").read_text())
        values["cluster"] = "modes"
        values["router"]["port"] = 0
        deployment = {"model": model, "handoff_mode": mode, "local_prefill_rows": 0}
        values["deployment"] |= deployment
        self._file = home / "modes.yaml"
        self._file.write_text(yaml.safe_dump(values))
        self._environment = {**os.environ, "HEADRACE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._run = home / "modes"
        self.model = ""

    def __enter__(self) -> Cluster:
        subprocess.run([HEADRACE, "up", self._file], env=self._environment, check=True)
        state = json.loads((self._run / "state.json").read_text())
        self.model = state["model"]
        key = (self._run / "api_key").read_text().strip()
        headers = {"authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=state["url"], headers=headers, timeout=300)
        return self

    def __exit__(self, *ended: object) -> None:
        self.client.close()
        subprocess.run([HEADRACE, "down", "--name", "modes"], env=self._environment, check=True)

    def ask(self, ids: list[int]) -> tuple[dict[str, Any], float, str]:
        """(the request's record, seconds to the first text, the text)."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        began_s, first_s, text = time.perf_counter(), 0.0, ""
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            request_id = answer.headers["x-request-id"]
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    text += "".join(choice["text"] for choice in event["choices"])
                    first_s = first_s or time.perf_counter() - began_s
        return self._record(request_id), first_s, text

    def _record(self, request_id: str) -> dict[str, Any]:
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            for line in (self._run / "records.jsonl").read_text().splitlines():
                record: dict[str, Any] = json.loads(line)
                if record["request_id"] == request_id:
                    return record
            time.sleep(0.05)
        raise RuntimeError("the request left no record")


def measure(model: str, lengths: list[int], repeats: int) -> list[Row]:
    found: dict[tuple[int, str, str], list[Row]] = {}
    with contextlib.ExitStack() as stack:
        clusters = {}
        for mode in MODES:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-modes-"))
            clusters[mode] = stack.enter_context(Cluster(Path(home), model, mode))
            warm = random.Random("warm")
            clusters[mode].ask([warm.randrange(300, 3900) for _ in range(300)])  # threads, links
        for n_tokens in lengths:
            for repeat in range(repeats):
                draw = random.Random(f"modes {n_tokens} {repeat}")
                ids = [draw.randrange(300, 3900) for _ in range(n_tokens)]
                more = [draw.randrange(300, 3900) for _ in range(TURN_TOKENS)]
                for name, prompt in (("cold", ids), ("turn", ids + more)):
                    for mode, cluster in clusters.items():
                        record, first_s, _ = cluster.ask(prompt)
                        time.sleep(0.5)  # write-behind
                        row = row_of(mode, name, record, first_s)
                        found.setdefault((n_tokens, name, mode), []).append(row)
    return [middle(rows) for rows in found.values()]


def middle(rows: list[Row]) -> Row:
    """The row of prompts that differ in their time alone, with the median of it."""
    counts = {astuple(replace(row, ttft_ms=0.0)) for row in rows}
    if len(counts) != 1:
        raise RuntimeError(f"the same length gave other counts: {counts}")
    return replace(rows[0], ttft_ms=round(statistics.median(row.ttft_ms for row in rows), 1))


def row_of(mode: str, name: str, record: dict[str, Any], first_s: float) -> Row:
    return Row(
        mode,
        name,
        record["prompt_tokens"],
        record["start_kind"],
        record["exactness"],
        record["load_bytes"],
        record["prefill_rows"],
        record["prefill_decoder_rows"],
        record["encoder_rows"],
        record["decoder_rows"],
        round(first_s * 1e3, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="t2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.model, options.lengths, options.repeats)
    rows.sort(key=lambda row: (row.prompt_tokens, MODES.index(row.mode)))
    names = list(asdict(rows[0]))
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(str(value) for value in asdict(row).values()) + " |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
