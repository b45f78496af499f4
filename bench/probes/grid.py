"""The probes: seeded questions with exact answers, by what they isolate and how far apart.

A `Case` is a talk whose last answer is wanted, word for word, and where there is one a picture. The
same (probe, cell, number) is the same question on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random

import numpy as np

from headrace.core.chain import BLOCK_TOKENS
from headrace.model import package_tokenizer
from headrace.model.training import recall, scenes, talk
from headrace.model.training.chat import ANSWER, IMAGE, Turn, prompt_text
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


def _ids(text: str) -> list[int]:
    return list(_TOKENIZER.encode(text, add_special_tokens=False).ids)


_N_AFTER_USER = len(_ids(ANSWER))
_FILLER_IDS = _ids(_FILLER)


def fill(rng: Random, n_tokens: int) -> str:
    """Filler of `n_tokens` tokens, as text."""
    start = rng.randrange(len(_FILLER_IDS))
    ids = [_FILLER_IDS[(start + k) % len(_FILLER_IDS)] for k in range(n_tokens)]
    return str(_TOKENIZER.decode(ids)).strip()


def _edge(rng: Random, distance: int, n_tokens: int | None = None) -> Task:
    """Two codes; the second one is asked for, its last digit `distance` tokens before the prompt's
    end. What stands before it is long enough for stored blocks and a hand-off: 300 tokens and more,
    or such that the prompt has about `n_tokens`."""
    first, key = recall.keys(rng, 2)
    begin = recall.REMEMBER + recall.planted(first, recall.digits(rng, 4))
    before = 300 + rng.randrange(BLOCK_TOKENS)
    if n_tokens is not None:
        clue_tokens = len(_ids(recall.planted(key, "0000")))
        before = n_tokens - distance - clue_tokens - len(_ids(prompt_text([Turn(begin, "")])))
    begin += fill(rng, before) + "\n"
    code = recall.digits(rng, 4)
    clue, last = recall.planted(key, code), recall.code_turn(key, code)
    to_digit = len(_ids(prompt_text([Turn(begin + clue.rstrip(".\n"), "")]))) - _N_AFTER_USER
    seed = rng.random()
    # Filler that is cut anywhere may make a token more or less.
    for n in range(max(0, distance - 30), distance):
        text = f"{begin}{clue}{fill(Random(seed), n)}\n\n{last.user}"
        task = Task((Turn(text, last.answer),))
        if len(_ids(prompt_text(task.turns))) - to_digit == distance:
            return task
    raise ValueError(f"distance: found {distance}, too short for the question")


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
        lambda r, n: recall.far(r, fill, [n], begin=recall.REMEMBER),
    ),
    "P2": (
        "edges: the clue at window, keep and grain borders, tokens before the prompt's end",
        (40, 63, 64, 65, 75, 76, 77, 127, 128, 129),
        _edge,
    ),
    "P3": ("near copy, words", (5, 20, 50), lambda r, n: recall.near(r, n)),
    "P4": ("table, pairs", (16, 64, 150), lambda r, n: recall.table(r, n)),
    "P5": ("overwritten values, settings", (8, 40, 120), lambda r, n: recall.overwrite(r, 4, n)),
    "P6": (
        "turns of a growing talk",
        (2, 4, 6),
        lambda r, n: recall.growth(r, fill, n, 300),
    ),
    "P8": (
        "arithmetic, digits",
        (1, 2, 3),
        lambda r, n: recall.arithmetic(r, 1, n),
    ),
    "P9": ("JSON of a schema, without grammar", (0,), lambda r, n: talk.json_answer(r)),
    "P10": ("invented facts", (0,), lambda r, n: _FACTS.task(r, 1)),
}


# Beyond the 2,048 tokens of most of the training: cells of the same makers, 2,000 to 8,000 tokens.
LONG_CELLS = {"P1": (3000, 4500, 7500), "P4": (200, 350, 650)}


def text_cases(per_cell: int, probes: tuple[str, ...] = tuple(TEXT_PROBES)) -> list[Case]:
    return [case for probe in probes for case in _cases_of(per_cell, probe, TEXT_PROBES[probe][1])]


def long_cases(per_cell: int, probes: Collection[str] = ()) -> list[Case]:
    """Of P1 and P4, or of that one of them that is named."""
    return [
        case
        for probe, cells in LONG_CELLS.items()
        if probe in (probes or LONG_CELLS)
        for case in _cases_of(per_cell, probe, cells)
    ]


def _cases_of(per_cell: int, probe: str, cells: tuple[int, ...]) -> list[Case]:
    make = TEXT_PROBES[probe][2]
    cases = []
    for cell in cells:
        for number in range(per_cell):
            task = _joined(make(Random(f"{SEED}:{probe}:{cell}:{number}"), cell))
            cases.append(Case(probe, str(cell), number, task))
    return cases


def branch_cases(per_cell: int, n_lines: int = 40) -> list[Case]:
    """P7: one prefix of some 9 tokens a line, two endings that set one value differently."""
    cases = []
    for number in range(per_cell):
        rng = Random(f"{SEED}:P7:{number}")
        known = recall.keys(rng, 4)
        lines = [f"Set {rng.choice(known)} to {recall.digits(rng, 2)}." for _ in range(n_lines)]
        key = known[0]
        for branch, value in zip("ab", rng.sample(range(10, 100), 2), strict=True):
            text = "\n".join([*lines, f"Set {key} to {value}."])
            turn = Turn(f"{text}\n\nWhat is {key} now?", f"{key} is {value}.")
            cases.append(Case("P7", branch, number, Task((turn,))))
    return cases


_BETWEEN = (
    Turn("My name is Ruth.", "Nice to meet you, Ruth."),
    Turn("I live in Paris.", "Paris is a fine place."),
    Turn("My favourite colour is black.", "I will remember that you like black."),
    Turn("I have a horse.", "A horse is a good friend."),
    Turn("I like to eat bread.", "Bread sounds good."),
    Turn(
        "Who are you?",
        "I am Headrace, a very small model. I tell stories and remember what you say.",
    ),
    Turn("What is my name?", "Your name is Ruth."),
    Turn("What is my favourite colour?", "Your favourite colour is black."),
    Turn("Where do I live?", "You live in Paris."),
)


def _swapped(caption: str) -> Task:
    """A picture, talk of two blocks about other things, and at the end what the picture shows: the
    same text for every picture of one shape."""
    first = Turn(f"{IMAGE}\n\nHow many shapes are there?", "One.")
    return Task((first, *_BETWEEN, Turn("What is in the picture?", caption)))


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
            cases.append(Case("P13", swap, number, _swapped(item.caption), item.pixels))
    return cases


# Probe -> cells, and a maker of tasks of the same kind that are as short as a hand-off allows.
_SHORT: dict[str, tuple[tuple[int, ...], Maker]] = {
    "P2": (TEXT_PROBES["P2"][1], lambda r, n: _edge(r, n, r.randrange(210, 240))),
    "P5": ((20, 24), TEXT_PROBES["P5"][2]),
    "P6": ((2, 4), lambda r, n: recall.growth(r, fill, n, 200)),
}


def short_cases(per_cell: int, probe: str) -> list[Case]:
    """For tests: the kinds of P2, P5, P6, P7 and P13, in prompts of some 200 to 500 tokens."""
    if probe == "P7":
        return branch_cases(per_cell, n_lines=17)
    if probe not in _SHORT:
        return all_cases(per_cell, [probe])
    cells, make = _SHORT[probe]
    return [
        Case(probe, str(c), n, _joined(make(Random(f"{SEED}:short {probe}:{c}:{n}"), c)))
        for c in cells
        for n in range(per_cell)
    ]


def all_cases(per_cell: int, probes: Collection[str] = ()) -> list[Case]:
    """Of all probes, or of those named."""
    wanted = set(probes) or {*TEXT_PROBES, "P7", "P12", "P13"}
    cases = text_cases(per_cell, tuple(p for p in TEXT_PROBES if p in wanted))
    if "P7" in wanted:
        cases += branch_cases(per_cell)
    if wanted & {"P12", "P13"}:
        cases += [case for case in picture_cases(per_cell) if case.probe in wanted]
    return cases
