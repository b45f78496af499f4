"""From logits to a token.

Greedy (temperature 0): the highest logit, the lowest id among equals. Otherwise, with
p = softmax(logits / temperature) in float64:

1. order the ids by falling p, equals by rising id;
2. keep the shortest prefix of that order whose sum reaches top_p (at least one id);
3. u = uniform(seed, position) in [0, 1); take the first id of the prefix at which the running sum
   exceeds u times the prefix's sum.

`position` is the place in the sequence that the token will take. Nothing else enters, so a row's
token does not depend on what shares the step, and a resumed sequence goes on with the same draws.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch

from headrace.core.request import Sampling


def uniform(seed: int, position: int, purpose: bytes = b"draw") -> float:
    """A number in [0, 1) on a grid of 2^-53 from SHA-256 over (purpose, seed, position): one of
    another purpose is independent of it."""
    digest = hashlib.sha256(purpose + struct.pack("<QQ", seed, position)).digest()
    return float(int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def kept_by_top_p(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """(ids in falling order of p, running sums of their p) of the kept prefix.

    `logits`: one row, with a finite maximum; -inf stands for an id that is never drawn."""
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    sums = np.cumsum(p[order])
    # The full sum may end a rounding below top_p = 1: then all ids are kept.
    count = min(int(np.searchsorted(sums, sampling.top_p, side="left")) + 1, len(sums))
    return order[:count], sums[:count]


def draw(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """The token for `position` at a temperature above 0; `logits` as in `kept_by_top_p`."""
    ids, sums = kept_by_top_p(logits, sampling)
    place = int(np.searchsorted(sums, uniform(sampling.seed, position) * sums[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[int | None]:
    """One token a row of `logits` [n, vocab]; None for a row with NaN or without a finite
    maximum. Only rows with a temperature travel to the host."""
    # max() names the first of several equal maxima, and a NaN is the maximum of its row.
    best, ids = logits.max(dim=1)
    tokens: list[int | None] = [
        token if good else None
        for token, good in zip(ids.tolist(), torch.isfinite(best).tolist(), strict=True)
    ]
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0 and tokens[row] is not None:
            tokens[row] = draw(logits[row].cpu().numpy(), sampling, position)
    return tokens
