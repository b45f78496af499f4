"""Root-mean-square normalisation."""

from __future__ import annotations

import torch


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, without the microsecond that `Tensor.to` takes to do nothing."""
    return x if x.dtype is dtype else x.to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in weight's dtype, cast to x's.

    `weight` carries the accumulate dtype. A zero row stays zero, also with eps 1e-20.
    """
    if x.shape[0] == 1 and x.dtype is weight.dtype and x.device.type == "cpu" and x.dim() == 2:
        row = x.reshape(-1)
        factor: float = (torch.dot(row, row).item() / row.shape[0] + eps) ** -0.5
        return (x * factor).mul_(weight)  # one row: half the cost of the general form
    if x.dtype is weight.dtype:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.to(weight.dtype)
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def unit_norm(x: torch.Tensor, eps: float, wide: torch.dtype) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last axis, in `wide`, cast to x's dtype (V4)."""
    y = as_dtype(x, wide)
    return as_dtype(y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps), x.dtype)
