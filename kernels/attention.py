"""Attention of query rows over gathered keys, with one sink logit a head. K and V are one."""

from __future__ import annotations

import torch

from headrace.kernels.norms import as_dtype


def attend(
    q: torch.Tensor,
    window: torch.Tensor,
    window_dead: torch.Tensor,
    main: torch.Tensor | None,
    main_dead: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(q.key * scale, sink) over window and main keys in one softmax: [n, heads, hd].

    q [n, heads, hd]; window [n, W, hd] (may be an overlapping view) and main [n, K, hd] hold
    finite values also where dead ([n, W], [n, K] bool; their content must have been replaced
    before, since a weight of zero does not silence a NaN). sink [heads] in the accumulate dtype
    adds to the denominator only: a row without live keys yields 0.
    """
    n, heads, _ = q.shape
    wide = sink.dtype
    q = as_dtype(q, wide) * scale
    keys = as_dtype(window, wide)
    parts = [torch.bmm(q, keys.transpose(1, 2)).masked_fill_(window_dead.unsqueeze(1), -torch.inf)]
    if main is not None and main_dead is not None:
        values = as_dtype(main, wide)
        scores = torch.bmm(q, values.transpose(1, 2))
        parts.append(scores.masked_fill_(main_dead.unsqueeze(1), -torch.inf))
    parts.append(sink.view(1, heads, 1).expand(n, heads, 1))
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    width = keys.shape[1]
    out = torch.bmm(weights[..., :width], keys)
    if main is not None:
        out = torch.baddbmm(out, weights[..., width:-1], values)
    return out
