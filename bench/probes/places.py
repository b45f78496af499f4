"""Why P12 misses places: by the number of shapes, and by what was said before.

    python bench/probes/places.py

Sixty drawn pictures of one to three shapes, `fast` numerics, the `all` engine: where a shape is,
asked first and after the right caption; the caption, asked first and after two turns of talk.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from random import Random

import torch
from grid import Case
from pools import Pools

from headrace.model.training import scenes
from headrace.model.training.chat import IMAGE, Turn
from headrace.model.training.recall import Task

TALK = (
    Turn("My name is Tom.", "Nice to meet you, Tom."),
    Turn("I live in Rome.", "Rome is a fine place."),
)


def cases(count: int) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = defaultdict(list)
    for number in range(count):
        rng = Random(f"place{number}")
        scene = scenes.make_scene(rng, n_items=1 + number % 3)
        where = [q for q in scenes.questions(rng, scene) if q[0].startswith("Where")]
        if not where:
            continue
        question, answer = where[0]
        caption = Turn(f"{IMAGE}\n\nWhat is in the picture?", scene.caption)
        for name, turns in (
            ("place, asked first", (Turn(f"{IMAGE}\n\n{question}", answer),)),
            ("place, after the caption", (caption, Turn(question, answer))),
            ("caption, asked first", (caption,)),
            ("caption, after two turns", (*TALK, caption)),
        ):
            shapes = str(1 + number % 3)
            found[name].append(Case(name, shapes, number, Task(turns), scene.pixels))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pictures", type=int, default=60)
    a = parser.parse_args()
    torch.set_num_threads(1)
    pools = Pools(a.model, "fast")
    for name, own in cases(a.pictures).items():
        prompts = [pools.prompts(case)[-1] for case in own]
        answers = pools.cold(prompts, pools.geometry.keep_for(0))
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for case, prompt, answer in zip(own, prompts, answers, strict=True):
            counts[case.cell][0] += pools.right(prompt, answer)
            counts[case.cell][1] += 1
        by_shapes = ", ".join(f"{k} shapes: {r}/{n}" for k, (r, n) in sorted(counts.items()))
        print(f"{name:26} {by_shapes}", flush=True)


if __name__ == "__main__":
    main()
