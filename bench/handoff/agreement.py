"""What a bounded replay costs in text: agreement with an exact run, and changed global rows, by
depth.

    .venv/bin/python bench/handoff/agreement.py                       both models, prints a table
    .venv/bin/python bench/handoff/agreement.py --json out.json --image docs/img/agreement.png

For every prompt the blocks below H are exact. A prefill engine goes on from H with the depth, which
writes the blocks from H to floor(N); a decode engine goes on from these with the same depth.
Compared with a cold run of the same keep: the entries that the prefill wrote, the logits of the
last prompt row, and the greedy tokens. All in `invariant` numerics, so that nothing but the replay
differs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.core.chain import as_token_ids
from headrace.core.ids import Digest
from headrace.core.request import GenRequest
from headrace.core.rows import plan_decode, plan_prefill
from headrace.engine import BlockDone, Engine, EngineSettings, Half, Job, TokenSampled
from headrace.model import Numerics, Trunk, load_named

ROOT = Digest(bytes(32))
TOKENS = 32
# model -> (prompt lengths, H, depths); the last depth is n_enc (W-1), the exact one
PLANS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    "t1": ((640, 768, 900), 384, (2, 16, 32, 64, 96, 128, 160, 186)),
    "t2": ((1300, 1500), 1024, (2, 64, 128, 256, 384, 512, 640, 762)),
}


@dataclass
class Row:
    """Means over the prompts of one model and depth."""

    model: str
    depth_tokens: int
    changed_entries: float  # share of the entries written from H on whose bytes differ
    first_token_equal: float
    equal_tokens: float  # greedy tokens before the first difference, of TOKENS
    logit_difference: float  # largest, at the last prompt row


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    blocks: dict[int, bytes] = field(default_factory=dict)
    logits: torch.Tensor | None = None


def run(
    trunk: Trunk,
    ids: Sequence[int],
    half: Half,
    hit: dict[int, bytes],
    depth: int | None,
    max_tokens: int = 1,
) -> Run:
    """One engine, one request; blocks that it was given or made come back with its tokens."""
    n_blocks = (len(ids) + max_tokens) // 128 + 2
    settings = EngineSettings(n_blocks=n_blocks, n_slots=1)
    engine = Engine(trunk, settings, half, record_spacing_tokens=1 << 20)
    known, w = as_token_ids(ids), engine.geometry.window_tokens
    request = GenRequest.offline(ROOT, known, keep_tokens=w + 12, max_tokens=max_tokens)
    admission = engine.admit(Job(request, as_token_ids([]), len(hit)))
    assert admission is not None
    for fill in admission.fills:
        engine.write_fill(fill, hit[fill.index])
    make = plan_decode if half is Half.FULL else plan_prefill
    n_tokens, keep = request.n_tokens, request.keep_tokens
    plan = make(n_tokens, len(hit) * 128, keep, (), engine.geometry, depth_tokens=depth)
    out = Run(blocks=dict(hit))

    def on_logits(_key: Any, position: int, row: torch.Tensor) -> None:
        if position == n_tokens - 1:
            out.logits = row.clone()

    engine.runner.on_logits = on_logits
    engine.start(request.key, plan)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, BlockDone):
                out.blocks[event.index] = bytes(engine.block_view(event.block))
            elif isinstance(event, TokenSampled):
                out.tokens.append(event.token_id)
    return out


def changed_share(trunk: Trunk, exact: dict[int, bytes], other: dict[int, bytes], h: int) -> float:
    """Share of main entries and index keys in the blocks from H on whose bytes differ."""
    from headrace.model import CacheLayout

    changed = total = 0
    for number in range(h // 128, len(other)):
        for source in CacheLayout.of(trunk.config).sources:
            for group in range(source.rows_per_block):
                parts = (
                    (source.main_offset, source.main_row_bytes),
                    (source.index_data_offset, source.index_data_bytes),
                    (source.index_scale_offset, source.index_scale_bytes),
                )
                spans = [slice(o + group * n, o + group * n + n) for o, n in parts]
                changed += any(exact[number][s] != other[number][s] for s in spans)
                total += 1
    return changed / total


def measure(model: str) -> list[Row]:
    lengths, h, depths = PLANS[model]
    trunk = load_named(model, 0, Numerics.INVARIANT)
    found: dict[int, list[tuple[float, bool, int, float]]] = {depth: [] for depth in depths}
    for n_tokens in lengths:
        draw = random.Random(f"agreement {n_tokens}")
        ids = [draw.randrange(300, 3900) for _ in range(n_tokens)]
        exact = run(trunk, ids, Half.FULL, {}, None, TOKENS)
        below = {number: exact.blocks[number] for number in range(h // 128)}
        for depth in depths:
            handed = run(trunk, ids, Half.ENCODER, below, depth).blocks
            got = run(trunk, ids, Half.FULL, handed, depth, TOKENS)
            same = [a == b for a, b in zip(exact.tokens, got.tokens, strict=True)]
            equal = same.index(False) if False in same else len(same)
            assert exact.logits is not None and got.logits is not None
            finite = torch.isfinite(exact.logits)  # ids that are never drawn have -inf
            far = float((exact.logits - got.logits)[finite].abs().max())
            changed = changed_share(trunk, exact.blocks, handed, h)
            found[depth].append((changed, same[0], equal, far))
    return [
        Row(model, depth, *(sum(float(v[i]) for v in values) / len(values) for i in range(4)))
        for depth, values in found.items()
    ]


def draw_image(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        depths = [row.depth_tokens / mine[-1].depth_tokens for row in mine]
        axes[0].plot(depths, [100 * r.changed_entries for r in mine], "o-", label=model.upper())
        axes[1].plot(depths, [r.equal_tokens for r in mine], "o-", label=model.upper())
    axes[0].set_ylabel("changed global entries, %")
    axes[1].set_ylabel(f"greedy tokens equal, of {TOKENS}")
    for axis in axes:
        axis.set_xlabel("depth / n_enc (W-1)")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--image", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| model | depth | changed entries | first token equal | equal tokens | logit diff |")
    print("|---|---|---|---|---|---|")
    for model in options.models:
        for row in measure(model):
            rows.append(row)
            print(
                f"| {row.model} | {row.depth_tokens} | {row.changed_entries:.1%} |"
                f" {row.first_token_equal:.0%} | {row.equal_tokens:.1f} of {TOKENS} |"
                f" {row.logit_difference:.3g} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.image:
        draw_image(rows, options.image)


if __name__ == "__main__":
    main()
