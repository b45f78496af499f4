"""Sampling: against the definition written out plainly, and against the distribution it names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.request import Sampling
from headrace.engine.sampler import draw, kept_by_top_p, sample, uniform

# 0.999 quantiles of chi-square, by degrees of freedom (printed tables).
CHI_SQUARE_999 = {3: 16.266, 4: 18.467, 7: 24.322}


def plain_top_p(logits: list[float], temperature: float, top_p: float) -> dict[int, float]:
    """Kept ids and their renormalised probabilities, by the definition, in plain Python."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    total = math.fsum(weights)
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept: list[int] = []
    mass = 0.0
    for index in order:
        kept.append(index)
        mass += weights[index] / total
        if mass >= top_p:
            break
    return {i: weights[i] / total / mass for i in kept}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-1.0, -1.0, -1.0, -1.0], [1.0, 2.0, 3.0, 3.0]])
    assert sample(logits, [Sampling()] * 3, [9, 9, 9]) == [1, 0, 2]


def test_rows_that_are_no_numbers() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[0.0, nan, 1.0], [-inf, -inf, -inf], [-inf, 2.0, -inf], [inf, 0.0, 0.0]]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        got = sample(torch.tensor(rows), [sampling] * 4, [0, 1, 2, 3])
        assert got == [None, None, 1, None]


def test_uniform_is_a_fixed_function() -> None:
    # SHA-256(b"draw" + u64le 7 + u64le 100), first 8 bytes little-endian, upper 53 bits.
    # Anything else would give resumed sequences other tokens than their first run.
    assert uniform(7, 100) == 0.06096984190053378
    assert uniform(7, 101) != uniform(8, 100)
    values = [uniform(seed, position) for seed in range(30) for position in range(30)]
    assert len(set(values)) == 900
    assert all(0.0 <= value < 1.0 for value in values)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([1e-6, 0.3, 0.5, 0.9, 1.0]),
)
def test_top_p_keeps_what_the_definition_keeps(
    logits: list[float], temperature: float, top_p: float
) -> None:
    wanted = plain_top_p(logits, temperature, top_p)
    got, sums = kept_by_top_p(np.array(logits, np.float32), Sampling(temperature, top_p, 0))
    near = abs(sum(plain_top_p(logits, temperature, 1.0)[i] for i in list(wanted)[:-1]) - top_p)
    if top_p == 1.0 or near < 1e-12:
        return  # a rounding decides whether the last id is kept
    assert got.tolist() == list(wanted)
    masses = np.diff(np.concatenate([[0.0], sums])) / sums[-1]
    assert np.allclose(masses, list(wanted.values()), rtol=1e-9)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, 8), (0.95, 5), (0.9, 4)], ids=["all", "five", "four"]
)
def test_frequencies_fit_the_definition(top_p: float, kept: int) -> None:
    logits = [1.0, 0.2, 2.0, -1.0, 0.6, -0.5, 1.4, -2.0]
    wanted = plain_top_p(logits, 0.8, top_p)
    assert len(wanted) == kept
    row, n = np.array(logits, np.float32), 4000
    counts = dict.fromkeys(range(8), 0)
    for position in range(n):
        counts[draw(row, Sampling(0.8, top_p, 11), position)] += 1
    assert all(counts[i] == 0 for i in range(8) if i not in wanted)
    chi = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in wanted.items())
    assert chi < CHI_SQUARE_999[kept - 1]


def test_masked_ids_are_never_drawn() -> None:
    row = np.array([0.0, -np.inf, 0.0, -np.inf], np.float32)
    drawn = {draw(row, Sampling(2.0, 1.0, 5), position) for position in range(200)}
    assert drawn == {0, 2}


def test_a_draw_depends_on_seed_position_and_logits_only() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    samplings = [Sampling(1.0, 0.95, seed) for seed in range(6)]
    positions = list(range(100, 106))
    together = sample(logits, samplings, positions)
    alone = [
        sample(logits[i : i + 1], samplings[i : i + 1], positions[i : i + 1])[0] for i in range(6)
    ]
    assert together == alone
    shuffled = sample(logits.flip(0), samplings[::-1], positions[::-1])
    assert shuffled == together[::-1]
    other = sample(logits, samplings, [p + 1 for p in positions])
    assert other != together
