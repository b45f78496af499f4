"""Headers read without decoding agree with what Pillow finds, on real, cut and damaged files."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, UnidentifiedImageError

from headrace.core.errors import InvalidRequest
from headrace.core.images import ImageFormat, ImageHeader, ImageLimits, read_header
from headrace.vision.preprocess import decode_rgb

LIMITS = ImageLimits()
# our format, Pillow's, Pillow's mode, options, our mode
KINDS: list[tuple[ImageFormat, str, str, dict[str, Any], str]] = [
    (ImageFormat.PNG, "PNG", "1", {}, "grey1"),
    (ImageFormat.PNG, "PNG", "L", {}, "grey8"),
    (ImageFormat.PNG, "PNG", "I;16", {}, "grey16"),
    (ImageFormat.PNG, "PNG", "LA", {}, "greya8"),
    (ImageFormat.PNG, "PNG", "P", {"bits": 8}, "palette8"),
    (ImageFormat.PNG, "PNG", "RGB", {}, "rgb8"),
    (ImageFormat.PNG, "PNG", "RGBA", {}, "rgba8"),
    (ImageFormat.JPEG, "JPEG", "L", {}, "grey8"),
    (ImageFormat.JPEG, "JPEG", "RGB", {}, "rgb8"),
    (ImageFormat.JPEG, "JPEG", "RGB", {"progressive": True, "comment": b"x" * 300}, "rgb8"),
    (ImageFormat.JPEG, "JPEG", "CMYK", {}, "cmyk8"),
    (ImageFormat.WEBP, "WEBP", "RGB", {}, "rgb8"),
    (ImageFormat.WEBP, "WEBP", "RGB", {"lossless": True}, "rgb8"),
    (ImageFormat.WEBP, "WEBP", "RGBA", {"lossless": True}, "rgba8"),
    (ImageFormat.WEBP, "WEBP", "RGBA", {}, "rgba8"),  # VP8X with ALPH
    (ImageFormat.WEBP, "WEBP", "RGB", {"icc_profile": b"profile"}, "rgb8"),  # VP8X with ICCP
    (ImageFormat.GIF, "GIF", "P", {}, "palette8"),
    (ImageFormat.GIF, "GIF", "P", {"comment": b"x" * 600}, "palette8"),
]
NAMES = [f"{k[1]}-{k[2]}-{'-'.join(k[3])}" for k in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@settings(max_examples=12)
@given(width=st.integers(1, 90), height=st.integers(1, 90))
def test_header_equals_what_pillow_finds(
    files: Any, kind: tuple[ImageFormat, str, str, dict[str, Any], str], width: int, height: int
) -> None:
    format_, pil_format, pil_mode, options, mode = kind
    data = files.file(width, height, pil_format, pil_mode, **options)
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.format, picture.size) == (pil_format, (width, height))
    assert read_header(data, LIMITS) == ImageHeader(format_, width, height, mode)


@pytest.mark.parametrize("size", [(16384, 1), (1, 16384), (4000, 3), (255, 257)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_long_sides(files: Any, kind: str, size: tuple[int, int]) -> None:
    header = read_header(files.file(*size, kind, "L"), LIMITS)
    assert (header.width, header.height) == size


def test_sixteen_bit_and_interlaced_png(files: Any) -> None:
    raw = b"\0" + bytes(range(12)) + b"\0" + bytes(range(12))
    header = read_header(files.png(2, 2, depth=16, colour=2, raw=raw), LIMITS)
    assert (header.width, header.height, header.mode) == (2, 2, "rgb16")


def test_picture_behind_a_picture_is_not_an_animation(files: Any) -> None:
    """A camera's JPEG with a second picture behind it (MPO) counts as its first one."""
    first, second = (Image.new("RGB", size, "red") for size in ((40, 30), (8, 8)))
    data = files.saved(first, "MPO", save_all=True, append_images=[second])
    assert read_header(data, LIMITS) == ImageHeader(ImageFormat.JPEG, 40, 30, "rgb8")


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_cut_is_refused_or_harmless(
    files: Any, kind: tuple[ImageFormat, str, str, dict[str, Any], str]
) -> None:
    data = files.file(13, 9, kind[1], kind[2], **kind[3])
    whole = read_header(data, LIMITS)
    refused = 0
    for length in range(len(data)):
        try:
            assert read_header(data[:length], LIMITS) == whole
        except InvalidRequest as error:
            assert error.status == 400
            refused += 1
    assert refused >= 12


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@settings(max_examples=40)
@given(
    changes=st.lists(st.tuples(st.integers(0, 119), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_damaged_files_end_in_one_kind_of_error(
    files: Any,
    kind: tuple[ImageFormat, str, str, dict[str, Any], str],
    changes: list[tuple[int, int]],
) -> None:
    """Whatever a damaged file says, either both readers agree on its size or it is refused."""
    data = bytearray(files.file(13, 9, kind[1], kind[2], **kind[3]))
    for place, value in changes:
        data[place % len(data)] = value
    try:
        header = read_header(bytes(data), ImageLimits(pixels=1_000_000))
        picture = decode_rgb(bytes(data), header)
    except InvalidRequest as error:
        assert error.status == 400
    else:
        assert picture.mode == "RGB" and picture.size == (header.width, header.height)


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_no_bytes_crash_the_reader(
    files: Any, tail: bytes, kind: tuple[ImageFormat, str, str, dict[str, Any], str]
) -> None:
    head = files.file(5, 5, kind[1], kind[2], **kind[3])
    for data in (tail, head[:12] + tail, head[:30] + tail):
        try:
            read_header(data, LIMITS)
        except InvalidRequest as error:
            assert error.status == 400


def test_other_formats_are_refused_by_name(files: Any) -> None:
    picture = Image.new("RGB", (8, 8))
    named = {
        "TIFF": files.saved(picture, "TIFF"),
        "BMP": files.saved(picture, "BMP"),
        "ICO": files.saved(picture, "ICO"),
        "PDF": files.saved(picture, "PDF"),
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
        "JPEG XL": b"\xff\x0a" + bytes(20),
        "AVIF": b"\0\0\0\x20ftypavif" + bytes(20),
        "HEIF": b"\0\0\0\x18ftypheic" + bytes(20),
        "PSD": b"8BPS" + bytes(20),
    }
    named |= {
        f"SVG {i}": text
        for i, text in enumerate(
            (b"<svg/>", b"\xef\xbb\xbf\n <?xml version='1.0'?><svg/>", b"<!DOCTYPE svg><svg/>")
        )
    }
    for name, data in named.items():
        with pytest.raises(InvalidRequest) as caught:
            read_header(data, LIMITS, param="messages[2].content[0]")
        message = caught.value.message
        kind = name if name.startswith("JPEG") else name.split(" ")[0]
        article = "an" if kind in ("SVG", "ICO", "AVIF") else "a"
        assert message.startswith(f"the image is {article} {kind} file; "), (name, message)
        assert message.endswith("supported are PNG, JPEG, WebP and GIF")
        assert caught.value.param == "messages[2].content[0]"
    for data in (b"", b"hello", b"RIFF\0\0\0\0WAVE", b"GIF88a" + bytes(30)):
        with pytest.raises(
            InvalidRequest,
            match="the image is of no known format; supported are PNG, JPEG, WebP and GIF",
        ):
            read_header(data, LIMITS)
        with pytest.raises(UnidentifiedImageError):
            Image.open(io.BytesIO(data))
