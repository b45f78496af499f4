"""One picture of what `run.py` and `handoff.py` found.

    python bench/probes/draw.py --right lines*.json --keep 64=k64.json --keep 253=k253.json \
        --replay replay.json --image docs/img/demo-probes.png

Left: right answers against distance (P1, P2) of `run.py --out`. Middle: of the same against keep,
a file of `run.py --keep K --out` each. Right: replay against depth, a line a keep: answers right,
and answers equal to the cold run's in every token.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Rows = list[dict[str, Any]]


def draw_distance(axis: Axes, rows: Rows) -> None:
    for probe in ("P1", "P2"):
        mine = [row for row in rows if row["probe"] == probe]
        places = [int(row["cell"]) for row in mine]
        axis.plot(places, [100 * r["right"] / r["n"] for r in mine], "o-", label=probe)
    axis.set(xlabel="tokens between clue and question", xscale="log", ylabel="right, %")


def draw_keep(axis: Axes, by_keep: dict[int, Rows]) -> None:
    counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for keep, rows in by_keep.items():
        for row in rows:
            counts[row["probe"]][keep][0] += row["right"]
            counts[row["probe"]][keep][1] += row["n"]
    for probe, found in counts.items():
        keeps = sorted(found)
        axis.plot(keeps, [100 * found[k][0] / found[k][1] for k in keeps], "o-", label=probe)
    axis.set(xlabel="keep, tokens (no cache)", ylabel="right, %")


def draw_depth(axis: Axes, rows: Rows) -> None:
    counts: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for row in rows:
        if row["passed"] != "cold":
            mine = counts[row["keep_tokens"]][row["depth_tokens"]]
            for place, name in enumerate(("right", "same_tokens", "n")):
                mine[place] += row[name]
    for number, (keep, found) in enumerate(sorted(counts.items())):
        depths, colour = sorted(found), f"C{number}"
        for place, style, what in ((0, "o-", "right"), (1, "s--", "as cold")):
            shares = [100 * found[d][place] / found[d][2] for d in depths]
            axis.plot(depths, shares, style, color=colour, label=f"keep {keep}, {what}")
    axis.set(xlabel="replay depth, tokens", ylabel="answers, %")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--right", type=Path, nargs="+", required=True)
    parser.add_argument("--keep", action="append", default=[], metavar="K=FILE")
    parser.add_argument("--replay", type=Path, required=True)
    parser.add_argument("--image", type=Path, required=True)
    a = parser.parse_args()
    rows = [row for path in a.right for row in json.loads(path.read_text())]
    by_keep = {}
    for pair in a.keep:
        keep, _, path = pair.partition("=")
        by_keep[int(keep)] = json.loads(Path(path).read_text())
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8))
    draw_distance(axes[0], rows)
    draw_keep(axes[1], by_keep)
    draw_depth(axes[2], json.loads(a.replay.read_text()))
    for axis in axes:
        axis.set_ylim(50, 101)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(a.image, dpi=110)


if __name__ == "__main__":
    main()
