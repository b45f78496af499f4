"""How many drafts stay, and what a verify step saves: greedy and sampled, on a checkpoint.

    .venv/bin/python bench/model/drafts.py FOLDER [--tokens 120] [--drafts 5]

Each prompt is continued by verify steps alone (`engine/speculation.py`), one sequence at a time,
`fast` numerics on the CPU. Kept a step = drafts that stayed; a step gives one token more. By place:
how often draft i stayed among the steps where all before it did, beside the drafter's mean
confidence there. Steps saved = 1 - steps / tokens.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
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

PROMPTS = (
    "In the beginning God created the heaven and the earth. And the earth was",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "The list of strings may be sorted with the method",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17",
    "8 3 0 1 7 7 2 9 4 6 5 0 2 8 1 3",
)


class Tally:
    """Counts over all steps of one way."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.reached: Counter[int] = Counter()
        self.stayed: Counter[int] = Counter()
        self.confidence: Counter[int] = Counter()

    def add(self, accepted: int, confidences: tuple[float, ...]) -> None:
        self.steps += 1
        self.tokens += accepted + 1
        for place in range(min(accepted + 1, len(confidences))):
            self.reached[place] += 1
            self.stayed[place] += place < accepted
            self.confidence[place] += confidences[place]

    def join(self, other: Tally) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        for mine, more in (
            (self.reached, other.reached),
            (self.stayed, other.stayed),
            (self.confidence, other.confidence),
        ):
            mine.update(more)

    def line(self, name: str) -> str:
        places = " | ".join(
            f"{self.stayed[i] / n:.2f} ({self.confidence[i] / n:.2f})"
            for i, n in sorted(self.reached.items())
        )
        kept, saved = self.tokens / self.steps - 1, 1 - self.steps / self.tokens
        return f"| {name} | {self.steps} | {kept:.2f} | {saved:.0%} | {places} |"


def run(
    trunk: Trunk, ids: TokenIds, n_tokens: int, n_drafts: int, sampling: Sampling, tally: Tally
) -> list[int]:
    """The text after `ids`, by verify steps."""
    state = KvState(trunk.config, CacheLayout.of(trunk.config, n_drafts + 1), 8, 1, trunk.numerics)
    runner = Runner(trunk, state, SYSTEM_CLOCK)
    runner.open(0, ids, list(range(8)))
    key, length, text = JobKey(RequestId("r"), 0), len(ids), list(ids)

    def segment(end: int, start: int) -> Segment:
        return Segment(key, 0, start, end, start, 0, 0, 0, sampling, False)

    (part,) = runner.run(StepPlan((segment(length, 0),))).segments
    assert part.token_id is not None
    text.append(part.token_id)
    while len(text) < len(ids) + n_tokens:
        anchor = Anchor(0, text[-1], length, 0, sampling, n_drafts)
        (drafts,) = propose(trunk, state, [anchor])
        rows = segment(length + 1 + len(drafts.token_ids), length)
        (verdict,) = verify_step(runner, [rows], [drafts])
        assert verdict is not None
        text += verdict.token_ids
        length += len(verdict.token_ids)
        tally.add(verdict.accepted, drafts.confidences)
    return text[len(ids) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--drafts", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trunk = load_trunk(args.folder, Numerics.FAST)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    print("| prompt | steps | kept a step | steps saved | draft i stays (confidence) |")
    print("|---|---|---|---|---|")
    for how, sampling in (("greedy", Sampling()), ("T = 0.8", Sampling(temperature=0.8, seed=1))):
        whole = Tally()
        for prompt in PROMPTS:
            ids = [trunk.config.bos_token_id, *tokenizer.encode(prompt).ids]
            own = Tally()
            run(trunk, as_token_ids(ids), args.tokens, args.drafts, sampling, own)
            whole.join(own)
            print(own.line(f"{how}: {prompt[:24]}"))
        print(whole.line(f"{how}: all"))


if __name__ == "__main__":
    main()
