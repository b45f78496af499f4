"""Pooling of consecutive tokens into one latent."""

from __future__ import annotations

import torch


def pool(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum_u softmax_u(z_u) v_u per channel: [n, r, c], [n, r, c] -> [n, c]."""
    return (torch.softmax(gates, dim=1) * values).sum(1)


def pool_overlapped(
    gates: torch.Tensor, values: torch.Tensor, absent: torch.Tensor
) -> torch.Tensor:
    """V4, ratio r: one softmax per channel over the former group's first halves and the group's
    own second halves: [n, 2r, 2c], [n, 2r, 2c] -> [n, c].

    `absent` (bool [n, 2r]) marks tokens that do not exist; what stands there is not read. A group's
    own last token always exists.
    """
    r, c = gates.shape[1] // 2, gates.shape[2] // 2
    gone = absent.unsqueeze(-1)
    z = torch.cat((gates[:, :r, :c], gates[:, r:, c:]), dim=1).masked_fill(gone, -torch.inf)
    v = torch.cat((values[:, :r, :c], values[:, r:, c:]), dim=1).masked_fill(gone, 0)
    return pool(z, v)
