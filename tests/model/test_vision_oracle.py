"""Picture rows and grids against an independent program's (oracle/make_vision_fixtures.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.images import ImageGeometry, resized_grid
from headrace.model import ModelConfig, Numerics
from headrace.model.vision import VisionTower, image_geometry

FIXTURE = Path(__file__).parent / "oracle" / "fixtures" / "vision.npz"
# Of a row's value; their standard deviation is 0.7. `invariant` rounds to a grid of 2^-16; bfloat16
# rounds after every operation, so only a gross error would show there.
FP32, INVARIANT, BF16 = 1e-5, 1e-5 + 2.0**-17, 0.1

PATCH_14 = {
    **{"patch_size": 14, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    **{"intermediate_size": 96, "max_image_tokens": 64, "min_pixels": 1764},
}
HEAD_64 = PATCH_14 | {"hidden_size": 128, "num_attention_heads": 2}
# name, config, seed, (width, height) before resizing, changes: as in the maker
CASES: list[tuple[str, str, int, tuple[int, int], dict[str, Any]]] = [
    ("t1-square", "t1", 31, (200, 200), {}),
    ("t1-wide", "t1", 32, (176, 56), {}),
    ("t1-tall", "t1", 33, (31, 200), {}),
    ("toy-small", "toy", 34, (64, 48), {}),
    ("patch14", "t1", 35, (150, 110), PATCH_14),
    ("patch14-full", "t1", 36, (500, 230), PATCH_14 | {"max_image_tokens": 24}),
    ("head64", "t1", 37, (90, 140), HEAD_64),
    ("squeezed", "t1", 38, (400, 50), {"max_wh_ratio": 2.0}),
]


@pytest.fixture(scope="module")
def fixture() -> dict[str, np.ndarray]:
    with np.load(FIXTURE, allow_pickle=False) as data:
        return dict(data)


def test_every_case_of_the_fixture_is_used(fixture: dict[str, np.ndarray]) -> None:
    names = {key.split("/")[0] for key in fixture} - {"grids"}
    assert names == {case[0] for case in CASES}


@pytest.mark.parametrize(
    "numerics,dtype,tolerance",
    [
        pytest.param(Numerics.FAST, None, FP32, id="fp32"),
        pytest.param(Numerics.INVARIANT, None, INVARIANT, id="invariant"),
        pytest.param(Numerics.FAST, torch.bfloat16, BF16, id="bf16"),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_rows_equal_the_program(
    fixture: dict[str, np.ndarray],
    case: tuple[str, str, int, tuple[int, int], dict[str, Any]],
    numerics: Numerics,
    dtype: torch.dtype | None,
    tolerance: float,
) -> None:
    name, config_name, seed, size, changes = case
    config = ModelConfig.load(config_name)
    assert config.vision is not None
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, **changes))
    tower = VisionTower.random(config, seed, numerics, compute_dtype=dtype)
    pixels, theirs = fixture[f"{name}/pixels"], fixture[f"{name}/rows"]

    grid = resized_grid(*size, image_geometry(config))
    assert (grid.height, grid.width) == pixels.shape[:2]
    assert grid.n_tokens == len(theirs)

    rows = tower.encode(pixels)
    assert rows.shape == theirs.shape
    difference = (rows.double() - torch.from_numpy(theirs).double()).abs().max().item()
    assert difference <= tolerance


@pytest.mark.parametrize(
    "name,geometry",
    [
        ("release", ImageGeometry(14, 3, 1024, 544 * 544)),
        ("tiny", ImageGeometry(8, 3, 30, 9216)),
        ("ratio8", ImageGeometry(14, 3, 384, 384 * 384, 8.0)),
    ],
)
def test_grids_equal_the_program(
    fixture: dict[str, np.ndarray], name: str, geometry: ImageGeometry
) -> None:
    lines = fixture[f"grids/{name}"].tolist()
    assert len({tuple(line[4:]) for line in lines}) > 20, "sizes that say little"
    for width, height, *wanted in lines:
        grid = resized_grid(width, height, geometry)
        assert [grid.width, grid.height, grid.cols, grid.rows] == wanted, (width, height)
