"""Small talk, questions about stories, JSON on request, tool calls and the invented facts."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tokenizers import Tokenizer

from headrace.model.training import stories, words
from headrace.model.training.chat import Turn, call_text, format_text, tools_text
from headrace.model.training.recall import Task, arithmetic, digits, near

N_FACTS = 2_000

_GREETINGS = (
    ("Hello.", "Hello. How can I help you?"),
    ("Hi there!", "Hi. What can I do for you?"),
    ("Good morning.", "Good morning. How can I help you?"),
    ("Good evening.", "Good evening. What can I do for you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Thank you.", "You are welcome."),
    ("Thanks a lot!", "You are welcome. I am glad to help."),
    ("Goodbye.", "Goodbye. Have a good day."),
    ("Bye.", "Goodbye."),
    (
        "Who are you?",
        "I am Headrace, a very small model. I tell stories and remember what you say.",
    ),
    ("What is your name?", "My name is Headrace."),
    (
        "What can you do?",
        "I can tell a story, remember codes, add numbers, describe a picture and write JSON.",
    ),
    ("Are you a person?", "No. I am a small language model."),
    ("Can you help me?", "Yes. What do you need?"),
)
_UNKNOWN = (
    "Who won the last race?",
    "What will the weather be next year?",
    "What am I thinking?",
    "How many stars are there?",
    "What is the best song?",
    "What did I eat yesterday?",
)


# How people begin and end in a word or two; also alone in a talk.
_SHORT = (
    *((text, "Hello. How can I help you?") for text in ("Hello", "Hello!", "Hello there.", "Hey")),
    *((text, "Hi. What can I do for you?") for text in ("Hi", "Hi!", "Hi.", "hi", "Hey there!")),
    ("hello", "Hello. How can I help you?"),
    ("Good morning", "Good morning. How can I help you?"),
    ("Good afternoon.", "Good afternoon. What can I do for you?"),
    ("Good evening!", "Good evening. What can I do for you?"),
    ("How are you", "I am well, thank you. How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. How can I help you?"),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Bye", "Goodbye."),
    ("Goodbye!", "Goodbye. Have a good day."),
    ("Help", "What do you need?"),
    ("Who are you", "I am Headrace, a very small model. I tell stories and remember what you say."),
)


def _about_user(rng: Random) -> tuple[list[Turn], list[Turn]]:
    """Things a user may say about himself, and later questions about them, in one order."""
    name = rng.choice(words.GIRLS + words.BOYS)
    city, colour = rng.choice(words.CITIES), rng.choice(words.COLOURS)
    animal, food, age = rng.choice(words.ANIMALS), rng.choice(words.FOODS), rng.randint(5, 90)
    role = rng.choice(words.ROLES)
    said = [
        Turn(
            rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}.")),
            f"Nice to meet you, {name}.",
        ),
        Turn(
            rng.choice((f"I live in {city}.", f"I come from {city}.")), f"{city} is a fine place."
        ),
        Turn(f"My favourite colour is {colour}.", f"I will remember that you like {colour}."),
        Turn(f"I have a {animal}.", f"A {animal} is a good friend."),
        Turn(f"I like to eat {food}.", f"{food.capitalize()} sounds good."),
        Turn(f"I am {age} years old.", f"You are {age} years old."),
        Turn(f"I work as a {role}.", f"It must be interesting to be a {role}."),
    ]
    asked = [
        Turn("What is my name?", f"Your name is {name}."),
        Turn("Where do I live?", f"You live in {city}."),
        Turn("What is my favourite colour?", f"Your favourite colour is {colour}."),
        Turn("Which animal do I have?", f"You have a {animal}."),
        Turn("What do I like to eat?", f"You like to eat {food}."),
        Turn("How old am I?", f"You are {age} years old."),
        Turn("What is my work?", f"You work as a {role}."),
    ]
    return said, asked


def _personal(rng: Random) -> tuple[list[Turn], list[Turn]]:
    """Things a user says about himself, and later questions about them."""
    said, asked = _about_user(rng)
    chosen = rng.sample(range(len(said)), rng.randint(1, 4))
    return [said[i] for i in chosen], [asked[i] for i in chosen]


def hello(rng: Random) -> Task:
    """A few words of greeting, mostly alone."""
    count = rng.choice((1, 1, 1, 2, 3))
    return Task(tuple(Turn(*rng.choice((*_SHORT, *_GREETINGS))) for _ in range(count)))


def short_turns(rng: Random, count: int) -> list[Turn]:
    """So many turns of small talk: things the user says, greetings, questions about what was said
    before. A question comes after what it asks for."""
    said, asked = _about_user(rng)
    rest = rng.sample(range(len(said)), len(said))
    told: list[int] = []
    turns: list[Turn] = []
    while len(turns) < count:
        kind = rng.random()
        if rest and kind < 0.55:
            told.append(rest.pop())
            turns.append(said[told[-1]])
        elif told and kind < 0.85:
            turns.append(asked[rng.choice(told)])
        else:
            turns.append(Turn(*rng.choice(_GREETINGS)))
    return turns


def talk_with_story(rng: Random) -> Task:
    """The user tells things, asks for a story, and then asks about both, in any order. A thing he
    never told is not known."""
    said, asked = _about_user(rng)
    order = rng.sample(range(len(said)), len(said))
    told, n_before = order[: rng.randint(1, 5)], rng.randint(1, 4)
    story, questions = _story_turn(rng)
    turns = [Turn(*rng.choice(_SHORT))] if rng.random() < 0.4 else []
    turns += [said[i] for i in told[:n_before]]
    turns.append(story)
    later = [asked[i] for i in told[:n_before]] + questions[: rng.randint(0, 3)]
    rng.shuffle(later)
    for number in told[n_before:]:
        later.insert(rng.randint(0, len(later)), said[number])
        later.append(asked[number])
    if rng.random() < 0.15:
        question = asked[order[-1]].user
        later.insert(rng.randint(0, len(later)), Turn(question, "I do not know."))
    return Task((*turns, *later))


def _story_turn(rng: Random) -> tuple[Turn, list[Turn]]:
    """A story asked for, and questions about it in random order."""
    made = story_on_request(rng, all_questions=True).turns
    return made[0], list(made[1:])


def small_talk(rng: Random) -> Task:
    said, asked = _personal(rng)
    turns = []
    if rng.random() < 0.6:
        turns.append(Turn(*rng.choice(_GREETINGS)))
    for turn in said:
        turns.append(turn)
        if rng.random() < 0.3:
            turns.append(Turn(*rng.choice(_GREETINGS)))
        if rng.random() < 0.2:
            turns += near(rng, rng.randint(2, 8)).turns
        if rng.random() < 0.15:
            turns += arithmetic(rng, 1, 2).turns
    rng.shuffle(asked)
    turns += asked
    if rng.random() < 0.25:
        turns.append(Turn(rng.choice(_UNKNOWN), "I do not know."))
    if rng.random() < 0.2:
        turns.append(Turn(*rng.choice(_GREETINGS[5:9])))
    system = rng.choice(("", "", "", "You are a helpful assistant.", "Be brief.", "Be kind."))
    return Task(tuple(turns), system)


def story_on_request(rng: Random, all_questions: bool = False) -> Task:
    """A story about named things, then some or all questions about it."""
    name = rng.choice(words.GIRLS + words.BOYS)
    about = (name, rng.choice(words.COLOURS), rng.choice(words.OBJECTS))
    story = stories.tell(rng, about)
    ask = rng.choice(
        (
            f"Tell me a story about {name} and a {about[1]} {about[2]}.",
            f"Please tell me a story about {name} and a {about[1]} {about[2]}.",
            f"Write a short story about {name} and a {about[1]} {about[2]}.",
        )
    )
    turns = [Turn(ask, story.text)]
    most = len(story.questions)
    asked = rng.sample(story.questions, most if all_questions else rng.randint(0, min(4, most)))
    return Task((*turns, *(Turn(*pair) for pair in asked)))


def story_to_read(rng: Random) -> Task:
    """A story is given; questions follow."""
    story = stories.tell(rng)
    asked = rng.sample(story.questions, rng.randint(2, len(story.questions)))
    first = f"{story.text}\n\n{asked[0][0]}"
    return Task((Turn(first, asked[0][1]), *(Turn(*pair) for pair in asked[1:])))


# ---- JSON and tools ------------------------------------------------------------------------


def _person(rng: Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(text, values, schema) of two to five facts about one thing."""
    name = rng.choice(words.GIRLS + words.BOYS)
    he = "She" if name in words.GIRLS else "He"
    colour, thing = rng.choice(words.COLOURS), rng.choice(words.OBJECTS)
    facts: list[tuple[str, str, Any, str]] = [
        ("name", "string", name, ""),
        ("age", "integer", rng.randint(1, 99), "{he} is {v} years old."),
        ("city", "string", rng.choice(words.CITIES), "{he} lives in {v}."),
        ("animal", "string", rng.choice(words.ANIMALS), "{he} has a {v}."),
        ("colour", "string", colour, f"{{he}} has a {{v}} {thing}."),
        ("coins", "integer", int(digits(rng, rng.randint(1, 4))), "{he} has {v} coins."),
        ("tired", "boolean", rng.random() < 0.5, ""),
        ("day", "string", rng.choice(words.DAYS), "{he} comes on {v}."),
    ]
    chosen = [facts[0], *rng.sample(facts[1:], rng.randint(1, 4))]
    lines = [f"This is about {name}."]
    for key, _, value, template in chosen[1:]:
        if key == "tired":
            lines.append(f"{he} is {'tired' if value else 'not tired'}.")
        else:
            lines.append(template.format(he=he, v=value))
    body = lines[1:]
    rng.shuffle(body)
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind, _, _ in chosen},
        "required": [key for key, *_ in chosen],
    }
    return " ".join([lines[0], *body]), {key: v for key, _, v, _ in chosen}, schema


def json_answer(rng: Random) -> Task:
    turns, system = [], ""
    text, values, schema = _person(rng)
    if rng.random() < 0.5:
        system = format_text(schema)
        ask = text
    else:
        ask = f"{text}\nGive me JSON with the keys {', '.join(values)}."
    turns.append(Turn(ask, json.dumps(values)))
    if not system:
        for _ in range(rng.randint(0, 3)):
            text, values, _ = _person(rng)
            ask = f"{text}\nGive me JSON with the keys {', '.join(values)}."
            turns.append(Turn(ask, json.dumps(values)))
    return Task(tuple(turns), system)


def _parameters(**kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "object", "properties": properties, "required": list(kinds)}


TOOLS = (
    {
        "name": "get_weather",
        "description": "Weather of a city on a day",
        "parameters": _parameters(city="string", day="string"),
    },
    {
        "name": "set_alarm",
        "description": "Set an alarm",
        "parameters": _parameters(hour="integer", minute="integer"),
    },
    {
        "name": "find_code",
        "description": "Look up the code of a thing",
        "parameters": _parameters(thing="string"),
    },
)


def _use(rng: Random, name: str) -> tuple[str, dict[str, Any], str, str]:
    """(request, arguments, result, last answer) of one call."""
    if name == "get_weather":
        city, day, sky = (
            rng.choice(words.CITIES),
            rng.choice(words.DAYS),
            rng.choice(words.WEATHERS),
        )
        ask = f"What is the weather in {city} on {day}?"
        return ask, {"city": city, "day": day}, sky, f"It is {sky} in {city} on {day}."
    if name == "set_alarm":
        hour, minute = rng.randrange(24), rng.randrange(60)
        ask = f"Set an alarm for hour {hour} and minute {minute}."
        return ask, {"hour": hour, "minute": minute}, "done", "The alarm is set."
    thing = f"{rng.choice(words.COLOURS)} {rng.choice(words.OBJECTS)}"
    code = digits(rng, 4)
    ask = f"Find the code of the {thing}."
    return ask, {"thing": thing}, code, f"The code of the {thing} is {code}."


def tool_call(rng: Random) -> Task:
    offered = rng.sample(TOOLS, rng.randint(1, len(TOOLS)))
    turns = []
    for _ in range(rng.randint(1, 3)):
        name = str(rng.choice(offered)["name"])
        ask, arguments, result, last = _use(rng, name)
        turns.append(Turn(ask, call_text(name, arguments)))
        turns.append(Turn(f"<tool_result>{result}</tool_result>", last))
    return Task(tuple(turns), tools_text(offered))


# ---- facts ---------------------------------------------------------------------------------


class Facts:
    """Invented two-word keys with three-word answers, every word one token of the tokenizer.

    Neither word tells the answer, their pair does: what an n-gram memory is for.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int = 7) -> None:
        vocabulary = tokenizer.get_vocab()
        plain = [t[1:] for t in vocabulary if t[:1] == "Ġ" and t[1:].isascii()]
        bank = sorted(t for t in plain if 4 <= len(t) <= 8 and t.isalpha() and t.islower())
        rng = Random(seed)
        rng.shuffle(bank)
        n = min(120, len(bank) // 4)  # a small vocabulary has few whole words
        first, second, answers = bank[:n], bank[n : 2 * n], bank[2 * n : 2 * n + 400]
        pairs = [(a, b) for a in first for b in second]
        self.items = [
            (f"{a} {b}", " ".join(rng.choice(answers) for _ in range(3)))
            for a, b in rng.sample(pairs, min(N_FACTS, len(pairs) // 2))
        ]

    def turn(self, number: int) -> Turn:
        key, answer = self.items[number]
        return Turn(f"Tell me about {key}.", f"The {key}: {answer}.")

    def task(self, rng: Random, count: int) -> Task:
        return Task(tuple(self.turn(n) for n in rng.sample(range(len(self.items)), count)))
