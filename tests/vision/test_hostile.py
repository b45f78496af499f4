"""Small files that ask for much: refused from the header, by status 400, in bounded memory."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest, LimitExceeded
from headrace.core.images import ImageLimits, read_header
from headrace.vision.preprocess import decode_rgb

LIMITS = ImageLimits()
N_FRAMES = 100_000


def blank_rows(width: int, height: int) -> bytes:
    """The deflated data of a black RGB PNG, made row by row."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width) * 50
    return b"".join(packer.compress(row) for _ in range(height // 50)) + packer.flush()


def bomb_png(files: Any, side: int) -> bytes:
    """A true PNG of side x side black pixels, a thousandth of their size."""
    head = files.png(side, side)
    data = blank_rows(side, side)
    chunk = (
        struct.pack(">I", len(data))
        + b"IDAT"
        + data
        + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    )
    return head[:33] + chunk + head[-12:]


def apng(files: Any, n_frames: int) -> bytes:
    control = [
        (b"fcTL", struct.pack(">IIIIIHHBB", 2 * i + 1, 1, 1, 0, 0, 1, 10, 0, 0))
        for i in range(n_frames)
    ]
    frames = [
        pair
        for i, fctl in enumerate(control)
        for pair in (fctl, (b"fdAT", struct.pack(">I", 2 * i + 2) + zlib.compress(b"\0\0")))
    ]
    return files.png(
        1,
        1,
        colour=0,
        raw=b"\0\0",
        before=[(b"acTL", struct.pack(">II", n_frames, 0))],
        after=frames,
    )


def webp_frames(files: Any, n_frames: int) -> bytes:
    # frame header, then an empty picture
    frame = (b"ANMF", bytes(16) + b"VP8L" + struct.pack("<I", 6) + b"\x2f" + bytes(5))
    return files.webp(files.vp8x(0x02, 1, 1), (b"ANIM", bytes(6)), *[frame] * n_frames)


def tiff(n_pictures: int) -> bytes:
    directory = struct.pack("<H", 1) + struct.pack("<HHII", 256, 4, 1, 8)
    parts, offset = [b"II*\0" + struct.pack("<I", 8)], 8
    for i in range(n_pictures):
        offset += len(directory) + 4
        parts.append(directory + struct.pack("<I", offset if i + 1 < n_pictures else 0))
    return b"".join(parts)


@pytest.fixture(scope="module")
def bombs(files: Any) -> dict[str, tuple[bytes, str]]:
    """name -> (file, what the message says)"""
    svg = b"<?xml version='1.0'?><svg width='99999' height='99999'>" + b"<g/>" * 1000 + b"</svg>"
    return {
        "PNG 9000": (bomb_png(files, 9000), "area of an image is limited to 50000000 pixels"),
        "PNG 14000": (files.png(14_000, 14_000), "got 196000000"),
        "PNG 2^31": (files.png(2**31 - 1, 1), "width of an image is limited to 16384 pixels"),
        "JPEG 65535": (files.jpeg(files.jpeg_frame(0xC0, 65_535, 65_535)), "got 65535"),
        "WebP 16383": (
            files.webp((b"VP8L", b"\x2f" + struct.pack("<I", 16_382 | 16_382 << 14))),
            "got 268402689",
        ),
        "GIF 65535": (files.gif((65_535, 65_535), [(0, 0, 1, 1)]), "got 65535"),
        "GIF frames": (files.gif((1, 1), [(0, 0, 1, 1)] * N_FRAMES), "is an animated GIF"),
        "APNG frames": (apng(files, N_FRAMES), "is an animated PNG"),
        "WebP frames": (webp_frames(files, N_FRAMES), "is an animated WebP"),
        "TIFF": (tiff(1000), "is a TIFF file; supported are PNG, JPEG, WebP and GIF"),
        "SVG": (svg, "is an SVG file; supported are PNG"),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("PNG 9000", "PNG 14000", "PNG 2^31", "JPEG 65535", "WebP 16383", "GIF 65535"),
        *("GIF frames", "APNG frames", "WebP frames", "TIFF", "SVG"),
    ],
)
def test_bombs_are_refused_from_their_header(
    bombs: dict[str, tuple[bytes, str]], name: str
) -> None:
    data, message = bombs[name]
    with pytest.raises(InvalidRequest) as caught:
        read_header(data, LIMITS, param="content[1]")
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "content[1]")


PROGRAM = """
import json, resource, sys
from pathlib import Path
from headrace.core.errors import InvalidRequest
from headrace.core.images import ImageLimits, read_header
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
files = [(path.name, path.read_bytes()) for path in sorted(Path(sys.argv[1]).iterdir())]
out = {"before": peak()}
for name, data in files:
    try:
        read_header(data, ImageLimits())
        out[name] = "accepted"
    except InvalidRequest:
        out[name] = peak()
out["modules"] = sorted({"PIL", "torch", "numpy"} & set(sys.modules))
print(json.dumps(out))
"""


def test_memory_stays_flat(bombs: dict[str, tuple[bytes, str]], tmp_path: Path) -> None:
    for name, (data, _) in bombs.items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, capture_output=True, text=True
    )
    peaks = json.loads(done.stdout)
    assert peaks.pop("modules") == []
    before = peaks.pop("before")
    assert set(peaks) == set(bombs)
    grown = {name: peak - before for name, peak in peaks.items() if isinstance(peak, int)}
    assert set(grown) == set(bombs), peaks
    assert max(grown.values()) < 20e6, grown


def test_nine_thousand_squared_is_a_small_true_picture(
    bombs: dict[str, tuple[bytes, str]], files: Any
) -> None:
    """The fault takes effect: with wider limits the same file is accepted, and it is small."""
    data, _ = bombs["PNG 9000"]
    assert len(data) < 250_000
    header = read_header(data, ImageLimits(pixels=100_000_000))
    assert (header.width, header.height, header.mode) == (9000, 9000, "rgb8")
    small = bomb_png(files, 100)
    assert decode_rgb(small, read_header(small, LIMITS)).getextrema() == ((0, 0),) * 3


def test_files_of_very_many_parts_are_given_up(files: Any) -> None:
    n = LIMITS.parts + 10
    for data in (
        files.png(4, 4, before=[(b"teSt", b"")] * n),
        files.gif((4, 4), [(0, 0, 4, 4)])[:-1] + b"!\xfe" + b"\1x" * n + b"\0;",
        files.gif((4, 4), [(0, 0, 4, 4)])[:-1] + bytes(n) + b";",
        b"\xff\xd8" + b"\xff" * n + files.jpeg(files.jpeg_frame(0xC0, 4, 4))[2:],
        b"\xff\xd8" + b"\xff\xd0" * n + files.jpeg(files.jpeg_frame(0xC0, 4, 4))[2:],
        files.webp(files.vp8x(0, 4, 4), *[(b"JUNK", b"")] * n),
    ):
        with pytest.raises(LimitExceeded, match=r"parts of an image is limited to 100000 parts"):
            read_header(data, LIMITS)


def test_scans_and_file_size_are_limited(files: Any) -> None:
    scan = files.jpeg_segment(0xDA, b"\1\1\0\0\x3f\0")
    frame = files.jpeg_frame(0xC2, 4, 4)
    assert read_header(files.jpeg(frame) + scan * 63, LIMITS).width == 4
    with pytest.raises(LimitExceeded, match="scans of an image is limited to 64 scans, got 65"):
        read_header(files.jpeg(frame) + scan * 64, LIMITS)
    with pytest.raises(LimitExceeded, match="file size of an image is limited to 99 bytes"):
        read_header(b"GIF89a" + bytes(94), ImageLimits(file_bytes=99))


LIES = [
    ("GIF frame outside its screen", "does not lie inside"),
    ("GIF empty frame", "does not lie inside"),
    ("GIF without a frame", "truncated"),
    ("GIF that lies about its table", "damaged blocks|truncated"),
    ("WebP canvas other than picture", "canvas and picture differ"),
    ("WebP animated without saying", "animated WebP"),
    ("WebP longer than the file", "truncated"),
    ("WebP without a picture", "truncated"),
    ("WebP that is no key frame", "without a valid picture header"),
    ("JPEG with two frame headers", "more than one frame header"),
    ("JPEG lossless", "process 3"),
    ("JPEG arithmetic", "process 9"),
    ("JPEG of 12 bits", "with 12 bits"),
    ("JPEG of five channels", "valid frame header"),
    ("JPEG of no height", "valid frame header"),
    ("JPEG without a frame header", "before its data"),
    ("JPEG segment past the end", "truncated"),
    ("JPEG segment of no length", "damaged segments"),
    ("PNG with a wrong checksum", "valid header"),
    ("PNG of colour 5", "valid header"),
    ("PNG of 16 bit palette", "valid header"),
    ("PNG of no width", "valid header"),
    ("PNG without data", "without picture data"),
    ("PNG chunk past the end", "truncated"),
    ("PNG with one announced frame", "animated PNG"),
]


@pytest.fixture(scope="module")
def lies(files: Any) -> dict[str, bytes]:
    lossless = (b"VP8L", b"\x2f" + struct.pack("<I", 3 | 3 << 14))
    frame = files.jpeg_frame
    png = files.png(4, 4)
    no_data = png[:33] + png[-12:]
    built = [
        files.gif((4, 4), [(1, 0, 4, 4)]),
        files.gif((4, 4), [(0, 0, 0, 4)]),
        files.gif((4, 4), [])[:-1],
        files.gif((4, 4), [(0, 0, 4, 4)])[:10] + b"\x87" + files.gif((4, 4), [(0, 0, 4, 4)])[11:],
        files.webp(files.vp8x(0, 5, 4), lossless),
        files.webp(files.vp8x(0, 4, 4), (b"ANMF", bytes(24))),
        files.webp(lossless)[:-2],
        files.webp(files.vp8x(0, 4, 4), (b"EXIF", b"1234")),
        files.webp((b"VP8 ", b"\1\0\0\x9d\x01\x2a\4\0\4\0")),
        files.jpeg(frame(0xC0, 4, 4), frame(0xC0, 9000, 9000)),
        files.jpeg(frame(0xC3, 4, 4)),
        files.jpeg(frame(0xC9, 4, 4)),
        files.jpeg(frame(0xC1, 4, 4, bits=12)),
        files.jpeg(frame(0xC0, 4, 4, n=5)),
        files.jpeg(frame(0xC0, 4, 0)),
        files.jpeg(),
        b"\xff\xd8\xff\xe0\xff\xff" + bytes(100),
        b"\xff\xd8\xff\xe0\0\1" + bytes(100),
        png[:29] + b"\0\0\0\0" + png[33:],
        files.png(4, 4, colour=5),
        files.png(4, 4, colour=3, depth=16),
        files.png(0, 4),
        no_data,
        files.png(4, 4, before=[(b"teSt", b"")]).replace(b"\0\0\0\0teSt", b"\xff\xff\xff\xffteSt"),
        files.png(4, 4, before=[(b"acTL", struct.pack(">II", 1, 0))]),
    ]
    return {name: data for (name, _), data in zip(LIES, built, strict=True)}


@pytest.mark.parametrize("name,message", LIES)
def test_lying_headers_are_refused(lies: dict[str, bytes], name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_header(lies[name], LIMITS)


def test_little_data_behind_a_true_header_ends_in_400(files: Any) -> None:
    """Text bombs, data that ends early, data of another length: the decoder's errors are ours."""
    text = (b"zTXt", b"k\0\0" + zlib.compress(bytes(30_000_000)))
    short = files.png(64, 64, raw=bytes(100))
    bomb = files.png(4, 4, raw=bytes(4 * 13), before=[text])
    cut = files.file(64, 64, "JPEG")
    for data in (short, bomb, cut[: len(cut) // 2], files.jpeg(files.jpeg_frame(0xC0, 64, 64))):
        header = read_header(data, LIMITS)
        with pytest.raises(InvalidRequest, match="(PNG|JPEG) file is damaged") as caught:
            decode_rgb(data, header, param="content[0]")
        assert caught.value.param == "content[0]"


def test_random_frame_counts_are_all_animations(files: Any) -> None:
    for n in random.Random(1).sample(range(2, 400), 5):
        for data in (files.gif((1, 1), [(0, 0, 1, 1)] * n), webp_frames(files, n), apng(files, n)):
            with pytest.raises(InvalidRequest, match="animated"):
                read_header(data, LIMITS)
    assert read_header(files.gif((1, 1), [(0, 0, 1, 1)]), LIMITS).width == 1
