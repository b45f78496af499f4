"""Parking: a sequence gives its slot up at any step and goes on later with the same tokens; blocks
and slots are conserved, and no row runs twice."""

from __future__ import annotations

import pytest

from headrace.core.chain import as_token_ids
from headrace.core.request import Sampling
from headrace.core.rows import plan_decode
from headrace.engine import Job, TokenSampled
from headrace.model import StateError

N, MAX_TOKENS = 122, 9  # position 128 lies among the answer's
SEEDED = Sampling(temperature=0.8, seed=3)


def begin(engine, request) -> bool:
    if engine.admit(Job(request, as_token_ids([]), 0)) is None:
        return False
    plan = plan_decode(request.n_tokens, 0, request.keep_tokens, (), engine.geometry)
    assert engine.start(request.key, plan)
    return True


def step(engine, tokens) -> bool:
    """One step; whether a sequence ended."""
    ended = False
    for event in engine.step():
        if isinstance(event, TokenSampled):
            tokens.setdefault(event.key.request_id, []).append(event.token_id)
            if event.finish is not None:
                engine.release(event.key)
                ended = True
    return ended


def test_another_runs_in_its_slot_and_the_tokens_stay(new_engine, new_request, run_alone) -> None:
    first = new_request(N, name="first", max_tokens=MAX_TOKENS, sampling=SEEDED)
    second = new_request(40, name="second", max_tokens=3, seed=8)
    alone = [run_alone(new_engine(n_slots=1), r) for r in (first, second)]
    for given in range(1, MAX_TOKENS):
        park_after(given, new_engine(n_slots=1), first, second, alone)


def park_after(given: int, engine, first, second, alone) -> None:
    tokens: dict[str, list[int]] = {}
    assert begin(engine, first)
    while len(tokens.get("first", ())) < given:
        assert not step(engine, tokens)
    assert not begin(engine, second)  # blocks are there, it is the slot that lacks
    held = engine.stats().held_blocks
    payload = engine.park(first.key)
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.free_slots, stats.held_blocks) == (1, held) and not engine.has_work
    assert begin(engine, second)
    assert not engine.unpark(first.key, payload)  # no slot is free
    while not step(engine, tokens):
        assert len(tokens["first"]) == given
    assert engine.unpark(first.key, payload)
    engine.check_integrity()
    while not step(engine, tokens):
        pass
    assert tokens == {"first": alone[0].tokens, "second": alone[1].tokens}
    # Poisoned slots are handed out, so a row that was not brought back would have shown.
    totals = engine.stats()
    assert totals.encoder_rows_total == sum(one.rows[0] for one in alone)
    assert totals.decoder_rows_total == sum(one.rows[1] for one in alone)
    engine.check_integrity()
    assert (totals.free_slots, totals.held_blocks) == (1, 0)


def test_a_parked_sequence_can_be_released(new_engine, new_request) -> None:
    request, tokens = new_request(50, max_tokens=5), {}
    engine = new_engine(n_slots=1)
    assert begin(engine, request)
    while not tokens:
        step(engine, tokens)
    payload = engine.park(request.key)
    engine.release(request.key)
    engine.release(request.key)
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.free_slots, stats.held_blocks) == (1, 0)
    with pytest.raises(ValueError, match="not the state"):
        engine.unpark(request.key, payload)


def test_what_cannot_be_parked_or_brought_back_changes_nothing(new_engine, new_request) -> None:
    request, tokens = new_request(50, max_tokens=5), {}
    engine = new_engine(n_slots=1)
    assert engine.admit(Job(request, as_token_ids([]), 0))
    with pytest.raises(ValueError, match="only a sequence that decodes"):
        engine.park(request.key)
    engine.start(request.key, plan_decode(50, 0, 44, (), engine.geometry))
    while not tokens:
        step(engine, tokens)
    payload = engine.park(request.key)
    with pytest.raises(ValueError, match="only a sequence that decodes"):
        engine.park(request.key)
    short = bytearray(payload[:-8])  # a tail is missing, and the header says so
    short[24:28] = (int.from_bytes(payload[24:28], "little") - 8).to_bytes(4, "little")
    for bad, error in ((payload[:-1], StateError), (bytes(short), StateError)):
        with pytest.raises(error):
            engine.unpark(request.key, bad)
        engine.check_integrity()
        assert engine.stats().free_slots == 1
    assert engine.unpark(request.key, payload)
    with pytest.raises(ValueError, match="not parked"):
        engine.unpark(request.key, payload)
    while not step(engine, tokens):
        pass
    engine.check_integrity()
