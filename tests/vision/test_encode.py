"""Files to payloads: values, keys, and what must never leave the encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from headrace.core.errors import InvalidRequest
from headrace.core.ids import Digest
from headrace.core.images import ImageLimits, image_digest, read_header
from headrace.model import ModelConfig, Numerics, StateError
from headrace.model.vision import VisionTower
from headrace.model.vision_rows import unpack_rows
from headrace.model.vision_weights import random_vision_tensors
from headrace.vision import PREPROCESSING_VERSION, ImageEncoder, prepare

TOY = ModelConfig.load("toy")
ROOT = Digest(hashlib.sha256(b"domain a").digest())


@pytest.fixture(scope="module", params=list(Numerics), ids=lambda n: n.value)
def encoder(request: pytest.FixtureRequest) -> ImageEncoder:
    return ImageEncoder(VisionTower.random(TOY, 9, request.param))


def rows_of(encoder: ImageEncoder, payload: bytes, n_rows: int) -> torch.Tensor:
    return unpack_rows(
        payload, n_rows=n_rows, hidden_size=TOY.hidden_size, dtype=encoder.tower.rows_dtype
    )


def test_payload_holds_the_towers_rows(files: Any, encoder: ImageEncoder) -> None:
    data = files.file(150, 100, "PNG")
    encoded = encoder.encode(data)
    pixels = prepare(data, encoder.tower.geometry, ImageLimits()).pixels
    rows = rows_of(encoder, encoded.payload, encoded.grid.n_tokens)
    assert (
        rows.dtype
        == {
            Numerics.INVARIANT: torch.float64,
            Numerics.FAST: torch.float32,
        }[encoder.tower.numerics]
    )
    assert torch.equal(rows, encoder.tower.encode(pixels))
    assert encoded.payload == encoder.encode(data).payload


def test_several_pictures_in_one_pass(files: Any) -> None:
    encoder = ImageEncoder(VisionTower.random(TOY, 9, Numerics.INVARIANT))
    data = [files.file(w, h, "PNG", seed) for w, h, seed in ((30, 40, "L"), (200, 90, "RGB"))]
    together = encoder.encode_prepared([encoder.prepare(one) for one in data])
    assert [e.payload for e in together] == [encoder.encode(one).payload for one in data]
    assert encoder.encode_prepared([]) == []


def test_equal_pixel_bytes_of_another_shape_or_mode(files: Any, encoder: ImageEncoder) -> None:
    """Another picture in every respect: key, rows, and no shared prefix of the payload's values."""
    flat = files.pixels(48, 12, 1).tobytes()
    pictures = [
        Image.frombytes("L", (48, 12), flat),
        Image.frombytes("L", (12, 48), flat),
        Image.frombytes("L", (24, 24), flat),
        Image.frombytes("RGB", (16, 12), flat),
        Image.frombytes("RGBA", (12, 12), flat),
    ]
    assert len({picture.tobytes() for picture in pictures}) == 1
    data = [files.saved(picture, "PNG") for picture in pictures]
    headers = [read_header(one, ImageLimits()) for one in data]
    keys = {encoder.digest(*pair, ROOT) for pair in zip(data, headers, strict=True)}
    payloads = {encoder.encode(one).payload for one in data}
    assert len(keys) == len(payloads) == 5
    # The same file under another claim of shape or mode has another key too.
    claims = {encoder.digest(data[0], header, ROOT) for header in headers}
    assert len(claims) == 5


def test_key_covers_tower_preprocessing_and_domain(files: Any, encoder: ImageEncoder) -> None:
    data = files.file(20, 20, "PNG")
    header = read_header(data, ImageLimits())
    key = encoder.digest(data, header, ROOT)
    fields = {"preprocessing": PREPROCESSING_VERSION, "model": encoder.tower.identity}
    assert key == image_digest(data, header, root=ROOT, **fields)
    other_domain = Digest(hashlib.sha256(b"domain b").digest())
    assert encoder.digest(data, header, other_domain) != key
    for numerics in Numerics:
        for seed in (9, 10):
            other = ImageEncoder(VisionTower.random(TOY, seed, numerics))
            same = other.tower.identity == encoder.tower.identity
            assert same == (seed == 9 and numerics is encoder.tower.numerics)
            assert (other.digest(data, header, ROOT) == key) == same
    assert image_digest(data, header, root=ROOT, **{**fields, "preprocessing": "2"}) != key


class BrokenTower(VisionTower):
    """Answers with `change` of the right rows."""

    def __init__(self, change: Any) -> None:
        tensors = random_vision_tensors(TOY, 0)
        super().__init__(TOY, tensors, Numerics.FAST, weights_id="broken")
        self.change = change

    def encode_batch(self, images: Sequence[NDArray[np.uint8]]) -> list[torch.Tensor]:
        return [self.change(rows) for rows in super().encode_batch(images)]


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda rows: rows[:-1], r"\(21, 128\), wanted torch.float32 \(22, 128\)"),
        (lambda rows: torch.cat((rows, rows[:1])), r"\(23, 128\)"),
        (lambda rows: rows[:, :-1], r"\(22, 127\)"),
        (lambda rows: rows.double(), "float64"),
        (lambda rows: rows.flatten(), r"\(2816,\)"),
        (lambda rows: torch.where(rows == rows.max(), torch.nan, rows), "values that are not"),
        (lambda rows: rows / 0.0, "not finite"),
    ],
    ids=["short", "long", "narrow", "dtype", "flat", "nan", "infinite"],
)
def test_wrong_rows_never_leave(files: Any, change: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        ImageEncoder(BrokenTower(change)).encode(files.file(96, 96, "PNG"))


def test_bad_files_are_the_clients_fault(files: Any, encoder: ImageEncoder) -> None:
    bad = [files.file(96, 96, "PNG")[:-200], b"<svg/>", files.gif((4, 4), [(0, 0, 4, 4)] * 2)]
    for data in bad:
        with pytest.raises(InvalidRequest) as caught:
            encoder.encode(data, param="messages[1].content[0]")
        assert (caught.value.status, caught.value.param) == (400, "messages[1].content[0]")
    limited = ImageEncoder(encoder.tower, ImageLimits(side=95))
    with pytest.raises(InvalidRequest, match="limited to 95"):
        limited.encode(files.file(96, 96, "PNG"))
