"""Routed and shared experts."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from headrace.kernels.norms import as_dtype

# Up to this many (row, expert) pairs each pair is multiplied by itself; above, rows are grouped.
_SINGLE_PAIRS = 12


def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [n, k] and weights [n, k] (gate's dtype) of rows x [n, D].

    gate is [D, E] (transposed); bias [E] or [n, E] decides the choice and does not enter the
    weights. Ties go to the lowest expert.
    """
    s = torch.sqrt(softplus(as_dtype(x, gate.dtype) @ gate))
    order = torch.sort(s + bias, dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k]
    return experts, _weights(s, experts, factor)


def route_to(
    x: torch.Tensor, gate: torch.Tensor, experts: torch.Tensor, factor: float
) -> torch.Tensor:
    """Weights [n, k] (gate's dtype) of rows x [n, D] for experts int64 [n, k] chosen by token id
    (V4's hash-routed layers)."""
    return _weights(torch.sqrt(softplus(as_dtype(x, gate.dtype) @ gate)), experts, factor)


def _weights(scores: torch.Tensor, experts: torch.Tensor, factor: float) -> torch.Tensor:
    chosen = scores.gather(1, experts)
    return chosen * (factor / (chosen.sum(-1, keepdim=True) + 1e-20))


def activate(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(g, limit)) * clamp(u, +-limit) of [..., 2 I] (gate half first)."""
    g, u = gate_up.chunk(2, dim=-1)
    return silu(g.clamp(max=limit)).mul_(u.clamp(-limit, limit))


def expert_sum(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """sum_e w2_e(a_e * weight_e) of rows x [n, D]: [n, D] in the weights' (accumulate) dtype.

    w13 is [E, D, 2 I], w2 [E, I, D], or sequences that give a matrix by expert; activations are
    cast to x's dtype before w2.
    """
    n, k = experts.shape
    wide = weights.dtype
    if n * k <= _SINGLE_PAIRS and x.device.type == "cpu":
        return _expert_pairs(x, experts, weights, w13, w2, limit)
    out = torch.zeros((n, x.shape[1]), dtype=wide, device=x.device)
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(w13)).tolist()
    rows_of = order // k
    weight_of = weights.reshape(-1)[order]
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = rows_of[start : start + count]
        a = activate(as_dtype(x.index_select(0, rows) @ w13[expert], wide), limit)
        a = as_dtype(a.mul_(weight_of[start : start + count].unsqueeze(-1)), x.dtype)
        out.index_add_(0, rows, as_dtype(a @ w2[expert], wide))
        start += count
    return out


def _expert_pairs(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """`expert_sum` pair by pair: views of the experts' weights, nothing gathered."""
    (n, k), wide = experts.shape, weights.dtype
    rows = [x] if n == 1 else x.split(1)
    picked = experts.tolist()
    hidden = torch.cat([row @ w13[e] for row, own in zip(rows, picked, strict=True) for e in own])
    a = activate(as_dtype(hidden, wide), limit).mul_(weights.reshape(-1, 1))
    a = as_dtype(a, x.dtype).split(1)
    parts = [a[i * k + j] @ w2[e] for i, own in enumerate(picked) for j, e in enumerate(own)]
    return as_dtype(torch.cat(parts), wide).view(n, k, -1).sum(1)


def shared_expert(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float, wide: torch.dtype
) -> torch.Tensor:
    """The expert every row passes, without a weight: [n, D] in `wide`. w13 [D, 2I], w2 [I, D]."""
    a = as_dtype(activate(as_dtype(x @ w13, wide), limit), x.dtype)
    return as_dtype(a @ w2, wide)
