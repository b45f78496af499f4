"""From files to pixels: each rule of `vision.preprocess` against values computed by hand."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from headrace.core.errors import InvalidRequest
from headrace.core.images import ImageGeometry, ImageGrid, ImageLimits, read_header, resized_grid
from headrace.vision import PREPROCESSING_VERSION, prepare
from headrace.vision.preprocess import decode_rgb, fit, fitted_size

LIMITS = ImageLimits()
TINY = ImageGeometry(8, 3, 30, 9216)
FIXTURE = Path(__file__).parent.parent / "model" / "oracle" / "fixtures" / "vision.npz"
# name, picture's seed and size, geometry: as in tests/model/oracle/make_vision_fixtures.py
PATCH_14 = ImageGeometry(14, 3, 64, 1764)
CASES = [
    ("t1-square", 31, (200, 200), TINY),
    ("t1-wide", 32, (176, 56), TINY),
    ("t1-tall", 33, (31, 200), TINY),
    ("toy-small", 34, (64, 48), TINY),
    ("patch14", 35, (150, 110), PATCH_14),
    ("patch14-full", 36, (500, 230), dataclasses.replace(PATCH_14, max_tokens=24)),
    ("head64", 37, (90, 140), PATCH_14),
    ("squeezed", 38, (400, 50), dataclasses.replace(TINY, max_wh_ratio=2.0)),
]


def decoded(data: bytes) -> NDArray[np.uint8]:
    return np.array(decode_rgb(data, read_header(data, LIMITS)))


def oracle_picture(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (5 + c)) + np.cos(y / (7 - c)) for c in range(3)]
    noise = rng.normal(0, 30, (height, width, 3))
    return (128 + 55 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("name,seed,size,geometry", CASES, ids=[case[0] for case in CASES])
def test_pixels_equal_the_independent_program(
    files: Any, name: str, seed: int, size: tuple[int, int], geometry: ImageGeometry
) -> None:
    data = files.saved(Image.fromarray(oracle_picture(seed, *size)), "PNG")
    prepared = prepare(data, geometry, LIMITS)
    with np.load(FIXTURE, allow_pickle=False) as fixture:
        assert np.array_equal(prepared.pixels, fixture[f"{name}/pixels"])
    assert prepared.grid.squeezed == (name == "squeezed")


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300))
def test_fit_equals_pillows_pad(files: Any, width: int, height: int) -> None:
    picture = Image.fromarray(files.pixels(width, height))
    grid = resized_grid(width, height, TINY)
    wanted = ImageOps.pad(picture, (grid.width, grid.height), color=(127, 127, 127))
    assert np.array_equal(fit(picture, grid), np.asarray(wanted))


@pytest.mark.parametrize("size", [(16384, 1), (1, 16384), (9000, 2), (3, 8000)])
def test_thread_thin_pictures_keep_a_pixel(files: Any, size: tuple[int, int]) -> None:
    """Pillow's own rule would make a side of no pixels."""
    prepared = prepare(files.file(*size, "PNG", "L"), TINY, LIMITS)
    grid = prepared.grid
    assert prepared.pixels.shape == (grid.height, grid.width, 3)
    wide, high = fitted_size(size, grid)
    assert min(wide, high) >= 1 and (wide == grid.width or high == grid.height)
    assert (prepared.pixels != 127).any()


def test_padding_is_grey_and_centred(files: Any) -> None:
    white = files.saved(Image.new("RGB", (100, 100), "white"), "PNG")
    picture = decode_rgb(white, read_header(white, LIMITS))
    for size, columns, lines in (
        ((104, 96), slice(4, 100), slice(0, 96)),
        ((96, 120), slice(0, 96), slice(12, 108)),
    ):
        pixels = fit(picture, ImageGrid(*size, size[1] // 8, size[0] // 8, 1, 1))
        inside = np.zeros(pixels.shape[:2], bool)
        inside[lines, columns] = True
        assert (pixels[inside] == 255).all()
        assert (pixels[~inside] == 127).all()


# ---- conversion ----------------------------------------------------------------------------------


def over_white(rgb: NDArray[Any], alpha: NDArray[Any]) -> NDArray[Any]:
    part = alpha[..., None].astype(float) / 255
    return rgb * part + 255 * (1 - part)


def test_alpha_is_laid_over_white(files: Any) -> None:
    rgba = files.pixels(20, 10, 4, seed=3)
    rgba[0, 0] = (10, 20, 30, 0)
    rgba[0, 1] = (10, 20, 30, 255)
    made = decoded(files.saved(Image.fromarray(rgba, "RGBA"), "PNG"))
    assert made[0, 0].tolist() == [255, 255, 255] and made[0, 1].tolist() == [10, 20, 30]
    assert np.abs(made - over_white(rgba[..., :3], rgba[..., 3])).max() <= 0.51

    lossless = decoded(
        files.saved(Image.fromarray(rgba, "RGBA"), "WEBP", lossless=True, exact=True)
    )
    assert np.array_equal(lossless, made)

    grey = decoded(files.saved(Image.fromarray(rgba, "RGBA").convert("LA"), "PNG"))
    level = np.asarray(Image.fromarray(rgba, "RGBA").convert("LA"))
    wanted = over_white(np.repeat(level[..., :1], 3, 2), level[..., 1])
    assert np.abs(grey - wanted).max() <= 0.51


def test_palette_and_colour_keys(files: Any) -> None:
    indices = np.arange(12, dtype=np.uint8).reshape(3, 4) % 4
    palette = [1, 2, 3, 40, 50, 60, 70, 80, 90, 200, 210, 220]
    picture = Image.fromarray(indices, "P")
    picture.putpalette(palette)
    colours = np.array(palette, np.uint8).reshape(4, 3)
    assert np.array_equal(decoded(files.saved(picture, "PNG")), colours[indices])
    assert np.array_equal(decoded(files.saved(picture, "GIF")), colours[indices])
    keyed = colours.copy()
    keyed[2] = 255
    for kind in ("PNG", "GIF"):
        assert np.array_equal(decoded(files.saved(picture, kind, transparency=2)), keyed[indices])
    # a palette with an alpha of its own for each colour
    half = decoded(files.saved(picture, "PNG", transparency=bytes([255, 128, 0, 255])))
    wanted = over_white(colours[indices], np.array([255, 128, 0, 255])[indices])
    assert np.abs(half - wanted).max() <= 0.51

    rgb = files.pixels(4, 4, seed=5)
    rgb[1, 2] = (9, 8, 7)
    made = decoded(files.saved(Image.fromarray(rgb), "PNG", transparency=(9, 8, 7)))
    rgb[1, 2] = 255
    assert np.array_equal(made, rgb)


def test_grey_and_one_bit(files: Any) -> None:
    grey = files.pixels(9, 7, 1)
    assert np.array_equal(
        decoded(files.saved(Image.fromarray(grey), "PNG")), grey[..., None].repeat(3, 2)
    )
    bits = Image.fromarray(grey).convert("1")
    wanted = np.asarray(bits).astype(np.uint8)[..., None].repeat(3, 2) * 255
    assert set(np.unique(wanted)) == {0, 255}
    assert np.array_equal(decoded(files.saved(bits, "PNG")), wanted)


def png_lines(values: NDArray[np.uint16]) -> bytes:
    """Filter byte 0 and big-endian values, line by line."""
    return b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)


@pytest.mark.parametrize("colour,channels", [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_sixteen_bits_keep_their_high_byte(files: Any, colour: int, channels: int) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (5, 6, channels)).astype(np.uint16)
    if channels in (2, 4):
        values[..., -1] = 65535  # opaque
    values.flat[0] = 0x7FFF
    data = files.png(6, 5, depth=16, colour=colour, raw=png_lines(values.reshape(5, -1)))
    high = (values >> 8).astype(np.uint8)
    wanted = high[..., :3] if channels >= 3 else high[..., :1].repeat(3, 2)
    assert wanted.flat[0] == 0x7F
    assert np.array_equal(decoded(data), wanted)


def test_cmyk_and_its_inverted_kind(files: Any) -> None:
    for ink, low, high in (
        ((0, 0, 0, 0), (250, 250, 250), (255, 255, 255)),
        ((255, 0, 0, 0), (0, 245, 245), (10, 255, 255)),
        ((0, 0, 0, 255), (0, 0, 0), (5, 5, 5)),
    ):
        made = decoded(files.saved(Image.new("CMYK", (16, 16), ink), "JPEG", quality=95))
        assert (made >= low).all() and (made <= high).all(), ink


def test_stored_pixels_decide_not_their_orientation(files: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.fromarray(files.pixels(24, 16))
    for kind, options in (("JPEG", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        turned = files.saved(picture, kind, exif=exif, **options)
        plain = files.saved(picture, kind, **options)
        assert turned != plain
        assert decoded(turned).shape == (16, 24, 3)
        assert np.array_equal(decoded(turned), decoded(plain))


def test_first_of_a_cameras_pictures(files: Any) -> None:
    first, second = (Image.new("RGB", size, c) for size, c in (((40, 30), "red"), ((8, 8), "blue")))
    made = decoded(files.saved(first, "MPO", save_all=True, append_images=[second]))
    assert made.shape == (30, 40, 3)
    assert np.abs(made.astype(int) - (254, 0, 0)).max() <= 2


def test_gif_frame_smaller_than_its_screen(files: Any) -> None:
    """One pixel of colour 1 at (1, 2); the table of `files.gif` is black and (255, 9, 7)."""
    codes = b"\2" + bytes([0b01_001_100, 0b1])  # clear, 1, end: three bits each, low first
    made = decoded(files.gif((3, 4), [(1, 2, 1, 1)], codes))
    assert made[2, 1].tolist() == [255, 9, 7]
    made[2, 1] = 0
    assert not made.any()


def test_profiles_and_gamma_are_ignored(files: Any) -> None:
    raw = b"".join(b"\0" + bytes(range(i, i + 12)) for i in range(4))
    plain = files.png(4, 4, raw=raw)
    gamma = files.png(4, 4, raw=raw, before=[(b"gAMA", struct.pack(">I", 100_000))])
    profile = (b"iCCP", b"p\0\0" + zlib.compress(b"no profile at all"))
    for other in (gamma, files.png(4, 4, raw=raw, before=[profile])):
        assert other != plain
        assert np.array_equal(decoded(other), decoded(plain))


# ---- the whole -----------------------------------------------------------------------------------


def test_equal_bytes_give_equal_pixels(files: Any) -> None:
    for kind in ("JPEG", "WEBP", "PNG", "GIF"):
        data = files.file(130, 77, kind, "P" if kind == "GIF" else "RGB")
        first, second = prepare(data, TINY, LIMITS), prepare(data, TINY, LIMITS)
        assert first.pixels.dtype == np.uint8 and first.pixels.flags.c_contiguous
        assert first.pixels.flags.owndata
        assert first.pixels.tobytes() == second.pixels.tobytes()
        assert (first.header, first.grid) == (second.header, second.grid)


def test_version_names_rules_and_decoders() -> None:
    assert PREPROCESSING_VERSION.startswith("headrace 1; ")
    assert f"pillow {PIL.__version__}" in PREPROCESSING_VERSION
    assert "None" not in PREPROCESSING_VERSION


def test_limits_hold_before_anything_is_decoded(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    real = Image.open

    def watched(*args: Any, **kwargs: Any) -> Image.Image:
        opened.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(Image, "open", watched)
    data = files.png(300, 300)
    for limits, message in (
        (ImageLimits(pixels=89_999), "area of an image is limited to 89999 pixels, got 90000"),
        (ImageLimits(side=299), "width of an image is limited to 299"),
        (ImageLimits(file_bytes=50), "file size"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            prepare(data, TINY, limits)
    assert not opened
    with pytest.raises(InvalidRequest, match="damaged"):
        prepare(data, TINY, LIMITS)
    assert len(opened) == 1
