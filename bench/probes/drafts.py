"""P11: how many drafts stay on each kind of text, and whether the drafter knows.

    .venv/bin/python bench/probes/drafts.py [FOLDER] [--prompts 3] [--tokens 60] [--drafts 5]
    .venv/bin/python bench/probes/drafts.py --json p11.json --image docs/img/demo-drafts.png

Each prompt is continued by verify steps alone (`engine/speculation.py`), one sequence at a time,
`fast` numerics on the CPU. Kinds: `template` are chats of the training's kinds, greedy; `prose`
goes on with the first words of books and manuals, greedy; `digits` goes on with random digits at
temperature 1, where only their law can be known. With `--to-end` an answer ends at its end mark, as
for a client; without it the model writes on, in text that training never weighed. Kept a step =
drafts that stayed; a step gives one token more. By place: how often draft i stayed among the steps
where all before it did, beside the drafter's mean confidence there. Steps saved = 1 - steps /
tokens. The second table: of all drafts that were reached, by their confidence, how many stayed;
equal columns are perfect calibration.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch
from grid import SEED
from tokenizers import Tokenizer

from headrace.core.chain import TokenIds, as_token_ids
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.ids import JobKey, RequestId
from headrace.core.request import Sampling
from headrace.engine.plan import Segment, StepPlan
from headrace.engine.runner import Runner
from headrace.engine.speculation import Anchor, propose, verify_step
from headrace.model import CacheLayout, KvState, Numerics, Trunk
from headrace.model.checkpoint import load_trunk
from headrace.model.training import recall, talk
from headrace.model.training.chat import BOS, prompt_text

PROSE = (
    "In the beginning God created the heaven and the earth. And the earth was",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "The list of strings may be sorted with the method",
    "This command creates a new table in the current database. The table",
    "And it came to pass in those days, that",
    "She was then about twenty years old, and her sister",
)
GREEDY, DRAWN = Sampling(), Sampling(temperature=1.0, seed=1)
BINS = 5


def prompts_of(kind: str, count: int) -> list[str]:
    """Texts with their special tokens."""
    if kind == "prose":
        return [BOS + text for text in PROSE[:count]]
    found = []
    for number in range(count):
        rng = Random(f"{SEED}:P11:{kind}:{number}")
        if kind == "digits":
            found.append(BOS + " ".join(recall.digits(rng, 40)))
        else:
            make = (talk.story_on_request, talk.small_talk, talk.json_answer)[number % 3]
            found.append(prompt_text(make(rng).turns[:1]))
    return found


class Tally:
    """Counts over all steps of one way."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.reached: Counter[int] = Counter()
        self.stayed: Counter[int] = Counter()
        self.confidence: Counter[int] = Counter()
        self.binned: list[list[float]] = [[0, 0, 0.0] for _ in range(BINS)]

    def add(self, accepted: int, confidences: tuple[float, ...]) -> None:
        self.steps += 1
        self.tokens += accepted + 1
        for place in range(min(accepted + 1, len(confidences))):
            self.reached[place] += 1
            self.stayed[place] += place < accepted
            self.confidence[place] += confidences[place]
            mine = self.binned[min(BINS - 1, int(confidences[place] * BINS))]
            mine[0] += 1
            mine[1] += place < accepted
            mine[2] += confidences[place]

    def join(self, other: Tally) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        for mine, more in (
            (self.reached, other.reached),
            (self.stayed, other.stayed),
            (self.confidence, other.confidence),
        ):
            mine.update(more)
        for own, theirs in zip(self.binned, other.binned, strict=True):
            own[:] = [a + b for a, b in zip(own, theirs, strict=True)]

    def calibration(self) -> list[tuple[int, float, float]]:
        """(drafts, mean confidence, share that stayed) of each bin that has any."""
        return [(int(n), c / n, stayed / n) for n, stayed, c in self.binned if n]

    def figures(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "kept_a_step": self.tokens / self.steps - 1,
            "stays_by_place": [self.stayed[i] / n for i, n in sorted(self.reached.items())],
            "calibration": self.calibration(),
        }

    def line(self, name: str) -> str:
        places = " | ".join(
            f"{self.stayed[i] / n:.2f} ({self.confidence[i] / n:.2f})"
            for i, n in sorted(self.reached.items())
        )
        kept, saved = self.tokens / self.steps - 1, 1 - self.steps / self.tokens
        return f"| {name} | {self.steps} | {kept:.2f} | {saved:.0%} | {places} |"


def run(
    trunk: Trunk,
    ids: TokenIds,
    n_tokens: int,
    n_drafts: int,
    sampling: Sampling,
    tally: Tally,
    ends: int | None = None,
) -> list[int]:
    """The text after `ids`, by verify steps, until `n_tokens` or the token `ends` have come."""
    state = KvState(trunk.config, CacheLayout.of(trunk.config, n_drafts + 1), 8, 1, trunk.numerics)
    runner = Runner(trunk, state, SYSTEM_CLOCK)
    runner.open(0, ids, list(range(8)))
    key, length, text = JobKey(RequestId("r"), 0), len(ids), list(ids)

    def segment(end: int, start: int) -> Segment:
        return Segment(key, 0, start, end, start, 0, 0, 0, sampling, False)

    (part,) = runner.run(StepPlan((segment(length, 0),))).segments
    assert part.token_id is not None
    text.append(part.token_id)
    while len(text) < len(ids) + n_tokens and ends not in text[len(ids) :]:
        anchor = Anchor(0, text[-1], length, 0, sampling, n_drafts)
        (drafts,) = propose(trunk, state, [anchor])
        rows = segment(length + 1 + len(drafts.token_ids), length)
        (verdict,) = verify_step(runner, [rows], [drafts])
        assert verdict is not None
        text += verdict.token_ids
        length += len(verdict.token_ids)
        tally.add(verdict.accepted, drafts.confidences)
    return text[len(ids) :]


def draw_image(kinds: dict[str, Tally], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for kind, tally in kinds.items():
        places = sorted(tally.reached)
        stays = [tally.stayed[i] / tally.reached[i] for i in places]
        axes[0].plot([i + 1 for i in places], stays, "o-", label=kind)
        found = tally.calibration()
        axes[1].plot([c for _, c, _ in found], [s for _, _, s in found], "o-", label=kind)
    axes[1].plot([0, 1], [0, 1], "k:", linewidth=1)
    labels = (
        ("place of the draft", "stays, if all before it do"),
        ("confidence", "share that stays"),
    )
    for axis, (x, y) in zip(axes, labels, strict=True):
        axis.set(xlabel=x, ylabel=y, ylim=(-0.02, 1.02))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(__file__).parents[2] / "configs" / "models" / "demo"
    parser.add_argument("folder", type=Path, nargs="?", default=folder, help="a checkpoint")
    parser.add_argument(
        "--prompts", type=int, default=3, help=f"of each kind; at most {len(PROSE)} are prose"
    )
    parser.add_argument("--tokens", type=int, default=60, help="of each answer")
    parser.add_argument("--drafts", type=int, default=5, help="a step")
    parser.add_argument("--to-end", action="store_true", help="stop at the end mark")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--image", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    trunk = load_trunk(args.folder, Numerics.FAST)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    ends = trunk.config.eos_token_id if args.to_end else None
    kinds = {}
    print("| text | steps | kept a step | steps saved | draft i stays (confidence) |")
    print("|---|---|---|---|---|")
    for kind, sampling in (("template", GREEDY), ("prose", GREEDY), ("digits", DRAWN)):
        kinds[kind] = whole = Tally()
        for text in prompts_of(kind, args.prompts):
            ids = as_token_ids(tokenizer.encode(text, add_special_tokens=False).ids)
            own = Tally()
            run(trunk, ids, args.tokens, args.drafts, sampling, own, ends)
            whole.join(own)
        print(whole.line(kind), flush=True)
    print("\n| text | confidence: drafts, of which stay |\n|---|---|")
    for kind, tally in kinds.items():
        cells = " | ".join(f"{c:.2f}: {n}, {stays:.2f}" for n, c, stays in tally.calibration())
        print(f"| {kind} | {cells} |")
    print(f"\n{time.monotonic() - began:.0f} s")
    if args.json:
        found = {kind: tally.figures() for kind, tally in kinds.items()}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.image:
        draw_image(kinds, args.image)


if __name__ == "__main__":
    main()
