"""Drawn pictures with exact captions: shapes of six colours on a 3 x 3 grid, or digits.

Pixels are made by numpy alone, at the demo tower's size, so that a PNG of them is served without
resizing and reaches the tower as it was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

SIZE = 96
_CELL = SIZE // 3
COLOURS = {
    "red": (210, 40, 40),
    "blue": (40, 70, 210),
    "green": (40, 160, 60),
    "yellow": (235, 205, 40),
    "black": (25, 25, 25),
    "purple": (140, 50, 170),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 7, "medium": 10, "large": 14}  # half a side, in pixels
PLACES = (
    *("top left", "top", "top right", "left", "centre", "right"),
    *("bottom left", "bottom", "bottom right"),
)
COUNTS = ("no", "one", "two", "three", "four")
_GROUNDS = ((245, 245, 245), (225, 232, 240), (242, 235, 220), (210, 210, 210))
# 5 x 7 dots a digit, rows as bits.
_DIGITS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


@dataclass(frozen=True)
class Item:
    size: str
    colour: str
    shape: str
    place: int

    @property
    def name(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """`pixels` uint8 [96, 96, 3]; `items` in reading order; `digits` instead of items or ''."""

    pixels: np.ndarray
    items: tuple[Item, ...]
    digits: str

    @property
    def caption(self) -> str:
        if self.digits:
            return f"The number {self.digits}."
        parts = [f"a {item.name} at the {PLACES[item.place]}" for item in self.items]
        text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
        return text[0].upper() + text[1:] + "."


def _ground(rng: Random) -> np.ndarray:
    pixels = np.empty((SIZE, SIZE, 3), np.uint8)
    first = rng.choice(_GROUNDS)
    pixels[:] = first
    if rng.random() < 0.4:  # stripes
        step = rng.choice((6, 8, 12))
        lines = np.arange(SIZE) // step % 2 == 1
        pixels[lines if rng.random() < 0.5 else slice(None)] = first
        darker = tuple(v - 18 for v in first)
        if rng.random() < 0.5:
            pixels[lines] = darker
        else:
            pixels[:, lines] = darker
    return pixels


def _stamp(shape: str, half: int) -> np.ndarray:
    """bool [2 half + 1, 2 half + 1]"""
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    if shape == "circle":
        return x * x + y * y <= half * half
    if shape == "square":
        return np.ones_like(x, bool)
    if shape == "triangle":
        return np.abs(x) * 2 <= y + half
    third = max(1, half // 3)
    return (np.abs(x) <= third) | (np.abs(y) <= third)


def _jitter(rng: Random, half: int) -> int:
    room = _CELL // 2 - half - 1
    return rng.randint(-room, room) if room > 0 else 0


def draw_items(rng: Random, items: tuple[Item, ...]) -> np.ndarray:
    pixels = _ground(rng)
    for item in items:
        half = SIZES[item.size]
        row, column = divmod(item.place, 3)
        y = row * _CELL + _CELL // 2 + _jitter(rng, half)
        x = column * _CELL + _CELL // 2 + _jitter(rng, half)
        area = pixels[y - half : y + half + 1, x - half : x + half + 1]
        colour = np.array(COLOURS[item.colour]) + rng.randint(-12, 12)
        area[_stamp(item.shape, half)] = colour.clip(0, 255)
    return pixels


def draw_digits(rng: Random, digits: str) -> np.ndarray:
    pixels = _ground(rng)
    zoom = rng.choice((3, 4)) if len(digits) < 4 else 3
    width = (6 * len(digits) - 1) * zoom
    x, y = rng.randint(2, SIZE - width - 2), rng.randint(2, SIZE - 7 * zoom - 2)
    ink = rng.choice(((25, 25, 25), (40, 70, 210), (210, 40, 40)))
    for digit in digits:
        rows = [[bits >> (4 - k) & 1 for k in range(5)] for bits in _DIGITS[int(digit)]]
        glyph = np.kron(np.array(rows, bool), np.ones((zoom, zoom), bool))
        pixels[y : y + 7 * zoom, x : x + 5 * zoom][glyph] = ink
        x += 6 * zoom
    return pixels


def digit_scene(rng: Random) -> Scene:
    """One to three digits."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 3)))
    return Scene(draw_digits(rng, digits), (), digits)


def make_scene(rng: Random, n_items: int | None = None) -> Scene:
    """One to four items, no two in one place or of one colour and shape; or digits."""
    if n_items is None and rng.random() < 0.2:
        return digit_scene(rng)
    count = n_items or rng.choices((1, 2, 3, 4), (4, 3, 2, 1))[0]
    places = sorted(rng.sample(range(9), count))
    looks = rng.sample([(c, s) for c in COLOURS for s in SHAPES], count)
    items = tuple(
        Item(rng.choice(tuple(SIZES)), colour, shape, place)
        for (colour, shape), place in zip(looks, places, strict=True)
    )
    return Scene(draw_items(rng, items), items, "")


def questions(rng: Random, scene: Scene) -> list[tuple[str, str]]:
    """(question, answer) pairs that the picture decides, in random order."""
    if scene.digits:
        return [("Which number is shown?", scene.digits)]
    found = [("How many shapes are there?", COUNTS[len(scene.items)].capitalize() + ".")]
    shapes = [item.shape for item in scene.items]
    for item in scene.items:
        if shapes.count(item.shape) == 1:
            found.append((f"What colour is the {item.shape}?", item.colour.capitalize() + "."))
            where = PLACES[item.place]
            found.append((f"Where is the {item.shape}?", f"At the {where}."))
        place = PLACES[item.place]
        found.append((f"What is at the {place}?", f"A {item.name}."))
    rng.shuffle(found)
    return found
