"""How the rows of windows, global KV and index keys are stored, and what that weighs.

V4.1 stores windows as FP8, main entries as NVFP4; V4 both with the rotated channels in bfloat16.
Index keys are MXFP4 in both. Without quantisation everything is float32, which only programs that
do not quantise can be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from headrace.kernels import rope_row_scales

if TYPE_CHECKING:
    import torch

    from headrace.kernels import Kernels

_E4M3_NAN = 0x7F  # without the sign: the one code that is no number
_BF16_INFINITE = 0x7F80


class RowKind(StrEnum):
    """The formats of `kernels.formats` and `kernels.rope_rows`."""

    FP8 = "fp8"
    NVFP4 = "nvfp4"
    FP8_ROPE = "fp8_rope"
    MXFP4 = "mxfp4"  # index keys: data and scales in sections of their own
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows of `channels` values, the last `rope_dim` of them rotated. Sizes in bytes a row."""

    kind: RowKind
    channels: int
    rope_dim: int

    @property
    def data_bytes(self) -> int:
        if self.kind is RowKind.FLOAT32:
            return 4 * self.channels
        if self.kind is RowKind.FP8:
            return self.channels
        if self.kind is RowKind.FP8_ROPE:
            return self.channels + self.rope_dim
        return self.channels // 2

    @property
    def scale_bytes(self) -> int:
        """Scales, and with FP8_ROPE the unused bytes behind them."""
        if self.kind is RowKind.FLOAT32:
            return 0
        if self.kind is RowKind.FP8_ROPE:
            return rope_row_scales(self.channels - self.rope_dim)
        return self.channels // (16 if self.kind is RowKind.NVFP4 else 32)

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def encode(self, k: Kernels, x: torch.Tensor) -> torch.Tensor:
        """[..., channels] -> uint8 [..., row_bytes]; not for MXFP4, whose parts lie apart."""
        if self.kind is RowKind.FP8:
            rows = k.quantize_fp8_rows(x)
        elif self.kind is RowKind.NVFP4:
            rows = k.quantize_nvfp4_rows(x)
        elif self.kind is RowKind.FP8_ROPE:
            rows = k.quantize_rope_rows(x, self.rope_dim)
        else:
            rows = k.pack_float_rows(x)
        return rows

    def decode(self, k: Kernels, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 [..., row_bytes] -> [..., channels]; not for MXFP4."""
        if self.kind is RowKind.FP8:
            values = k.dequantize_fp8_rows(rows, dtype)
        elif self.kind is RowKind.NVFP4:
            values = k.dequantize_nvfp4_rows(rows, dtype)
        elif self.kind is RowKind.FP8_ROPE:
            values = k.dequantize_rope_rows(rows, self.rope_dim, dtype)
        else:
            values = k.unpack_float_rows(rows, dtype)
        return values

    def has_nan(self, rows: torch.Tensor) -> bool:
        """Whether any of these rows, uint8 [..., row_bytes], holds a NaN. A NaN stays visible: in
        an e4m3 scale of NVFP4, in its own channel otherwise."""
        import torch  # not above: a layout is arithmetic, and asked for without it

        if self.kind is RowKind.FLOAT32:
            return bool(rows.contiguous().view(torch.float32).isnan().any())
        if self.kind is RowKind.NVFP4:
            codes = rows[..., self.data_bytes :]
        else:
            plain = self.channels if self.kind is RowKind.FP8 else self.channels - self.rope_dim
            codes = rows[..., :plain]
        if bool(((codes & _E4M3_NAN) == _E4M3_NAN).any()):
            return True
        if self.kind is not RowKind.FP8_ROPE:
            return False
        at = self.channels - self.rope_dim
        turned = rows[..., at : at + 2 * self.rope_dim].contiguous().view(torch.int16)
        return bool(((turned & 0x7FFF) > _BF16_INFINITE).any())


@dataclass(frozen=True, slots=True)
class KvFormats:
    """What a layout stores: window rows, main entries, index keys."""

    window: RowFormat
    main: RowFormat
    index: RowFormat

    @classmethod
    def of(
        cls, head_dim: int, index_head_dim: int, rope_dim: int, *, is_v4: bool, quantised: bool
    ) -> KvFormats:
        window, main, index = RowKind.FP8, RowKind.NVFP4, RowKind.MXFP4
        if is_v4:
            window = main = RowKind.FP8_ROPE
        if not quantised:
            window = main = index = RowKind.FLOAT32
        return cls(
            RowFormat(window, head_dim, rope_dim),
            RowFormat(main, head_dim, rope_dim),
            RowFormat(index, index_head_dim, rope_dim),
        )
