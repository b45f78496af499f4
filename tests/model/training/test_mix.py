"""What the training mix says, and where its texts stand in the rows."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from headrace.model import ModelConfig
from headrace.model.training import recall, talk
from headrace.model.training.chat import IMAGE
from headrace.model.training.data import Corpus, Mixer
from headrace.model.training.pictures import picture_talk
from headrace.model.training.scenes import PLACES


def mixer(**changes) -> Mixer:
    sizes = {"seed": 3, "batch": 3, "length": 1024, "pictures": 2} | changes
    return Mixer(ModelConfig.load("demo"), Corpus(None), **sizes)


@pytest.mark.parametrize(("batch", "pictures"), [(1, 1), (2, 3), (3, 2), (4, 1)])
def test_half_of_the_rows_have_all_pictures(batch, pictures):
    """The number of a batch never changes (compiled code has one shape), and every picture's span
    lies in a row of the first half."""
    made = mixer(batch=batch, pictures=pictures).make(7)
    places = made["picture_places"]
    assert len(made["pictures"]) == len(places) == batch * pictures
    counts = Counter(int(place[0]) // 1024 for place in places)
    assert set(counts) == set(range(-(-batch // 2)))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("seed", range(6))
def test_long_recall_fills_the_room_and_hardly_ever_overflows_it(seed):
    own, rng = mixer(), Random(seed)
    sizes = []
    for _ in range(30):
        task = own.recall_task(rng, 2048, is_long=True)
        sizes.append(len(own.encoder.encode(task.document())[0]))
    assert sum(n > 2048 for n in sizes) <= 2 and sorted(sizes)[len(sizes) // 2] > 900


def test_more_keys_than_pairs_of_words():
    few, many = recall.keys(Random(1), 360), recall.keys(Random(1), 900)
    assert len(set(few)) == 360 and {len(key.split()) for key in few} == {2}
    assert len(set(many)) == 900 and {len(key.split()) for key in many} == {3}


def test_settings_with_questions_between_them():
    """Each answer is the last value set before its question."""
    rng = Random(4)
    for _ in range(20):
        values: dict[str, str] = {}
        for turn in recall.overwrite_in_turns(rng, 3, 24, 4).turns:
            *lines, empty, question = str(turn.user).splitlines()
            for line in lines:
                key, value = line.removeprefix("Set ").rstrip(".").split(" to ")
                values[key] = value
            key = question.removeprefix("What is ").removesuffix(" now?")
            assert not empty and turn.answer == f"{key} is {values[key]}."


def test_pictures_are_asked_for_places_and_stand_anywhere_in_a_talk():
    rng, asked, at = Random(2), Counter(), Counter()
    for _ in range(400):
        made = picture_talk(rng)
        at["first" if made.at == 0 else "later"] += 1
        at["other talk between"] += made.at == 0 and len(made.turns) > 7
        document = made.document()
        marks = [str(p.content).count(IMAGE) for p in document.pieces]
        assert sum(marks) == len(document.pictures) == 1
        shapes = [item.shape for item in made.scene.items]
        for turn in made.turns[made.at :]:
            if turn.user.startswith("Where is the "):
                shape = turn.user.removeprefix("Where is the ").rstrip("?")
                item = made.scene.items[shapes.index(shape)]
                assert turn.answer == f"At the {PLACES[item.place]}."
                asked["where"] += len(shapes) > 1
            asked["all"] += turn.user.endswith("?")
        while len(made.turns) > 1:
            made = made.shorter()
            assert made.document().pictures
    assert asked["where"] > 0.2 * asked["all"]
    assert at["later"] > 20 and at["other talk between"] > 20


def test_what_a_user_is_told_later_he_said_before():
    """In talks with a story, and in small talk: each fact's answer names what was said, or, in a
    story's talk, is not known."""
    rng = Random(8)
    facts = ("You live in ", "Your name is ", "You have a ", "You work as a ")
    unknown = 0
    for number in range(300):
        with_story = number % 2
        turns = talk.talk_with_story(rng).turns if with_story else talk.short_turns(rng, 12)
        said = ""
        for turn in turns:
            for begin in facts:
                if turn.answer.startswith(begin) and turn.answer.endswith("."):
                    what = turn.answer.removeprefix(begin).rstrip(".")
                    assert what in said, turn
            unknown += turn.answer == "I do not know."
            if not str(turn.user).startswith(("What", "Where", "Which", "Who", "How")):
                said += f" {turn.user}"
    assert 5 < unknown < 60


def test_a_greeting_of_one_word_gets_a_greeting():
    """Alone, too: a talk that begins otherwise must not be the only one that the model knows."""
    rng = Random(1)
    alone = [t.turns[0] for t in (talk.hello(rng) for _ in range(400)) if len(t.turns) == 1]
    answers = {turn.user: turn.answer for turn in alone}
    assert len(alone) > 150
    for text in ("Hello", "Hi", "Hey", "hello"):
        assert answers[text].startswith(("Hello", "Hi"))


def test_filler_is_as_long_as_asked_for():
    own, rng = mixer(), Random(5)
    for n in (1, 99, 100, 700):
        assert len(own.filler(rng, n)) == n
