"""The verdict on drafts: against the rule written out plainly and against the law it must keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.request import Sampling
from headrace.engine.sampler import draw, uniform
from headrace.engine.speculation import Drafts, Verdict, law, verify

# 0.999 quantiles of chi-square, by degrees of freedom (printed tables).
CHI_SQUARE_999 = {4: 18.467, 5: 20.515, 15: 37.697}


def logits_of(*rows: Sequence[float]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(rows, dtype=np.float32))


def one_hot(*tokens: int, vocab: int = 6) -> torch.Tensor:
    """Logits whose greedy tokens are these."""
    rows = torch.zeros(len(tokens), vocab)
    rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 2.0
    return rows


@pytest.mark.parametrize("accepted", range(6))
def test_greedy_keeps_drafts_up_to_the_first_that_differs(accepted: int) -> None:
    text = (3, 1, 4, 1, 5, 2)
    drafts = [*text[:5]]
    if accepted < 5:
        drafts[accepted] = 0  # what follows a wrong draft does not matter, right or not
    verdict = verify(one_hot(*text), Drafts(tuple(drafts)), Sampling(), 100)
    assert verdict == Verdict(text[: accepted + 1], accepted)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    rows = logits_of([1, 5, 5], [4, 0, 4])
    assert verify(rows, Drafts((1,)), Sampling(), 9) == Verdict((1, 0), 1)
    assert verify(rows, Drafts((2,)), Sampling(), 9) == Verdict((1,), 0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_only_rows_that_the_verdict_needs_must_be_numbers(sampling: Sampling, bad: float) -> None:
    broken = torch.full((1, 6), bad)
    certain = torch.full((1, 6), -1000.0)
    certain[0, 2] = 1000.0
    laws = (np.eye(6)[2], np.eye(6)[2])
    right, wrong = Drafts((2, 2), laws), Drafts((4, 2), (np.eye(6)[4], laws[1]))
    first = torch.cat((broken, certain, certain))
    last = torch.cat((certain, certain, broken))
    assert verify(first, right, sampling, 7) is None
    assert verify(last, right, sampling, 7) is None
    assert verify(last, wrong, sampling, 7) == Verdict((2,), 0)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=9),
    st.floats(0.2, 2),
    st.floats(0.05, 1),
    st.integers(0, 99),
)
@example([0.0, 0.0, 2.0**-52], 2.0, 0.5, 0)
def test_the_law_is_what_the_sampler_draws_with(
    logits: list[float], temperature: float, top_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    row = np.asarray(logits, dtype=np.float32)
    own = law(row, sampling)
    assert own.sum() == pytest.approx(1.0, abs=1e-12)
    assert own[draw(row, sampling, 5)] > 0
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    kept = own > 0
    assert np.allclose(own[kept], weights[kept] / weights[kept].sum(), atol=1e-12)
    # The kept ones are the most probable, the fewest whose mass reaches top_p. Two logits that
    # differ by less than their exponentials can tell are as probable as each other.
    assert weights[kept].min() >= (weights[~kept].max() if (~kept).any() else 0) * (1 - 1e-12)
    mass = weights[kept].sum() / weights.sum()
    assert mass >= top_p - 1e-12
    assert mass - weights[kept].min() / weights.sum() < top_p + 1e-12


@given(st.integers(0, 1 << 30), st.integers(0, 5000), st.data())
def test_a_verdict_is_the_rule_written_out(seed: int, position: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    m, vocab = data.draw(st.integers(0, 5)), 5
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=seed)
    rows = rng.normal(0, 2, (m + 1, vocab)).astype(np.float32)
    laws = tuple(law(rng.normal(0, 2, vocab), sampling) for _ in range(m))
    tokens = tuple(int(rng.choice(vocab, p=own)) for own in laws)
    verdict = verify(torch.from_numpy(rows), Drafts(tokens, laws), sampling, position)
    assert verdict is not None
    wanted: list[int] = []
    for i, (token, own) in enumerate(zip(tokens, laws, strict=True)):
        target = law(rows[i], sampling)
        ratio = min(1.0, target[token] / own[token])
        if uniform(seed, position + i, b"accept") < ratio:
            wanted.append(token)
            continue
        rest = [max(0.0, p - q) for p, q in zip(target, own, strict=True)]
        u = uniform(seed, position + i) * sum(rest)
        sums = list(accumulate(rest))
        wanted.append(next(t for t, total in enumerate(sums) if total > u))
        break
    else:
        wanted.append(draw(rows[m], sampling, position + m))
    assert verdict == Verdict(tuple(wanted), len(wanted) - 1)


def chi_square(counts: Counter[object], expected: dict[object, float]) -> float:
    assert set(counts) <= {cell for cell, share in expected.items() if share > 0}
    total = sum(counts.values())
    return sum(
        (counts[cell] - total * share) ** 2 / (total * share)
        for cell, share in expected.items()
        if share > 0
    )


def drafted(own: np.ndarray, seed: int, position: int) -> int:
    u = uniform(seed, position, b"draft")
    return int(np.searchsorted(np.cumsum(own), u * own.sum(), side="right"))


@pytest.mark.parametrize(
    ("target", "draft", "top_p"),
    [
        ([0.0, 1.0, 2.0, 0.5, -1.0, 1.5], [2.0, 0.0, -1.0, 0.5, 1.0, 0.0], 1.0),
        ([0.0, 1.0, 2.0, 0.5, -1.0, 1.5], [0.0, 1.1, 2.0, 0.4, -1.0, 1.4], 1.0),
        ([0.0, 1.0, 2.0, 0.5, -1.0, 1.5], [2.0, 2.0, 1.0, 2.0, 3.0, 0.0], 0.95),
    ],
    ids=["far", "near", "top_p"],
)
def test_a_token_has_the_target_s_law(
    target: list[float], draft: list[float], top_p: float
) -> None:
    """5,000 seeds; the law that the draft came from shows in how many stay, not in the text."""
    counts: Counter[object] = Counter()
    accepted = 0
    rows = logits_of(target, target)
    for seed in range(5_000):
        sampling = Sampling(temperature=0.8, top_p=top_p, seed=seed)
        own = law(np.asarray(draft), sampling)
        token = drafted(own, seed, 11)
        verdict = verify(rows, Drafts((token,), (own,)), sampling, 11)
        assert verdict is not None
        counts[verdict.token_ids[0]] += 1
        accepted += verdict.accepted
    wanted = law(np.asarray(target), Sampling(temperature=0.8, top_p=top_p))
    expected: dict[object, float] = dict(enumerate(wanted))
    degrees = int((wanted > 0).sum()) - 1
    assert chi_square(counts, expected) < CHI_SQUARE_999[degrees]
    overlap = np.minimum(wanted, law(np.asarray(draft), Sampling(0.8, top_p))).sum()
    assert accepted / 5_000 == pytest.approx(overlap, abs=0.025)  # 3.5 deviations at most


def test_two_tokens_have_the_joint_law_also_when_the_second_is_drafted_again() -> None:
    """Two drafts; where the first falls, the second position is drafted and verified in a step of
    its own, with the same numbers that made the draft that was thrown away."""
    rng = np.random.default_rng(4)
    first, second = rng.normal(0, 1, 4), rng.normal(0, 1, (4, 4))
    own_first, own_second = rng.normal(0, 1, 4), rng.normal(0, 1, (4, 4))
    bonus = np.zeros(4)
    counts: Counter[object] = Counter()
    steps: Counter[int] = Counter()
    for seed in range(5_000):
        sampling = Sampling(temperature=1.0, seed=seed)
        q1 = law(own_first, sampling)
        d1 = drafted(q1, seed, 30)
        q2 = law(own_second[d1], sampling)
        d2 = drafted(q2, seed, 31)
        rows = logits_of(first, second[d1], bonus)
        verdict = verify(rows, Drafts((d1, d2), (q1, q2)), sampling, 30)
        assert verdict is not None
        text = verdict.token_ids[:2]
        steps[verdict.accepted] += 1
        if len(text) == 1:
            q2 = law(own_second[text[0]], sampling)
            d2 = drafted(q2, seed, 31)
            rows = logits_of(second[text[0]], bonus)
            again = verify(rows, Drafts((d2,), (q2,)), sampling, 31)
            assert again is not None
            text = (text[0], again.token_ids[0])
        counts[text] += 1
    plain = Sampling(temperature=1.0)
    p1 = law(first, plain)
    expected: dict[object, float] = {
        (a, b): p1[a] * law(second[a], plain)[b] for a, b in product(range(4), range(4))
    }
    assert min(steps[k] for k in range(3)) > 250  # all three ways were taken often
    assert chi_square(counts, expected) < CHI_SQUARE_999[15]


def test_without_drafts_a_verdict_is_the_plain_draw() -> None:
    rng = np.random.default_rng(1)
    for seed in range(50):
        sampling = Sampling(temperature=0.7, top_p=0.8, seed=seed)
        row = rng.normal(0, 2, 50).astype(np.float32)
        verdict = verify(torch.from_numpy(row[None]), Drafts(()), sampling, seed)
        assert verdict == Verdict((draw(row, sampling, seed),), 0)


def test_equal_laws_keep_every_draft() -> None:
    row = [0.3, 1.0, -2.0, 0.0]
    for seed in range(300):
        sampling = Sampling(temperature=1.0, seed=seed)
        own = law(np.asarray(row, dtype=np.float32), sampling)
        token = drafted(own, seed, 3)
        verdict = verify(logits_of(row, row), Drafts((token,), (own,)), sampling, 3)
        assert verdict is not None and verdict.accepted == 1


def test_rows_and_drafts_that_do_not_belong_together_are_refused() -> None:
    sampling = Sampling(temperature=1.0, seed=0)
    own = np.full(4, 0.25)
    for how in (sampling, Sampling()):
        with pytest.raises(ValueError, match="2 drafts need 3 rows, got 1"):
            verify(logits_of([0, 0, 0, 0]), Drafts((1, 1), (own, own)), how, 3)
