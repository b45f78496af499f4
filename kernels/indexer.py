"""Indexer scores and the stable choice of entries and candidate blocks.

Ties are common (relu gives exact zeros, 4-bit keys give equal dots) and must go to the lowest
entry whatever the shapes of a call. 4-bit dots are sums of few-bit products and exact in either
dtype; what follows is elementwise and in a fixed order, so equal keys get equal scores.
"""

from __future__ import annotations

import numpy as np
import torch

# Below this many scores one stable sort is cheaper than the threshold method.
_SORT_LIMIT = 16_384


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_h relu(q_h . key_j) w_h: q [s, m, heads, d], keys [s, N, d], weights [s, m, heads].

    Returns [s, m, N]. Products and sums are separate roundings (a fused multiply-add would be
    applied to some lanes of a vector and not to others).
    """
    s, m, heads, d = q.shape
    dots = torch.bmm(q.reshape(s, m * heads, d), keys.transpose(1, 2)).view(s, m, heads, -1)
    products = dots.relu_().mul_(weights.unsqueeze(-1))
    total = products[:, :, 0]
    for head in range(1, heads):
        total = total + products[:, :, head]
    return total


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., d] times the orthonormal Hadamard matrix, d a power of two.

    Spreads outliers before quantisation (V4); dot products of two rotated vectors are those of
    the vectors. Butterflies in a fixed order: a row's bits do not depend on the others.
    """
    d, half = x.shape[-1], 1
    y = x * d**-0.5
    while half < d:
        pairs = y.view(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return y


def select_top(scores: torch.Tensor, k: int, width: int) -> torch.Tensor:
    """The k best entries of every row, ascending, -1 padded: int64 [n, width], width >= k.

    scores [n, N]; -inf is never selected; ties go to the lowest entry.
    """
    n, total = scores.shape
    k = min(k, total)
    if scores.numel() <= _SORT_LIMIT:
        values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
        order = order[:, :k].masked_fill(values[:, :k] == -torch.inf, total)
        chosen = order.sort(dim=-1).values
        chosen = chosen.masked_fill_(chosen == total, -1)
    else:
        chosen = _select_by_threshold(scores, k)
    if k == width:
        return chosen
    return torch.nn.functional.pad(chosen, (0, width - k), value=-1)


def _select_by_threshold(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Everything above the k-th value, then the first of those equal to it."""
    kth = _kth_largest(scores, k)
    above, keep = scores > kth, scores >= kth
    if int((counts := keep.sum(-1)).max()) > k:  # more equal to the k-th than there is room for
        equal = keep & ~above
        keep = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
        counts = keep.sum(-1)
    if bool((kth == -torch.inf).any()):
        keep &= scores > -torch.inf
        counts = keep.sum(-1)
    rows, entries = keep.nonzero(as_tuple=True)
    n = scores.shape[0]
    if entries.shape[0] == n * k:
        return entries.view(n, k)
    first = counts.cumsum(0) - counts
    chosen = torch.full((n, k), -1, dtype=torch.int64, device=scores.device)
    chosen[rows, torch.arange(rows.shape[0], device=scores.device) - first[rows]] = entries
    return chosen


def _kth_largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest value of every row, [n, 1]."""
    if scores.device.type == "cpu":  # numpy selects in linear time, several times faster than topk
        at = scores.shape[1] - k
        return torch.from_numpy(np.partition(scores.numpy(), at, axis=1)[:, at : at + 1].copy())
    return torch.topk(scores, k, dim=-1, sorted=True).values[:, -1:]


def candidate_entries(
    scores: torch.Tensor, visible: torch.Tensor, topk_blocks: int, block_size: int
) -> torch.Tensor:
    """Entries inside the best `topk_blocks` blocks of each row: bool [n, N].

    A block's score is the maximum over its visible entries; the last visible block always
    stays; blocks without a visible entry never do. visible [n] counts entries, scores [n, N]
    are -inf beyond.
    """
    n, total = scores.shape
    n_blocks = -(-total // block_size)
    padded = torch.nn.functional.pad(scores, (0, n_blocks * block_size - total), value=-torch.inf)
    best = padded.view(n, n_blocks, block_size).amax(-1)
    last = ((visible - 1).clamp(min=0) // block_size).unsqueeze(-1)
    best = best.scatter(1, last, torch.inf)
    best = best.masked_fill((visible == 0).unsqueeze(-1), -torch.inf)
    chosen = select_top(best, topk_blocks, min(topk_blocks, n_blocks))
    keep = torch.zeros((n, n_blocks + 1), dtype=torch.bool, device=scores.device)
    keep.scatter_(1, torch.where(chosen < 0, n_blocks, chosen), True)
    return keep[:, :n_blocks].repeat_interleave(block_size, dim=1)[:, :total]
