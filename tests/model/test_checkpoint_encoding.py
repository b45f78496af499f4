"""Stored formats: widening by the definition, quantising by brute force over all codes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels import kernels_for
from headrace.model.checkpoint import CheckpointError, Encoding, Kind, quantise, widen

FP8_32 = Encoding(Kind.FP8, (32, 32))
FP8_128 = Encoding(Kind.FP8, (128, 128))
FP8_ROWS = Encoding(Kind.FP8, (1, 32))
MXFP4 = Encoding(Kind.MXFP4, (1, 32))
SCALED = [FP8_32, FP8_128, FP8_ROWS, MXFP4]


def code_values(kind: Kind) -> list[float]:
    """Value of every code, written out."""
    if kind is Kind.MXFP4:
        positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        return positive + [-x for x in positive]
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values.append(math.nan if code & 127 == 127 else -value if code & 128 else value)
    return values


def decode(encoding: Encoding, data: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]):  # type: ignore[no-untyped-def]
    """float64 values element by element, from the definition."""
    rows, columns = shape
    values, flat = code_values(encoding.kind), data.tolist()
    out = np.empty(shape)
    for o in range(rows):
        for i in range(columns):
            if encoding.kind is Kind.MXFP4:
                byte = flat[o * (columns // 2) + i // 2]
                code = byte >> 4 if i % 2 else byte & 15
            else:
                code = flat[o * columns + i]
            exponent = int(scale[o // encoding.block[0], i // encoding.block[1]]) - 127
            out[o, i] = values[code] * 2.0**exponent
    return out


@pytest.mark.parametrize("encoding", SCALED, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (40, 96), (3, 32)])
def test_widening_is_the_definition(encoding: Encoding, shape: tuple[int, int]) -> None:
    data_spec, scale_spec = encoding.stored("x.weight", shape)
    assert scale_spec.name == "x.scale"
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, data_spec.n_bytes, dtype=np.uint8)
    if encoding.kind is Kind.FP8:
        codes[codes & 127 == 127] = 3  # NaN codes are refused
    scale = torch.from_numpy(rng.integers(90, 160, scale_spec.shape, dtype=np.uint8))
    data, out = torch.from_numpy(codes), torch.empty(shape)
    widen("x", encoding, data, scale, out)
    wanted = decode(encoding, data, scale, shape)
    assert np.array_equal(out.numpy().astype(np.float64), wanted)
    narrow = torch.empty(shape, dtype=torch.bfloat16)
    widen("x", encoding, data, scale, narrow)
    assert torch.equal(narrow.to(torch.float32), out)


@pytest.mark.parametrize("kind", [Kind.FP8, Kind.MXFP4])
def test_every_code_and_every_scale_widens_and_comes_back(kind: Kind) -> None:
    """All codes of a row under each scale byte; byte 255 and NaN codes are refused below."""
    per_row = 32
    codes = [c for c, v in enumerate(code_values(kind)) if v == v]
    encoding = Encoding(kind, (1, per_row))
    codes += [0] * (-len(codes) % per_row)
    columns = len(codes)
    if kind is Kind.MXFP4:
        row = [a + 16 * b for a, b in zip(codes[::2], codes[1::2], strict=True)]
    else:
        row = codes
    for byte in range(0, 246):  # 448 * 2^(246-127) is past float32
        scale = torch.full((1, columns // per_row), byte, dtype=torch.uint8)
        data, out = torch.tensor(row, dtype=torch.uint8), torch.empty(1, columns)
        widen("x", encoding, data, scale, out)
        values = code_values(kind)
        assert out[0].tolist() == [values[c] * 2.0 ** (byte - 127) for c in codes]


@pytest.mark.parametrize("encoding", SCALED, ids=str)
def test_quantising_takes_the_nearest_value_on_the_finest_grid_that_reaches(
    encoding: Encoding,
) -> None:
    rng = np.random.default_rng(2)
    values = torch.from_numpy(rng.standard_normal((64, 64)).astype(np.float32))
    values *= torch.from_numpy(np.exp2(rng.integers(-12, 12, (64, 1))).astype(np.float32))
    values[5, :32] = 0.0
    data, scale = quantise("x", encoding, values)
    assert scale is not None
    out = decode(encoding, data, scale, (64, 64))
    grid = np.unique([v for v in code_values(encoding.kind) if v == v])
    largest = grid.max()
    b0, b1 = encoding.block
    for r in range(0, 64, b0):
        for c in range(0, 64, b1):
            block = values[r : r + b0, c : c + b1].numpy().astype(np.float64)
            step = 2.0 ** (int(scale[r // b0, c // b1]) - 127)
            distance = np.abs(block[..., None] - grid * step)
            wanted = distance.min(-1)
            assert np.array_equal(np.abs(out[r : r + b0, c : c + b1] - block), wanted)
            amax = np.abs(block).max()
            if amax:  # half the step would clamp: what it loses is more than rounding may
                past = largest * step / 2
                half_gap = (grid[-1] - grid[-2]) * step / 4
                assert amax - past >= half_gap
                assert amax - largest * step <= 2 * half_gap


@pytest.mark.parametrize(
    ("encoding", "top", "limit"),
    [(FP8_ROWS, 448.0, 464.0), (MXFP4, 6.0, np.nextafter(np.float32(7), np.float32(0)))],
    ids=str,
)
def test_scale_steps_exactly_where_the_largest_code_stops_being_nearest(
    encoding: Encoding, top: float, limit: float
) -> None:
    for value, byte in ((limit, 127), (np.nextafter(np.float32(limit), np.float32(1e9)), 128)):
        row = torch.zeros(1, 32)
        row[0, 7] = float(value)
        data, scale = quantise("x", encoding, row)
        assert scale is not None and scale.tolist() == [[byte]]
        if byte == 127:
            assert decode(encoding, data, scale, (1, 32))[0, 7] == top


@pytest.mark.parametrize("encoding", [FP8_ROWS, MXFP4], ids=str)
def test_no_error_grows_against_the_rule_of_activations(encoding: Encoding) -> None:
    """And values that went through that rule already are kept exactly."""
    kernels = kernels_for("cpu")
    rng = np.random.default_rng(3)
    values = torch.from_numpy(rng.standard_normal((500, 64)).astype(np.float32))
    values[:, 1::2] *= 2.0**-14  # reaches the subnormal codes of e4m3
    if encoding.kind is Kind.MXFP4:
        other = kernels.round_mxfp4(values)
    else:
        rows = kernels.quantize_fp8_rows(values)
        other = kernels.dequantize_fp8_rows(rows, torch.float32)
    out = torch.empty_like(values)
    widen("x", encoding, *quantise("x", encoding, values), out)
    assert bool(((out - values).abs() <= (other - values).abs()).all())
    assert not torch.equal(out, other)  # the rules do differ
    again = torch.empty_like(values)
    widen("x", encoding, *quantise("x", encoding, other), again)
    assert torch.equal(again, other)


finite = st.floats(-(2.0**127), 2.0**127, width=32)


@given(st.lists(finite, min_size=1, max_size=64), st.sampled_from(SCALED), st.integers(1, 3))
def test_quantising_what_was_widened_gives_the_same_bytes(
    numbers: list[float], encoding: Encoding, n_rows: int
) -> None:
    columns = 64
    flat = (numbers * (n_rows * columns))[: n_rows * columns]
    values = torch.tensor(flat).view(n_rows, columns)
    data, scale = quantise("x", encoding, values)
    out = torch.empty_like(values)
    widen("x", encoding, data, scale, out)
    data_again, scale_again = quantise("x", encoding, out)
    assert torch.equal(data_again, data)
    assert scale is not None and scale_again is not None
    assert torch.equal(scale_again, scale)


def test_what_is_not_finite_is_refused_on_both_ways() -> None:
    for bad in (math.nan, math.inf, -(2.0**127) * 1.5):
        values = torch.zeros(32, 32)
        values[3, 4] = bad
        for encoding in (FP8_32, MXFP4, Encoding(Kind.BF16)):
            with pytest.raises(CheckpointError, match="w: found a NaN or a value beyond"):
                quantise("w", encoding, values)
    out, ones = torch.empty(32, 32), torch.ones(1024, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="w: found a NaN scale"):
        widen("w", FP8_32, ones, torch.tensor([[255]], dtype=torch.uint8), out)
    scale = torch.tensor([[127]], dtype=torch.uint8)
    widen("w", FP8_32, ones, scale, out)
    ones[1000] = 0xFF
    with pytest.raises(CheckpointError, match="w: found a NaN or infinite"):
        widen("w", FP8_32, ones, scale, out)
    for encoding, largest, one in ((FP8_ROWS, 0x7E, 0x38), (MXFP4, 0x77, 0x22)):
        top, wide = torch.full((1, 1), 254, dtype=torch.uint8), torch.empty(1, 32)
        n = 32 if encoding is FP8_ROWS else 16
        widen("w", encoding, torch.full((n,), one, dtype=torch.uint8), top, wide)
        assert wide.tolist() == [[2.0**127] * 32]
        with pytest.raises(CheckpointError, match="w: found a NaN or infinite"):
            widen("w", encoding, torch.full((n,), largest, dtype=torch.uint8), top, wide)
    with pytest.raises(CheckpointError, match="found torch.float64, wanted float32 or bfloat16"):
        quantise("w", FP8_32, torch.zeros(32, 32, dtype=torch.float64))
