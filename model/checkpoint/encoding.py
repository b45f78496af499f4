"""How weights lie in a checkpoint: values <-> stored codes and scales, exactly defined.

    FP8     W[o, i] = e4m3[o, i] * 2^(scale[o // rows, i // columns] - 127)   F8_E4M3 + F8_E8M0
    MXFP4   two e2m1 codes a byte, the even input in the low nibble,           I8 + F8_E8M0
            a scale per row and 32 inputs
    BF16, F32   as they are; I64 (tables of expert numbers) too, and never widened

Every stored value is a float32 and, for scales from 2^-120 up, a bfloat16: widening rounds nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.formats import decode_e2m1, encode_e2m1, encode_e4m3, pack_nibbles
from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.stored import Encoding, Kind

_NAN_SCALE = 255
_LEAST_SCALE, _GREATEST_SCALE = 1, 254
_GREATEST_VALUE = 2.0**127
_SAFE_SCALE = 245  # 448 * 2^(245-127) is a float32


_PLAIN = {Kind.BF16: torch.bfloat16, Kind.F32: torch.float32, Kind.I64: torch.int64}


@lru_cache(maxsize=8)
def _powers(dtype: torch.dtype) -> torch.Tensor:
    """2^(byte-127) for every E8M0 byte; 2^-127 is a subnormal float32. Byte 255 is NaN."""
    values = [2.0 ** (byte - 127) for byte in range(255)] + [math.nan]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@lru_cache(maxsize=8)
def _codes(kind: Kind, dtype: torch.dtype) -> NDArray[np.generic]:
    """[256] the value of a byte (FP8) or its two values (MXFP4), as integers of their width.

    Taking whole bit patterns from a table by numpy is two to ten times as fast as torch's casts
    and gathers of bytes.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    if kind is Kind.FP8:
        patterns = codes.view(torch.float8_e4m3fn).to(dtype)
        return patterns.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    pairs = decode_e2m1(codes.view(256, 1), torch.float32).to(dtype)
    return pairs.view(torch.int32 if dtype == torch.bfloat16 else torch.int64).view(-1).numpy()


def _decode(encoding: Encoding, data: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Codes times scales into `out` (float32 or bfloat16, contiguous)."""
    rows, columns = out.shape
    taken = np.take(_codes(encoding.kind, out.dtype), data.numpy(), mode="clip")
    values = torch.from_numpy(taken).view(out.dtype).view(rows, columns)
    powers = _powers(out.dtype)[scale.to(torch.int64)]
    b0, b1 = encoding.block
    if rows % b0 == 0 and columns % b1 == 0:
        shape = (rows // b0, b0, columns // b1, b1)
        torch.mul(values.view(shape), powers[:, None, :, None], out=out.view(shape))
    else:  # the last blocks are cut
        spread = powers.repeat_interleave(b0, 0).repeat_interleave(b1, 1)
        torch.mul(values, spread[:rows, :columns], out=out)


def widen(
    name: str,
    encoding: Encoding,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Decode stored bytes into `out`, the same rows of the weight, contiguous, any float dtype
    (int64 for I64).

    `data` is uint8 [n] (the bytes of whole rows, the first at a block's border), `scale` uint8
    [scale rows, scale columns] of those rows. Raises CheckpointError, naming the tensor, on a NaN
    scale and on any value that is not finite.
    """
    if scale is None:
        out.copy_(data.view(_PLAIN[encoding.kind]).view(out.shape))
        finite = bool(torch.isfinite(out).all())
    else:
        if bool((scale == _NAN_SCALE).any()):
            raise CheckpointError(f"{name}: found a NaN scale (byte 255), wanted a finite one")
        direct = out.dtype in (torch.float32, torch.bfloat16)
        target = out if direct else torch.empty(out.shape, dtype=torch.float32)
        _decode(encoding, data, scale, target)
        if not direct:
            out.copy_(target)
        finite = encoding.kind is Kind.MXFP4 or not bool(((data & 127) == 127).any())
        if bool((scale > _SAFE_SCALE).any()):  # past it a finite code may pass the float range
            finite = finite and bool(torch.isfinite(target).all())
    if not finite:
        raise CheckpointError(f"{name}: found a NaN or infinite value, wanted finite ones")


def _scale_bytes(amax: torch.Tensor, limit_mantissa: float, limit_exponent: int) -> torch.Tensor:
    """The least E8M0 byte for which amax / scale <= limit; limit = mantissa * 2^exponent."""
    mantissa, exponent = torch.frexp(amax)
    power = exponent - limit_exponent + (mantissa > limit_mantissa).to(exponent.dtype)
    power = torch.where(amax > 0, power, torch.full_like(power, _LEAST_SCALE - 127))
    return (power + 127).clamp(_LEAST_SCALE, _GREATEST_SCALE).to(torch.uint8)


# The largest magnitudes that round to the largest code: 464 is a tie that goes to the even 448,
# 7 one that would go to 8, so it is excluded (by the float32 below it).
_FP8_LIMIT = math.frexp(464.0)
_FP4_LIMIT = math.frexp(7.0 - 2.0**-21)


def quantise(
    name: str, encoding: Encoding, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data bytes (uint8, flat) and scale bytes (uint8 [scale rows, scale columns]) of a weight.

    `values` are float32 or bfloat16 (int64 for I64). A block's scale is the least power of two for
    which nothing rounds past the largest code. The rule of activations, ceil(log2(amax / largest)),
    is at most one power above it and its grid is a subset below the largest code, so no error
    grows, values that already went through that rule are kept exactly, and quantising what was
    widened gives the same bytes. Raises CheckpointError on other dtypes, on NaN and on values
    beyond 2^127, which could round to what no float32 holds.
    """
    if encoding.kind is Kind.I64:
        if values.dtype != torch.int64:
            raise CheckpointError(f"{name}: found {values.dtype}, wanted int64 to encode")
        return values.contiguous().view(torch.uint8).reshape(-1), None
    if values.dtype not in (torch.float32, torch.bfloat16):
        raise CheckpointError(f"{name}: found {values.dtype}, wanted float32 or bfloat16 to encode")
    if not bool((values.abs() <= _GREATEST_VALUE).all()):  # NaN compares false
        raise CheckpointError(f"{name}: found a NaN or a value beyond 2^127, wanted finite ones")
    if not encoding.has_scale:
        return values.to(_PLAIN[encoding.kind]).contiguous().view(torch.uint8).reshape(-1), None
    rows, columns = values.shape
    b0, b1 = encoding.block
    blocks = torch.nn.functional.pad(
        values.to(torch.float32), (0, -columns % b1, 0, -rows % b0)
    ).unflatten(0, (-1, b0))
    blocks = blocks.unflatten(2, (-1, b1))  # [rows / b0, b0, columns / b1, b1]
    amax = blocks.abs().amax((1, 3))
    scale = _scale_bytes(amax, *(_FP8_LIMIT if encoding.kind is Kind.FP8 else _FP4_LIMIT))
    inverse = _powers(torch.float32)[254 - scale.to(torch.int64)]
    scaled = (blocks * inverse[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    if encoding.kind is Kind.FP8:
        return encode_e4m3(scaled).contiguous().reshape(-1), scale
    return pack_nibbles(encode_e2m1(scaled)).contiguous().reshape(-1), scale
