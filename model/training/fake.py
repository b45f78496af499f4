"""Rounding to the stored formats with a straight-through gradient.

The values are those of `kernels.formats` (KV rows) and `model.checkpoint.encoding` (weights),
computed in float32 by formulas that torch.compile fuses; the gradient is that of the identity.
"""

from __future__ import annotations

import torch

from headrace.model.checkpoint.stored import Encoding, Kind

_E4M3_MAX = 448.0
# The checkpoint writer's rule: the largest magnitudes that still round to the largest code.
_WEIGHT_FP8_LIMIT = 464.0
_WEIGHT_FP4_LIMIT = 7.0 - 2.0**-21


def wide(x: torch.Tensor) -> torch.Tensor:
    """Float32, or float64 as it is (tests compare in float64)."""
    return x if x.dtype == torch.float64 else x.float()


def _power_above(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x) of positive values, by bits: the exponent, one more with a mantissa."""
    if x.dtype == torch.float64:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))
    bits = x.view(torch.int32)
    return (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    m = x.abs().clamp(max=6.0)
    fine = torch.round(m * 2) * 0.5
    coarse = torch.where(m < 4, torch.round(m), torch.round(m * 0.5) * 2)
    return torch.where(m < 2, fine, coarse) * torch.sign(x)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def _straight(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    exact = wide(x)
    return (exact + (rounded.reshape(x.shape) - exact).detach()).to(x.dtype)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """Window keys: e4m3 in groups of 32 channels under a power of two."""
    g = wide(x.detach()).unflatten(-1, (-1, 32))
    scale = _power_above(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / _E4M3_MAX)
    return _straight(x, _e4m3(g / scale) * scale)


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Index queries and keys: e2m1 in groups of 32 channels under a power of two."""
    g = wide(x.detach()).unflatten(-1, (-1, 32))
    scale = _power_above(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    return _straight(x, _e2m1(g / scale) * scale)


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Main entries: e2m1 in groups of 16 channels under an e4m3 scale."""
    g = wide(x.detach()).unflatten(-1, (-1, 16))
    scale = _e4m3(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6)
    return _straight(x, _e2m1(g / scale) * scale)


def weight(x: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """A stack of weights [n, out, in] as the checkpoint will hold them."""
    if not encoding.has_scale:
        return x
    rows, columns = encoding.block
    values = wide(x.detach())
    out, inner = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -inner % columns, 0, -out % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    amax = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=2.0**-100)
    if encoding.kind is Kind.FP8:
        scale = _power_above(amax / _WEIGHT_FP8_LIMIT)
        rounded = _e4m3(blocks / scale) * scale
    else:
        scale = _power_above(amax / _WEIGHT_FP4_LIMIT)
        rounded = _e2m1(blocks / scale) * scale
    rounded = rounded.flatten(-2).flatten(-3, -2)[..., :out, :inner]
    return _straight(x, rounded)
