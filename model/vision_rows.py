"""The bytes of a picture's rows: what a vision replica writes and the others read.

    "HRIR" | u8 version | u8 dtype (4: float32, 8: float64) | u16 0 | u32 rows | u32 D | rows

All little-endian; rows are row-major, in span order. The header repeats what the reader already
knows, so that rows of another picture, model or numerics class are refused and never run.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import torch

from headrace.model.errors import StateError

Buffer: TypeAlias = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sBBHII")
_MAGIC = b"HRIR"
_VERSION = 1
_WIDTHS = {torch.float32: 4, torch.float64: 8}


def payload_bytes(n_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Length of the payload of `n_rows` rows."""
    return _HEADER.size + n_rows * hidden_size * _width(dtype)


def pack_rows(rows: torch.Tensor) -> bytes:
    """Payload of float32 or float64 rows [n, D] on any device.

    Raises `StateError` for another shape or dtype and for a value that is not finite."""
    if rows.dim() != 2:
        raise StateError(f"picture rows: found {rows.dim()} dimensions, wanted [rows, D]")
    width = _width(rows.dtype)
    _check_finite(rows)
    values = rows.detach().cpu().contiguous().numpy().astype(f"<f{width}", copy=False)
    return _HEADER.pack(_MAGIC, _VERSION, width, 0, *rows.shape) + values.tobytes()


def unpack_rows(
    payload: Buffer, *, n_rows: int, hidden_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows [n_rows, D] of `dtype` on the CPU, in memory of their own.

    Raises `StateError` unless the payload is exactly that: length, shape, dtype, all finite."""
    view = memoryview(payload).cast("B")
    wanted = payload_bytes(n_rows, hidden_size, dtype)
    if len(view) != wanted:
        raise StateError(f"picture rows: found {len(view)} bytes, wanted {wanted}")
    found = _HEADER.unpack_from(view)
    header = (_MAGIC, _VERSION, _width(dtype), 0, n_rows, hidden_size)
    if found != header:
        raise StateError(f"picture rows: found header {found}, wanted {header}")
    values = np.frombuffer(view, f"<f{_width(dtype)}", offset=_HEADER.size)
    rows = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))
    _check_finite(rows)
    return rows.view(n_rows, hidden_size)


def _width(dtype: torch.dtype) -> int:
    if dtype not in _WIDTHS:
        raise StateError(f"picture rows: found {dtype}, wanted float32 or float64")
    return _WIDTHS[dtype]


def _check_finite(rows: torch.Tensor) -> None:
    bad = int((~torch.isfinite(rows)).sum())
    if bad:
        raise StateError(f"picture rows: found {bad} values that are not finite, wanted none")
