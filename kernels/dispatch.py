"""Chooses one implementation per operation and device, once per model.

Every operation has a torch reference, which is also the CPU path. Faster ones enter here: add
the function to `_BY_DEVICE` under its device type and operation name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from headrace.kernels import (
    attention,
    compressor,
    engram,
    formats,
    indexer,
    mhc,
    moe,
    norms,
    rope,
    rope_rows,
)

Op = Callable[..., Any]


@dataclass(frozen=True)
class Kernels:
    """One function per operation; the contracts stand at the torch references."""

    rms_norm: Op = norms.rms_norm
    unit_norm: Op = norms.unit_norm
    rotate_: Op = rope.rotate_
    mixes: Op = mhc.mixes
    head_gates: Op = mhc.head_gates
    collapse: Op = mhc.collapse
    expand: Op = mhc.expand
    attend: Op = attention.attend
    pool: Op = compressor.pool
    pool_overlapped: Op = compressor.pool_overlapped
    hadamard: Op = indexer.hadamard
    index_scores: Op = indexer.index_scores
    select_top: Op = indexer.select_top
    candidate_entries: Op = indexer.candidate_entries
    route: Op = moe.route
    route_to: Op = moe.route_to
    expert_sum: Op = moe.expert_sum
    shared_expert: Op = moe.shared_expert
    add_engram: Op = engram.add_engram
    quantize_fp8_rows: Op = formats.quantize_fp8_rows
    dequantize_fp8_rows: Op = formats.dequantize_fp8_rows
    quantize_mxfp4: Op = formats.quantize_mxfp4
    dequantize_mxfp4: Op = formats.dequantize_mxfp4
    round_mxfp4: Op = formats.round_mxfp4
    quantize_nvfp4_rows: Op = formats.quantize_nvfp4_rows
    dequantize_nvfp4_rows: Op = formats.dequantize_nvfp4_rows
    quantize_rope_rows: Op = rope_rows.quantize_rope_rows
    dequantize_rope_rows: Op = rope_rows.dequantize_rope_rows
    pack_float_rows: Op = rope_rows.pack_float_rows
    unpack_float_rows: Op = rope_rows.unpack_float_rows


OPERATIONS = tuple(f.name for f in fields(Kernels))
_BY_DEVICE: dict[str, dict[str, Op]] = {"cpu": {}, "cuda": {}}


def kernels_for(device: str | torch.device) -> Kernels:
    """The operations to use on `device`; raises KeyError for a device type nobody wrote for."""
    return Kernels(**_BY_DEVICE[torch.device(device).type])
