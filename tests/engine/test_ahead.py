"""Rows of a later step are told to the Engram tables before it is planned; no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.chain import as_token_ids
from headrace.core.request import Sampling
from headrace.core.rows import plan_decode, plan_prefill
from headrace.engine import Engine, EngineSettings, Half, Job, SequenceFailed, TokenSampled
from headrace.model import Numerics, Trunk, load_named


@dataclass
class Watched:
    """A table that notes which of its rows were told of when they were asked for."""

    inner: Any
    reads_ahead: bool = True
    expected: set[int] = field(default_factory=set)
    asked: list[tuple[int, int]] = field(default_factory=list)  # rows of a fetch, untold ones

    @property
    def n_rows(self) -> int:
        return self.inner.n_rows

    def fetch(self, rows: np.ndarray) -> Callable[[], torch.Tensor]:
        wanted = set(rows.ravel().tolist())
        self.asked.append((rows.shape[0], len(wanted - self.expected)))
        return self.inner.fetch(rows)

    def expect(self, rows: np.ndarray) -> None:
        self.expected.update(rows.ravel().tolist())


@pytest.fixture(scope="module")
def watched() -> tuple[Trunk, list[Watched]]:
    trunk = load_named("t1", 0, Numerics.INVARIANT)
    trunk.engram = [Watched(table) for table in trunk.engram]
    for params, table in zip(
        (p.engram for p in trunk.params.layers if p.engram is not None), trunk.engram, strict=True
    ):
        assert params.table is table.inner
    return trunk, trunk.engram


def run(trunk: Trunk, requests: list[Any], **settings: int) -> dict[str, list[int]]:
    """All requests together to their ends; their tokens."""
    sizes = EngineSettings(**{"n_blocks": 32, "n_slots": 4, **settings})
    engine = Engine(trunk, sizes, Half.FULL, record_spacing_tokens=8192, poison=True)
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for one in requests:
        assert engine.admit(Job(one, as_token_ids([]), 0)) is not None
        plan = plan_decode(one.n_tokens, 0, one.keep_tokens, (), engine.geometry)
        assert engine.start(one.key, plan)
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, SequenceFailed), event
            if isinstance(event, TokenSampled):
                tokens[event.key.request_id].append(event.token_id)
                if event.finish is not None:
                    engine.release(event.key)
    return tokens


def test_every_row_after_the_first_step_was_told_before(watched, t1, new_request) -> None:
    trunk, tables = watched
    requests = [
        new_request(n, name=f"r{n}", max_tokens=6, seed=n, sampling=Sampling(0.8, seed=n))
        for n in (300, 41)
    ]
    for table in tables:
        table.expected.clear()
        table.asked.clear()
    found = run(trunk, requests, max_rows_per_step=64)
    assert found == run(t1, requests, max_rows_per_step=64)
    for table in tables:
        (rows, untold), later = table.asked[0], table.asked[1:]
        assert rows == 64 and untold > 100
        # While one decodes the other goes on with 63 rows of known tokens, all of them told.
        assert len(later) >= 9 and {untold for _, untold in later} == {0}
        assert {rows for rows, _ in later} >= {64, 1, 2}


def test_nothing_is_told_where_nobody_reads_ahead(watched, new_request) -> None:
    trunk, tables = watched
    for table in tables:
        table.expected.clear()
        table.reads_ahead = False
    try:
        run(trunk, [new_request(100, max_tokens=3)], max_rows_per_step=64)
    finally:
        for table in tables:
            table.reads_ahead = True
    assert not any(table.expected for table in tables)


def test_what_is_ahead_is_what_is_planned_next(new_scheduler, new_request, answer) -> None:
    """With nobody decoding: step by step the same rows, and none after the last."""
    scheduler = new_scheduler(Half.ENCODER, max_rows_per_step=100)
    for number, n in enumerate((300, 140, 700)):
        one = new_request(n, name=f"r{number}", seed=number)
        assert scheduler.admit(Job(one, as_token_ids([]), 0)) is not None
        plan = plan_prefill(n, 0, one.keep_tokens, (), scheduler.geometry)
        assert scheduler.start(one.key, plan) is not None
    guessed, n_steps = None, 0
    while (plan := scheduler.plan()) is not None:
        rows = [(s.slot, s.start, s.end) for s in plan.segments]
        if guessed is not None:
            told = {(g.slot, p) for g in guessed for p in range(g.start, g.end)}
            planned = {(slot, p) for slot, start, end in rows for p in range(start, end)}
            assert planned <= told and len(told) <= 100
        guessed = scheduler.ahead(plan)
        scheduler.advance(answer(plan))
        n_steps += 1
    assert guessed == () and n_steps >= 10


def test_a_text_that_fills_its_positions_has_no_row_ahead(watched, new_request) -> None:
    trunk, _ = watched
    most = 2 * 128
    one = new_request(most - 2, max_tokens=2)
    assert len(run(trunk, [one], n_blocks=2)["r"]) == 2
