"""Sinkhorn's iteration with a gradient, for training.

The forward is `mhc.sinkhorn`'s. The gradient is that of the iteration's limit: with P doubly
stochastic and G = P o dP it is G - P o (a 1' + 1 b'), where a + P b are the row sums of G and
P' a + b its column sums; a and b come from the same kind of iteration. Differentiating through
the 39 divisions instead would keep each of them.
"""

from __future__ import annotations

from typing import Any

import torch


def balance(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Balanced softmax(logits) [n, s, s]; differentiable, float32 on CUDA."""
    result: torch.Tensor = _Balance.apply(logits, iterations, eps)
    return result


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        if logits.is_cuda:
            from headrace.kernels.balance_triton import balance_cuda as run
        else:
            run = balance_torch
        c = run(logits, iterations, eps)
        ctx.save_for_backward(c)
        ctx.iterations = iterations
        return c

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (c,) = ctx.saved_tensors
        if c.is_cuda:
            from headrace.kernels.balance_triton import gradient_cuda as run
        else:
            run = gradient_torch
        return run(c, grad, ctx.iterations), None, None


def balance_torch(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def gradient_torch(c: torch.Tensor, grad: torch.Tensor, iterations: int) -> torch.Tensor:
    """Gradient of the logits from that of the balanced matrix `c` [n, s, s]."""
    g = c * grad
    rows, columns = g.sum(-1, keepdim=True), g.sum(-2, keepdim=True)
    b = torch.zeros_like(columns)
    a = torch.zeros_like(rows)
    for _ in range(iterations):
        a = rows - (c * b).sum(-1, keepdim=True)
        b = columns - (c * a).sum(-2, keepdim=True)
    return g - c * (a + b)
