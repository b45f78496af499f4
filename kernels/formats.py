"""KV formats: values <-> packed bytes, with exactly one rounding whatever the input dtype.

Three formats, groups of consecutive channels sharing a scale:

    FP8     32 channels  E8M0 scale 2^ceil(log2(max(amax, 1e-4) / 448))        e4m3, clamp +-448
    MXFP4   32 channels  E8M0 scale 2^ceil(log2(max(amax, 6 * 2^-126) / 6))    e2m1
    NVFP4   16 channels  e4m3 scale of min(max(amax, 6 * 2^-9) / 6, 448)       e2m1

e2m1 codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign; ties go to the even code; the even
channel lies in the low nibble. All arithmetic is done in the input's dtype (bfloat16 in float32).
"""

from __future__ import annotations

from functools import lru_cache

import torch

FP8_GROUP = 32
MXFP4_GROUP = 32
NVFP4_GROUP = 16
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# float64 keeps 29 more mantissa bits than float32.
_STICKY_MASK = (1 << 29) - 1


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., c] -> [..., c/size, size]; a view where the layout allows."""
    return x.reshape(*x.shape[:-1], -1, size)


@lru_cache(maxsize=32)
def _e8m0_table(dtype: torch.dtype, device: torch.device, inverse: bool) -> torch.Tensor:
    """2^(byte-127), or its reciprocal. Byte 255 is NaN. 2^127 has a float32 reciprocal."""
    powers = [2.0 ** ((127 - b) if inverse else (b - 127)) for b in range(255)] + [float("nan")]
    return torch.tensor(powers, dtype=torch.float64).to(dtype).to(device)


@lru_cache(maxsize=32)
def _e4m3_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32).to(dtype).to(device)


@lru_cache(maxsize=32)
def _e2m1_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2]: the two values of a packed byte, low nibble first."""
    signed = [*_E2M1_LEVELS, *(-level for level in _E2M1_LEVELS)]
    pairs = [[signed[byte & 15], signed[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=dtype, device=device)


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    flat = table.index_select(0, codes.reshape(-1).to(torch.int32))
    return flat.view(codes.shape)


def narrow(x: torch.Tensor) -> torch.Tensor:
    """float32 that rounds to any narrower format as x itself does; other dtypes pass.

    float64 goes to float32 by truncation with a sticky last bit ("round to odd"): a second
    rounding then gives what one rounding from float64 gives.
    """
    if x.dtype != torch.float64:
        return x
    bits = x.contiguous().view(torch.int64)
    odd = ((bits | ((bits & _STICKY_MASK) + _STICKY_MASK)) & ~_STICKY_MASK).view(torch.float64)
    return odd.to(torch.float32)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes nearest to x, ties to even, |x| clamped to 448."""
    x = narrow(_wide(x).clamp(-_E4M3_MAX, _E4M3_MAX))
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _look_up(_e4m3_table(dtype, codes.device), codes)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """e2m1 codes (uint8 0..15, one per channel) nearest to x; |x| above 6 becomes 6.

    The levels are spaced 1/2 below 2, 1 below 4 and 2 above, so the code is the smallest of three
    rounded lines; each line's ties go to even, which is the even code.
    """
    magnitude = x.abs().clamp_(max=_E2M1_MAX)
    code = torch.round(magnitude * 2)
    code = torch.minimum(code, torch.round(magnitude).add_(2))
    code = torch.minimum(code, torch.round(magnitude * 0.5).add_(4)).to(torch.uint8)
    return code.add_(torch.signbit(x).to(torch.uint8), alpha=8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., c] codes below 16 -> [..., c/2] bytes, even channel in the low nibble."""
    return codes[..., 0::2] + codes[..., 1::2] * 16


def decode_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., c/2] bytes -> [..., c] values."""
    pairs = _e2m1_pairs(dtype, packed.device)
    flat = pairs.index_select(0, packed.reshape(-1).to(torch.int32))
    return flat.view(*packed.shape[:-1], 2 * packed.shape[-1])


def e8m0_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^(byte-127) of E8M0 bytes."""
    return _look_up(_e8m0_table(dtype, codes.device, False), codes)


def e8m0_scale(
    groups: torch.Tensor, floor: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0 bytes [..., g] and reciprocal scales [..., g, 1] of groups [..., g, size]."""
    amax = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax.clamp_(min=floor) / largest)
    # frexp gives mantissa in [1/2, 1): an exact power of two is not rounded up.
    byte = exponent + 127 - (mantissa == 0.5).to(exponent.dtype)
    inverse = _e8m0_table(groups.dtype, groups.device, True)
    reciprocal = inverse.index_select(0, byte.reshape(-1)).view(*byte.shape, 1)
    return byte.to(torch.uint8), reciprocal


def quantize_fp8_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., c] values -> uint8 [..., c + c/32]: e4m3 data, then E8M0 scales."""
    groups = _grouped(_wide(x), FP8_GROUP)
    scales, reciprocal = e8m0_scale(groups, 1e-4, _E4M3_MAX)
    data = encode_e4m3(groups * reciprocal).flatten(-2)
    return torch.cat((data, scales), dim=-1)


def dequantize_fp8_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., c + c/32] -> [..., c]."""
    n_scales = rows.shape[-1] // (FP8_GROUP + 1)
    table = _e4m3_table(dtype, rows.device)
    codes = rows.reshape(-1).to(torch.int32)
    values = table.index_select(0, codes).view(rows.shape)[..., :-n_scales]
    scales = e8m0_values(rows[..., -n_scales:], dtype)
    return (_grouped(values, FP8_GROUP) * scales.unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., c] values -> packed e2m1 [..., c/2] and E8M0 scales [..., c/32]."""
    groups = _grouped(_wide(x), MXFP4_GROUP)
    scales, reciprocal = e8m0_scale(groups, _E2M1_MAX * 2.0**-126, _E2M1_MAX)
    return pack_nibbles(encode_e2m1(groups * reciprocal).flatten(-2)), scales


def dequantize_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Packed e2m1 [..., c/2] and E8M0 scales [..., c/32] -> [..., c]."""
    values = _grouped(decode_e2m1(packed, dtype), MXFP4_GROUP)
    scale = e8m0_values(scales, dtype)
    return (values * scale.unsqueeze(-1)).flatten(-2)


def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """The values that `dequantize_mxfp4(quantize_mxfp4(x))` gives, in x's dtype."""
    packed, scales = quantize_mxfp4(x)
    return dequantize_mxfp4(packed, scales, x.dtype)


def quantize_nvfp4_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., c] values -> uint8 [..., c/2 + c/16]: packed e2m1, then e4m3 scales."""
    groups = _grouped(_wide(x), NVFP4_GROUP)
    amax = groups.abs().amax(-1).clamp_(min=_E2M1_MAX * 2.0**-9)
    scales = encode_e4m3(amax / _E2M1_MAX)
    codes = encode_e2m1(groups / decode_e4m3(scales, groups.dtype).unsqueeze(-1))
    return torch.cat((pack_nibbles(codes.flatten(-2)), scales), dim=-1)


def dequantize_nvfp4_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., c/2 + c/16] -> [..., c]."""
    n_scales = rows.shape[-1] // (NVFP4_GROUP // 2 + 1)
    values = _grouped(decode_e2m1(rows[..., :-n_scales], dtype), NVFP4_GROUP)
    scale = decode_e4m3(rows[..., -n_scales:], dtype)
    return (values * scale.unsqueeze(-1)).flatten(-2)
