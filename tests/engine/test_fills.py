"""Blocks written from other threads: good, damaged, late, and in flight while others come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.chain import as_token_ids
from headrace.core.request import GenRequest
from headrace.core.rows import StartKind, plan_decode
from headrace.engine import Engine, EngineSettings, Half, Job
from headrace.model import StateError

NewEngine = Callable[..., Engine]
NewRequest = Callable[..., GenRequest]
NO_IDS = as_token_ids([])


@pytest.fixture(scope="module")
def cold(t1: Any, new_request: NewRequest, run_alone: Any) -> Any:
    """300 tokens from nothing: what every way of loading must end in."""
    engine = Engine(t1, EngineSettings(8, 1), Half.FULL, record_spacing_tokens=128, poison=True)
    return run_alone(engine, new_request(300))


def finish(engine: Engine, session: Any, request: GenRequest, outcome: Any) -> Any:
    session.seen[request.key] = outcome
    session.open.add(request.key)
    session.finish()
    return outcome


def test_filled_blocks_serve_and_stay_resident(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, cold: Any
) -> None:
    engine, request = new_engine(), new_request(300)
    admission = engine.admit(Job(request, NO_IDS, 2))
    assert admission is not None
    assert engine.resident_blocks(request.digests) == 0  # not visible before the start
    first, second = admission.fills
    assert engine.write_fill(first, cold.blocks[0])
    with engine.filling(second) as writer:
        assert writer is not None
        writer.view[:] = cold.blocks[1]
        writer.complete = True
    plan = plan_decode(300, 256, 44, [256], engine.geometry)
    assert plan.kind is StartKind.WINDOW
    assert engine.start(request.key, plan, cold.windows[256])
    assert engine.resident_blocks(request.digests) == 2
    got = finish(engine, new_session(engine), request, type(cold)())
    assert got.tokens == cold.tokens and got.blocks == {}
    assert got.rows == (44 + 3, 44 + 3)
    assert engine.resident_blocks(request.digests) == 2
    again = engine.admit(Job(new_request(300, name="again"), NO_IDS, 2))
    assert again is not None and again.fills == ()


def test_a_damaged_fill_is_computed_here(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, cold: Any
) -> None:
    """Block 1 does not verify: the hit ends at 128, the text is the same, with more rows."""
    engine, request = new_engine(), new_request(300)
    admission = engine.admit(Job(request, NO_IDS, 2))
    assert admission is not None
    assert engine.write_fill(admission.fills[0], cold.blocks[0])
    with engine.filling(admission.fills[1]) as writer:
        assert writer is not None
        writer.view[:] = bytes(byte ^ 1 for byte in cold.blocks[1])  # copied, then refused
    with pytest.raises(ValueError, match="block 1 of the hit was not filled"):
        engine.start(request.key, plan_decode(300, 256, 44, (), engine.geometry))
    assert engine.start(request.key, plan_decode(300, 128, 44, (), engine.geometry))
    got = finish(engine, new_session(engine), request, type(cold)())
    assert got.tokens == cold.tokens
    assert got.blocks == {1: cold.blocks[1]}
    assert got.rows == (300 + 3, 44 + 3)


def test_what_a_start_needs(new_engine: NewEngine, new_request: NewRequest, cold: Any) -> None:
    engine, request = new_engine(), new_request(300)
    admission = engine.admit(Job(request, NO_IDS, 2))
    assert admission is not None
    with pytest.raises(StateError, match="block bytes: found 9"):
        engine.write_fill(admission.fills[0], b"too short")
    for fill in admission.fills:
        assert engine.write_fill(fill, cold.blocks[fill.index])
    plan = plan_decode(300, 256, 44, [256], engine.geometry)
    for window in (None, cold.windows[256][:-1]):
        with pytest.raises(ValueError, match="needs its record of"):
            engine.start(request.key, plan, window)
    assert engine.start(request.key, plan, cold.windows[256])
    assert not engine.write_fill(admission.fills[0], cold.blocks[1])  # too late: it runs
    engine.release(request.key)
    assert engine.resident_blocks(request.digests) == 2


def test_release_during_a_fill_never_hands_its_block_on(
    new_engine: NewEngine, new_request: NewRequest, run_alone: Any, cold: Any
) -> None:
    """A loader is in the middle of a block when its sequence is released and another one, which
    needs every free block, is admitted: the loader's late bytes must not reach it."""
    engine = new_engine(n_blocks=3, n_slots=2)
    admission = engine.admit(Job(new_request(300, name="gone"), NO_IDS, 1))
    assert admission is not None
    (fill,) = admission.fills
    inside, go_on = threading.Event(), threading.Event()

    def load() -> None:
        with engine.filling(fill) as writer:
            assert writer is not None
            inside.set()
            assert go_on.wait(10)
            writer.view[:] = b"\x11" * len(writer.view)
            writer.complete = True

    loader = threading.Thread(target=load)
    loader.start()
    assert inside.wait(10)
    engine.release(admission.key)
    engine.check_integrity()
    assert engine.stats().free_blocks == 2
    request = new_request(300)
    assert engine.admit(Job(request, NO_IDS, 0)) is None  # three blocks, one is still written
    go_on.set()
    loader.join(10)
    assert bytes(engine.block_view(fill.block)) == b"\x11" * engine.state.layout.block_bytes
    assert engine.stats().free_blocks == 3
    assert run_alone(engine, request).tokens == cold.tokens


def test_a_late_fill_leaves_the_next_owner_alone(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, cold: Any
) -> None:
    engine = new_engine(n_blocks=3, n_slots=1)
    admission = engine.admit(Job(new_request(300, name="gone"), NO_IDS, 2))
    assert admission is not None
    engine.release(admission.key)
    request = new_request(300)
    second = engine.admit(Job(request, NO_IDS, 2))
    assert second is not None
    assert {f.block for f in second.fills} & {f.block for f in admission.fills}
    for fill in second.fills:
        assert engine.write_fill(fill, cold.blocks[fill.index])
    for fill in admission.fills:
        assert not engine.write_fill(fill, b"\x11" * engine.state.layout.block_bytes)
        with engine.filling(fill) as writer:
            assert writer is None
    assert engine.start(request.key, plan_decode(300, 256, 44, (), engine.geometry))
    assert finish(engine, new_session(engine), request, type(cold)()).tokens == cold.tokens


def test_loaders_and_releases_at_random(
    new_engine: NewEngine, new_request: NewRequest, cold: Any
) -> None:
    """Two loader threads fill whatever was admitted while sequences come and go; at the end
    every block is back, and a sequence that did start has the bytes that were meant for it."""
    engine = new_engine(n_blocks=6, n_slots=3)
    todo: list[Any] = []
    lock = threading.Condition()
    stop = False

    def load() -> None:
        while True:
            with lock:
                while not todo and not stop:
                    lock.wait(5)
                if not todo:
                    return
                fill = todo.pop()
            engine.write_fill(fill, cold.blocks[fill.index])

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    live: list[Any] = []
    for number in range(300):
        # Another root a request: nothing is resident, all blocks are filled.
        root = type(cold.digests[0])(number.to_bytes(32, "big"))
        request = new_request(256, name=str(number), root=root, max_tokens=1)
        admission = engine.admit(Job(request, NO_IDS, 2))
        if admission is not None:
            live.append(request)
            with lock:
                todo.extend(admission.fills)
                lock.notify_all()
        if admission is None or number % 3 == 0:
            gone = live.pop(0)
            engine.release(gone.key)
        engine.check_integrity()
    with lock:
        stop = True
        lock.notify_all()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for sequence in list(engine.scheduler.sequences()):
        assert engine.start(sequence.key, plan_decode(256, 256, 44, (), engine.geometry))
        held = [engine.state.read_block(block) for block in sequence.lease.blocks[:2]]
        assert held == [cold.blocks[0], cold.blocks[1]]
        engine.release(sequence.key)
    engine.check_integrity()
    assert (engine.stats().free_blocks, engine.stats().free_slots) == (6, 3)
