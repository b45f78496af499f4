"""One picture of what `run.py` and `handoff.py` found.

    python bench/probes/draw.py --right lines*.json --keep 64=k64.json --keep 253=k253.json \
        --replay replay*.json --image docs/img/demo-probes.png

What is left out is not drawn. Left: right answers against distance (P1, P2) of `run.py --out` or
`handoff.py --out`. Middle: right answers against keep, a file of `run.py --keep K --out` each.
Right: replay against depth, the largest difference of a logit from the cold run of the same keep.
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
    found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["passed"] != "cold":
            mine = found[f"{row['probe']}, keep {row['keep_tokens']}"]
            depth = row["depth_tokens"]
            mine[depth] = max(mine[depth], row["logit_difference"])
    for label, by_depth in found.items():
        depths = sorted(by_depth)
        axis.plot(depths, [max(by_depth[d], 1e-5) for d in depths], "o-", label=label)
    axis.set(xlabel="replay depth, tokens", ylabel="logits apart, at most", yscale="log")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--right", type=Path, nargs="*", default=[])
    parser.add_argument("--keep", action="append", default=[], metavar="K=FILE")
    parser.add_argument("--replay", type=Path, nargs="*", default=[])
    parser.add_argument("--image", type=Path, required=True)
    a = parser.parse_args()
    rows = [row for path in a.right for row in json.loads(path.read_text())]
    rows = [row for row in rows if row.get("passed", "cold") == "cold"]
    by_keep = {}
    for pair in a.keep:
        keep, _, path = pair.partition("=")
        by_keep[int(keep)] = json.loads(Path(path).read_text())
    replay = [row for path in a.replay for row in json.loads(path.read_text())]
    panels = [(draw_distance, rows), (draw_keep, by_keep), (draw_depth, replay)]
    drawn = [(draw, data) for draw, data in panels if data]
    if not drawn:
        raise SystemExit("nothing to draw: name --right, --keep or --replay")
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4.4 * len(drawn), 3.8), squeeze=False)
    for axis, (draw, data) in zip(axes[0], drawn, strict=True):
        draw(axis, data)
        axis.legend(fontsize=7, loc="lower left")
        if draw is not draw_depth:
            axis.set_ylim(50, 101)
    figure.tight_layout()
    figure.savefig(a.image, dpi=110)


if __name__ == "__main__":
    main()
