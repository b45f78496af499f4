"""The probes: seeded questions with exact answers, by what they isolate and how far apart.

A `Case` is a talk whose last answer is wanted, word for word, and where there is one a picture. The
same (probe, cell, number) is the same question on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from headrace.model import package_tokenizer
from headrace.model.training import recall, scenes, talk
from headrace.model.training.chat import IMAGE, Turn
from headrace.model.training.recall import Task

SEED = 4_242  # no training batch has it
_FILLER = (
    "The sky was grey and the road was long. They walked on without a word. A bird sat on the wall "
    "and looked at the sea. Nobody came by. The old house stood empty. It was late in the day. "
)


@dataclass(frozen=True)
class Case:
    """`cell` is the place in the grid: a distance, a size."""

    probe: str
    cell: str
    number: int
    task: Task
    picture: np.ndarray | None = None


_TOKENIZER = package_tokenizer(4096)
_FACTS = talk.Facts(_TOKENIZER)
_FILLER_IDS = _TOKENIZER.encode(_FILLER, add_special_tokens=False).ids


def fill(rng: Random, n_tokens: int) -> str:
    """Filler of `n_tokens` tokens, as text."""
    start = rng.randrange(len(_FILLER_IDS))
    ids = [_FILLER_IDS[(start + k) % len(_FILLER_IDS)] for k in range(n_tokens)]
    return str(_TOKENIZER.decode(ids)).strip()


def _joined(task: Task) -> Task:
    """Turns whose parts are texts, as one text each (an API takes no pieces)."""
    turns = [
        turn if isinstance(turn.user, str) else Turn("".join(map(str, turn.user)), turn.answer)
        for turn in task.turns
    ]
    return Task(tuple(turns), task.system)


Maker = Callable[[Random, int], Task]
# probe -> (what it isolates, cells, maker of a task in a cell)
TEXT_PROBES: dict[str, tuple[str, tuple[int, ...], Maker]] = {
    "P1": (
        "far recall, tokens between code and question",
        (32, 128, 512, 1024, 1700),
        lambda r, n: recall.far(r, fill, [n]),
    ),
    "P2": (
        "edges: the clue at window, grain and keep borders",
        (40, 63, 64, 65, 75, 76, 77, 127, 128, 129),
        lambda r, n: recall.far(r, fill, [n - 12]),
    ),
    "P3": ("near copy, words", (5, 20, 50), lambda r, n: recall.near(r, n)),
    "P4": ("table, pairs", (16, 64, 150), lambda r, n: recall.table(r, n)),
    "P5": ("overwritten values, settings", (8, 40, 120), lambda r, n: recall.overwrite(r, 4, n)),
    "P6": (
        "turns of a growing talk",
        (2, 4, 6),
        lambda r, n: recall.growth(r, fill, n, 200),
    ),
    "P8": (
        "arithmetic, digits",
        (1, 2, 3),
        lambda r, n: recall.arithmetic(r, 1, n),
    ),
    "P9": ("JSON of a schema, without grammar", (0,), lambda r, n: talk.json_answer(r)),
    "P10": ("invented facts", (0,), lambda r, n: _FACTS.task(r, 1)),
}


def text_cases(per_cell: int, probes: tuple[str, ...] = tuple(TEXT_PROBES)) -> list[Case]:
    cases = []
    for probe in probes:
        _, cells, make = TEXT_PROBES[probe]
        for cell in cells:
            for number in range(per_cell):
                task = _joined(make(Random(f"{SEED}:{probe}:{cell}:{number}"), cell))
                cases.append(Case(probe, str(cell), number, task))
    return cases


def branch_cases(per_cell: int) -> list[Case]:
    """P7: one prefix, two endings that set one value differently."""
    cases = []
    for number in range(per_cell):
        rng = Random(f"{SEED}:P7:{number}")
        key, other = recall.keys(rng, 2)
        first = f"Set {key} to {recall.digits(rng, 2)}.\nSet {other} to {recall.digits(rng, 2)}.\n"
        for branch in "ab":
            value = recall.digits(rng, 2)
            text = f"{first}{fill(Random(number), 60)}\nSet {key} to {value}."
            turn = Turn(f"{text}\n\nWhat is {key} now?", f"{key} is {value}.")
            cases.append(Case("P7", branch, number, Task((turn,))))
    return cases


def picture_cases(per_cell: int) -> list[Case]:
    """P12 by kind of question; P13: two pictures under one text."""
    cases = []
    for number in range(per_cell):
        rng = Random(f"{SEED}:P12:{number}")
        scene = scenes.make_scene(rng, n_items=1 + number % 3)
        asked = [("What is in the picture?", scene.caption), *scenes.questions(rng, scene)]
        kinds = {
            "caption": "What is in",
            "count": "How many",
            "colour": "What colour",
            "place": "Where is",
            "at": "What is at",
        }
        for kind, begin in kinds.items():
            pair = next((p for p in asked if p[0].startswith(begin)), None)
            if pair is not None:
                turn = Turn(f"{IMAGE}\n\n{pair[0]}", pair[1])
                cases.append(Case("P12", kind, number, Task((turn,)), scene.pixels))
        digits = recall.digits(rng, 2)
        turn = Turn(f"{IMAGE}\n\nWhich number is shown?", digits)
        pixels = scenes.draw_digits(rng, digits)
        cases.append(Case("P12", "digits", number, Task((turn,)), pixels))
        for swap in "ab":
            item = scenes.make_scene(rng, n_items=1)
            turn = Turn(f"{IMAGE}\n\nWhat is in the picture?", item.caption)
            cases.append(Case("P13", swap, number, Task((turn,)), item.pixels))
    return cases
