"""The tower's own promises: company, determinism, layout, refusals, and the payload's format."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.model import ConfigError, ModelConfig, Numerics, StateError
from headrace.model.errors import BatchError
from headrace.model.vision import ROW_GRID, VisionTower, image_geometry
from headrace.model.vision_rows import pack_rows, payload_bytes, unpack_rows
from headrace.model.vision_weights import random_vision_tensors, vision_tensor_specs

TOY = ModelConfig.load("toy")
PATCH = 8


@pytest.fixture(scope="module")
def towers() -> dict[Numerics, VisionTower]:
    return {numerics: VisionTower.random(TOY, 3, numerics) for numerics in Numerics}


def noise(rows: int, cols: int, seed: int) -> NDArray[np.uint8]:
    shape = (rows * PATCH, cols * PATCH, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# grids of at most 30 rows: cells (h, w) with h (w + 1) + 2 <= 30
GRIDS = st.sampled_from(
    [(r, c) for r in range(1, 28) for c in range(1, 28) if -(-r // 3) * (-(-c // 3) + 1) + 2 <= 30]
)
PICTURES = st.tuples(GRIDS, st.integers(0, 99))


@settings(max_examples=30)
@given(st.lists(PICTURES, min_size=2, max_size=5))
def test_rows_do_not_depend_on_company(
    towers: dict[Numerics, VisionTower], pictures: list[tuple[tuple[int, int], int]]
) -> None:
    images = [noise(*grid, seed) for grid, seed in pictures]
    tower = towers[Numerics.INVARIANT]
    together = tower.encode_batch(images)
    assert len(together) == len(images)
    for image, rows in zip(images, together, strict=True):
        assert torch.equal(rows, tower.encode(image))
    fast = towers[Numerics.FAST]
    for image, rows in zip(images, fast.encode_batch(images), strict=True):
        assert torch.allclose(rows, fast.encode(image), atol=1e-5)


def test_invariant_rows_lie_on_their_grid(towers: dict[Numerics, VisionTower]) -> None:
    rows = towers[Numerics.INVARIANT].encode(noise(12, 12, 1))
    assert rows.dtype == torch.float64
    assert torch.equal(rows / ROW_GRID, (rows / ROW_GRID).round())
    assert not torch.signbit(rows[rows == 0]).any()
    fast = towers[Numerics.FAST].encode(noise(12, 12, 1))
    assert fast.dtype == torch.float32
    assert (rows - fast).abs().max() < 1e-4


@settings(max_examples=30)
@given(PICTURES)
def test_span_layout(
    towers: dict[Numerics, VisionTower], picture: tuple[tuple[int, int], int]
) -> None:
    (patch_rows, patch_cols), seed = picture
    tower = towers[Numerics.INVARIANT]
    rows, cols = -(-patch_rows // 3), -(-patch_cols // 3)
    span = tower.encode(noise(patch_rows, patch_cols, seed))
    tensors = random_vision_tensors(TOY, 3)
    roles = {
        role: torch.round(tensors[f"image_{role}"].double() / ROW_GRID) * ROW_GRID
        for role in ("start", "newline", "end")
    }
    assert span.shape == (rows * (cols + 1) + 2, TOY.hidden_size)
    assert torch.equal(span[0], roles["start"])
    assert torch.equal(span[-1], roles["end"])
    newlines = {1 + r * (cols + 1) + cols for r in range(rows)}
    for index in range(1, len(span) - 1):
        assert torch.equal(span[index], roles["newline"]) == (index in newlines)


def test_every_pixel_counts_and_shape_counts(towers: dict[Numerics, VisionTower]) -> None:
    """Equal bytes in another shape are another picture, and so is one changed corner."""
    tower = towers[Numerics.INVARIANT]
    flat = np.random.default_rng(7).integers(0, 256, 48 * 96 * 3, dtype=np.uint8)
    wide, tall = flat.reshape(48, 96, 3), flat.reshape(96, 48, 3)
    assert wide.tobytes() == tall.tobytes()
    assert not torch.equal(tower.encode(wide)[1], tower.encode(tall)[1])
    for corner in ((0, 0, 0), (47, 95, 2)):
        other = wide.copy()
        other[corner] ^= 0x80
        # Attention is full: each cell sees each pixel.
        changed = (tower.encode(other) != tower.encode(wide)).any(1)
        cells = [i for i in range(1, 1 + 2 * 5) if i % 5]
        assert changed[cells].all()


def test_mirrored_picture_is_no_mirrored_span(towers: dict[Numerics, VisionTower]) -> None:
    """Positions enter: two equal halves give different cells, a transposed picture other rows."""
    tower = towers[Numerics.INVARIANT]
    half = noise(6, 6, 5)
    span = tower.encode(np.concatenate([half, half], axis=1))
    assert not torch.equal(span[1], span[3])
    square = noise(6, 6, 8)
    assert not torch.equal(
        tower.encode(square), tower.encode(np.ascontiguousarray(square.transpose(1, 0, 2)))
    )


def test_padding_rule_of_the_aligner(towers: dict[Numerics, VisionTower]) -> None:
    """A cell that hangs over the edge gets zeros for the missing patches: computed anew here from
    the aligner's weights, with the tower's patch outputs taken before it."""
    tower = towers[Numerics.INVARIANT]
    states = torch.randn(4 * 5, TOY.vision.hidden_size, dtype=torch.float64)  # type: ignore[union-attr]
    cells = tower._unfold(states, 4, 5)
    grid = torch.zeros(6, 6, states.shape[1], dtype=torch.float64)
    for r in range(4):
        for c in range(5):
            grid[r, c] = states[r * 5 + c]
    for r in range(2):
        for c in range(2):
            # channel-major: (c, dy, dx)
            wanted = grid[3 * r : 3 * r + 3, 3 * c : 3 * c + 3].permute(2, 0, 1).flatten()
            assert torch.equal(cells[r * 2 + c], wanted)


PROGRAM = """
import sys, numpy as np
from headrace.model import ModelConfig, Numerics
from headrace.model.vision import VisionTower
tower = VisionTower.random(ModelConfig.load("toy"), 3, Numerics.INVARIANT)
pixels = np.random.default_rng(4).integers(0, 256, (96, 96, 3), dtype=np.uint8)
sys.stdout.buffer.write(tower.encode(pixels).numpy().tobytes())
"""


def test_equal_bits_in_another_process_with_more_threads(
    towers: dict[Numerics, VisionTower],
) -> None:
    rows = towers[Numerics.INVARIANT].encode(noise(12, 12, 4))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=True,
        capture_output=True,
    )
    assert done.stdout == rows.numpy().tobytes()


def test_identity_names_weights_and_numerics(towers: dict[Numerics, VisionTower]) -> None:
    names = {tower.identity for tower in towers.values()}
    names.add(VisionTower.random(TOY, 3, Numerics.FAST, compute_dtype=torch.bfloat16).identity)
    names.add(VisionTower.random(TOY, 4, Numerics.FAST).identity)
    assert len(names) == 4
    assert towers[Numerics.FAST].identity.endswith("/fast-fp32")


def test_wrong_pixels_are_refused(towers: dict[Numerics, VisionTower]) -> None:
    tower = towers[Numerics.FAST]
    for bad, message in (
        (np.zeros((96, 96, 3), np.float32), "uint8"),
        (np.zeros((96, 96), np.uint8), "uint8"),
        (np.zeros((96, 96, 4), np.uint8), "uint8"),
        (np.zeros((96, 90, 3), np.uint8), "multiples of 8"),
        (np.zeros((0, 96, 3), np.uint8), "multiples of 8"),
        (np.zeros((160, 160, 3), np.uint8), "at most 30"),
    ):
        with pytest.raises(BatchError, match=message):
            tower.encode(bad)
    assert tower.encode_batch([]) == []


def test_wrong_weights_and_configs_are_refused() -> None:
    tensors = random_vision_tensors(TOY, 0)
    with pytest.raises(ConfigError, match="lacks tensor aligner.w1.bias"):
        lacking = {k: v for k, v in tensors.items() if k != "aligner.w1.bias"}
        VisionTower(TOY, lacking, Numerics.FAST, weights_id="x")
    with pytest.raises(ConfigError, match=r"image_end: found shape \(64,\), wanted \(128,\)"):
        wrong = tensors | {"image_end": torch.zeros(64)}
        VisionTower(TOY, wrong, Numerics.FAST, weights_id="x")
    with pytest.raises(ConfigError, match="found nothing"):
        image_geometry(dataclasses.replace(TOY, vision=None))
    assert TOY.vision is not None
    for key, value, message in (
        ("num_attention_heads", 3, "3 heads"),
        ("downsample", 0, "downsample: found 0"),
        ("max_image_tokens", 3, "max_tokens must be at least 4"),
    ):
        vision = dataclasses.replace(TOY.vision, **{key: value})
        with pytest.raises(ConfigError, match=message):
            image_geometry(dataclasses.replace(TOY, vision=vision))


def test_release_tower_has_the_published_shapes() -> None:
    """From the published checkpoint's tensor list."""
    shapes = {s.name: s.shape for s in vision_tensor_specs(ModelConfig.load("flash"))}
    assert shapes["vision.patch_embed.proj.weight"] == (1024, 588)
    assert shapes["vision.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert shapes["vision.blocks.31.mlp.w1.weight"] == (5632, 1024)
    assert shapes["aligner.w1.weight"] == (5120, 9216)
    assert shapes["aligner.w2.bias"] == (5120,)
    assert shapes["image_newline"] == (5120,)
    # per block: 2 norms, wqkv, wo with bias, w1, w2; 2 patch, 1 norm, 4 aligner, 3 roles
    assert len(shapes) == 32 * 8 + 10


# ---- payload -------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from([torch.float32, torch.float64]))
def test_payload_round_trip(n_rows: int, width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(n_rows, width, dtype=dtype)
    payload = pack_rows(rows)
    assert len(payload) == payload_bytes(n_rows, width, dtype)
    back = unpack_rows(payload, n_rows=n_rows, hidden_size=width, dtype=dtype)
    assert back.dtype == dtype and torch.equal(back, rows)
    item = struct.Struct("<f" if dtype == torch.float32 else "<d")
    last = item.unpack(payload[-item.size :])[0]
    assert last == rows[-1, -1].item()
    back[0, 0] = 9.0  # own memory
    assert pack_rows(rows) == payload


def test_payload_of_another_shape_type_or_value_is_refused() -> None:
    rows = torch.ones(3, 4)
    good = pack_rows(rows)
    read = {"n_rows": 3, "hidden_size": 4, "dtype": torch.float32}
    for name, payload, changes in (
        ("short", good[:-1], {}),
        ("long", good + b"\0", {}),
        ("empty", b"", {}),
        ("magic", b"X" + good[1:], {}),
        ("version", good[:4] + b"\2" + good[5:], {}),
        ("rows", good, {"n_rows": 4}),
        ("transposed", good, {"n_rows": 4, "hidden_size": 3}),
        ("dtype of equal length", good, {"hidden_size": 2, "dtype": torch.float64}),
        ("NaN", good[:-4] + struct.pack("<f", float("nan")), {}),
        ("infinite", good[:-4] + struct.pack("<f", float("inf")), {}),
    ):
        with pytest.raises(StateError):
            unpack_rows(payload, **{**read, **changes})  # type: ignore[arg-type]
            pytest.fail(name)
    for bad in (torch.tensor([[1.0, float("nan")]]), torch.ones(3), torch.ones(2, 2).half()):
        with pytest.raises(StateError):
            pack_rows(bad)
