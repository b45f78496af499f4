"""`balance` and its gradient as one kernel each: a matrix stays in registers for all iterations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64


@triton.jit
def _places(n, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, SIZE)
    places = row[:, None, None] * (SIZE * SIZE) + i[None, :, None] * SIZE + i[None, None, :]
    return places, (row < n)[:, None, None] & (i[None, :, None] >= 0) & (i[None, None, :] >= 0)


@triton.jit
def _balance(  # type: ignore[no-untyped-def]
    logits, out, n, eps, ITERATIONS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    places, inside = _places(n, SIZE, BLOCK)
    x = tl.load(logits + places, mask=inside, other=0.0)
    x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    c = x / tl.sum(x, axis=2)[:, :, None] + eps
    c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
    tl.store(out + places, c, mask=inside)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    c_in, grad, out, n, ITERATIONS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    places, inside = _places(n, SIZE, BLOCK)
    c = tl.load(c_in + places, mask=inside, other=0.0)
    g = c * tl.load(grad + places, mask=inside, other=0.0)
    rows = tl.sum(g, axis=2)[:, :, None]
    columns = tl.sum(g, axis=1)[:, None, :]
    a = rows
    b = columns - tl.sum(c * a, axis=1)[:, None, :]
    for _ in range(ITERATIONS - 1):
        a = rows - tl.sum(c * b, axis=2)[:, :, None]
        b = columns - tl.sum(c * a, axis=1)[:, None, :]
    tl.store(out + places, g - c * (a + b), mask=inside)


def balance_cuda(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """float32 [n, s, s], s a power of two."""
    x = logits.float().contiguous()
    n, size = x.shape[0], x.shape[-1]
    out = torch.empty_like(x)
    _balance[(triton.cdiv(n, _BLOCK),)](x, out, n, eps, iterations, size, _BLOCK)
    return out


def gradient_cuda(c: torch.Tensor, grad: torch.Tensor, iterations: int) -> torch.Tensor:
    n, size = c.shape[0], c.shape[-1]
    out = torch.empty_like(c)
    grid = (triton.cdiv(n, _BLOCK),)
    _gradient[grid](c, grad.float().contiguous(), out, n, iterations, size, _BLOCK)
    return out
