"""Numerics classes: which dtype computes, and when a result's bits are comparable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from headrace.model.errors import ConfigError

LOGIT_GRID = 2.0**-16


class Numerics(StrEnum):
    """INVARIANT: bits do not depend on what shares the call. FAST: the device's usual dtype."""

    INVARIANT = "invariant"
    FAST = "fast"


def resolve_numerics(numerics: str, device: str) -> Numerics:
    """`auto` is invariant on CPU and fast elsewhere. Raises `ValueError` for another word."""
    if numerics == "auto":
        return Numerics.INVARIANT if torch.device(device).type == "cpu" else Numerics.FAST
    return Numerics(numerics)


def one_thread_on_cpu(device: str) -> None:
    """Have torch compute in one thread when `device` is the CPU: several engines share the cores of
    a host, and pools of threads on the same core cost many times what they gain. Sets the whole
    process."""
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Precision:
    """`compute` holds activations and matrices, `accumulate` norms, softmaxes, gates, mixes."""

    numerics: Numerics
    compute: torch.dtype
    accumulate: torch.dtype

    @classmethod
    def of(cls, numerics: Numerics, compute_dtype: torch.dtype | None = None) -> Precision:
        """FAST takes float32 (default) or bfloat16; INVARIANT is float64 throughout."""
        if numerics is Numerics.INVARIANT:
            if compute_dtype not in (None, torch.float64):
                raise ConfigError(f"compute_dtype: found {compute_dtype}, wanted float64")
            return cls(numerics, torch.float64, torch.float64)
        compute = compute_dtype or torch.float32
        if compute not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"compute_dtype: found {compute}, wanted float32 or bfloat16")
        return cls(numerics, compute, torch.float32)

    def publish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 logits.

        A float64 sum's last bits depend on how many rows share the call (about 1e-15). Every
        value that feeds state is quantised to few bits, so the noise dies there; logits are the
        one result that would show it. On a grid of 2^-16 it vanishes unless a logit lies within
        1e-15 of a grid midpoint (one value in 10^10), and below 256 each grid point is a
        float32, so the conversion rounds nothing.
        """
        if self.numerics is Numerics.INVARIANT:
            logits = torch.round(logits / LOGIT_GRID) * LOGIT_GRID
        return logits.to(torch.float32)
