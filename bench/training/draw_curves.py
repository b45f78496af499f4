"""The pictures of a checkpoint's loss curves, from the tables beside it.

    python bench/training/draw_curves.py configs/models/demo --image docs/img/demo-curves.png

training.csv: the loss of every part against tokens; drafter.csv: the share of drafts that would
stay, place by place, against steps. What the folder lacks is not drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from headrace.model.training.curves import DRAFTER, TRAINING, read_curve


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a checkpoint")
    parser.add_argument("--image", type=Path, required=True)
    a = parser.parse_args()
    files = [a.folder / name for name in (TRAINING, DRAFTER) if (a.folder / name).is_file()]
    if not files:
        raise SystemExit(f"{a.folder}: has neither {TRAINING} nor {DRAFTER}; `export` writes them")
    figure, axes = pyplot.subplots(1, len(files), figsize=(5 * len(files), 3.6), squeeze=False)
    for axis, file in zip(axes[0], files, strict=True):
        columns = read_curve(file)
        across, begin = ("tokens", "loss_") if file.name == TRAINING else ("drafter_step", "acc")
        for name, values in columns.items():
            if name.startswith(begin):
                axis.plot(columns[across], values, label=name.split("_", 1)[1], linewidth=1)
        what = "loss, nats a token" if file.name == TRAINING else "share of drafts that stay"
        if file.name == TRAINING:
            axis.set(yscale="log", ylim=(1e-4, None))  # parts differ a thousandfold
        axis.set(xlabel=across.replace("_", " "), ylabel=what)
        axis.legend(fontsize=7, loc="lower left" if file.name == TRAINING else "lower right")
    figure.tight_layout()
    figure.savefig(a.image, dpi=110)


if __name__ == "__main__":
    main()
