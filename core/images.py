"""Pictures in a prompt: how many rows one takes, and how its content enters the keys.

A picture is scaled, padded to whole patches and encoded to one row a cell of the aligner's grid;
rows of cells end in a newline row, the whole begins with a start row and ends with an end row:

    [start] + ([cell] * cols + [newline]) * rows + [end]        rows * (cols + 1) + 2 positions

All these positions carry the same token id, so ids alone do not say which picture is meant. Its
digest therefore enters the digest of every block that its span touches. The image mask of a request
is made from its spans, never from ids. Everything here follows from a file's header
(`core.image_headers`); pixels are opened in the vision role alone.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.core.chain import (
    BLOCK_TOKENS,
    TOKEN_TYPE,
    TokenIds,
    as_token_ids,
    block_digests,
)
from headrace.core.errors import ConfigError, InvalidRequest
from headrace.core.ids import DIGEST_BYTES, Digest
from headrace.core.image_headers import ImageFormat, ImageHeader, read_header
from headrace.core.limits import ImageLimits

__all__ = [
    "ExpandedPrompt",
    "ImageFormat",
    "ImageGeometry",
    "ImageGrid",
    "ImageHeader",
    "ImageLimits",
    "ImageSpan",
    "expand_placeholders",
    "image_digest",
    "image_mask",
    "read_header",
    "resized_grid",
    "span_block_digests",
    "span_extras",
    "spans_within",
]

_RESIZE_PASSES = 10


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """The numbers of a model's image tower that decide the size of a picture in rows.

    `patch_px`: side of a patch in pixels; `downsample`: patches of an aligner cell's side;
    `max_tokens`: most rows of one picture, all roles counted; `min_pixels`: area below which a
    picture is scaled up; `max_wh_ratio`: a wider picture is squeezed to it, None = never."""

    patch_px: int
    downsample: int
    max_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("patch_px", 1), ("downsample", 1), ("max_tokens", 4)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.min_pixels < 1:
            raise ConfigError(f"min_pixels must be at least 1, got {self.min_pixels}")
        if self.max_wh_ratio is not None and not self.max_wh_ratio >= 1:
            raise ConfigError(f"max_wh_ratio must be at least 1, got {self.max_wh_ratio}")


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """What a picture becomes. `width` and `height` in pixels, whole patches, padding included;
    `rows` and `cols` count aligner cells; `squeezed`: resize without keeping the aspect ratio."""

    width: int
    height: int
    patch_rows: int
    patch_cols: int
    rows: int
    cols: int
    squeezed: bool = False

    @property
    def n_tokens(self) -> int:
        """Positions of the span: cells, one newline a row of cells, start and end."""
        return self.rows * (self.cols + 1) + 2


def resized_grid(
    width: int, height: int, geometry: ImageGeometry, *, param: str = "image"
) -> ImageGrid:
    """The grid of a picture of `width` x `height` pixels.

    Scale up to `min_pixels`, round both sides up to whole patches, scale down into `max_tokens`;
    repeated until nothing changes, since rounding may leave a thin picture below `min_pixels`
    again. The formula is that of the released processor, the repetition that of deepseek-recipe
    0.2.0, whose counts these are. Raises `InvalidRequest` for sizes below 1 and for a size whose
    passes do not settle (none is known in the geometries of `configs/models`)."""
    if width < 1 or height < 1:
        raise InvalidRequest(f"an image of {width} x {height} pixels has no area", param=param)
    squeezed = geometry.max_wh_ratio is not None and width >= geometry.max_wh_ratio * height
    wide: float = width
    if geometry.max_wh_ratio is not None:
        wide = min(wide, height * geometry.max_wh_ratio)
    patch = geometry.patch_px
    cols, rows = _fit_patches(wide, height, geometry)
    for _ in range(_RESIZE_PASSES - 1):
        fitted = _fit_patches(cols * patch, rows * patch, geometry)
        if fitted == (cols, rows):
            cells = _cells(rows, geometry), _cells(cols, geometry)
            grid = ImageGrid(cols * patch, rows * patch, rows, cols, *cells, squeezed)
            if grid.n_tokens <= geometry.max_tokens:
                return grid
            break
        cols, rows = fitted
    raise InvalidRequest(
        f"an image of {width} x {height} pixels does not fit into {geometry.max_tokens} tokens",
        param=param,
    )


def _cells(patches: int, geometry: ImageGeometry) -> int:
    return -(-patches // geometry.downsample)


def _fit_patches(width: float, height: float, geometry: ImageGeometry) -> tuple[int, int]:
    """One pass: (patch columns, patch rows) of a picture of this size."""
    if width * height < geometry.min_pixels:
        ratio = math.sqrt(geometry.min_pixels / (width * height))
        width, height = int(width * ratio), int(height * ratio)
    patch = geometry.patch_px
    cols, rows = math.ceil(width / patch), math.ceil(height / patch)
    if _cells(rows, geometry) * (_cells(cols, geometry) + 1) + 2 <= geometry.max_tokens:
        return cols, rows
    return _shrink(width, height, geometry)


def _shrink(width: float, height: float, geometry: ImageGeometry) -> tuple[int, int]:
    """The largest size of this aspect ratio with rows * (cols + 1) = max_tokens - 2 cells."""
    budget = geometry.max_tokens - 2
    aspect = height / width
    max_cols = math.sqrt(budget / aspect + 0.25) - 0.5
    max_rows = max_cols * aspect
    if max_cols < 1:
        return geometry.downsample, budget // 2 * geometry.downsample
    if max_rows < 1:
        return (budget - 1) * geometry.downsample, geometry.downsample
    cell = geometry.patch_px * geometry.downsample
    scale = min(int(max_cols) * cell / width, int(max_rows) * cell / height)
    patch = geometry.patch_px
    return max(1, int(width * scale / patch)), max(1, int(height * scale / patch))


# ---- keys ----------------------------------------------------------------------------------------


def image_digest(
    data: bytes, header: ImageHeader, *, preprocessing: str, model: str, root: Digest
) -> Digest:
    """The key of the `mm` object that holds this picture's rows.

    SHA-256 over framed fields: file bytes, format, size and mode, the version of the
    preprocessing, the tower (`model`: its weights and numerics class), and `root`, which covers
    the text model and the cache domain. The size and mode stand beside the bytes, so that equal
    pixel bytes under another shape can never share a key."""
    if len(root) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, got {len(root)}")
    key = hashlib.sha256(b"img" + root)
    for text in (model, preprocessing, header.format.value, header.mode):
        field = text.encode()
        key.update(struct.pack("<I", len(field)) + field)
    key.update(struct.pack("<IIQ", header.width, header.height, len(data)))
    key.update(data)
    return Digest(key.digest())


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Positions [start, end) of a prompt that one picture's rows fill, in row order."""

    start: int
    n_tokens: int
    digest: Digest

    def __post_init__(self) -> None:
        if self.start < 0 or self.n_tokens < 1 or len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"no span: start {self.start}, {self.n_tokens} tokens")

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


def span_extras(spans: Sequence[ImageSpan]) -> dict[int, bytes]:
    """Block number -> typed extras for `core.chain.next_digest`, for every block a span touches.

    A block's extras are, for each span in it, "img" | digest | u32 first position in the block |
    u32 first row of the picture | u32 rows. Spans must be in order and must not overlap
    (`ValueError`). O(blocks touched)."""
    parts: dict[int, list[bytes]] = {}
    last_end = 0
    for span in spans:
        if span.start < last_end:
            raise ValueError(f"span at {span.start} begins before {last_end}")
        last_end = span.end
        for block in range(span.start // BLOCK_TOKENS, -(-span.end // BLOCK_TOKENS)):
            begin = max(span.start, block * BLOCK_TOKENS)
            end = min(span.end, (block + 1) * BLOCK_TOKENS)
            places = (begin - block * BLOCK_TOKENS, begin - span.start, end - begin)
            parts.setdefault(block, []).append(b"img" + span.digest + struct.pack("<III", *places))
    return {block: b"".join(pieces) for block, pieces in parts.items()}


def span_block_digests(
    root: bytes, token_ids: TokenIds, spans: Sequence[ImageSpan]
) -> tuple[Digest, ...]:
    """Digests of the complete blocks of a text with pictures; see `core.chain.block_digests`.

    Raises `ValueError` for a span that ends after the text."""
    if spans and spans[-1].end > len(token_ids):
        raise ValueError(f"span ends at {spans[-1].end}, the text at {len(token_ids)}")
    return block_digests(root, token_ids, extras=span_extras(spans))


# ---- spans in a prompt ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """Token ids with every placeholder drawn out to its picture's rows, and where they lie."""

    token_ids: TokenIds
    spans: tuple[ImageSpan, ...]


def expand_placeholders(
    token_ids: TokenIds,
    image_token_id: int,
    images: Sequence[tuple[int, Digest]],
    *,
    param: str = "messages",
) -> ExpandedPrompt:
    """Replace the i-th placeholder by `images[i]` = (rows, digest) copies of the image token.

    Raises `InvalidRequest` unless there are as many placeholders as pictures: a stray one would
    become a row without content."""
    found = token_ids.count(image_token_id)
    if found != len(images):
        raise InvalidRequest(
            f"the prompt has {found} image placeholders for {len(images)} images", param=param
        )
    out = as_token_ids([])
    spans: list[ImageSpan] = []
    done = 0
    for n_tokens, digest in images:
        place = token_ids.index(image_token_id, done)
        out += token_ids[done:place]
        spans.append(ImageSpan(len(out), n_tokens, digest))
        out += type(out)(TOKEN_TYPE, [image_token_id]) * n_tokens
        done = place + 1
    out += token_ids[done:]
    return ExpandedPrompt(out, tuple(spans))


def image_mask(spans: Iterable[ImageSpan], length: int) -> bytearray:
    """One byte a position below `length`: 1 inside a span."""
    mask = bytearray(length)
    for span in spans:
        begin, end = min(span.start, length), min(span.end, length)
        mask[begin:end] = b"\1" * (end - begin)
    return mask


def spans_within(spans: Iterable[ImageSpan], begin: int, end: int) -> tuple[ImageSpan, ...]:
    """The spans with a position in [begin, end): those whose rows a run of these rows needs."""
    return tuple(span for span in spans if span.start < end and span.end > begin and begin < end)
