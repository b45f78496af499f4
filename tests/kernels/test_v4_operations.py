"""V4's own operations: torch references against plain loops and rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from headrace.kernels import compressor, indexer, mhc, moe, norms, rope_row_scales, rope_rows

F64 = torch.float64
DTYPES = (torch.float32, torch.float64)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_overlapped_pooling_reads_first_halves_then_second_halves() -> None:
    n, r, c = 3, 4, 5
    z, v = rand(n, 2 * r, 2 * c), rand(n, 2 * r, 2 * c, seed=1)
    absent = torch.zeros((n, 2 * r), dtype=torch.bool)
    absent[1, :4] = True  # the first group of a text
    absent[2, :2] = True
    z[1, :4], v[2, :2] = float("nan"), float("nan")  # what does not exist is not read
    got = compressor.pool_overlapped(z, v, absent)
    for row in range(n):
        for channel in range(c):
            live = [t for t in range(2 * r) if not absent[row, t]]
            at = {t: channel if t < r else c + channel for t in live}
            top = sum(math.exp(z[row, t, at[t]]) * float(v[row, t, at[t]]) for t in live)
            bottom = sum(math.exp(z[row, t, at[t]]) for t in live)
            assert float(got[row, channel]) == pytest.approx(top / bottom, abs=1e-12)
    # Neither a former group's second half nor the own group's first half counts.
    z[0, :r, c:], z[0, r:, :c], v[0, :r, c:], v[0, r:, :c] = 9.0, 9.0, 9.0, 9.0
    assert torch.equal(compressor.pool_overlapped(z, v, absent)[0], got[0])


@pytest.mark.parametrize("d", [1, 2, 32, 128])
def test_hadamard_is_the_orthonormal_matrix(d: int) -> None:
    signs = [[(-1) ** (i & j).bit_count() for j in range(d)] for i in range(d)]
    matrix = torch.tensor(signs, dtype=F64) / math.sqrt(d)
    x, y = rand(6, 3, d), rand(6, 3, d, seed=1)
    assert torch.allclose(indexer.hadamard(x), x @ matrix, atol=1e-12)
    dots = (indexer.hadamard(x) * indexer.hadamard(y)).sum(-1)
    assert torch.allclose(dots, (x * y).sum(-1), atol=1e-12)


def test_a_row_s_hadamard_does_not_depend_on_its_company() -> None:
    x = rand(9, 64)
    assert torch.equal(indexer.hadamard(x)[4:5], indexer.hadamard(x[4:5]))


def test_unit_norm() -> None:
    x = rand(2, 3, 8)
    for row in range(2):
        for head in range(3):
            scale = 1 / math.sqrt(float((x[row, head] ** 2).mean()) + 1e-6)
            assert torch.allclose(norms.unit_norm(x, 1e-6, F64)[row, head], x[row, head] * scale)
    assert norms.unit_norm(x.to(torch.bfloat16), 1e-6, torch.float32).dtype == torch.bfloat16


def test_weights_of_experts_chosen_by_token() -> None:
    x, gate = rand(4, 6), rand(6, 5, seed=1)
    experts = torch.tensor([[0, 4], [3, 1], [2, 0], [4, 3]])
    got = moe.route_to(x, gate, experts, 1.5)
    for row in range(4):
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in (x[row] @ gate).tolist()]
        chosen = [scores[e] for e in experts[row].tolist()]
        want = [1.5 * s / sum(chosen) for s in chosen]
        assert got[row].tolist() == pytest.approx(want, abs=1e-12)


def test_head_gates_normalise_after_projecting() -> None:
    n, hc, d = 3, 4, 6
    h, fn = rand(n, hc, d), rand(hc * d, hc, seed=1)
    base, scale = rand(hc, seed=2), torch.tensor([0.7], dtype=F64)
    got = mhc.head_gates(h, fn, base, scale, 1e-6, 1e-3)
    for row in range(n):
        flat = h[row].flatten()
        unit = flat / math.sqrt(float((flat**2).mean()) + 1e-6)
        for s in range(hc):
            m = float(unit @ fn[:, s]) * 0.7 + float(base[s])
            assert float(got[row, s]) == pytest.approx(1 / (1 + math.exp(-m)) + 1e-3, abs=1e-12)


# ---- rows ----------------------------------------------------------------------------------


def e4m3(code: int) -> Fraction:
    exponent, mantissa = (code >> 3) & 15, Fraction(code & 7, 8)
    size = mantissa / 64 if exponent == 0 else (1 + mantissa) * Fraction(2) ** (exponent - 7)
    return -size if code & 128 else size


def test_a_row_of_the_release_weighs_584_bytes() -> None:
    assert rope_row_scales(448) == 8
    row = rope_rows.quantize_rope_rows(rand(1, 512), 64)
    assert row.shape == (1, 584)
    assert row[0, 576:583].gt(0).all() and row[0, 583] == 0  # seven scales and a byte unused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("plain", "rope"), [(64, 32), (128, 2), (448, 64), (512, 64), (576, 8)])
def test_rope_rows_equal_the_definition(dtype: torch.dtype, plain: int, rope: int) -> None:
    x = rand(5, plain + rope, dtype=dtype) * torch.tensor([[1e-6], [0.3], [1.0], [40.0], [5e4]])
    x = x.to(dtype)
    rows = rope_rows.quantize_rope_rows(x, rope)
    back = rope_rows.dequantize_rope_rows(rows, rope, F64)
    assert back.shape == x.shape
    for row, values, decoded in zip(rows.tolist(), x.tolist(), back.tolist(), strict=True):
        for g in range(plain // 64):
            part = range(64 * g, 64 * g + 64)
            amax = max(1e-4, *(abs(values[i]) for i in part))
            power = Fraction(2) ** (row[plain + 2 * rope + g] - 127)
            assert amax / 448 <= power * (1 + 2**-20) and power / 2 < Fraction(amax) / 448
            for i in part:
                stored = e4m3(row[i]) * power
                assert Fraction(decoded[i]) == stored
                # nearest: no farther than half a step of its own size
                step = max(abs(stored) / 8, power / 512)
                assert abs(Fraction(values[i]) - stored) <= step / 2 * (1 + Fraction(1, 1000))
        for i in range(plain, plain + rope):
            wide = torch.tensor(values[i], dtype=torch.float64)
            assert decoded[i] == float(nearest_bf16(float(wide)))
    again = rope_rows.quantize_rope_rows(back.to(dtype), rope)  # values on the grid survive
    assert torch.equal(rope_rows.dequantize_rope_rows(again, rope, F64), back)


def nearest_bf16(x: float) -> Fraction:
    """Ties to even, one rounding from float64."""
    mantissa, exponent = math.frexp(x)
    scaled = Fraction(mantissa) * 256
    low = math.floor(scaled)
    rest = scaled - low
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2)
    return (low + int(up)) * Fraction(2) ** (exponent - 8)


def test_bf16_rounds_once_from_float64() -> None:
    tie = 1.0 + 2.0**-8
    x = torch.full((1, 66), 0.0, dtype=F64)
    x[0, 64], x[0, 65] = tie, tie + 2.0**-40
    back = rope_rows.dequantize_rope_rows(rope_rows.quantize_rope_rows(x, 2), 2, F64)
    assert back[0, 64:].tolist() == [1.0, 1.0 + 2.0**-7]
    assert x[0, 65].to(torch.float32).to(torch.bfloat16) == 1.0  # the detour would round down


def test_float_rows_keep_float32() -> None:
    x = rand(3, 7, dtype=torch.float32)
    rows = rope_rows.pack_float_rows(x)
    assert rows.shape == (3, 28)
    assert torch.equal(rope_rows.unpack_float_rows(rows, torch.float32), x)


def test_nan_stays_visible() -> None:
    from headrace.kernels import kernels_for
    from headrace.model.row_format import RowFormat, RowKind

    k = kernels_for("cpu")
    for kind in (RowKind.FP8, RowKind.NVFP4, RowKind.FP8_ROPE, RowKind.FLOAT32):
        form = RowFormat(kind, 96, 32)
        x = rand(4, 96, dtype=torch.float32)
        assert not form.has_nan(form.encode(k, x))
        for channel in (0, 63, 64, 95):
            broken = x.clone()
            broken[2, channel] = float("nan")
            assert form.has_nan(form.encode(k, broken)), (kind, channel)
