"""Talks about a drawn picture: what is asked, how much, and what else is said around it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from headrace.model.training import scenes
from headrace.model.training.chat import IMAGE, Document, Turn, conversation
from headrace.model.training.scenes import Scene
from headrace.model.training.talk import short_turns

_CAPTION = "What is in the picture?"
_MOST_ASKED = 6
_MOST_TURNS = 10  # of other talk


@dataclass(frozen=True)
class PictureTalk:
    """`turns[at]` shows the picture."""

    scene: Scene
    turns: tuple[Turn, ...]
    at: int

    def document(self) -> Document:
        turns = list(self.turns)
        shown = turns[self.at]
        turns[self.at] = Turn(f"{IMAGE}\n\n{shown.user}", shown.answer)
        document = conversation(turns)
        document.pictures.append(self.scene.pixels)
        return document

    def shorter(self) -> PictureTalk:
        """One turn less, after the picture or, where there is none, before it."""
        if len(self.turns) > self.at + 1:
            return PictureTalk(self.scene, self.turns[:-1], self.at)
        return PictureTalk(self.scene, self.turns[1:], self.at - 1)


def picture_talk(rng: Random) -> PictureTalk:
    """One to four shapes or digits; where the shapes are comes first in most.
    One talk of four says other things before the picture or between it and later questions."""
    if rng.random() < 0.15:
        scene = scenes.digit_scene(rng)
    else:
        scene = scenes.make_scene(rng, rng.choices((1, 2, 3, 4), (2, 3, 3, 2))[0])
    asked = scenes.questions(rng, scene)
    if rng.random() < 0.7:
        asked.sort(key=lambda pair: not pair[0].startswith("Where"))  # stays random otherwise
    asked = asked[: rng.randint(2, _MOST_ASKED)]
    if rng.random() < 0.6:
        asked.insert(rng.randint(0, len(asked)), (_CAPTION, scene.caption))
    turns = [Turn(*pair) for pair in asked]
    kind = rng.random()
    other = short_turns(rng, rng.randint(1, _MOST_TURNS)) if kind < 0.25 else []
    if kind < 0.12:
        return PictureTalk(scene, (*other, *turns), len(other))
    return PictureTalk(scene, (turns[0], *other, *turns[1:]), 0)
