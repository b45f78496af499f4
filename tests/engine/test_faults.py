"""One sequence's trouble stays its own: NaN, exceptions in a step, poisoned state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.core import faults
from headrace.core.chain import as_token_ids
from headrace.core.request import GenRequest
from headrace.core.rows import plan_decode
from headrace.engine import Engine, EngineDamaged, EngineSettings, Half, Job, NotANumber
from headrace.model import RowBatch, RowResult

NewEngine = Callable[..., Engine]
NewRequest = Callable[..., GenRequest]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    faults.disarm()
    yield
    faults.disarm()


@pytest.fixture(scope="module")
def texts(t1: Any, new_request: NewRequest, run_alone: Any) -> dict[int, Any]:
    def run(n: int) -> Any:
        engine = Engine(
            t1, EngineSettings(8, 1), Half.FULL, record_spacing_tokens=8192, poison=True
        )
        return run_alone(engine, new_request(n, seed=n))

    return {n: run(n) for n in (150, 60, 40)}


def begin_all(session: Any, new_request: NewRequest) -> dict[int, Any]:
    return {n: session.begin(new_request(n, name=str(n), seed=n)) for n in (150, 60, 40)}


def test_nan_logits_fail_one_sequence(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, texts: dict[int, Any]
) -> None:
    session = new_session(new_engine())
    got = begin_all(session, new_request)
    faults.arm("engine.step=nan@3")
    session.finish()
    assert faults.fired("engine.step") == 1
    assert isinstance(got[150].error, NotANumber)
    assert got[150].tokens == texts[150].tokens[:1]  # its prompt took two steps
    assert (got[60], got[40]) == (texts[60], texts[40])
    assert session.engine.stats().held_blocks == 0


@pytest.mark.parametrize("place", [5, 130, 250])
def test_a_nan_in_the_encoder_half_reaches_nobody(
    place: int, new_engine: NewEngine, new_request: NewRequest, new_session: Any, t1: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One embedding row is NaN: no block with such a row is announced or stays resident."""
    bad_id = 4000
    embed = t1.params.embed.clone()
    embed[bad_id] = float("nan")
    monkeypatch.setattr(t1, "params", dataclasses.replace(t1.params, embed=embed))
    engine = new_engine(Half.ENCODER, max_rows_per_step=100, replay_rows_per_step=100)
    session = new_session(engine)
    ids = list(new_request(300).token_ids)
    good = session.begin(new_request(ids, name="good"))
    ids[place] = bad_id
    bad_request = new_request(ids, name="bad")
    bad = session.begin(bad_request)
    session.finish()
    assert isinstance(bad.error, NotANumber)
    assert list(bad.blocks) == list(range(place // 128))
    assert engine.resident_blocks(bad_request.digests) == place // 128
    assert good.error is None and list(good.blocks) == [0, 1] and list(good.windows) == [256]


def test_a_step_that_raised_once_is_retried_singly(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, texts: dict[int, Any]
) -> None:
    for at in (1, 2, 3):
        faults.disarm()
        engine = new_engine(max_rows_per_step=100, replay_rows_per_step=90)
        session = new_session(engine)
        got = begin_all(session, new_request)
        faults.arm(f"engine.step=raise@{at}")
        session.finish()
        assert faults.fired("engine.step") == 1
        if at == 1:  # only the first sequence ran in it: nobody to save
            assert got[150].error is not None and got[150].error.code == "injected_fault"
            assert (got[60], got[40]) == (texts[60], texts[40])
        else:
            assert got == texts
        assert (engine.stats().held_blocks, engine.stats().free_slots) == (0, 4)


class HalfWay:
    """A trunk whose calls with rows of one slot write all state, then raise."""

    def __init__(self, engine: Engine) -> None:
        self.real = engine.runner.trunk.forward
        self.bad_slot = -1
        self.raised = 0

    def forward(self, batch: RowBatch, state: Any) -> RowResult:
        result = self.real(batch, state)
        if bool((batch.slots == self.bad_slot).any()):
            self.raised += 1
            raise RuntimeError("secret path /tmp/x")
        return result


def test_a_poison_sequence_fails_alone_and_its_neighbours_lose_nothing(
    new_engine: NewEngine,
    new_request: NewRequest,
    new_session: Any,
    texts: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed call ran to its end, so every ring was overwritten before the single retries:
    a chunk of 90 rows on a ring of 38 must get its history back."""
    engine = new_engine(max_rows_per_step=90, replay_rows_per_step=90)
    session = new_session(engine)
    good = session.begin(new_request(150, name="150", seed=150))
    session.step()
    bad = session.begin(new_request(60, name="60", seed=60))
    trap = HalfWay(engine)
    trap.bad_slot = max(s.lease.slot for s in engine.scheduler.sequences())
    assert [s.lease.slot for s in engine.scheduler.sequences()] == [0, trap.bad_slot]
    monkeypatch.setattr(engine.runner, "trunk", _Stand(engine.runner.trunk, trap))
    session.finish()
    assert trap.raised == 2  # together, then alone
    assert bad.tokens == [] and bad.error is not None
    assert bad.error.message == "the replica failed to run this request"
    assert good == texts[150]
    assert engine.stats().encoder_rows_total == 153


class _Stand:
    def __init__(self, trunk: Any, trap: HalfWay) -> None:
        self.config = trunk.config
        self.reads_ahead = trunk.reads_ahead
        self.forward = trap.forward


@pytest.mark.parametrize("others", [True, False], ids=["batched", "alone"])
def test_trouble_after_the_forward_is_one_sequence_s_too(
    others: bool, new_engine: NewEngine, new_request: NewRequest, new_session: Any,
    texts: dict[int, Any],
) -> None:  # fmt: skip
    engine = new_engine()
    session = new_session(engine)

    def look(key: Any, position: int, row: Any) -> None:
        if key.request_id == "bad" and position == 41:
            raise ArithmeticError("not this one")

    engine.runner.on_logits = look
    bad = session.begin(new_request(40, name="bad", seed=40))
    good = session.begin(new_request(60, name="good", seed=60)) if others else None
    session.finish()
    assert bad.error is not None and bad.tokens == texts[40].tokens[:2]
    assert good is None or good == texts[60]
    assert engine.stats().encoder_rows_total == 41 + (63 if others else 0)


def test_a_poisoned_block_shows(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any
) -> None:
    """The poison of the other tests bites: a hit whose bytes were never written gives NaN."""
    engine, request = new_engine(), new_request(300)
    admission = engine.admit(Job(request, as_token_ids([]), 2))
    assert admission is not None
    for fill in admission.fills:
        assert engine.write_fill(fill, engine.state.read_block(fill.block))  # poison itself
    plan = plan_decode(300, 256, 44, (), engine.geometry)
    session = new_session(engine)
    other = session.begin(new_request(40, name="other"))
    session.seen[request.key] = outcome = type(other)()
    session.open.add(request.key)
    assert engine.start(request.key, plan)
    session.finish()
    assert isinstance(outcome.error, NotANumber)
    assert other.error is None and len(other.tokens) == 4


def test_damaged_accounts_are_seen(new_engine: NewEngine, new_request: NewRequest) -> None:
    engine = new_engine()
    request = new_request(40)
    assert engine.admit(Job(request, as_token_ids([]), 0)) is not None
    engine.check_integrity()
    (sequence,) = engine.scheduler.sequences()
    lost = sequence.lease.blocks.pop()
    with pytest.raises(EngineDamaged, match=rf"blocks \[{lost}\]"):
        engine.check_integrity()
