"""Pictures in prompts: grids, keys, spans. Headers of real files are in tests/vision."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chain import as_token_ids, block_digests, next_digest
from headrace.core.errors import ConfigError, InvalidRequest, LimitExceeded
from headrace.core.ids import Digest
from headrace.core.images import (
    ImageFormat,
    ImageGeometry,
    ImageHeader,
    ImageLimits,
    ImageSpan,
    expand_placeholders,
    image_digest,
    image_mask,
    resized_grid,
    span_block_digests,
    span_extras,
    spans_within,
)

RELEASE = ImageGeometry(14, 3, 1024, 544 * 544)
TINY = ImageGeometry(8, 3, 30, 96 * 96)
SIDES = st.one_of(st.integers(1, 700), st.integers(1, 16_384))
ROOT = Digest(hashlib.sha256(b"root").digest())
IMAGE = 4001


def digest_of(number: int) -> Digest:
    return Digest(hashlib.sha256(bytes([number])).digest())


# ---- grids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [RELEASE, TINY], ids=["release", "tiny"])
@given(SIDES, SIDES)
def test_grid_is_whole_patches_within_its_budget(
    geometry: ImageGeometry, width: int, height: int
) -> None:
    grid = resized_grid(width, height, geometry)
    patch, step = geometry.patch_px, geometry.downsample
    assert (grid.width, grid.height) == (grid.patch_cols * patch, grid.patch_rows * patch)
    assert grid.cols == -(-grid.patch_cols // step)
    assert grid.rows == -(-grid.patch_rows // step)
    assert grid.n_tokens == grid.rows * (grid.cols + 1) + 2 <= geometry.max_tokens
    # Settled: a picture of the resulting size stays as it is.
    again = resized_grid(grid.width, grid.height, geometry)
    assert again == grid
    assert not grid.squeezed


@pytest.mark.parametrize("side", [1, 8, 95, 96, 97, 200, 1000, 9000])
def test_tiny_geometry_has_one_size_for_squares(side: int) -> None:
    grid = resized_grid(side, side, TINY)
    assert (grid.width, grid.height, grid.patch_rows, grid.patch_cols) == (96, 96, 12, 12)
    assert (grid.rows, grid.cols, grid.n_tokens) == (4, 4, 22)


@pytest.mark.parametrize(
    "size,wanted",
    [
        # 544 x 544 pixels are 39 patches a side, 13 cells: 13 * 14 + 2
        ((1, 1), (546, 546, 13, 13, 184)),
        ((544, 544), (546, 546, 13, 13, 184)),
        ((547, 546), (560, 546, 14, 13, 197)),
        # 31 cells a side: 31 * 32 + 2, the largest square below 1,024
        ((9000, 9000), (1302, 1302, 31, 31, 994)),
    ],
)
def test_release_geometry_by_hand(size: tuple[int, int], wanted: tuple[int, ...]) -> None:
    grid = resized_grid(*size, RELEASE)
    assert (grid.width, grid.height, grid.cols, grid.rows, grid.n_tokens) == wanted


def test_ratio_limit_squeezes_wide_pictures_only() -> None:
    geometry = replace(RELEASE, max_wh_ratio=2.0)
    wide, at_limit = resized_grid(4000, 100, geometry), resized_grid(1200, 600, geometry)
    assert wide.squeezed and at_limit.squeezed
    assert wide.width / wide.height == pytest.approx(2, rel=0.05)
    tall = resized_grid(100, 4000, geometry)
    assert not tall.squeezed
    assert tall == resized_grid(100, 4000, RELEASE)


def test_impossible_sizes_and_geometries_are_refused() -> None:
    for size in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(InvalidRequest, match="no area") as caught:
            resized_grid(*size, RELEASE, param="messages[0]")
        assert caught.value.param == "messages[0]" and caught.value.status == 400
    # Budget and least area chase each other: said, not guessed.
    with pytest.raises(InvalidRequest, match="3 x 2 pixels does not fit into 22 tokens"):
        resized_grid(3, 2, replace(TINY, max_tokens=22))
    for changes, message in (
        ({"patch_px": 0}, "patch_px must be at least 1, got 0"),
        ({"max_tokens": 3}, "max_tokens must be at least 4, got 3"),
        ({"min_pixels": 0}, "min_pixels"),
        ({"max_wh_ratio": 0.5}, "max_wh_ratio"),
        ({"max_wh_ratio": float("nan")}, "max_wh_ratio"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(TINY, **changes)


# ---- keys ----------------------------------------------------------------------------------------

HEADER = ImageHeader(ImageFormat.PNG, 6, 4, "rgb8")


def key(
    data: bytes = b"file",
    header: ImageHeader = HEADER,
    preprocessing: str = "p1",
    model: str = "m1",
    root: Digest = ROOT,
) -> Digest:
    return image_digest(data, header, preprocessing=preprocessing, model=model, root=root)


def test_key_equals_the_formula_written_out() -> None:
    framed = b"".join(
        struct.pack("<I", len(text)) + text for text in (b"m1", b"p1", b"PNG", b"rgb8")
    )
    wanted = b"img" + ROOT + framed + struct.pack("<IIQ", 6, 4, 4) + b"file"
    assert key() == hashlib.sha256(wanted).digest()


def test_every_field_makes_another_key() -> None:
    keys = [
        key(),
        key(data=b"filf"),
        key(data=b""),
        key(header=replace(HEADER, width=4, height=6)),
        key(header=replace(HEADER, width=12, height=2)),
        key(header=replace(HEADER, mode="rgba8")),
        key(header=replace(HEADER, format=ImageFormat.GIF)),
        key(preprocessing="p2"),
        key(model="m2"),
        key(model="m1p", preprocessing="1"),  # the same letters, another border
        key(root=digest_of(1)),
    ]
    assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="32 bytes"):
        key(root=Digest(b"short"))


def test_extras_equal_the_formula_written_out() -> None:
    a, b, c = (digest_of(i) for i in range(3))
    spans = [ImageSpan(120, 10, a), ImageSpan(130, 2, b), ImageSpan(256, 300, c)]
    assert span_extras(spans) == {
        0: b"img" + a + struct.pack("<III", 120, 0, 8),
        1: b"img" + a + struct.pack("<III", 0, 8, 2) + b"img" + b + struct.pack("<III", 2, 0, 2),
        2: b"img" + c + struct.pack("<III", 0, 0, 128),
        3: b"img" + c + struct.pack("<III", 0, 128, 128),
        4: b"img" + c + struct.pack("<III", 0, 256, 44),
    }
    assert span_extras([]) == {}


def test_spans_out_of_order_or_past_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="begins before"):
        span_extras([ImageSpan(0, 10, ROOT), ImageSpan(9, 2, ROOT)])
    with pytest.raises(ValueError, match="ends at 130"):
        span_block_digests(ROOT, as_token_ids([5] * 129), [ImageSpan(120, 10, ROOT)])
    for bad in ((-1, 2, ROOT), (0, 0, ROOT), (0, 2, Digest(b""))):
        with pytest.raises(ValueError):
            ImageSpan(*bad)


def test_blocks_from_a_span_on_change_with_its_picture() -> None:
    ids = as_token_ids([5] * 640)
    plain = block_digests(ROOT, ids)
    one = span_block_digests(ROOT, ids, [ImageSpan(200, 100, digest_of(1))])
    two = span_block_digests(ROOT, ids, [ImageSpan(200, 100, digest_of(2))])
    moved = span_block_digests(ROOT, ids, [ImageSpan(201, 100, digest_of(1))])
    assert span_block_digests(ROOT, ids, []) == plain
    for chain in (one, two, moved):
        assert chain[0] == plain[0]  # before the span
    for block in range(1, 5):
        assert len({chain[block] for chain in (plain, one, two, moved)}) == 4
    # By hand: block 1 holds positions 128..255, block 2 the rest.
    extra = b"img" + digest_of(1) + struct.pack("<III", 72, 0, 56)
    assert one[1] == next_digest(plain[0], memoryview(ids[128:256]).cast("B"), extra)


@given(st.integers(0, 4), st.data())
def test_chain_continues_from_any_block(start: int, data: st.DataObject) -> None:
    ids = as_token_ids(range(700))
    begin = data.draw(st.integers(0, 600))
    extras = span_extras([ImageSpan(begin, data.draw(st.integers(1, 100)), ROOT)])
    whole = block_digests(ROOT, ids, extras=extras)
    parent = whole[start - 1] if start else None
    assert block_digests(ROOT, ids, start, parent, extras) == whole[start:]


# ---- spans in a prompt ---------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.integers(0, 4000), st.just(IMAGE)), max_size=60),
    st.lists(st.integers(1, 40), min_size=60, max_size=60),
)
def test_expansion_keeps_text_and_counts_rows(ids: list[int], counts: list[int]) -> None:
    images = [(counts[i], digest_of(i)) for i in range(ids.count(IMAGE))]
    out = expand_placeholders(as_token_ids(ids), IMAGE, images)
    mask = image_mask(out.spans, len(out.token_ids))
    rows = iter(images)
    wanted: list[tuple[int, int]] = []
    for token in ids:
        wanted += [(token, 1)] * next(rows)[0] if token == IMAGE else [(token, 0)]
    assert list(zip(out.token_ids, mask, strict=True)) == wanted
    assert [(span.n_tokens, span.digest) for span in out.spans] == images


def test_markers_without_pictures_and_pictures_without_markers_are_refused() -> None:
    for ids, n_images in (([1, IMAGE], 0), ([1], 1), ([IMAGE, IMAGE], 1), ([IMAGE], 2)):
        images = [(3, ROOT)] * n_images
        with pytest.raises(InvalidRequest, match=f"{ids.count(IMAGE)} image placeholders") as bad:
            expand_placeholders(as_token_ids(ids), IMAGE, images)
        assert bad.value.status == 400


def test_spans_within_a_run_of_rows() -> None:
    a, b = ImageSpan(10, 5, digest_of(1)), ImageSpan(20, 1, digest_of(2))
    for begin, end, wanted in (
        (0, 10, ()),
        (0, 11, (a,)),
        (14, 20, (a,)),
        (14, 21, (a, b)),
        (15, 20, ()),
        (20, 21, (b,)),
        (12, 12, ()),
    ):
        assert spans_within((a, b), begin, end) == wanted, (begin, end)


def test_image_mask_is_cut_at_the_length() -> None:
    assert image_mask([ImageSpan(2, 3, ROOT)], 4) == b"\0\0\1\1"
    assert image_mask([ImageSpan(8, 3, ROOT)], 4) == bytes(4)


def test_count_of_images_is_limited() -> None:
    limits = ImageLimits(images=3)
    limits.check_count(3)
    with pytest.raises(LimitExceeded, match="images is limited to 3 images, got 1000") as caught:
        limits.check_count(1000)
    assert caught.value.status == 400
    with pytest.raises(ConfigError, match="pixels"):
        ImageLimits(pixels=0)
