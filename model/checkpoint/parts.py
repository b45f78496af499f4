"""One weight of a checkpoint and the part of the model that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from headrace.model.checkpoint.stored import Encoding, StoredSpec


class Part(StrEnum):
    """Disjoint parts that roles load or leave."""

    EMBEDDING = "embedding"
    ENGRAM = "engram"
    ENCODER = "encoder"
    KV_SOURCE = "kv_source"  # first decoder layer: attention norm, compressor, index keys
    DECODER = "decoder"  # the rest of the decoder layers
    HEAD = "head"  # final norm and output matrix
    DRAFTER = "drafter"
    VISION = "vision"  # tower, aligner, the three rows around an image's rows


@dataclass(frozen=True)
class TensorEntry:
    """A weight: its name as the model knows it, its shape when widened, how files hold it.

    `layer` is the trunk layer or the drafter stage, None outside of them. An optional entry may be
    absent from a checkpoint, and no model reads it: copies and digests alone do.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    part: Part
    layer: int | None = None
    optional: bool = False

    @cached_property
    def stored(self) -> tuple[StoredSpec, ...]:
        return self.encoding.stored(self.name, self.shape)

    @cached_property
    def n_bytes(self) -> int:
        return sum(spec.n_bytes for spec in self.stored)
