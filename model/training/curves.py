"""The loss curves of a run's log.jsonl as small tables, which are kept beside the checkpoint.

`training.csv`: a line a report (loss of every part, gradient norm, tokens/s), `drafter.csv`: a line
every 50 steps of the drafter (divergence from the trunk, loss of the confidence, and place by place
the share of drafts that would stay and that are the trunk's first choice).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_CURVE_BYTES = 100_000
TRAINING, DRAFTER = "training.csv", "drafter.csv"


def curves_of(log: Path) -> dict[str, str]:
    """File name -> text, of at most MAX_CURVE_BYTES; a log without lines of a kind has no such
    file. A step that a resumed run took again counts as it went the last time."""
    reports: dict[int, dict[str, object]] = {}
    drafts: dict[int, dict[str, object]] = {}
    for text in log.read_text("utf-8").splitlines():
        line = json.loads(text)
        if "step" in line:
            parts = line.pop("parts")
            reports[line["step"]] = line | {f"loss_{name}": loss for name, loss in parts.items()}
        elif "drafter_step" in line:
            drafts[line["drafter_step"]] = _flat(line)
    found = {TRAINING: reports, DRAFTER: drafts}
    return {name: _table([own[s] for s in sorted(own)]) for name, own in found.items() if own}


def read_curve(file: Path) -> dict[str, list[float]]:
    """Column -> values."""
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def _flat(line: Mapping[str, object]) -> dict[str, object]:
    """Lists of one value as that value, longer ones as a column a place."""
    flat: dict[str, object] = {}
    for name, value in line.items():
        if not isinstance(value, list):
            flat[name] = value
        elif len(value) == 1:
            flat[name] = value[0]
        else:
            flat |= {f"{name}_{place}": one for place, one in enumerate(value, 1)}
    return flat


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    """Every row, or every second, third .. and the last one, as many as there is room for."""
    every = 1
    while True:
        kept = [row for n, row in enumerate(rows) if n % every == 0 or n == len(rows) - 1]
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(kept)
        if len(text.getvalue()) <= MAX_CURVE_BYTES:
            return text.getvalue()
        every += 1
