"""Rotary positions on adjacent channel pairs of the last `rd` channels."""

from __future__ import annotations

import math

import torch


def frequencies(rope_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """theta^(-2i/rd), [rd/2]."""
    exponent = torch.arange(0, rope_dim, 2, dtype=dtype) / rope_dim
    return 1.0 / torch.pow(torch.tensor(theta, dtype=dtype), exponent)


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_positions: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """YaRN by frequency alone: slow pairs are stretched by `factor`, fast ones kept, [rd/2]."""

    def correction(turns: float) -> float:
        angle = math.log(original_positions / (turns * 2 * math.pi))
        return rope_dim * angle / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    ramp = (torch.arange(rope_dim // 2, dtype=dtype) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    base = frequencies(rope_dim, theta, dtype)
    return base / factor * ramp + base * (1 - ramp)


def phases(positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """exp(i * p * f) as complex [n, rd/2]; int64 positions [n]."""
    angles = positions.to(freqs.dtype).unsqueeze(-1) * freqs
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of x [n, c] or [n, heads, c] in place by phase [n, rd/2].

    x may be a view as long as its last axis is contiguous. Returns x. Pass the conjugate phase
    to rotate back.
    """
    half = phase.shape[-1]
    part = x[..., -2 * half :].view(*x.shape[:-1], half, 2)
    turn = phase.unsqueeze(1) if x.dim() == 3 else phase
    if x.dtype is torch.bfloat16:
        wide = torch.view_as_complex(part.to(torch.float32))
        part.copy_(torch.view_as_real(wide * turn))
    else:
        torch.view_as_complex(part).mul_(turn)
    return x
