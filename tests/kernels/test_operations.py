"""Torch references against plain loops, and the properties that bit-equality rests on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import (
    OPERATIONS,
    attention,
    dispatch,
    engram,
    frequencies,
    indexer,
    kernels_for,
    mhc,
    moe,
    norms,
    phases,
    rope,
    yarn_frequencies,
)

F64 = torch.float64


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def best(scores: list[float], k: int) -> list[int]:
    """The k best entries, ties to the lowest, ascending, -inf never."""
    live = [j for j, s in enumerate(scores) if s > -math.inf]
    return sorted(sorted(live, key=lambda j: (-scores[j], j))[:k])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    rows=st.integers(1, 5),
    entries=st.integers(1, 90),
    k=st.integers(1, 20),
    levels=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_both_selection_methods_are_stable(rows, entries, k, levels, seed):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(-levels, levels, (rows, entries)).astype(np.float64))
    scores[torch.from_numpy(rng.random((rows, entries)) < 0.2)] = -torch.inf
    wanted = []
    for row in scores.tolist():
        chosen = best(row, k)
        wanted.append(chosen + [-1] * (k - len(chosen)))
    assert indexer.select_top(scores, k, k).tolist() == wanted
    by_threshold = indexer._select_by_threshold(scores, min(k, entries))
    width = min(k, entries)
    assert by_threshold.tolist() == [row[:width] for row in wanted]


def test_large_selections_use_the_threshold_and_agree():
    scores = torch.round(rand(8, 4000) * 20) / 20
    assert scores.numel() > indexer._SORT_LIMIT
    wanted = [best(row, 64) for row in scores.tolist()]
    assert indexer.select_top(scores, 64, 64).tolist() == wanted
    assert indexer.select_top(scores[:2], 64, 70).tolist() == [w + [-1] * 6 for w in wanted[:2]]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("visible", [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100])
def test_candidate_blocks_at_their_borders(block_size, visible):
    total, top = 100, 3
    scores = rand(1, total, seed=visible)
    scores[0, visible:] = -torch.inf
    keep = indexer.candidate_entries(scores, torch.tensor([visible]), top, block_size)[0]
    n_blocks = -(-total // block_size)
    block = [scores[0, b * block_size : (b + 1) * block_size].max().item() for b in range(n_blocks)]
    if visible:
        block[(visible - 1) // block_size] = math.inf
    kept = best(block, top)
    wanted = [j // block_size in kept for j in range(total)]
    assert keep.tolist() == wanted
    assert keep[:visible].sum() == 0 or keep[visible - 1]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_keys_score_equally_wherever_they_stand(dtype):
    """Else a tie would be broken by a key's place in a vector register."""
    key = torch.randint(-6, 7, (64,), generator=torch.Generator().manual_seed(3)).to(dtype) / 2
    q = torch.randint(-6, 7, (1, 3, 4, 64), generator=torch.Generator().manual_seed(4)).to(dtype)
    weights = rand(1, 3, 4, dtype=dtype)
    reference = None
    for total in (1, 2, 3, 7, 8, 9, 31, 33, 100, 257):
        scores = indexer.index_scores(q, key.expand(1, total, 64), weights)
        assert scores.shape == (1, 3, total)
        assert (scores == scores[..., :1]).all()
        reference = scores[..., 0] if reference is None else reference
        assert torch.equal(scores[..., 0], reference)
    plain = sum(max(0.0, float(q[0, 1, h] @ key)) * float(weights[0, 1, h]) for h in range(4))
    assert reference is not None and reference[0, 1].item() == pytest.approx(plain, rel=1e-5)


def test_all_sinkhorn_paths_give_the_same_bits_in_float64():
    c = torch.softmax(rand(17, 4, 4), -1) + 1e-6
    by_numpy = mhc._sinkhorn_numpy(c, 20, 1e-6)
    assert torch.equal(by_numpy, mhc._sinkhorn_torch(c, 20, 1e-6))
    by_floats = [mhc._sinkhorn_floats(row, 20, 1e-6) for row in c.flatten(1).tolist()]
    assert torch.equal(by_numpy, torch.tensor(by_floats, dtype=F64).view(17, 4, 4))
    assert (by_numpy.sum(1) - 1).abs().max() < 1e-4 and (by_numpy.sum(2) - 1).abs().max() < 1e-2


def test_sinkhorn_follows_its_definition():
    logits = rand(2, 4, 4)
    for row, got in zip(logits, mhc.sinkhorn(logits, 3, 1e-6), strict=True):
        c = torch.softmax(row, -1) + 1e-6
        c = c / (c.sum(0, keepdim=True) + 1e-6)
        for _ in range(2):
            c = c / (c.sum(1, keepdim=True) + 1e-6)
            c = c / (c.sum(0, keepdim=True) + 1e-6)
        assert (got - c).abs().max() < 1e-14


@pytest.mark.parametrize("n", [3, 6])
def test_mixes_collapse_and_expand_follow_their_definition(n):
    hc, d, eps, norm_eps = 4, 16, 1e-6, 1e-20
    assert (n <= mhc._FLOAT_ROWS) == (n == 3)
    h, fn, base = rand(n, hc, d), rand(24, hc * d, seed=1), rand(24, seed=2)
    scale = torch.tensor([0.5, 0.7, 0.9], dtype=F64)
    spread = scale.repeat_interleave(torch.tensor([4, 4, 16]))
    pre, post, c = mhc.mixes(h, fn.T.contiguous(), base, spread, 20, norm_eps, eps)
    y = rand(n, d, seed=3)
    out = mhc.expand(y, h, post, c)
    for i in range(n):
        flat = h[i].flatten()
        m = (fn @ flat) / torch.sqrt((flat**2).mean() + norm_eps)
        want_pre = torch.sigmoid(m[:4] * scale[0] + base[:4]) + eps
        want_post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
        want_c = mhc.sinkhorn((m[8:] * scale[2] + base[8:]).view(1, 4, 4), 20, eps)[0]
        assert torch.allclose(pre[i], want_pre, rtol=1e-12)
        assert torch.allclose(post[i], want_post, rtol=1e-12)
        assert torch.allclose(c[i], want_c, rtol=1e-10)
        collapsed = sum(pre[i, s] * h[i, s] for s in range(hc))
        assert torch.allclose(mhc.collapse(h, pre)[i], collapsed, rtol=1e-12)
        for k in range(hc):  # the sum runs over the FIRST index of C
            want = post[i, k] * y[i] + sum(c[i, j, k] * h[i, j] for j in range(hc))
            assert torch.allclose(out[i, k], want, rtol=1e-12)


def test_rms_norm_keeps_a_zero_row_zero_and_a_tiny_row_visible():
    weight = torch.full((8,), 2.0)
    x = torch.stack((torch.zeros(8), torch.full((8,), 1e-9), torch.arange(8.0)))
    out = norms.rms_norm(x, weight, 1e-20)
    for i in range(3):
        assert torch.allclose(norms.rms_norm(x[i : i + 1], weight, 1e-20)[0], out[i])
    assert out[0].abs().max() == 0.0
    assert torch.allclose(out[1], weight * 1e-9 / math.sqrt(1e-18 + 1e-20))
    assert torch.allclose(out[2], x[2] * 2 / math.sqrt(17.5))


def test_rope_turns_adjacent_pairs_of_the_last_channels_and_back():
    freqs = frequencies(4, 10_000.0, F64)
    assert freqs.tolist() == [1.0, pytest.approx(0.01)]
    x, positions = rand(2, 3, 6), torch.tensor([0, 7])
    turned = rope.rotate_(x.clone(), phases(positions, freqs))
    assert torch.equal(turned[0], x[0]) and torch.equal(turned[..., :2], x[..., :2])
    for pair, f in enumerate((1.0, 0.01)):
        a, b = x[1, :, 2 + 2 * pair], x[1, :, 3 + 2 * pair]
        cos, sin = math.cos(7 * f), math.sin(7 * f)
        assert torch.allclose(turned[1, :, 2 + 2 * pair], a * cos - b * sin)
        assert torch.allclose(turned[1, :, 3 + 2 * pair], a * sin + b * cos)
    back = rope.rotate_(turned, phases(positions, freqs).conj())
    assert torch.allclose(back, x)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    base = frequencies(64, 160_000.0, F64)
    scaled = yarn_frequencies(64, 160_000.0, 16.0, 32.0, 1.0, 65_536, F64)
    low = math.floor(64 * math.log(65_536 / (64 * math.pi)) / (2 * math.log(160_000)))
    high = math.ceil(64 * math.log(65_536 / (2 * math.pi)) / (2 * math.log(160_000)))
    assert 0 < low < high < 32
    assert torch.equal(scaled[: low + 1], base[: low + 1])
    assert torch.allclose(scaled[high:], base[high:] / 16)
    assert (scaled[low + 1 : high] < base[low + 1 : high]).all()


def test_attention_equals_a_loop_over_live_keys():
    n, heads, hd, window, extra = 3, 2, 8, 5, 4
    q, sink = rand(n, heads, hd), rand(heads, seed=9)
    keys, main = rand(n, window, hd, seed=1), rand(n, extra, hd, seed=2)
    dead = torch.rand((n, window), generator=torch.Generator().manual_seed(1)) < 0.4
    main_dead = torch.rand((n, extra), generator=torch.Generator().manual_seed(2)) < 0.4
    dead[2], main_dead[2] = True, True
    out = attention.attend(q, keys, dead, main, main_dead, sink, hd**-0.5)
    for i in range(n):
        live = [*keys[i][~dead[i]], *main[i][~main_dead[i]]]
        for h in range(heads):
            weights = [math.exp(float(q[i, h] @ key) * hd**-0.5) for key in live]
            total = sum(weights) + math.exp(float(sink[h]))
            want = sum(
                (w / total * key for w, key in zip(weights, live, strict=True)), torch.zeros(hd)
            )
            assert torch.allclose(out[i, h], want.to(F64), atol=1e-12)
    assert out[2].abs().max() == 0.0
    alone = attention.attend(q, keys, dead, None, None, sink, hd**-0.5)
    assert torch.allclose(alone[2], torch.zeros((heads, hd), dtype=F64))


def test_experts_one_by_one_and_grouped_equal_the_definition():
    n, d, inner, experts, k = 9, 12, 6, 5, 2
    x, gate, bias = rand(n, d), rand(d, experts, seed=1), rand(experts, seed=2) * 0.3
    w13, w2 = rand(experts, d, 2 * inner, seed=3), rand(experts, inner, d, seed=4)
    chosen, weights = moe.route(x, gate, bias, k, 1.5)
    out = moe.expert_sum(x, chosen, weights, w13, w2, 0.8)
    assert n * k > moe._SINGLE_PAIRS
    for i in range(n):
        s = torch.sqrt(torch.log1p(torch.exp(x[i] @ gate)))
        order = sorted(range(experts), key=lambda e: (-float(s[e] + bias[e]), e))[:k]
        assert chosen[i].tolist() == order
        total = sum(float(s[e]) for e in order)
        want = torch.zeros(d, dtype=F64)
        for e in order:
            g = (x[i] @ w13[e][:, :inner]).clamp(max=0.8)
            u = (x[i] @ w13[e][:, inner:]).clamp(-0.8, 0.8)
            a = g * torch.sigmoid(g) * u * (float(s[e]) / total * 1.5)
            want += a @ w2[e]
        assert torch.allclose(out[i], want, atol=1e-12)
        one = moe.expert_sum(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1], w13, w2, 0.8)
        assert torch.allclose(one[0], want, atol=1e-12)


def test_equal_experts_go_to_the_lowest():
    chosen, _ = moe.route(torch.ones(1, 4), torch.zeros(4, 6), torch.zeros(6), 3, 1.0)
    assert chosen.tolist() == [[0, 1, 2]]


def test_engram_gates_every_stream_and_skips_image_rows():
    n, hc, d, width = 2, 4, 6, 10
    h, rows = rand(n, hc, d), rand(n, width, seed=1)
    wkv, qk = rand(width, (hc + 1) * d, seed=2), rand(hc, d, seed=3)
    image = torch.tensor([False, True])
    out = engram.add_engram(h, rows, wkv, qk, image, 1e-20)
    assert torch.equal(out[1], h[1])
    both = (rows[0] @ wkv).view(hc + 1, d)
    for s in range(hc):
        key = both[s]
        dot = float((h[0, s] * qk[s] * key).sum()) / math.sqrt(d)
        dot /= math.sqrt(float((h[0, s] ** 2).mean())) * math.sqrt(float((key**2).mean()))
        root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
        want = h[0, s] + both[hc] / (1 + math.exp(-root))
        assert torch.allclose(out[0, s], want, atol=1e-12)


def test_dispatcher_offers_every_operation_on_both_devices():
    assert kernels_for("cpu") == kernels_for("cuda:0")  # torch everywhere, today
    assert all(callable(getattr(kernels_for("cpu"), name)) for name in OPERATIONS)
    with pytest.raises(KeyError):
        kernels_for("meta")
    assert set(dispatch._BY_DEVICE) == {"cpu", "cuda"}
