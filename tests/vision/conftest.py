"""Picture files for the tests: real ones written by Pillow, hostile ones put together by hand."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image


class Files:
    """Builders; every method returns the bytes of one file."""

    # ---- real ------------------------------------------------------------------------------------

    @staticmethod
    def pixels(width: int, height: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
        shape = (height, width, channels) if channels > 1 else (height, width)
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    @staticmethod
    def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
        out = io.BytesIO()
        picture.save(out, kind, **options)
        return out.getvalue()

    def file(self, width: int, height: int, kind: str, mode: str = "RGB", **options: Any) -> bytes:
        """Noise in the given mode, written by Pillow."""
        if mode == "I;16":
            grey = self.pixels(width, height, 1).astype(np.uint16) * 257
            return self.saved(Image.fromarray(grey), kind, **options)
        noise = Image.fromarray(self.pixels(width, height, 4), "RGBA")
        picture = noise.convert("RGB").convert(mode) if mode in ("CMYK", "P", "1") else noise
        return self.saved(
            picture if picture.mode == mode else picture.convert(mode), kind, **options
        )

    # ---- by hand ---------------------------------------------------------------------------------

    @staticmethod
    def png(
        width: int,
        height: int,
        *,
        depth: int = 8,
        colour: int = 2,
        raw: bytes | None = None,
        before: Iterable[tuple[bytes, bytes]] = (),
        after: Iterable[tuple[bytes, bytes]] = (),
    ) -> bytes:
        """A PNG with chunks before and after its data. `raw` None: no data worth the name."""
        head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
        data = zlib.compress(raw if raw is not None else b"\0")
        parts = [(b"IHDR", head), *before, (b"IDAT", data), *after, (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in parts
        )

    @staticmethod
    def gif(
        screen: tuple[int, int], frames: Iterable[tuple[int, int, int, int]], data: bytes = b"\2L\1"
    ) -> bytes:
        """Frames are (left, top, width, height); `data` is code size and codes of each."""
        head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes([0, 0, 0, 255, 9, 7])
        body = data[:1] + bytes([len(data) - 1]) + data[1:] + b"\0"
        return head + b"".join(struct.pack("<BHHHHB", 0x2C, *f, 0) + body for f in frames) + b";"

    @staticmethod
    def webp(*parts: tuple[bytes, bytes]) -> bytes:
        body = b"".join(
            kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) & 1)
            for kind, data in parts
        )
        return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body

    @staticmethod
    def vp8x(flags: int, width: int, height: int) -> tuple[bytes, bytes]:
        size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        return b"VP8X", bytes([flags, 0, 0, 0]) + size

    @staticmethod
    def jpeg_segment(marker: int, body: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body

    def jpeg_frame(self, marker: int, width: int, height: int, n: int = 3, bits: int = 8) -> bytes:
        parts = b"".join(bytes([i + 1, 0x11, 0]) for i in range(n))
        return self.jpeg_segment(marker, struct.pack(">BHHB", bits, height, width, n) + parts)

    def jpeg(self, *segments: bytes) -> bytes:
        """Segments and the start of a scan; no data."""
        scan = self.jpeg_segment(0xDA, b"\1\1\0\0\x3f\0")
        return b"\xff\xd8" + b"".join(segments) + scan + b"\xff\xd9"


@pytest.fixture(scope="session")
def files() -> Files:
    return Files()
