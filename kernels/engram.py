"""n-gram memory: gathered table rows gate a value into every residual stream."""

from __future__ import annotations

import torch

from headrace.kernels.norms import as_dtype


def add_engram(
    h: torch.Tensor,
    rows: torch.Tensor,
    wkv: torch.Tensor,
    qk_weight: torch.Tensor,
    image: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """H_c + gate_c * value for streams h [n, hc, D]; table rows [n, R] of the row's n-grams.

    wkv is [R, (hc + 1) D] (transposed: hc keys, then the value), qk_weight [hc, D] in the
    accumulate dtype. The gate is 0 on image rows (bool [n]).
    """
    n, streams, dim = h.shape
    wide = qk_weight.dtype
    projected = as_dtype(rows @ wkv, wide).view(n, streams + 1, dim)
    key, value = projected[:, :streams], projected[:, streams:]
    stream = as_dtype(h, wide)
    dot = (stream * qk_weight * key).sum(-1)
    dot = dot * torch.rsqrt((stream * stream).mean(-1) + eps)
    dot = dot * torch.rsqrt((key * key).mean(-1) + eps) * dim**-0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    if image is not None:
        gate = gate.masked_fill(image.unsqueeze(-1), 0.0)
    return as_dtype(torch.addcmul(stream, gate.unsqueeze(-1), value), h.dtype)
