"""What a picture file says of itself: format, size and mode, read without decoding a pixel.

PNG, JPEG, WebP and GIF; every other format is refused by its name. The bytes are hostile: each
length is checked against the file, the parts stepped over are counted, and a file that announces an
animation is refused whatever number of frames it has. Two rules of content:

  - Width and height are those of the stored pixels. An EXIF orientation is not applied: the
    preprocessing of the release (deepseek-recipe 0.2.0) does not apply it either, and a count of
    rows would otherwise hang on metadata that two parsers may read differently.
  - Where a file states its size twice (a GIF's screen and frame, a WebP's canvas and picture, two
    JPEG frame headers), the statements must agree.

Formats from their specifications: PNG third edition, ITU-T T.81, RFC 9649, GIF89a.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, TypeAlias

from headrace.core.errors import InvalidRequest, LimitExceeded
from headrace.core.limits import ImageLimits, Limit


class ImageFormat(StrEnum):
    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """`width` and `height` in pixels as stored. `mode`: channels and bits a channel, like `rgb8`,
    `rgba8`, `grey16`, `palette4`, `cmyk8`."""

    format: ImageFormat
    width: int
    height: int
    mode: str


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# PNG colour type -> (name, allowed bit depths)
_PNG_MODES: dict[int, tuple[str, tuple[int, ...]]] = {
    0: ("grey", (1, 2, 4, 8, 16)),
    2: ("rgb", (8, 16)),
    3: ("palette", (1, 2, 4, 8)),
    4: ("greya", (8, 16)),
    6: ("rgba", (8, 16)),
}
_JPEG_MODES = {1: "grey8", 3: "rgb8", 4: "cmyk8"}
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_DECODABLE = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive; Huffman coded
_OTHER_FORMATS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"BM", "BMP"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "PSD"),
    (0, b"%PDF", "PDF"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL ", "JPEG XL"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphei", "HEIF"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftyp", "video or HEIF"),
)
_SVG_STARTS = (b"<svg", b"<?xml", b"<!doctype svg", b"<!--")


def read_header(data: bytes, limits: ImageLimits, *, param: str = "image") -> ImageHeader:
    """The header of one picture file, within `limits`; O(parts), and no pixel is decoded.

    Raises `LimitExceeded` (bound and value) or `InvalidRequest` (what is wrong with the file), both
    status 400 with `param` naming the place in the request."""
    file = _File(data, limits, param)
    file.bound("file size", len(data), limits.file_bytes, "bytes")
    header = _reader_for(file)(file)
    file.bound("width", header.width, limits.side, "pixels")
    file.bound("height", header.height, limits.side, "pixels")
    file.bound("area", header.width * header.height, limits.pixels, "pixels")
    return header


class _File:
    """The bytes under inspection, with bounds on where and how often they are looked at."""

    def __init__(self, data: bytes, limits: ImageLimits, param: str) -> None:
        self.data = data
        self.limits = limits
        self.param = param
        self.parts = 0

    def take(self, offset: int, count: int) -> bytes:
        piece = self.data[offset : offset + count]
        if len(piece) != count:
            self.refuse("is truncated")
        return piece

    def byte(self, offset: int) -> int:
        return self.take(offset, 1)[0]

    def step(self) -> None:
        """Count parts stepped over, so that a file of millions of empty parts costs little."""
        self.parts += 1
        if self.parts > self.limits.parts:
            self.bound("number of parts", self.parts, self.limits.parts, "parts")

    def bound(self, what: str, value: int, high: int, unit: str) -> None:
        try:
            Limit(f"{what} of an image", 0, high, unit).at_most(value)
        except LimitExceeded as error:
            raise LimitExceeded(error.message, param=self.param) from None

    def refuse(self, what: str) -> NoReturn:
        raise InvalidRequest(f"the image {what}", param=self.param)

    def refuse_animation(self, kind: str) -> NoReturn:
        self.refuse(f"is an animated {kind}; only pictures of one frame are accepted")


_Reader: TypeAlias = Callable[[_File], ImageHeader]


def _reader_for(file: _File) -> _Reader:
    data = file.data
    if data.startswith(_PNG_SIGNATURE):
        return _png
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _gif
    file.refuse(f"{_what_else(data)}; supported are PNG, JPEG, WebP and GIF")


def _what_else(data: bytes) -> str:
    for offset, magic, name in _OTHER_FORMATS:
        if data[offset : offset + len(magic)] == magic:
            return f"is {'an' if name[0] in 'AIO' else 'a'} {name} file"
    text = data[:256].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return "is an SVG file" if text.startswith(_SVG_STARTS) else "is of no known format"


def _png(file: _File) -> ImageHeader:
    head = file.take(8, 25)
    length, kind, width, height, depth, colour, compression, filtering, interlace = struct.unpack(
        ">I4sIIBBBBB", head[:21]
    )
    if kind != b"IHDR" or length != 13 or zlib.crc32(head[4:21]) != int.from_bytes(head[21:]):
        file.refuse("is a PNG without a valid header")
    name, depths = _PNG_MODES.get(colour, ("", ()))
    legal = depth in depths and compression == 0 and filtering == 0 and interlace in (0, 1)
    if not legal or not 0 < width < 2**31 or not 0 < height < 2**31:
        file.refuse("is a PNG without a valid header")
    offset = 33
    while True:
        length, kind = struct.unpack(">I4s", file.take(offset, 8))
        file.step()
        if kind == b"acTL":
            file.refuse_animation("PNG")
        if kind == b"IDAT":
            return ImageHeader(ImageFormat.PNG, width, height, f"{name}{depth}")
        if kind in (b"IEND", b"IHDR"):
            file.refuse("is a PNG without picture data")
        offset += 12 + length


def _jpeg(file: _File) -> ImageHeader:
    file.bound("number of scans", file.data.count(b"\xff\xda"), file.limits.scans, "scans")
    offset = 2
    header: ImageHeader | None = None
    while True:
        file.step()
        if file.byte(offset) != 0xFF:
            file.refuse("is a JPEG with damaged segments")
        marker = file.byte(offset + 1)
        if marker == 0xFF:  # fill byte
            offset += 1
            continue
        offset += 2
        if marker in _JPEG_BARE:
            continue
        if marker == 0xDA and header is not None:
            return header
        if marker in (0x00, 0xD8, 0xD9, 0xDA):
            file.refuse("is a JPEG without a frame header before its data")
        length = int.from_bytes(file.take(offset, 2))
        if length < 2:
            file.refuse("is a JPEG with damaged segments")
        if marker in _JPEG_FRAMES:
            if header is not None:
                file.refuse("is a JPEG with more than one frame header")
            header = _jpeg_frame(file, marker, file.take(offset + 2, 6), length)
        offset += length


def _jpeg_frame(file: _File, marker: int, frame: bytes, length: int) -> ImageHeader:
    precision, height, width, components = struct.unpack(">BHHB", frame)
    if marker not in _JPEG_DECODABLE or precision != 8:
        file.refuse(
            f"is a JPEG of process {marker - 0xC0} with {precision} bits;"
            " accepted are baseline, extended and progressive Huffman coding with 8 bits"
        )
    mode = _JPEG_MODES.get(components)
    if mode is None or length != 8 + 3 * components or not width or not height:
        file.refuse("is a JPEG without a valid frame header")
    return ImageHeader(ImageFormat.JPEG, width, height, mode)


def _webp(file: _File) -> ImageHeader:
    if 8 + int.from_bytes(file.take(4, 4), "little") > len(file.data):
        file.refuse("is truncated")
    if file.take(12, 4) != b"VP8X":
        return _webp_picture(file, 12, alpha=False)
    flags = file.byte(20)
    canvas = file.take(24, 6)
    width = int.from_bytes(canvas[:3], "little") + 1
    height = int.from_bytes(canvas[3:], "little") + 1
    if flags & 0x02:
        file.refuse_animation("WebP")
    offset = 12
    while True:
        size = int.from_bytes(file.take(offset + 4, 4), "little")
        offset += 8 + size + (size & 1)
        file.step()
        kind = file.take(offset, 4)
        if kind in (b"ANIM", b"ANMF"):
            file.refuse_animation("WebP")
        if kind in (b"VP8 ", b"VP8L"):
            break
    picture = _webp_picture(file, offset, alpha=bool(flags & 0x10))
    if (picture.width, picture.height) != (width, height):
        file.refuse("is a WebP whose canvas and picture differ in size")
    return picture


def _webp_picture(file: _File, offset: int, *, alpha: bool) -> ImageHeader:
    kind = file.take(offset, 4)
    if kind == b"VP8 ":
        tag = file.take(offset + 8, 10)
        key_frame = not tag[0] & 1
        width, height = (n & 0x3FFF for n in struct.unpack("<HH", tag[6:]))
        valid = key_frame and tag[3:6] == b"\x9d\x01\x2a" and width > 0 and height > 0
    elif kind == b"VP8L":
        tag = file.take(offset + 8, 5)
        bits = int.from_bytes(tag[1:], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        alpha = alpha or bool(bits >> 28 & 1)
        valid = tag[0] == 0x2F and bits >> 29 == 0
    else:
        valid = False
    if not valid:
        file.refuse("is a WebP without a valid picture header")
    return ImageHeader(ImageFormat.WEBP, width, height, "rgba8" if alpha else "rgb8")


def _gif(file: _File) -> ImageHeader:
    width, height, packed = struct.unpack("<HHB", file.take(6, 5))
    offset = 13 + _colour_table_bytes(packed)
    frames = 0
    while offset < len(file.data) or not frames:
        file.step()
        kind = file.byte(offset)
        if kind == 0x3B and frames:
            break
        if kind == 0x2C:
            frames += 1
            if frames > 1:
                file.refuse_animation("GIF")
            left, top, wide, high, packed = struct.unpack("<HHHHB", file.take(offset + 1, 9))
            if not wide or not high or left + wide > width or top + high > height:
                file.refuse("is a GIF whose frame does not lie inside its screen")
            offset = _skip_sub_blocks(file, offset + 11 + _colour_table_bytes(packed))
        elif kind == 0x21:
            offset = _skip_sub_blocks(file, offset + 2)
        elif kind == 0x00:
            offset += 1  # padding that some writers leave between blocks
        else:
            file.refuse("is a GIF with damaged blocks")
    return ImageHeader(ImageFormat.GIF, width, height, "palette8")


def _colour_table_bytes(packed: int) -> int:
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def _skip_sub_blocks(file: _File, offset: int) -> int:
    """The offset after the empty sub-block that ends a sequence."""
    while size := file.byte(offset):
        file.step()
        offset += 1 + size
    return offset + 1
