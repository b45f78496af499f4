"""The three KV formats against their definitions, evaluated in exact rational arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import formats

E2M1 = [Fraction(x) for x in (0, "1/2", 1, "3/2", 2, 3, 4, 6)]
DTYPES = (torch.float32, torch.float64)


def e4m3_levels() -> list[Fraction]:
    """Magnitudes of codes 0..126 from the format's definition: 4 exponent, 3 mantissa bits."""
    levels = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            levels.append(Fraction(mantissa, 8) * Fraction(1, 64))
        else:
            levels.append((1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7))
    return levels


E4M3 = e4m3_levels()


def nearest_code(x: Fraction, levels: list[Fraction]) -> int:
    """Code of the level nearest to |x|, ties to the even code, saturating."""
    x = abs(x)
    at = bisect_left(levels, x)
    if at == 0:
        return 0
    if at == len(levels):
        return len(levels) - 1
    below, above = x - levels[at - 1], levels[at] - x
    if below == above:
        return at if at % 2 == 0 else at - 1
    return at if above < below else at - 1


def power_of_two_above(x: Fraction) -> int:
    """ceil(log2 x) exactly."""
    e = math.floor(math.log2(float(x))) - 2
    while Fraction(2) ** e < x:
        e += 1
    return e


def sign_bit(value: float) -> int:
    return int(math.copysign(1.0, value) < 0)


def divide(a: float, b: float, dtype: torch.dtype) -> float:
    """a / b with one rounding in the computing dtype."""
    if dtype == torch.float32:
        return float(np.float32(a) / np.float32(b))
    return a / b


def fp8_row(values: list[float], dtype: torch.dtype) -> list[int]:
    data, scales = [], []
    for g in range(0, len(values), 32):
        group = values[g : g + 32]
        amax = max(float(torch.tensor(1e-4, dtype=dtype)), *(abs(v) for v in group))
        e = power_of_two_above(Fraction(divide(amax, 448.0, dtype)))
        scales.append(e + 127)
        for v in group:
            code = nearest_code(Fraction(v) / Fraction(2) ** e, E4M3)
            data.append(code | sign_bit(v) << 7)
    return data + scales


def nibbles(codes: list[int]) -> list[int]:
    return [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]


def mxfp4_row(values: list[float], dtype: torch.dtype) -> list[int]:
    codes, scales = [], []
    for g in range(0, len(values), 32):
        group = values[g : g + 32]
        amax = max(6 * 2.0**-126, *(abs(v) for v in group))
        e = power_of_two_above(Fraction(divide(amax, 6.0, dtype)))
        scales.append(e + 127)
        for v in group:
            codes.append(nearest_code(Fraction(v) / Fraction(2) ** e, E2M1) | sign_bit(v) << 3)
    return nibbles(codes) + scales


def nvfp4_row(values: list[float], dtype: torch.dtype) -> list[int]:
    codes, scales = [], []
    for g in range(0, len(values), 16):
        group = values[g : g + 16]
        amax = max(6 * 2.0**-9, *(abs(v) for v in group))
        scale = nearest_code(Fraction(divide(amax, 6.0, dtype)), E4M3)
        scales.append(scale)
        for v in group:
            scaled = divide(v, float(E4M3[scale]), dtype)
            codes.append(nearest_code(Fraction(scaled), E2M1) | sign_bit(v) << 3)
    return nibbles(codes) + scales


def quantised(kind: str, x: torch.Tensor) -> list[list[int]]:
    if kind == "mxfp4":
        return torch.cat(formats.quantize_mxfp4(x), dim=-1).tolist()
    return getattr(formats, f"quantize_{kind}_rows")(x).tolist()


REFERENCE = {"fp8": fp8_row, "mxfp4": mxfp4_row, "nvfp4": nvfp4_row}


def edge_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows on and one step beside every tie and every scale border, and extreme magnitudes."""
    ties = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)]
    ties += [(a + b) / 2 for a, b in zip(E4M3[::5], E4M3[1::5], strict=False)]
    base = torch.tensor([float(t) for t in ties], dtype=dtype)
    up = torch.nextafter(base, torch.full_like(base, 1e9))
    down = torch.nextafter(base, torch.zeros_like(base))
    points = torch.cat((base, up, down, -base, -up, -down))
    rows = []
    for largest in (6.0, 448.0, 1.0, 6 * 2.0**-9, 1e-4, 7.0, 2.0**-7 * 448, 3000.0):
        filler = points[points.abs() <= largest][: 31 * (points.numel() // 31)]
        for part in filler.split(31):
            row = torch.zeros(32, dtype=dtype)
            row[: part.numel()], row[31] = part, largest
            rows.append(row)
    rows += [torch.full((32,), v, dtype=dtype) for v in (0.0, 1e-30, -1e-30, 1e6, -0.0)]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", REFERENCE)
def test_edges_equal_the_definition(kind, dtype):
    x = edge_rows(dtype)
    assert x.shape[0] > 20
    expected = [REFERENCE[kind](row.tolist(), dtype) for row in x]
    assert quantised(kind, x) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", REFERENCE)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 12))
def test_random_rows_equal_the_definition(kind, dtype, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((3, 64), generator=generator, dtype=dtype) * 2.0**exponent
    expected = [REFERENCE[kind](row.tolist(), dtype) for row in x]
    assert quantised(kind, x) == expected


def test_every_e4m3_code_round_trips():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    for dtype in DTYPES:
        values = formats.decode_e4m3(codes, dtype)
        assert values.isnan().tolist() == (~finite).tolist()
        assert values[:127].tolist() == [float(level) for level in E4M3]
        assert torch.equal(formats.encode_e4m3(values[finite]), codes[finite])


def test_every_e2m1_code_round_trips():
    packed = torch.arange(256, dtype=torch.uint8)
    for dtype in DTYPES:
        values = formats.decode_e2m1(packed.unsqueeze(1), dtype)
        low = [float(level) for level in E2M1] + [-float(level) for level in E2M1]
        assert values[:16, 0].tolist() == low
        assert torch.equal(formats.pack_nibbles(formats.encode_e2m1(values)).squeeze(1), packed)


def test_every_e8m0_byte_scales_by_its_power_of_two_and_255_is_nan():
    for byte in range(1, 255):
        row = torch.full((1, 33), byte, dtype=torch.uint8)
        row[0, :32] = 0x38  # 1.0
        assert formats.dequantize_fp8_rows(row, torch.float64)[0, 0] == 2.0 ** (byte - 127)
    poison = torch.full((1, 33), 0xFF, dtype=torch.uint8)
    assert formats.dequantize_fp8_rows(poison, torch.float32).isnan().all()
    index = torch.zeros((1, 16), dtype=torch.uint8), torch.full((1, 1), 0xFF, dtype=torch.uint8)
    assert formats.dequantize_mxfp4(*index, torch.float32).isnan().all()
    main = torch.full((1, 18), 0xFF, dtype=torch.uint8)
    assert formats.dequantize_nvfp4_rows(main, torch.float64).isnan().all()


def test_e4m3_rounds_once_from_float64():
    """Just above a tie, by less than float32 resolves: a detour over float32 would round down."""
    tie = 1.0 + 1.0 / 16  # between codes of 1.0 and 1.125; ties go to 1.0
    x = torch.tensor([tie, tie + 2.0**-40, -tie - 2.0**-40], dtype=torch.float64)
    assert formats.encode_e4m3(x).tolist() == [0x38, 0x39, 0xB9]
    assert x.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).tolist()[1] == 0x38


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_on_the_grid_survive(dtype):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((40, 64), generator=generator, dtype=dtype)
    rows = formats.quantize_fp8_rows(x)
    again = formats.dequantize_fp8_rows(rows, dtype)
    assert torch.equal(formats.dequantize_fp8_rows(formats.quantize_fp8_rows(again), dtype), again)
    main = formats.dequantize_nvfp4_rows(formats.quantize_nvfp4_rows(x), dtype)
    assert torch.equal(
        formats.dequantize_nvfp4_rows(formats.quantize_nvfp4_rows(main), dtype), main
    )
    index = formats.round_mxfp4(x)
    assert torch.equal(formats.round_mxfp4(index), index)
    assert rows.shape == (40, 66) and formats.quantize_nvfp4_rows(x).shape == (40, 36)
