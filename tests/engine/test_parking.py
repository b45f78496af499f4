"""Parking: a sequence gives its slot up at any step and goes on later with the same tokens; blocks
and slots are conserved, and no row runs twice."""

from __future__ import annotations

import pytest

from headrace.core.chain import as_token_ids
from headrace.core.request import Sampling
from headrace.core.rows import plan_decode
from headrace.engine import Engine, EngineSettings, Half, Job, TokenSampled
from headrace.model import Numerics, StateError, load_named

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
    payload = engine.parking.hold(first.key)
    assert not engine.has_work and engine.stats().free_slots == 0
    assert engine.parking.park(first.key)
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.free_slots, stats.held_blocks) == (1, held) and not engine.has_work
    assert begin(engine, second)
    assert not engine.parking.unpark(first.key, payload)  # no slot is free
    while not step(engine, tokens):
        assert len(tokens["first"]) == given
    assert engine.parking.unpark(first.key, payload)
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


@pytest.mark.parametrize("parked", [False, True])
def test_a_held_or_parked_sequence_can_be_released(new_engine, new_request, parked) -> None:
    request, tokens = new_request(50, max_tokens=5), {}
    engine = new_engine(n_slots=1)
    assert begin(engine, request)
    while not tokens:
        step(engine, tokens)
    payload = engine.parking.hold(request.key)
    if parked:
        assert engine.parking.park(request.key)
    engine.release(request.key)
    engine.release(request.key)
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.free_slots, stats.held_blocks, stats.parked) == (1, 0, 0)
    assert engine.parking.hold(request.key) is None
    assert not engine.parking.park(request.key) and not engine.parking.unhold(request.key)
    with pytest.raises(ValueError, match="not parked"):
        engine.parking.unpark(request.key, payload)


def test_what_cannot_be_parked_or_brought_back_changes_nothing(new_engine, new_request) -> None:
    request, tokens = new_request(50, max_tokens=5), {}
    engine = new_engine(n_slots=1)
    assert engine.admit(Job(request, as_token_ids([]), 0))
    with pytest.raises(ValueError, match="only a sequence that decodes"):
        engine.parking.hold(request.key)
    engine.start(request.key, plan_decode(50, 0, 44, (), engine.geometry))
    while not tokens:
        step(engine, tokens)
    with pytest.raises(ValueError, match="only a sequence that is held"):
        engine.parking.park(request.key)
    with pytest.raises(ValueError, match="not held"):
        engine.parking.unhold(request.key)
    payload = engine.parking.hold(request.key)
    with pytest.raises(ValueError, match="only a sequence that decodes"):
        engine.parking.hold(request.key)
    with pytest.raises(ValueError, match="not parked"):
        engine.parking.unpark(request.key, payload)
    assert engine.parking.park(request.key) and engine.stats().parked == 1
    short = bytearray(payload[:-8])  # a tail is missing, and the header says so
    short[24:28] = (int.from_bytes(payload[24:28], "little") - 8).to_bytes(4, "little")
    for bad, error in ((payload[:-1], StateError), (bytes(short), StateError)):
        with pytest.raises(error):
            engine.parking.unpark(request.key, bad)
        engine.check_integrity()
        assert engine.stats().free_slots == 1
    later = bytearray(payload)
    later[8:12] = (51).to_bytes(4, "little")  # a length; its tails would be others
    with pytest.raises(ValueError, match="not the state that was parked"):
        engine.parking.unpark(request.key, bytes(later))
    assert engine.parking.unpark(request.key, payload)
    with pytest.raises(ValueError, match="not parked"):
        engine.parking.unpark(request.key, payload)
    while not step(engine, tokens):
        pass
    engine.check_integrity()


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_blocks_given_back_too_are_admitted_again_and_the_tokens_stay(
    new_engine, new_request, run_alone, sampling: Sampling
) -> None:
    """The second needs all blocks of the engine. Complete blocks come back as fills, the begun one
    with the state; 122 + 6 rows end a block exactly, 122 + 7 begin the next."""
    first = new_request(N, name="first", max_tokens=MAX_TOKENS, sampling=sampling)
    second = new_request(200, name="second", max_tokens=3, seed=8)
    alone = [run_alone(new_engine(n_slots=1), r) for r in (first, second)]
    for given in (1, 6, 7, MAX_TOKENS - 1):
        give_all_back_after(given, new_engine(n_slots=2, n_blocks=2), first, second, alone)


def give_all_back_after(given: int, engine, first, second, alone) -> None:
    tokens: dict[str, list[int]] = {}
    assert begin(engine, first)
    while len(tokens.get("first", ())) < given:
        assert not step(engine, tokens)
    assert not begin(engine, second)  # a slot is free, it is blocks that lack
    payload, rows = engine.parking.hold(first.key), N + given - 1
    kept = [(digest, bytes(view)) for digest, view in engine.parking.complete_blocks(first.key)]
    assert len(kept) == rows // 128
    engine.release(first.key)
    assert begin(engine, second)
    while not step(engine, tokens):
        assert len(tokens["first"]) == given
    admission = engine.admit(Job(first, as_token_ids(tokens["first"]), rows // 128))
    assert [fill.digest for fill in admission.fills] == [digest for digest, _ in kept]
    cold = plan_decode(N, 0, first.keep_tokens, (), engine.geometry)
    if admission.fills:
        with pytest.raises(ValueError, match="was not filled"):
            engine.adopt(first.key, payload, cold)
    with pytest.raises(ValueError, match="which rows made the state is not told"):
        engine.adopt(first.key, payload)
    for fill, (_, payload_of) in zip(admission.fills, kept, strict=True):
        assert engine.write_fill(fill, payload_of)
    assert engine.adopt(first.key, payload, cold)
    engine.check_integrity()
    while not step(engine, tokens):
        pass
    assert tokens == {"first": alone[0].tokens, "second": alone[1].tokens}
    totals = engine.stats()
    assert totals.encoder_rows_total == sum(one.rows[0] for one in alone)
    assert totals.decoder_rows_total == sum(one.rows[1] for one in alone)
    engine.check_integrity()
    assert (totals.free_slots, totals.held_blocks) == (2, 0)


def test_only_the_state_of_the_newest_token_is_adopted(new_engine, new_request) -> None:
    request, tokens = new_request(50, max_tokens=9), {}
    engine = new_engine(n_slots=1)
    assert begin(engine, request)
    payloads = []
    for _ in range(3):
        while not step(engine, tokens) and len(tokens.get("r", ())) < len(payloads) + 1:
            pass
        payloads.append(engine.parking.hold(request.key))
        assert engine.parking.unhold(request.key)
    engine.release(request.key)
    given = tokens["r"][:3]
    assert engine.admit(Job(request, as_token_ids(given), 0))
    cold = plan_decode(50, 0, request.keep_tokens, (), engine.geometry)
    for old in payloads[:2]:
        with pytest.raises(ValueError, match="not the state that was parked"):
            engine.adopt(request.key, old, cold)
    assert engine.adopt(request.key, payloads[2], cold)
    assert [event.index for event in engine.step()] == [3]


def test_one_that_ended_meanwhile_is_not_held(new_engine, new_request) -> None:
    request = new_request(50, max_tokens=1)
    engine = new_engine(n_slots=1)
    assert begin(engine, request)
    (event,) = engine.step()
    assert event.finish is not None
    assert engine.parking.hold(request.key) is None
    assert engine.stats().late_events == 1
    engine.release(request.key)
    engine.check_integrity()


def test_a_model_without_a_decoder_half_is_parked_too(new_request) -> None:
    """V4 has nothing to keep; 140 + 5 rows: a block, and one that is begun."""
    trunk = load_named("v4-toy", 0, Numerics.INVARIANT)
    request = new_request(
        [17 + i * 7 % 600 for i in range(140)], keep_tokens=1, max_tokens=12, sampling=SEEDED
    )
    sizes = EngineSettings(n_blocks=4, n_slots=1)
    engine = Engine(trunk, sizes, Half.FULL, record_spacing_tokens=8192, poison=True)
    cold = plan_decode(140, 0, 1, (), engine.geometry)
    alone: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    assert begin(engine, request)
    while not step(engine, alone):
        pass
    rows = engine.stats().encoder_rows_total
    assert begin(engine, request)
    while not step(engine, tokens):
        if len(tokens.get("r", ())) == 3:
            payload = engine.parking.hold(request.key)
            assert engine.parking.park(request.key)
            assert engine.parking.unpark(request.key, payload)
        elif len(tokens.get("r", ())) == 6:
            payload = engine.parking.hold(request.key)
            engine.release(request.key)
            assert engine.admit(Job(request, as_token_ids(tokens["r"]), 1)).fills == ()
            assert engine.adopt(request.key, payload, cold)
            engine.check_integrity()
    assert tokens == alone
    assert engine.stats().encoder_rows_total == 2 * rows
