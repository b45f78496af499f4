"""Residual streams: mixing coefficients, Sinkhorn normalisation, collapse and expand."""

from __future__ import annotations

from math import exp

import numpy as np
import torch

from headrace.kernels.norms import as_dtype

# Up to this many rows plain floats are cheapest: 25 us a row against 150 us for the tensor calls.
_FLOAT_ROWS = 4


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Balance softmax(logits) [n, hc, hc]; returns [n, hc, hc] in the same dtype.

    C = softmax over the last axis + eps, then columns, then `iterations - 1` times rows and
    columns: C /= (sum + eps). Sums start from eps and add in index order, so that in float64 all
    ways below give the same bits from the same softmax.
    """
    c = torch.softmax(logits, dim=-1).add_(eps)
    if c.device.type == "cpu":
        return _sinkhorn_numpy(c, iterations, eps)
    return _sinkhorn_torch(c, iterations, eps)


def _sinkhorn_torch(c: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    streams = c.shape[-1]
    for half in range(2 * iterations - 1):
        axis = 1 + half % 2
        total = c.select(axis, 0) + eps
        for i in range(1, streams):
            total = total + c.select(axis, i)
        c = c / total.unsqueeze(axis)
    return c


def _sinkhorn_numpy(c: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The same arithmetic at a fifth of the dispatch cost: 78 operations on [hc, hc, n].

    With one row numpy adds in another order.
    """
    m = np.ascontiguousarray(c.numpy().transpose(1, 2, 0))
    streams, n = m.shape[1:]
    columns, rows = np.empty((1, streams, n), m.dtype), np.empty((streams, 1, n), m.dtype)
    start, add, divide = m.dtype.type(eps), np.add.reduce, np.divide
    # Positional: axis, dtype, out, keepdims, initial.
    add(m, 0, None, columns, True, start)
    divide(m, columns, m)
    for _ in range(iterations - 1):
        add(m, 1, None, rows, True, start)
        divide(m, rows, m)
        add(m, 0, None, columns, True, start)
        divide(m, columns, m)
    return torch.from_numpy(np.ascontiguousarray(m.transpose(2, 0, 1)))


def _sinkhorn_floats(c: list[float], iterations: int, eps: float) -> tuple[float, ...]:
    """One 4 x 4 matrix, row by row in a list of 16."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = c
    for iteration in range(iterations):
        if iteration:
            a, b = eps + a0 + a1 + a2 + a3, eps + b0 + b1 + b2 + b3
            x, y = eps + c0 + c1 + c2 + c3, eps + d0 + d1 + d2 + d3
            a0, a1, a2, a3 = a0 / a, a1 / a, a2 / a, a3 / a
            b0, b1, b2, b3 = b0 / b, b1 / b, b2 / b, b3 / b
            c0, c1, c2, c3 = c0 / x, c1 / x, c2 / x, c3 / x
            d0, d1, d2, d3 = d0 / y, d1 / y, d2 / y, d3 / y
        a, b = eps + a0 + b0 + c0 + d0, eps + a1 + b1 + c1 + d1
        x, y = eps + a2 + b2 + c2 + d2, eps + a3 + b3 + c3 + d3
        a0, b0, c0, d0 = a0 / a, b0 / a, c0 / a, d0 / a
        a1, b1, c1, d1 = a1 / b, b1 / b, c1 / b, d1 / b
        a2, b2, c2, d2 = a2 / x, b2 / x, c2 / x, d2 / x
        a3, b3, c3, d3 = a3 / y, b3 / y, c3 / y, d3 / y
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


def mixes(
    h: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [n, hc], post [n, hc], C [n, hc, hc]) of streams h [n, hc, D], in fn's dtype.

    `fn` is [hc * D, hc (2 + hc)] (transposed), `scale` already spread to one value per output.
    The projection comes before the normalisation.
    """
    n, streams = h.shape[:2]
    flat = as_dtype(h.flatten(1), fn.dtype)
    squares = torch.linalg.vecdot(flat, flat)
    projected = flat @ fn
    if n <= _FLOAT_ROWS and streams == 4 and h.device.type == "cpu":
        return _mixes_floats(
            projected, squares, flat.shape[1], base, scale, iterations, norm_eps, eps
        )
    mean = squares.unsqueeze(-1) * (1.0 / flat.shape[1])
    m = torch.addcmul(base, projected * torch.rsqrt(mean + norm_eps), scale)
    gates = torch.sigmoid(m[:, : 2 * streams])
    c = sinkhorn(m[:, 2 * streams :].view(-1, streams, streams), iterations, eps)
    return gates[:, :streams] + eps, gates[:, streams:] * 2, c


def _mixes_floats(
    projected: torch.Tensor,
    squares: torch.Tensor,
    width: int,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mixes` of four streams after its products, for few rows, in plain (double) floats."""
    rows, scales, bases = [], scale.tolist(), base.tolist()
    for values, square in zip(projected.tolist(), squares.tolist(), strict=True):
        factor = (square / width + norm_eps) ** -0.5
        m = [v * factor * s + b for v, s, b in zip(values, scales, bases, strict=True)]
        out = [1.0 / (1.0 + exp(-v)) + eps for v in m[:4]]
        out += [2.0 / (1.0 + exp(-v)) for v in m[4:8]]
        c: list[float] = []
        for i in range(8, 24, 4):
            top = max(m[i : i + 4])
            e = [exp(v - top) for v in m[i : i + 4]]
            total = e[0] + e[1] + e[2] + e[3]
            c += [v / total + eps for v in e]
        out += _sinkhorn_floats(c, iterations, eps)
        rows.append(out)
    mixed = torch.tensor(rows, dtype=base.dtype)
    return mixed[:, :4], mixed[:, 4:8], mixed[:, 8:].view(-1, 4, 4)


def head_gates(
    h: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
) -> torch.Tensor:
    """pre [n, hc] of V4's last collapse of streams h [n, hc, D], in fn's dtype.

    `fn` is [hc * D, hc] (transposed), base [hc], scale [1].
    """
    flat = as_dtype(h.flatten(1), fn.dtype)
    mean = torch.linalg.vecdot(flat, flat).unsqueeze(-1) * (1.0 / flat.shape[1])
    return torch.sigmoid((flat @ fn) * torch.rsqrt(mean + norm_eps) * scale + base) + eps


def collapse(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_i pre_i H_i: [n, hc, D], [n, hc] -> [n, D] in h's dtype."""
    wide = torch.bmm(pre.unsqueeze(1), as_dtype(h, pre.dtype)).squeeze(1)
    return as_dtype(wide, h.dtype)


def expand(y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """H'_k = post_k y + sum_j C[j, k] H_j: [n, hc, D] in h's dtype."""
    update = post.unsqueeze(-1) * as_dtype(y, post.dtype).unsqueeze(1)
    return as_dtype(torch.baddbmm(update, c.transpose(1, 2), as_dtype(h, post.dtype)), h.dtype)
