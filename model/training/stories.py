"""Short stories whose later sentences depend on earlier ones, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from headrace.model.training import words


@dataclass
class Story:
    """`questions` holds (question, answer) pairs that the text decides."""

    text: str
    questions: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _Tale:
    """What has been said so far."""

    rng: Random
    hero: str
    he: str
    his: str
    him: str
    friend: str
    colour: str
    thing: str
    home: str
    place: str
    animal: str
    food: str
    feeling: str
    day: str
    weather: str
    lines: list[str] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)

    @property
    def treasure(self) -> str:
        return f"{self.colour} {self.thing}"


def _cast(rng: Random) -> _Tale:
    is_girl = rng.random() < 0.5
    hero = rng.choice(words.GIRLS if is_girl else words.BOYS)
    he, his, him = ("she", "her", "her") if is_girl else ("he", "his", "him")
    friend = rng.choice([n for n in words.GIRLS + words.BOYS if n != hero])
    home, place = rng.sample(words.PLACES, 2)
    pick = rng.choice
    return _Tale(
        rng,
        hero,
        he,
        his,
        him,
        friend,
        pick(words.COLOURS),
        pick(words.OBJECTS),
        home,
        place,
        pick(words.ANIMALS),
        pick(words.FOODS),
        pick(words.FEELINGS),
        pick(words.DAYS),
        pick(words.WEATHERS),
    )


_OPENINGS = (
    "Once upon a time there was a child named {hero}. {He} lived near the {home}.",
    "{hero} lived in a small house by the {home}.",
    "Long ago, close to the {home}, there lived a {role} called {hero}.",
    "There was once a {role} named {hero} who lived at the {home}.",
    "It was a {weather} {day}. {hero} woke up early in the house by the {home}.",
    "On {day} morning {hero} looked out of the window. It was {weather} at the {home}.",
    "Everyone at the {home} knew {hero}, the {role}.",
    "In a village near the {home} lived {hero} and {his} {animal}.",
)
_TREASURES = (
    "{He} had a {treasure} that {he} loved very much.",
    "One day {hero} found a {treasure} under a tree.",
    "For {his} birthday {hero} got a {treasure}.",
    "{hero} always carried a {treasure} in {his} bag.",
    "{His} best friend {friend} gave {him} a {treasure}.",
    "At the market {hero} bought a {treasure} for two coins.",
)
_LOSSES = (
    "One morning the {treasure} was gone. {hero} looked everywhere, but {he} could not find it.",
    "But a {animal} took the {treasure} and ran to the {place}.",
    "On the way to the {place} {hero} lost the {treasure}.",
    "{hero} went to the {place} and left the {treasure} there.",
    "A strong wind carried the {treasure} away to the {place}.",
    "When {he} came back from the {place}, the {treasure} was not in {his} bag.",
)
_SEARCHES = (
    "{hero} was {feeling}. {He} asked {friend} for help.",
    '"Have you seen my {thing}?" {hero} asked {friend}. '
    '"No," said {friend}, "but I will help you."',
    "{hero} called {friend}, and together they went to the {place}.",
    "{hero} sat down and cried. Then {friend} came by with some {food}.",
    "{He} walked to the {place} with {friend} and the {animal}.",
    '"Do not be {feeling}," said {friend}. "We will look at the {place}."',
    "They ate {food} and made a plan. Then they walked to the {place}.",
    "It was {weather}, but {hero} and {friend} went on to the {place}.",
)
_FINDS = (
    "At the {place} {friend} found the {treasure} behind a stone.",
    "There, at the {place}, lay the {treasure}. {friend} saw it first.",
    "The {animal} had kept the {treasure} safe at the {place}. "
    "{friend} took it and gave it to {hero}.",
    "{friend} looked under the bridge of the {place}, and there was the {treasure}.",
    "After a long time {friend} pulled the {treasure} out of the grass at the {place}.",
)
_ENDS = (
    "{hero} was happy again. {He} thanked {friend} and shared {his} {food}.",
    '"Thank you, {friend}," said {hero}. They went home to the {home} and ate {food}.',
    "From that day {hero} and {friend} were the best of friends.",
    "{hero} hugged {friend}, and they walked home to the {home} together.",
    "That night {hero} slept with the {treasure} beside {his} bed.",
    "And {hero} never lost the {treasure} again.",
    "The {animal} was given some {food}, and everyone was glad.",
)
_EXTRAS = (
    "The {animal} followed them all the way.",
    "It was a {weather} day, and the road was long.",
    "{friend} sang a song about a {animal}.",
    "{hero} told {friend} about the {home}.",
    "They met a {role} who sold {food}.",
    "The {role} at the {place} wished them good luck.",
)


def _say(tale: _Tale, templates: tuple[str, ...]) -> None:
    template = tale.rng.choice(templates)
    text = template.format(
        hero=tale.hero,
        he=tale.he,
        his=tale.his,
        him=tale.him,
        He=tale.he.capitalize(),
        His=tale.his.capitalize(),
        friend=tale.friend,
        treasure=tale.treasure,
        thing=tale.thing,
        home=tale.home,
        place=tale.place,
        animal=tale.animal,
        food=tale.food,
        feeling=tale.feeling,
        day=tale.day,
        weather=tale.weather,
        role=tale.rng.choice(words.ROLES),
    )
    tale.lines.append(text)


def tell(rng: Random, about: tuple[str, str, str] | None = None) -> Story:
    """A story; `about` = (hero, colour, thing) is asked for beforehand."""
    tale = _cast(rng)
    if about is not None:
        name, tale.colour, tale.thing = about
        girl = name in words.GIRLS
        tale.hero = name
        tale.he, tale.his, tale.him = ("she", "her", "her") if girl else ("he", "his", "him")
        if tale.friend == name:
            tale.friend = "Robert"
    first: tuple[tuple[str, ...], ...] = (_OPENINGS, _TREASURES, _LOSSES, _SEARCHES)
    for part in first:
        _say(tale, part)
        if rng.random() < 0.3:
            _say(tale, _EXTRAS)
    if rng.random() < 0.4:
        _say(tale, _SEARCHES)
    last: tuple[tuple[str, ...], ...] = (_FINDS, _ENDS)
    for part in last:
        _say(tale, part)
    if rng.random() < 0.4:
        _say(tale, _ENDS)
    tale.questions = [
        (f"Who found the {tale.thing}?", f"{tale.friend} found the {tale.treasure}."),
        (f"What colour was the {tale.thing}?", f"The {tale.thing} was {tale.colour}."),
        (f"Where was the {tale.thing} found?", f"It was found at the {tale.place}."),
        ("Who is the story about?", f"The story is about {tale.hero}."),
        (f"Who helped {tale.hero}?", f"{tale.friend} helped {tale.hero}."),
        (f"What did {tale.hero} lose?", f"{tale.hero} lost a {tale.treasure}."),
    ]
    if f"by the {tale.home}" in tale.lines[0] or f"the {tale.home}" in tale.lines[0]:
        tale.questions.append(
            (f"Where did {tale.hero} live?", f"{tale.hero} lived near the {tale.home}.")
        )
    return Story(" ".join(tale.lines), tale.questions)
