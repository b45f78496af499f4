"""A picture file as the tower takes it: uint8 [H, W, 3], RGB, resized and padded.

Rules, all part of `PREPROCESSING_VERSION`; a change of one needs another version, since the keys of
stored rows contain it:

  size         that of the stored pixels; an EXIF orientation is not applied (core.image_headers)
  alpha        laid over white, for alpha channels, palettes with alpha and colour keys alike:
               drawings and screenshots with a clear ground are made for a white one. A colour key
               of a 16-bit grey PNG is ignored
  palette      looked up, then as alpha or RGB
  grey, 1 bit  the value in all three channels
  16 bits      the high byte of each value
  CMYK         Pillow's plain conversion, Adobe's inverted values included; profiles are ignored
  colour       ICC profiles, gamma and chromaticities are ignored
  GIF          the one frame on its screen; what it leaves uncovered is transparent, hence white,
               or the palette's first colour if it has no transparent one
  resize       bicubic with Pillow's antialiasing into the grid of `core.images.resized_grid`,
               aspect kept, centred, the rest grey 127; wider than `max_wh_ratio`: squeezed

Decoding and resizing are integer arithmetic: equal bytes in, equal bytes out, for one version of
the decoders. Their versions are part of `PREPROCESSING_VERSION` for that reason.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, features

from headrace.core.errors import InvalidRequest
from headrace.core.images import (
    ImageFormat,
    ImageGeometry,
    ImageGrid,
    ImageHeader,
    ImageLimits,
    read_header,
    resized_grid,
)

RULES_VERSION = 1
PADDING = (127, 127, 127)
GROUND = (255, 255, 255)

_PIL_FORMATS = {
    ImageFormat.PNG: "PNG",
    ImageFormat.JPEG: "JPEG",
    ImageFormat.WEBP: "WEBP",
    ImageFormat.GIF: "GIF",
}


def _preprocessing_version() -> str:
    """The rules and the decoders whose bytes may differ from build to build."""
    decoders = [f"{name} {features.version(name)}" for name in ("jpg", "libjpeg_turbo", "webp")]
    return "; ".join([f"headrace {RULES_VERSION}", f"pillow {PIL.__version__}", *decoders])


PREPROCESSING_VERSION = _preprocessing_version()


@dataclass(frozen=True)
class PreparedImage:
    """`pixels` is uint8 [grid.height, grid.width, 3], contiguous, and owns its memory."""

    header: ImageHeader
    grid: ImageGrid
    pixels: NDArray[np.uint8]


def prepare(
    data: bytes, geometry: ImageGeometry, limits: ImageLimits, *, param: str = "image"
) -> PreparedImage:
    """Decode, resize and pad one picture file.

    The header is judged before Pillow sees a byte, so memory is bounded by `limits.pixels` (8 bytes
    a pixel with alpha, 4 without). Raises `InvalidRequest` or `LimitExceeded`, status 400, for
    everything that is wrong with the file."""
    header = read_header(data, limits, param=param)
    grid = resized_grid(header.width, header.height, geometry, param=param)
    picture = decode_rgb(data, header, param=param)
    return PreparedImage(header, grid, fit(picture, grid))


def decode_rgb(data: bytes, header: ImageHeader, *, param: str = "image") -> Image.Image:
    """The file's one picture in mode RGB at its stored size.

    `header` is `read_header`'s of the same bytes; Pillow must find the same format and size.
    Raises `InvalidRequest` on damaged data, whatever the decoder raised: over the bytes of a file
    Pillow fails with nearly any exception, `AttributeError` of a palette that is missing among
    them, and a list of those it may be would never be complete. Only `MemoryError` is ours."""
    try:
        with Image.open(io.BytesIO(data), formats=(_PIL_FORMATS[header.format],)) as picture:
            # A JPEG with further pictures behind it (MPO) is opened at its first one.
            if picture.size != (header.width, header.height):
                raise ValueError(f"decoder found {picture.size}")
            picture.load()
            if picture.size != (header.width, header.height):
                raise ValueError(f"decoder made {picture.size}")
            return _to_rgb(picture)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidRequest(
            f"the image's {header.format} file is damaged: its pixels cannot be read", param=param
        ) from error


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):
        high = np.asarray(picture).astype(np.int64) >> 8
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        ground = Image.new("RGB", picture.size, GROUND)
        layer = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        ground.paste(layer, mask=layer)
        return ground
    if picture.mode not in ("RGB", "L", "1", "P", "CMYK", "YCbCr"):
        raise ValueError(f"mode {picture.mode}")
    return picture.convert("RGB")


def fit(picture: Image.Image, grid: ImageGrid) -> NDArray[np.uint8]:
    """The RGB picture resized into `grid`, centred on padding; uint8 [H, W, 3]."""
    size = (grid.width, grid.height) if grid.squeezed else fitted_size(picture.size, grid)
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (grid.width, grid.height), PADDING)
    canvas.paste(resized, (round((grid.width - size[0]) / 2), round((grid.height - size[1]) / 2)))
    return np.array(canvas)


def fitted_size(size: tuple[int, int], grid: ImageGrid) -> tuple[int, int]:
    """(width, height) of a picture of `size` inside `grid`: one side fills it, none is below 1.

    Rounds as `PIL.ImageOps.contain` does, the released processor's choice."""
    width, height = size
    if width / height > grid.width / grid.height:
        return grid.width, max(1, round(height / width * grid.width))
    if width / height < grid.width / grid.height:
        return max(1, round(width / height * grid.height)), grid.height
    return grid.width, grid.height
