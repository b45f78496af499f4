"""Picture files to row payloads: what the vision role answers with and puts into the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.core import faults
from headrace.core.deployment import Deployment
from headrace.core.ids import Digest
from headrace.core.images import ImageGrid, ImageHeader, ImageLimits, image_digest
from headrace.model import ModelConfig, StateError, resolve_numerics
from headrace.model.numerics import Precision
from headrace.model.vision import VisionTower, image_geometry
from headrace.model.vision_rows import pack_rows, payload_bytes
from headrace.vision.preprocess import PREPROCESSING_VERSION, PreparedImage, prepare


@dataclass(frozen=True)
class EncodedImage:
    """`payload` holds grid.n_tokens rows in the format of `headrace.model.vision_rows`: float64
    where the tower computes in float64 (`invariant`), else float32."""

    header: ImageHeader
    grid: ImageGrid
    payload: bytes


def largest_payload_bytes(config: ModelConfig, deployment: Deployment) -> int:
    """Bytes of the payload of the largest picture that the deployment's tower takes. Makes no
    weights. Raises `ConfigError` for a model without a tower."""
    geometry = image_geometry(config)
    numerics = resolve_numerics(deployment.numerics, deployment.device)
    dtype = Precision.of(numerics).accumulate
    return payload_bytes(geometry.max_tokens, config.hidden_size, dtype)


class ImageEncoder:
    """Files in, payloads out, for one tower. Not thread-safe: one call at a time."""

    def __init__(self, tower: VisionTower, limits: ImageLimits | None = None) -> None:
        self.tower = tower
        self.limits = limits or ImageLimits()

    def digest(self, data: bytes, header: ImageHeader, root: Digest) -> Digest:
        """The key under which this encoder's rows of this file are stored."""
        return image_digest(
            data,
            header,
            preprocessing=PREPROCESSING_VERSION,
            model=self.tower.identity,
            root=root,
        )

    def prepare(self, data: bytes, *, param: str = "image") -> PreparedImage:
        """Decode and resize, the part that may run in another thread. Raises `InvalidRequest`."""
        return prepare(data, self.tower.geometry, self.limits, param=param)

    def encode(self, data: bytes, *, param: str = "image") -> EncodedImage:
        """One file. Raises `InvalidRequest` for a bad file, `StateError` for rows that are not
        finite or not as many as the header promised."""
        return self.encode_prepared([self.prepare(data, param=param)])[0]

    def encode_prepared(self, pictures: Sequence[PreparedImage]) -> list[EncodedImage]:
        """Several pictures in one pass of the tower, in order.

        Every payload is checked before it leaves: shape, dtype, finite values. Memory grows with
        the patches of all pictures together, which the caller bounds."""
        rows = self.tower.encode_batch([picture.pixels for picture in pictures])
        match faults.hit("vision.encode"):
            case "nan":
                rows[0][0, 0] = torch.nan
            case "flip":
                rows[0] = rows[0][:-1]
        return [self._encoded(*pair) for pair in zip(pictures, rows, strict=True)]

    def _encoded(self, picture: PreparedImage, rows: torch.Tensor) -> EncodedImage:
        wanted = (picture.grid.n_tokens, self.tower.hidden_size)
        if tuple(rows.shape) != wanted or rows.dtype != self.tower.rows_dtype:
            raise StateError(
                f"picture rows: found {rows.dtype} {tuple(rows.shape)},"
                f" wanted {self.tower.rows_dtype} {wanted}"
            )
        return EncodedImage(picture.header, picture.grid, pack_rows(rows))
