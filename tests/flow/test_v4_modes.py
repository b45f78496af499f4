"""V4 in the modes `state` and `replay` and in a resume, bit for bit, engines alone in one process.

The yardstick is the `all` engine, cold. Every engine hands out blocks and slots filled with NaN and
has rings, steps and block numbers of its own. `test_exact_handoff.py` has mode `exact`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from headrace.core.chain import as_token_ids
from headrace.core.errors import ConfigError
from headrace.core.ids import Digest, RequestId
from headrace.core.request import GenRequest
from headrace.core.rows import RowPlan, StartKind, plan_decode, plan_resume
from headrace.engine import (
    BlockDone,
    Engine,
    EngineSettings,
    Half,
    Job,
    TokenSampled,
    WindowDone,
)
from headrace.model import Numerics, Trunk, load_named

MODEL = "v4-toy"
ROOT = Digest(bytes(32))
MAX_TOKENS = 20
REACH = 186  # 6 layers, W = 32


@dataclass
class Run:
    """Tokens, logits of the sampled rows, and what was complete, by number or position."""

    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    blocks: dict[int, bytes] = field(default_factory=dict)
    windows: dict[int, bytes] = field(default_factory=dict)
    encoder_rows: int = 0

    def follow(self, engine: Engine, until: Callable[[], bool] = lambda: False) -> None:
        engine.runner.on_logits = lambda _k, _p, row: self.logits.append(row.numpy().tobytes())
        while engine.has_work and not until():
            for event in engine.step():
                if isinstance(event, BlockDone):
                    self.blocks[event.index] = bytes(engine.block_view(event.block))
                elif isinstance(event, WindowDone):
                    self.windows[event.position] = event.payload
                elif isinstance(event, TokenSampled):
                    if not self.tokens:
                        self.encoder_rows = event.encoder_rows
                    self.tokens.append(event.token_id)


@cache
def trunk() -> Trunk:
    torch.set_num_threads(1)
    return load_named(MODEL, 0, Numerics.INVARIANT)


def make_engine(rows: int, backtrack_rows: int, ring_rows: int | None = None) -> Engine:
    return Engine(
        trunk(),
        EngineSettings(n_blocks=12, n_slots=2, max_rows_per_step=rows, replay_rows_per_step=rows),
        Half.FULL,
        record_spacing_tokens=128,
        poison=True,
        backtrack_rows=backtrack_rows,
        ring_rows=ring_rows,
    )


@cache
def request(n_tokens: int) -> GenRequest:
    draw = random.Random(n_tokens)
    ids = as_token_ids([draw.randrange(16, 1000) for _ in range(n_tokens)])
    return GenRequest.offline(ROOT, ids, keep_tokens=1, max_tokens=MAX_TOKENS, name=RequestId("r"))


def begin(
    engine: Engine,
    n_tokens: int,
    blocks: dict[int, bytes],
    hit: int,
    generated: list[int] | None = None,
) -> GenRequest:
    job = request(n_tokens)
    admission = engine.admit(Job(job, as_token_ids(generated or []), hit))
    assert admission is not None
    for fill in admission.fills:
        assert engine.write_fill(fill, blocks[fill.index])
    return job


@cache
def whole(n_tokens: int) -> Run:
    """The `all` engine, cold, with a window record at every grain."""
    engine, run = make_engine(512, 6), Run()
    job = begin(engine, n_tokens, {}, 0)
    assert engine.start(job.key, plan_decode(n_tokens, 0, 1, (), engine.geometry))
    run.follow(engine)
    assert len(run.tokens) == MAX_TOKENS and run.encoder_rows == n_tokens
    return run


@pytest.mark.parametrize("n_tokens", [5, 120, 250, 256, 257, 500])
def test_state_is_taken_over_by_other_rings_and_chunks(n_tokens: int) -> None:
    wanted = whole(n_tokens)
    source, first = make_engine(77, 3, ring_rows=60), Run()
    job = begin(source, n_tokens, {}, 0)
    assert source.start(job.key, plan_decode(n_tokens, 0, 1, (), source.geometry))
    first.follow(source, until=lambda: bool(first.tokens))
    assert first.tokens == wanted.tokens[:1] and first.logits == wanted.logits[:1]
    payload = source.export_state(job.key)

    target, run = make_engine(203, 9), Run()
    assert target.state.layout.ring_rows == 41 != source.state.layout.ring_rows
    begin(target, n_tokens, first.blocks, n_tokens // 128)
    assert target.adopt(job.key, payload)
    run.follow(target)
    assert run.tokens == wanted.tokens and run.logits == wanted.logits[1:]
    assert run.encoder_rows == 0
    made = {i: b for i, b in wanted.blocks.items() if i >= n_tokens // 128}
    assert run.blocks == made and bool(made) == (n_tokens in (120, 250, 500))
    assert all(wanted.windows[x] == record for x, record in run.windows.items())
    for engine in (source, target):
        engine.release(job.key)
        engine.check_integrity()


def replayed(n_tokens: int, hit: int, depth: int, rows: int, backtrack: int) -> tuple[Run, RowPlan]:
    engine, run = make_engine(rows, backtrack), Run()
    job = begin(engine, n_tokens, whole(n_tokens).blocks, hit)
    plan = plan_decode(n_tokens, hit * 128, 1, (), engine.geometry, depth_tokens=depth)
    assert engine.start(job.key, plan)
    run.follow(engine)
    assert run.encoder_rows == plan.encoder_rows
    return run, plan


@pytest.mark.parametrize("depth", [0, 2, 32, 100])
@pytest.mark.parametrize(("n_tokens", "hit"), [(500, 3), (512, 4)])
def test_a_replay_equals_a_reference_doing_the_same(n_tokens: int, hit: int, depth: int) -> None:
    """The same start gives the same bits in other steps and rings, and no dead byte is read."""
    run, plan = replayed(n_tokens, hit, depth, 203, 9)
    reference, _ = replayed(n_tokens, hit, depth, 37, 3)
    assert plan.start == 384 - depth and plan.kind is StartKind.BOUNDED
    assert run.logits == reference.logits and run.blocks == reference.blocks
    if n_tokens == 500:  # 512 - (384 - depth) rows may be enough for rows that all come after 512
        assert run.logits != whole(n_tokens).logits  # approximate; how far is nobody's promise
    assert not run.windows  # a record of it would be found under an exact key


def test_a_replay_of_the_whole_reach_is_exact() -> None:
    run, plan = replayed(500, 3, REACH, 61, 6)
    assert plan.kind is StartKind.REPLAY and plan.start == 384 - REACH
    assert run.logits == whole(500).logits and run.tokens == whole(500).tokens


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("given", [1, 12, 13, 19])
def test_a_resume_goes_on_with_the_same_text(given: int, record: bool) -> None:
    """M = 500 + given tokens are known, the newest without a row; 512 lies between."""
    wanted, m = whole(500), 500 + given
    hit = (m - 1) // 128
    p = hit * 128 if hit * 128 <= m - 1 else (hit - 1) * 128
    engine, run = make_engine(90, 4), Run()
    job = begin(engine, 500, wanted.blocks, hit, wanted.tokens[:given])
    plan = plan_resume(m, hit * 128, 499, (p,) if record else (), engine.geometry)
    assert plan.start == (p if record else p - REACH)
    assert engine.start(job.key, plan, wanted.windows[p] if record else None)
    run.follow(engine)
    assert run.tokens == wanted.tokens[given:] and run.logits == wanted.logits[given:]


def test_a_ring_that_is_too_short_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"window \+ backtrack = 32 \+ 6 = 38, got 37"):
        make_engine(64, 6, ring_rows=37)
