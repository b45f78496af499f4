"""V4's row format: FP8 for the channels without position, bfloat16 for the rotated ones.

    [ e4m3 x plain | bfloat16 x rope | E8M0 scales, one for 64 plain channels | zeros to 8 ]

and `float32` rows, which keep what they are given: for comparisons with programs that do not
quantise. The scale is that of `formats.FP8`, over 64 channels.
"""

from __future__ import annotations

import torch

from headrace.kernels.formats import decode_e4m3, e8m0_scale, e8m0_values, encode_e4m3, narrow
from headrace.kernels.row_sizes import ROPE_ROW_GROUP, SCALES_ALIGNMENT, rope_row_scales


def quantize_rope_rows(x: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """[..., c] values -> uint8 [..., plain + 2 rope + scales]; c - rope_dim a multiple of 64."""
    x = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    plain = x.shape[-1] - rope_dim
    groups = x[..., :plain].reshape(*x.shape[:-1], -1, ROPE_ROW_GROUP)
    scales, reciprocal = e8m0_scale(groups, 1e-4, 448.0)
    data = encode_e4m3(groups * reciprocal).flatten(-2)
    turned = narrow(x[..., plain:]).to(torch.bfloat16).contiguous().view(torch.uint8)
    unused = scales.new_zeros((*scales.shape[:-1], rope_row_scales(plain) - scales.shape[-1]))
    return torch.cat((data, turned, scales, unused), dim=-1)


def dequantize_rope_rows(rows: torch.Tensor, rope_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., plain + 2 rope + scales] -> [..., c]."""
    plain = _plain_channels(rows.shape[-1] - 2 * rope_dim)
    values = decode_e4m3(rows[..., :plain], dtype)
    groups = values.reshape(*rows.shape[:-1], -1, ROPE_ROW_GROUP)
    at = plain + 2 * rope_dim
    scale = e8m0_values(rows[..., at : at + plain // ROPE_ROW_GROUP], dtype)
    turned = rows[..., plain:at].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat(((groups * scale.unsqueeze(-1)).flatten(-2), turned), dim=-1)


def _plain_channels(data_and_scales: int) -> int:
    """Inverse of plain + rope_row_scales(plain)."""
    whole = SCALES_ALIGNMENT * (ROPE_ROW_GROUP + 1)
    rows, rest = divmod(data_and_scales, whole)
    tail = rest - SCALES_ALIGNMENT if rest else 0
    return rows * SCALES_ALIGNMENT * ROPE_ROW_GROUP + tail


def pack_float_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., c] values -> uint8 [..., 4 c]."""
    return narrow(x).to(torch.float32).contiguous().view(torch.uint8)


def unpack_float_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., 4 c] -> [..., c]."""
    return rows.contiguous().view(torch.float32).to(dtype)
