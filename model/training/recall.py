"""Tasks whose answers the text before them decides exactly: the mix's recall part, and the probes.

Every function takes a seeded `Random` and sizes and gives a `Task`; training learns all answers of
a task, a probe asks for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from headrace.model.training import words
from headrace.model.training.chat import Document, Turn, conversation

Filler = str | Sequence[int]


@dataclass(frozen=True)
class Task:
    """`turns[-1].answer` is the exact answer wanted."""

    turns: tuple[Turn, ...]
    system: str = ""

    @property
    def answer(self) -> str:
        return self.turns[-1].answer

    def document(self) -> Document:
        return conversation(self.turns, self.system)


class Fill(Protocol):
    """Neutral text of about so many tokens."""

    def __call__(self, rng: Random, n_tokens: int) -> Filler: ...


def keys(rng: Random, count: int) -> list[str]:
    """Different names, a colour and a thing each; more than 360 (to 1,440) have an age or a size
    before them."""
    pairs = [f"{c} {o}" for c in words.COLOURS for o in words.OBJECTS]
    if count > len(pairs):
        pairs = [f"{kind} {pair}" for kind in ("old", "new", "small", "large") for pair in pairs]
    return rng.sample(pairs, count)


def digits(rng: Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


REMEMBER = "Read this and remember the codes.\n\n"


def planted(key: str, code: str) -> str:
    """The line that tells a code."""
    return f"The code of the {key} is {code}.\n"


def code_turn(key: str, code: str) -> Turn:
    return Turn(f"What is the code of the {key}?", f"The code of the {key} is {code}.")


def _begin(rng: Random) -> str:
    """How a text of codes opens. One law for codes that are there and codes that are not: a model
    learns whatever tells the two apart, the opening too."""
    return rng.choice((REMEMBER, REMEMBER, ""))


def _text_of_codes(
    rng: Random, fill: Fill, names: Sequence[str], gaps: Sequence[int], begin: str | None
) -> tuple[list[str | Sequence[int]], dict[str, str]]:
    """(parts, codes) of a text that tells the code of each name, gaps[i] tokens of filler after."""
    codes = {key: digits(rng, 4) for key in names}
    parts: list[str | Sequence[int]] = [_begin(rng) if begin is None else begin]
    for key, gap in zip(names, gaps, strict=True):
        parts.append(planted(key, codes[key]))
        if gap:
            parts += [fill(rng, gap), "\n"]
    return parts, codes


def far(
    rng: Random, fill: Fill, gaps: Sequence[int], asked: int = 1, begin: str | None = None
) -> Task:
    """Codes planted before gaps[0], gaps[1], ... tokens of filler; `asked` of them are asked for,
    the first planted one last. `begin`: the opening, drawn where there is none."""
    names = keys(rng, len(gaps))
    parts, codes = _text_of_codes(rng, fill, names, gaps, begin)
    order = rng.sample(names[1:], min(asked, len(names)) - 1) + [names[0]]
    questions = [code_turn(key, codes[key]) for key in order]
    parts.append("\n" + str(questions[0].user))
    return Task((Turn(parts, questions[0].answer), *questions[1:]))


def unknown(rng: Random, fill: Fill, gaps: Sequence[int]) -> Task:
    """As `far`, and another code is asked for."""
    *names, other = keys(rng, len(gaps) + 1)
    parts, _ = _text_of_codes(rng, fill, names, gaps, None)
    parts.append("\n" + str(code_turn(other, "").user))
    return Task((Turn(parts, f"I do not know the code of the {other}."),))


def near(rng: Random, count: int) -> Task:
    """Repeat what has just been said: words, digits or both."""
    kind = rng.random()
    bank = words.OBJECTS + words.COLOURS + words.ANIMALS + words.PLACES + words.FOODS
    if kind < 0.5:
        text = " ".join(rng.choice(bank) for _ in range(count))
    elif kind < 0.8:
        text = digits(rng, count)
    else:
        text = " ".join(rng.choice((rng.choice(bank), digits(rng, 2))) for _ in range(count))
    return Task((Turn(f"Repeat this exactly.\n{text}", text),))


def table(rng: Random, pairs: int, asked: int = 1) -> Task:
    names = keys(rng, pairs)
    values = {key: digits(rng, 3) for key in names}
    lines = "\n".join(f"{key}: {value}" for key, value in values.items())
    order = rng.sample(names, min(asked, pairs))
    questions = [Turn(f"What stands beside {key}?", f"{key}: {values[key]}") for key in order]
    first = f"Here is a table.\n{lines}\n\n{questions[0].user}"
    return Task((Turn(first, questions[0].answer), *questions[1:]))


def overwrite(rng: Random, names: int, settings: int, asked: int = 1) -> Task:
    """Values are set again and again; the last one counts."""
    known = keys(rng, names)
    values: dict[str, str] = {}
    lines = []
    for number in range(max(settings, names)):
        key = known[number] if number < names else rng.choice(known)
        values[key] = digits(rng, 2)
        lines.append(f"Set {key} to {values[key]}.")
    order = rng.sample(known, min(asked, names))
    questions = [Turn(f"What is {key} now?", f"{key} is {values[key]}.") for key in order]
    first = "\n".join(lines) + f"\n\n{questions[0].user}"
    return Task((Turn(first, questions[0].answer), *questions[1:]))


def overwrite_in_turns(rng: Random, names: int, settings: int, rounds: int) -> Task:
    """As `overwrite`, with questions between the settings: what is right then may change later."""
    known = keys(rng, names)
    values: dict[str, str] = {}
    turns, each = [], max(1, settings // rounds)
    for _ in range(rounds):
        lines = []
        for _ in range(each):
            key = rng.choice(known)
            values[key] = digits(rng, 2)
            lines.append(f"Set {key} to {values[key]}.")
        key = rng.choice(sorted(values))
        question = f"What is {key} now?"
        turns.append(Turn("\n".join(lines) + f"\n\n{question}", f"{key} is {values[key]}."))
    return Task(tuple(turns))


def growth(rng: Random, fill: Fill, turns: int, longest: int) -> Task:
    """A talk of turns of very different length; asks about the first and the last of them."""
    names = keys(rng, turns)
    codes = {key: digits(rng, 4) for key in names}
    said = []
    for key in names:
        gap = rng.choice((0, 0, rng.randint(1, longest)))
        text = [f"The code of the {key} is {codes[key]}."]
        said.append(Turn([*text, "\n", fill(rng, gap)] if gap else text[0], "Noted."))
    asked = [names[-1], names[0]]
    return Task((*said, *(code_turn(key, codes[key]) for key in asked)))


def arithmetic(rng: Random, asked: int = 1, most_digits: int = 3) -> Task:
    turns = []
    for _ in range(asked):
        a, b = (rng.randrange(10 ** rng.randint(1, most_digits)) for _ in range(2))
        if rng.random() < 0.35:
            a, b = max(a, b), min(a, b)
            text, value = f"{a} - {b}", a - b
        else:
            text, value = f"{a} + {b}", a + b
        turns.append(Turn(f"What is {text}?", f"{text} = {value}."))
    return Task(tuple(turns))
