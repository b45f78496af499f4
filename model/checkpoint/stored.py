"""Which formats weights are stored in, and what tensors of a file that makes; no torch.

What the codes mean, and how values become codes, is `encoding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

# dtype names of the safetensors format that a release uses, and their sizes.
DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}


class Kind(StrEnum):
    BF16 = "BF16"
    F32 = "F32"
    I64 = "I64"
    FP8 = "FP8"
    MXFP4 = "MXFP4"


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """One tensor of a file: its full name, safetensors dtype and stored shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Encoding:
    """`block` = rows and columns that share a scale; (1, 1) where there is none."""

    kind: Kind
    block: tuple[int, int] = (1, 1)

    @property
    def has_scale(self) -> bool:
        return self.kind in (Kind.FP8, Kind.MXFP4)

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[StoredSpec, ...]:
        """The file's tensors for a weight of `shape`: the data, then the scale if there is one."""
        if not self.has_scale:
            return (StoredSpec(name, str(self.kind), shape),)
        rows, columns = shape
        scale_name = name.removesuffix(".weight") + ".scale"
        scale_shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if self.kind is Kind.FP8:
            data = StoredSpec(name, "F8_E4M3", shape)
        else:
            data = StoredSpec(name, "I8", (rows, columns // 2))
        return (data, StoredSpec(scale_name, "F8_E8M0", scale_shape))

    def __str__(self) -> str:
        return f"{self.kind} {self.block[0]}x{self.block[1]}" if self.has_scale else str(self.kind)


BF16 = Encoding(Kind.BF16)
F32 = Encoding(Kind.F32)
I64 = Encoding(Kind.I64)
MXFP4 = Encoding(Kind.MXFP4, (1, 32))
FP8_ROWS = Encoding(Kind.FP8, (1, 32))
