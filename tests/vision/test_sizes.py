"""Counts of rows: the release's equal deepseek-recipe's, and the router's equal the tower's."""

from __future__ import annotations

import math
import random
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headrace.core.images import ImageLimits, read_header, resized_grid
from headrace.model import ModelConfig, Numerics
from headrace.model.vision import VisionTower, image_geometry
from headrace.vision import ImageEncoder

RELEASE = image_geometry(ModelConfig.load("flash"))
GEOMETRIES = [image_geometry(ModelConfig.load(name)) for name in ("toy", "t1", "t2", "flash")]
LIMITS = ImageLimits()
# Everyday sizes, thin ones, and those around a border of the arithmetic.
SIZES = [
    *((1, 1), (14, 14), (96, 96), (100, 50), (543, 544), (544, 544), (546, 546), (547, 546)),
    *((640, 480), (800, 600), (1024, 768), (1280, 720), (1920, 1080), (1080, 1920)),
    *((2480, 3508), (3024, 4032), (3840, 2160), (6000, 4000), (1302, 1302), (1303, 1302)),
    *((1288, 1302), (1260, 1260), (16384, 16384), (16384, 1), (1, 16384), (41, 1), (1, 59)),
    *((8, 10595), (9018, 6), (1087, 73), (10000, 10), (10, 10000), (3000, 1), (2268, 756)),
]


def recipe_count(width: int, height: int) -> int:
    data = recipe.MultiModalData([recipe.ImageInfo(b"", width, height)])
    return int(data.image_token_adjustment()) + 1


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_release_count_equals_recipe(size: tuple[int, int]) -> None:
    assert resized_grid(*size, RELEASE).n_tokens == recipe_count(*size)


def test_release_counts_equal_recipe_at_random() -> None:
    rng = random.Random(7)
    counts = set()
    for _ in range(20_000):
        if rng.random() < 0.5:
            size = rng.randint(1, 3000), rng.randint(1, 3000)
        else:
            size = int(math.exp(rng.uniform(0, 9.7))), int(math.exp(rng.uniform(0, 9.7)))
        wanted = recipe_count(*size)
        assert resized_grid(*size, RELEASE).n_tokens == wanted, size
        counts.add(wanted)
    assert len(counts) > 300


@pytest.mark.parametrize(
    "size", [(800, 400), (3000, 1000), (100, 20), (41, 1), (60, 300), (1303, 1302)]
)
def test_release_pixels_equal_recipe(files: Any, size: tuple[int, int]) -> None:
    """Not only the count: the very size of the resized picture."""
    options = recipe.PreprocessOptions("high", 100_000, 100_000)
    blank = files.saved(Image.new("RGB", size), "PNG")
    made = recipe.OpenCvImagePreprocessor().preprocess(blank, options)
    grid = resized_grid(*size, RELEASE)
    assert (grid.width, grid.height) == (made.width, made.height)


def test_orientation_is_ignored_there_too(files: Any) -> None:
    options = recipe.PreprocessOptions("high", 100_000, 100_000)
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    data = files.file(800, 400, "JPEG", exif=exif)
    made = recipe.OpenCvImagePreprocessor().preprocess(data, options)
    header = read_header(data, LIMITS)
    grid = resized_grid(header.width, header.height, RELEASE)
    assert (grid.width, grid.height) == (made.width, made.height) == (812, 406)


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    return ImageEncoder(VisionTower.random(ModelConfig.load("toy"), 5, Numerics.FAST))


def test_rows_equal_the_count_from_the_header(files: Any, encoder: ImageEncoder) -> None:
    """300 random sizes: what a router without pixels promises is what the tower gives."""
    rng = random.Random(11)
    counts = set()
    for index in range(300):
        width, height = (int(math.exp(rng.uniform(0, 6))) for _ in range(2))
        kind = ("PNG", "JPEG", "GIF", "WEBP")[index % 4]
        data = files.file(width, height, kind, "L" if kind != "WEBP" else "RGB")
        header = read_header(data, LIMITS)
        promised = resized_grid(header.width, header.height, encoder.tower.geometry).n_tokens
        encoded = encoder.encode(data)
        # 16 bytes of header, then float32 rows
        assert len(encoded.payload) == 16 + 4 * 128 * promised
        assert encoded.grid.n_tokens == promised
        counts.add(promised)
    assert len(counts) > 12


@settings(max_examples=200)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_every_named_geometry_settles(width: int, height: int) -> None:
    for geometry in GEOMETRIES:
        assert 4 <= resized_grid(width, height, geometry).n_tokens <= geometry.max_tokens
