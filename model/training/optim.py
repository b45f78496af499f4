"""Two optimisers side by side: orthogonalised momentum for hidden matrices, AdamW for the rest.

Muon's step (Jordan et al., 2024): the momentum matrix is moved towards the nearest orthogonal one
by five Newton-Schulz iterations; scaled by 0.2 sqrt(max(m, n)) its size is that of AdamW's step
(Liu et al., arXiv:2502.16982), so both share one learning rate schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.model.training.weights import Stack

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: fast, not exact


def orthogonalise(m: torch.Tensor) -> torch.Tensor:
    """Near-orthogonal matrices of the stack [n, rows, columns], in bfloat16."""
    a, b, c = _NEWTON_SCHULZ
    x = m.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


@dataclass(frozen=True)
class Rates:
    """Step sizes at schedule 1.0. `memory`: rows that are looked up (embedding, Engram tables).

    `mix` is small with a reason: at 2e-3 the stream mixes' scales grew tenfold in 1,400 steps, the
    balanced matrices came near permutations, and training diverged (docs/model-card.md).
    """

    hidden: float = 3e-3
    memory: float = 4e-3
    head: float = 1.5e-3
    other: float = 1e-3
    mix: float = 3e-4
    decay: float = 0.05  # of hidden matrices and mixes, a step's rate times this


class Optimiser:
    """Steps all stacks; `state` can be saved and given back."""

    def __init__(
        self, stacks: Mapping[str, Stack], values: Mapping[str, torch.Tensor], rates: Rates
    ) -> None:
        """Router biases are left out: balance moves them, not the loss."""
        self.rates = rates
        trained = {p: v for p, v in values.items() if not stacks[p].is_bias_of_router}
        self.hidden = {p: v for p, v in trained.items() if stacks[p].is_hidden_matrix}
        self.momentum = {p: torch.zeros_like(v) for p, v in self.hidden.items()}
        self._shapes: dict[tuple[int, ...], list[str]] = {}  # stacks that are stepped as one
        for pattern, value in self.hidden.items():
            self._shapes.setdefault(tuple(value.shape[1:]), []).append(pattern)
        groups: dict[float, list[torch.Tensor]] = {}
        for pattern, value in trained.items():
            if pattern not in self.hidden:
                groups.setdefault(self._rate(pattern), []).append(value)
        self.adam = torch.optim.AdamW(
            [{"params": v, "lr": rate, "base": rate} for rate, v in groups.items()],
            betas=(0.9, 0.98),
            eps=1e-10,
            weight_decay=0.0,
            fused=next(iter(values.values())).is_cuda,
        )

    def forget(self) -> None:
        """Drop all momentum: after the values were set back."""
        for kept in self.momentum.values():
            kept.zero_()
        self.adam.state.clear()

    def _rate(self, pattern: str) -> float:
        if pattern.endswith("embed.weight"):
            return self.rates.memory
        if ".hc_" in pattern:
            return self.rates.mix
        return self.rates.head if "head" in pattern else self.rates.other

    def step(self, schedule: float, momentum: float = 0.95) -> None:
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * schedule
        self.adam.step()
        rate = self.rates.hidden * schedule
        with torch.no_grad():
            for shape, patterns in self._shapes.items():
                self._step_matrices(shape, patterns, rate, momentum)

    def _step_matrices(
        self, shape: tuple[int, ...], patterns: list[str], rate: float, momentum: float
    ) -> None:
        values = [self.hidden[p] for p in patterns]
        grads = [v.grad if v.grad is not None else torch.zeros_like(v) for v in values]
        kept = [self.momentum[p] for p in patterns]
        torch._foreach_lerp_(kept, grads, 1 - momentum)
        ahead = torch.cat(torch._foreach_lerp(grads, kept, momentum))
        update = orthogonalise(ahead).float()
        torch._foreach_mul_(values, 1 - rate * self.rates.decay)
        parts = update.split([len(v) for v in values])
        torch._foreach_add_(values, list(parts), alpha=-rate * 0.2 * max(shape) ** 0.5)

    def clear(self) -> None:
        for group in self.adam.param_groups:
            for value in group["params"]:
                value.grad = None
        for value in self.hidden.values():
            value.grad = None

    def state(self) -> dict[str, object]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def restore(self, state: dict[str, object]) -> None:
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
        for pattern, value in state["momentum"].items():  # type: ignore[attr-defined]
            self.momentum[pattern].copy_(value)


@torch.no_grad()
def clip(values: Mapping[str, torch.Tensor], limit: float, refuse: float) -> torch.Tensor:
    """Scale all gradients to a common norm of at most `limit`; beyond `refuse` they become zero,
    since the matrix optimiser's step does not depend on their size. Returns the norm before."""
    grads = [v.grad for v in values.values() if v.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, torch.where(total < refuse, factor, torch.zeros_like(factor)))
    return total
