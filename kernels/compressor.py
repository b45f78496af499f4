"""Pooling of r consecutive tokens into one latent."""

from __future__ import annotations

import torch


def pool(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum_u softmax_u(z_u) v_u per channel: [n, r, c], [n, r, c] -> [n, c]."""
    return (torch.softmax(gates, dim=1) * values).sum(1)
