"""The modules of bench/probes, and engines of the trained model that the files here share."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "bench" / "probes"
MODULES = ("grid", "pools", "handoff", "batch", "forward")


@pytest.fixture(scope="session")
def keep() -> int:
    return 76  # W + 12


@pytest.fixture(scope="session")
def probes() -> Any:
    """The modules of bench/probes, which import each other as scripts do."""
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**{name: import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def pools(probes: Any) -> Any:
    torch.set_num_threads(1)
    return probes.pools.Pools("demo", "invariant", n_blocks=200, poison=True)


@pytest.fixture(scope="session")
def cases(probes: Any) -> Any:
    """`cases(probe, cell, count)` of the grid, `short=True` for its short prompts."""

    @cache
    def cells(probe: str, count: int, short: bool) -> dict[str, list[Any]]:
        grid = probes.grid
        made = grid.short_cases(count, probe) if short else grid.all_cases(count, [probe])
        return {c: own for _, c, own in probes.handoff.by_cell(made)}

    def of(probe: str, cell: str, count: int, *, short: bool = False) -> list[Any]:
        return cells(probe, count, short)[cell]

    return of


@pytest.fixture(scope="session")
def check_bits(pools: Any) -> Any:
    """That each answer in rows of (prompt, answer, cold answer) is the cold one in every bit."""

    def check(rows: Any) -> None:
        for prompt, got, cold in rows:
            assert got.tokens == cold.tokens
            assert len(got.logits) == len(cold.logits) == len(got.tokens)
            assert all(map(torch.equal, got.logits, cold.logits)), len(prompt.ids)

    return check
