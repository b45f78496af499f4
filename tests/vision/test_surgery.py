"""Files whose parts are well formed and do not fit together: pixels, or a refusal of this picture.

Decoders fail over such files with exceptions of any kind; none may look like a failure of ours.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from headrace.core.errors import InvalidRequest
from headrace.core.images import ImageHeader, ImageLimits, read_header
from headrace.vision.preprocess import decode_rgb

LIMITS = ImageLimits(pixels=1_000_000)
SIDE = 8
PALETTE = bytes(range(9))  # three colours
CHUNKS: tuple[tuple[bytes, bytes], ...] = (
    (b"PLTE", b""),
    (b"PLTE", PALETTE),
    (b"PLTE", PALETTE[:4]),
    (b"PLTE", bytes(3 * 300)),
    (b"tRNS", b""),
    (b"tRNS", b"\0" * 3),
    (b"tRNS", b"\0" * 300),
    (b"acTL", struct.pack(">II", 2, 0)),
    (b"fcTL", struct.pack(">IIIIIHHBB", 0, SIDE, SIDE, 0, 0, 1, 10, 0, 0)),
    (b"fcTL", b"\0"),
    (b"fdAT", b""),
    (b"iCCP", b"x\0\0" + b"no profile"),
    (b"iCCP", b""),
    (b"gAMA", b"\0"),
    (b"cHRM", b"\0" * 31),
    (b"sRGB", b""),
    (b"pHYs", b"\0"),
    (b"eXIf", b"MM\0*\0\0\0\xff"),
    (b"zTXt", b"a\0\0" + b"broken"),
    (b"iTXt", b"a\0\1\0\0\0broken"),
    (b"tEXt", b"\0"),
    (b"IHDR", b""),
    (b"IDAT", b"\0"),
    (b"CgBI", b"\0\0\0\0"),
)


def judged(data: bytes, wanted: str = "") -> bool:
    """Whether the file gives pixels; what it fails with is the client's fault and says so."""
    try:
        header = read_header(data, LIMITS, param="here")
        picture = decode_rgb(data, header, param="here")
    except InvalidRequest as error:
        assert (error.status, error.param) == (400, "here")
        assert wanted in error.message
        return False
    assert picture.mode == "RGB" and picture.size == (header.width, header.height)
    return True


def rows(depth: int, colour: int) -> bytes:
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 1)
    return (b"\0" + bytes(-(-SIDE * channels * depth // 8))) * SIDE


def test_a_palette_that_is_missing_short_or_of_half_colours(files: Any) -> None:
    def png(depth: int, *before: tuple[bytes, bytes]) -> bytes:
        made: bytes = files.png(
            SIDE, SIDE, depth=depth, colour=3, raw=rows(depth, 3), before=before
        )
        return made

    for depth in (1, 2, 4, 8):
        assert not judged(png(depth), "damaged")
        judged(png(depth, (b"tRNS", b"\0")))  # Pillow lets it pass, with a palette of its own
        assert judged(png(depth, (b"PLTE", PALETTE)))  # the control


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 8, 16, 255])
@pytest.mark.parametrize("colour", [0, 1, 2, 3, 4, 5, 6, 255])
def test_png_chunks_of_every_kind_before_and_behind(files: Any, depth: int, colour: int) -> None:
    raw = rows(depth, colour)
    for chunk in CHUNKS:
        for kinds in ({"before": [chunk]}, {"after": [chunk]}, {"before": [chunk, chunk]}):
            judged(files.png(SIDE, SIDE, depth=depth, colour=colour, raw=raw, **kinds))
    for size in ((0, SIDE), (SIDE, 0), (2**31, 1), (SIDE, SIDE + 1)):
        judged(files.png(*size, depth=depth, colour=colour, raw=raw))


def test_png_flags_of_interlace_and_compression(files: Any) -> None:
    good = files.file(13, 9, "PNG")
    for place in (26, 27, 28):  # compression, filter, interlace
        for value in range(256):
            head = bytearray(good[12:29])
            head[place - 12] = value
            data = good[:12] + bytes(head) + struct.pack(">I", zlib.crc32(head)) + good[33:]
            judged(data)


def samples(files: Any) -> Iterator[bytes]:
    for kind, modes in (
        ("PNG", ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
        ("JPEG", ("RGB", "L", "CMYK")),
        ("WEBP", ("RGB", "RGBA")),
        ("GIF", ("P", "L")),
    ):
        for mode in modes:
            yield files.file(13, 9, kind, mode)
    yield files.file(13, 9, "PNG", "P", transparency=3)
    yield files.file(13, 9, "JPEG", "RGB", progressive=True)
    yield files.file(13, 9, "WEBP", "RGBA", lossless=True)
    frames = [Image.fromarray(files.pixels(13, 9, seed=i)) for i in range(3)]
    for kind in ("PNG", "GIF", "WEBP"):
        yield files.saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=9)


def mended(data: bytearray) -> bytes:
    """A PNG's check sums made right again, so that what stands in its chunks is looked at."""
    at = 8
    while data[:4] == b"\x89PNG" and at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return bytes(data)


def test_cuts_and_changed_bytes_of_every_format(files: Any) -> None:
    dice = random.Random(20261130)
    for good in samples(files):
        for n_bytes in range(0, len(good), 7):
            judged(good[:n_bytes])
            judged(good[:n_bytes] + bytes(64))
        for _ in range(150):
            data = bytearray(good)
            for _ in range(dice.randint(1, 4)):
                data[dice.randrange(len(data))] = dice.choice(
                    (0, 1, 3, 127, 255, dice.randrange(256))
                )
            judged(mended(data))


@pytest.mark.parametrize(
    "error", [AttributeError, AssertionError, RuntimeError, RecursionError, NotImplementedError]
)
def test_whatever_a_decoder_raises(
    files: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    data = files.file(5, 5, "PNG")
    header: ImageHeader = read_header(data, LIMITS)
    assert np.asarray(decode_rgb(data, header)).shape == (5, 5, 3)

    def fails(*_: Any) -> None:
        raise error("inside")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fails)
    assert not judged(data, "damaged")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        decode_rgb(data, header)
