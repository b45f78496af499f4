"""Why P1 beyond 1,000 tokens and P5 at 120 settings miss: what is asked, keep, and the index.

    python bench/probes/misses.py --cases 20

`fast` numerics, the `all` engine. Beside the probes as they are: keep 253 (from which nothing of
the decoder's history is cut), the question asked twice, the clue's name told before the text, and
the same weights with an index that chooses 128 entries (from 32 candidate blocks) instead of 64
(from 16), or all of them: what is right then was lost by the choice, not by the attention.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from grid import TEXT_PROBES, Case, text_cases
from pools import Pools

from headrace.model.config import checkpoint_folder
from headrace.model.training.chat import Turn
from headrace.model.training.recall import Task

CELLS = (("P1", "1024"), ("P1", "1700"), ("P5", "120"))
INDEX = {"index 128 of 32 blocks": (128, 32), "index of everything": (1024, 128)}


def asked_twice(case: Case) -> Case:
    text, question = _parts(case)
    return _with(case, f"{question}\n\n{text}\n\n{question}")


def named_before(case: Case) -> Case:
    """As the training has it nowhere: what will be asked for stands before the text."""
    text, question = _parts(case)
    name = question.removesuffix("?").removesuffix(" now").rpartition("What is ")[2]
    return _with(case, f"I will ask for {name}.\n\n{text}\n\n{question}")


def _parts(case: Case) -> tuple[str, str]:
    text, _, question = str(case.task.turns[0].user).rpartition("\n\n")
    if not question.startswith("What is"):  # P1 puts one line break before it
        text, _, question = str(case.task.turns[0].user).rpartition("\n")
    return text, question


def _with(case: Case, text: str) -> Case:
    return replace(case, task=Task((Turn(text, case.task.answer),)))


def other_index(folder: Path, name: str, topk: int, blocks: int) -> Path:
    """The demo checkpoint with another index in its configuration."""
    source = checkpoint_folder("demo")
    assert source is not None
    made = folder / name.replace(" ", "-")
    made.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (made / file.name).symlink_to(file.resolve())
    document = json.loads((source / "config.json").read_text("utf-8"))
    document["text_config"] |= {"index_topk": topk, "candidate_topk_blocks": blocks}
    (made / "config.json").write_text(json.dumps(document), "utf-8")
    return made


def right(pools: Pools, cases: list[Case], keep_tokens: int) -> int:
    prompts = [pools.prompts(case)[-1] for case in cases]
    answers = pools.cold(prompts, keep_tokens)
    return sum(pools.right(p, a) for p, a in zip(prompts, answers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20)
    a = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    assert all(int(cell) in TEXT_PROBES[probe][1] for probe, cell in CELLS)
    by_cell = {
        (probe, cell): [c for c in text_cases(a.cases, (probe,)) if c.cell == cell]
        for probe, cell in CELLS
    }

    def line(name: str, pools: Pools, keep_tokens: int, change=lambda case: case) -> None:
        found = [right(pools, [change(c) for c in own], keep_tokens) for own in by_cell.values()]
        cells = " | ".join(f"{n}/{a.cases}" for n in found)
        print(f"| {name} | {cells} |  ({time.monotonic() - began:.0f} s)", flush=True)

    print("| | " + " | ".join(f"{p} {c}" for p, c in CELLS) + " |\n" + "|---" * 4 + "|")
    pools = Pools("demo", "fast")
    keep = pools.geometry.keep_for(0)
    line("as it is", pools, keep)
    line("keep 253", pools, 253)
    line("asked before and after", pools, keep, asked_twice)
    line("name told before", pools, keep, named_before)
    with tempfile.TemporaryDirectory() as folder:
        for name, (topk, blocks) in INDEX.items():
            changed = other_index(Path(folder), name, topk, blocks)
            line(name, Pools(str(changed), "fast"), keep)


if __name__ == "__main__":
    main()
