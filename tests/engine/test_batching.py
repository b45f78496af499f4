"""What shares a step, a block or an engine changes nothing: T1, `invariant`, poisoned state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.chain import as_token_ids, block_digests
from headrace.core.ids import Digest
from headrace.core.request import FinishReason, GenRequest, Sampling
from headrace.core.rows import StartKind, plan_decode, plan_resume
from headrace.engine import Engine, EngineSettings, Half, Job
from headrace.engine.sampler import draw

NewEngine = Callable[..., Engine]
NewRequest = Callable[..., GenRequest]

PROMPTS = (1, 31, 127, 128, 200, 300)


@pytest.fixture(scope="module")
def alone(t1: Any, new_request: NewRequest, run_alone: Any) -> Callable[..., Any]:
    """One request in an engine of its own, everything in one step as far as it goes; cached."""
    cache: dict[tuple[object, ...], Any] = {}

    def run(n: int, **how: Any) -> Any:
        key = (n, *sorted(how.items()))
        if key not in cache:
            engine = Engine(
                t1, EngineSettings(12, 1, 512, 512), Half.FULL, record_spacing_tokens=128,
                poison=True,
            )  # fmt: skip
            cache[key] = run_alone(engine, new_request(n, **how))
        return cache[key]

    return run


@pytest.mark.parametrize("budget", [(23, 11), (160, 160)], ids=str)
def test_batched_equals_alone(
    budget: tuple[int, int],
    new_engine: NewEngine,
    new_request: NewRequest,
    new_session: Any,
    alone: Any,
) -> None:
    """Tokens, block bytes, window records and counted rows, whatever the step sizes; sequences
    join while others decode, more of them than slots."""
    max_rows, replay_rows = budget
    engine = new_engine(
        max_rows_per_step=max_rows, replay_rows_per_step=replay_rows, n_blocks=10, n_slots=3,
        spacing=128,
    )  # fmt: skip
    session = new_session(engine)
    hot = Sampling(temperature=0.8, top_p=0.9, seed=5)
    waiting = [
        new_request(n, name=f"{n}-{i}", seed=n, sampling=(Sampling(), hot)[i], max_tokens=5)
        for n in PROMPTS
        for i in (0, 1)
    ]
    random.Random(max_rows).shuffle(waiting)
    wanted = {r.key: alone(r.n_tokens, seed=r.n_tokens, sampling=r.sampling, max_tokens=5)
              for r in waiting}  # fmt: skip
    most_running = 0
    while waiting or engine.has_work:
        while waiting and engine.stats().free_slots:
            if engine.stats().free_blocks < 4:
                break
            session.begin(waiting.pop())
        most_running = max(most_running, engine.stats().running)
        session.step()
    session.finish()
    assert most_running >= 2
    assert session.seen == wanted


def test_a_common_prefix_stands_once(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, alone: Any
) -> None:
    engine = new_engine(n_blocks=12)
    session = new_session(engine)
    first = session.begin(new_request(300, name="a"))
    while not first.tokens:
        session.step()
    digests = new_request(300).digests
    assert engine.resident_blocks(digests) == 2
    assert engine.stats().held_blocks == 3
    second_request = new_request(290, name="b")  # the same first 290 ids
    # Resident blocks are a hit of 256 tokens; rows run by exact replay from 246 - 186.
    second = session.begin(second_request, hit_blocks=2)
    assert engine.stats().held_blocks == 4  # two shared, one of its own
    leases = [s.lease.blocks for s in engine.scheduler.sequences()]
    assert leases[0][:2] == leases[1][:2] and leases[0][2] != leases[1][2]
    before = [engine.state.read_block(b) for b in leases[0][:2]]
    session.finish()
    assert [engine.state.read_block(b) for b in leases[0][:2]] == before
    assert first.tokens == alone(300).tokens
    assert second.tokens == alone(290).tokens
    assert second.blocks == {}  # nothing below the write floor is announced again
    assert second.rows == (290 - 60 + 3, 44 + 3)
    stats = engine.stats()
    assert (stats.held_blocks, stats.free_blocks, stats.resident_blocks) == (0, 12, 2)


def test_two_that_compute_one_block_at_the_same_time(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any, alone: Any
) -> None:
    """The second keeps a private copy until its release; both announce their own bytes."""
    engine = new_engine(max_rows_per_step=100, replay_rows_per_step=100)
    session = new_session(engine)
    one = session.begin(new_request(130, name="a"))
    two = session.begin(new_request(130, name="b"))
    assert engine.stats().held_blocks == 4
    session.finish()
    assert one == two == alone(130)
    assert engine.stats().resident_blocks == 1
    assert engine.stats().free_blocks == 16


def test_domains_share_nothing(
    new_engine: NewEngine, new_request: NewRequest, new_session: Any
) -> None:
    engine = new_engine()
    session = new_session(engine)
    mine = session.begin(new_request(300, name="a"))
    session.finish()
    other = new_request(300, name="b", root=Digest(bytes([1] * 32)))
    assert engine.resident_blocks(other.digests) == 0
    assert engine.resident_blocks(new_request(300).digests) == 2
    theirs = session.begin(other)
    session.finish()
    assert theirs.blocks == mine.blocks  # the same bytes, under other names
    assert not set(theirs.digests.values()) & set(mine.digests.values())


# ---- ends and samples -----------------------------------------------------------------------


def test_a_stop_id_ends_the_text(new_engine: NewEngine, new_request: NewRequest, run_alone: Any,
                                 alone: Any) -> None:  # fmt: skip
    full = alone(40, max_tokens=12)
    assert full.finish is FinishReason.LENGTH and len(full.tokens) == 12
    stop = full.tokens[5]
    place = full.tokens.index(stop)
    got = run_alone(new_engine(), new_request(40, max_tokens=12, stop_token_ids=[9, stop]))
    assert got.tokens == full.tokens[: place + 1]
    assert got.finish is FinishReason.STOP
    at_the_end = run_alone(
        new_engine(), new_request(40, max_tokens=place + 1, stop_token_ids=[stop])
    )
    assert at_the_end.finish is FinishReason.STOP


def test_samples_repeat_for_a_seed_only(alone: Any) -> None:
    def text(seed: int) -> list[int]:
        how = Sampling(temperature=1.0, top_p=0.95, seed=seed)
        return list(alone(50, sampling=how, max_tokens=10).tokens)

    assert len({tuple(text(seed)) for seed in range(4)}) == 4
    assert text(2) != alone(50, max_tokens=10).tokens


def test_a_draw_is_for_the_place_that_the_token_takes(
    new_engine: NewEngine, new_request: NewRequest, run_alone: Any
) -> None:
    engine, hot = new_engine(), Sampling(temperature=1.0, top_p=0.9, seed=8)
    rows: list[tuple[int, Any]] = []
    engine.runner.on_logits = lambda key, position, row: rows.append((position, row.numpy().copy()))
    got = run_alone(engine, new_request(50, sampling=hot))
    assert [position for position, _ in rows] == [49, 50, 51, 52]
    assert got.tokens == [draw(row, hot, position + 1) for position, row in rows]


# ---- resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "generated"), [(32, 1), (32, 40), (64, 57), (64, 140)])
def test_resume_goes_on_with_the_same_text(
    keep: int, generated: int, new_engine: NewEngine, new_request: NewRequest, alone: Any,
    new_session: Any,
) -> None:  # fmt: skip
    """After a decode death: known tokens, stored blocks, the F of the first run, nothing else.

    At 140 tokens with keep 64 the decoder rows begin above F, at M - W - (n_dec-1)(W-1)."""
    hot = Sampling(temperature=0.7, top_p=0.95, seed=3)
    how = {"keep_tokens": keep, "sampling": hot, "max_tokens": {32: 58, 64: 145}[keep]}
    full, request = alone(200, **how), new_request(200, **how)
    ids = as_token_ids([*request.token_ids, *full.tokens[:-1]])  # the newest has no KV
    assert full.digests == dict(enumerate(block_digests(request.chain_root, ids)))
    for hit_blocks in sorted({0, 1, (200 + generated) // 128}):
        session = new_session(new_engine(spacing=128))
        outcome = _resume(session, request, full, generated, hit_blocks)
        while session.open and len(outcome.tokens) < 5:
            session.step()
        session.engine.release(request.key)
        session.engine.check_integrity()
        assert outcome.tokens == full.tokens[generated : generated + 5]
        assert all(full.blocks[i] == b for i, b in outcome.blocks.items())
        assert all(full.digests[i] == d for i, d in outcome.digests.items())
        assert list(outcome.blocks) == list(range(hit_blocks, (204 + generated) // 128))
        assert all(full.windows[x] == w for x, w in outcome.windows.items())


def _resume(session: Any, request: GenRequest, full: Any, generated: int, hit_blocks: int) -> Any:
    engine = session.engine
    known = request.n_tokens + generated
    admission = engine.admit(Job(request, as_token_ids(full.tokens[:generated]), hit_blocks))
    assert admission is not None
    assert [f.digest for f in admission.fills] == [full.digests[i] for i in range(hit_blocks)]
    for fill in admission.fills:
        assert engine.write_fill(fill, full.blocks[fill.index])
    plan = plan_resume(
        known, hit_blocks * 128, request.first_decoder_row, full.windows, engine.geometry
    )
    session.seen[request.key] = outcome = type(full)()
    session.open.add(request.key)
    window = full.windows.get(plan.window_position)
    assert (plan.kind is StartKind.WINDOW) == (window is not None)
    assert engine.start(request.key, plan, window)
    while not outcome.tokens:
        session.step()
    assert outcome.rows == (plan.encoder_rows, plan.decoder_rows)
    assert (plan.decoder_start > request.first_decoder_row) == (known > 123 + 200)
    return outcome


# ---- cancel ---------------------------------------------------------------------------------


def test_release_in_every_state_gives_everything_back(
    new_engine: NewEngine, new_request: NewRequest
) -> None:
    engine = new_engine(max_rows_per_step=64, replay_rows_per_step=64, n_blocks=6, n_slots=2)
    empty = engine.stats()
    request = new_request(300, max_tokens=6)
    reached = []
    for steps in range(13):
        filling = steps == 0
        assert engine.admit(Job(request, as_token_ids([]), 0)) is not None
        if not filling:
            engine.start(request.key, plan_decode(300, 0, 44, (), engine.geometry))
        for _ in range(steps - 1):
            engine.step()
        (sequence,) = engine.scheduler.sequences()
        reached.append((str(sequence.state), sequence.next_row))
        assert engine.stats().held_blocks == 3
        engine.check_integrity()
        engine.release(request.key)
        engine.release(request.key)  # a second time changes nothing
        engine.check_integrity()
        after = engine.stats()
        assert (after.free_blocks, after.held_blocks) == (empty.free_blocks, 0)
        assert (after.free_slots, after.waiting, after.running) == (2, 0, 0)
        assert (after.backlog_rows, after.resident_tokens) == (0, 0)
        assert engine.step() == () and not engine.has_work
    assert reached[:3] == [("filling", 0), ("known", 0), ("known", 64)]
    assert ("known", 256) in reached and ("decoding", 300) in reached
    assert reached[-1] == ("finished", 305)


def test_backlog_and_resident_tokens_follow_the_rows(
    new_engine: NewEngine, new_request: NewRequest
) -> None:
    engine = new_engine(max_rows_per_step=100, replay_rows_per_step=100)
    request = new_request(250, max_tokens=2)
    assert engine.admit(Job(request, as_token_ids([]), 0)) is not None
    assert (engine.stats().waiting, engine.stats().backlog_rows) == (1, 250)
    engine.start(request.key, plan_decode(250, 0, 44, (), engine.geometry))
    seen = []
    while engine.has_work:
        stats = engine.stats()
        seen.append((stats.running, stats.backlog_rows, stats.resident_tokens, stats.steps))
        engine.step()
    assert seen == [  # the second step ends at 128, where a record is made
        *((1, 250, 0, 0), (1, 150, 100, 1), (1, 122, 128, 2)),
        *((1, 22, 228, 3), (1, 0, 250, 4)),
    ]
    assert engine.stats().rows_per_s > 0
    assert (engine.stats().encoder_rows_total, engine.stats().decoder_rows_total) == (251, 45)
