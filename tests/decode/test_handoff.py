"""The receiving end of a hand-off: its automaton, its book, early frames, and windows to keep."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chain import as_token_ids, block_digests
from headrace.core.errors import IllegalTransition
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.messages import BlocksReady, Place, PrefillDone
from headrace.core.request import GenRequest
from headrace.core.rows import (
    Geometry,
    plan_decode,
    plan_prefill,
    plan_resume,
    record_position,
)
from headrace.decode.handoff import (
    DECODE_TABLE,
    TERMINAL,
    DecodeEvent,
    DecodeState,
    EarlyFrames,
    Handoff,
    known_digests,
    make_plan,
    window_candidates,
    windows_to_hold,
)

ROOT = Digest(hashlib.sha256(b"root of a test").digest())
KEY = JobKey(RequestId("r"), 0)
S, E = DecodeState, DecodeEvent
FROM_OUTSIDE = (
    *(E.BLOCKS, E.WINDOW, E.PREFILL_DONE, E.PREFILL_FAILED, E.PREFILL_GONE, E.STALLED),
    *(E.AGAIN, E.CANCEL),
)


def place(number: int) -> Place:
    return Place(BootId("b"), number * 4096, 100, 1, number)


def ready(digests: tuple[Digest, ...], first: int, count: int, base: int = 0) -> BlocksReady:
    places = tuple(place(base + i) for i in range(first, first + count))
    return BlocksReady(KEY, first, digests[first : first + count], places)


def chain(n_tokens: int) -> tuple[Digest, ...]:
    return block_digests(ROOT, as_token_ids(range(n_tokens)))


def request(n_tokens: int, keep_tokens: int = 76) -> GenRequest:
    ids = as_token_ids(range(n_tokens))
    return GenRequest.offline(ROOT, ids, keep_tokens=keep_tokens, max_tokens=9, name=RequestId("r"))


# ---- the automaton ---------------------------------------------------------------------------


@pytest.mark.parametrize("state", S)
def test_what_others_send_is_answered_in_every_state(state: DecodeState) -> None:
    for event in FROM_OUTSIDE:
        DECODE_TABLE.step(state, event)
    if state not in TERMINAL:
        assert DECODE_TABLE.step(state, E.CANCEL).state is S.CANCELLED


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_nothing_leaves_an_end(state: DecodeState) -> None:
    for event in E:
        step = DECODE_TABLE.step(state, event)
        assert step.ignored and step.state is state


@pytest.mark.parametrize("event", (E.PREFILL_FAILED, E.PREFILL_GONE, E.STALLED))
def test_a_lost_prefill_ends_an_open_handoff_and_nothing_else(event: DecodeEvent) -> None:
    for state in S:
        step = DECODE_TABLE.step(state, event)
        if state in (S.QUEUED_OPEN, S.AWAITING):
            assert step.state is S.FAILED
        else:
            assert step.ignored


@pytest.mark.parametrize("order", ((E.ADMITTED, E.PREFILL_DONE), (E.PREFILL_DONE, E.ADMITTED)))
def test_room_and_completion_may_come_in_either_order(order: tuple[DecodeEvent, ...]) -> None:
    state = S.QUEUED_OPEN
    for event in order:
        with pytest.raises(IllegalTransition):
            DECODE_TABLE.step(state, E.STARTED)  # never before both
        state = DECODE_TABLE.step(state, event).state
    assert state is S.LOADING


# ---- the book of what came --------------------------------------------------------------------


def test_blocks_are_news_once_and_again_only_after_damage() -> None:
    digests = chain(700)
    book = Handoff(digests)
    assert book.blocks(ready(digests, 0, 3)) == [(i, place(i)) for i in range(3)]
    assert book.blocks(ready(digests, 0, 3)) == []  # a duplicate
    assert book.blocks(ready(digests, 1, 2, base=50)) == []  # elsewhere, while the first loads
    book.loaded(0)
    assert book.lost(1) == place(51)  # and there it is looked for next
    assert book.blocks(ready(digests, 0, 3, base=50)) == []
    assert book.lost(1) is None
    assert book.blocks(ready(digests, 0, 3, base=90)) == [(1, place(91))]
    assert book.verified_blocks == 1
    book.loaded(1)
    book.loaded(2)
    assert book.verified_blocks == 3


@pytest.mark.parametrize(
    "message",
    [
        BlocksReady(KEY, 0, chain(700)[1:3], (place(0), place(1))),  # shifted by one
        BlocksReady(KEY, 4, (*chain(700)[4:], ROOT), (place(0), place(1))),  # beyond the prompt
        BlocksReady(KEY, 0, chain(700)[:2], (place(0),)),
        BlocksReady(KEY, -1, chain(700)[-1:], (place(0),)),
        BlocksReady(KEY, 1, block_digests(ROOT, as_token_ids([7] * 256))[1:], (place(0),)),
    ],
)
def test_an_announcement_that_does_not_fit_the_request_changes_nothing(
    message: BlocksReady,
) -> None:
    book = Handoff(chain(700))
    assert book.blocks(message) is None
    assert not book.told


def test_an_empty_announcement_is_a_sign_of_life() -> None:
    assert Handoff(chain(700)).blocks(BlocksReady(KEY, 0, (), ())) == []


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=40))
def test_the_hit_ends_at_the_first_block_that_is_not_here(
    events: list[tuple[int, bool]],
) -> None:
    book = Handoff(chain(1024))
    here: set[int] = set()
    for index, good in events:
        if good:
            book.loaded(index)
            here.add(index)
        elif index not in here:
            book.lost(index)
    assert book.verified_blocks == next(i for i in range(9) if i not in here)


# ---- plans and windows ------------------------------------------------------------------------


def test_known_digests_go_on_over_generated_tokens() -> None:
    prompt, answer = as_token_ids(range(300)), as_token_ids(range(300, 530))
    wish = request(300)
    assert known_digests(wish, as_token_ids(())) == wish.digests
    assert known_digests(wish, answer) == block_digests(ROOT, prompt + answer)
    short = request(100)
    assert known_digests(short, as_token_ids(range(100, 130))) == chain(130)


def test_a_first_attempt_and_a_resume_have_their_own_plans() -> None:
    geometry = Geometry(64, 4, 4)
    wish = request(1000)
    assert make_plan(wish, 0, 896, (896,), geometry) == plan_decode(1000, 896, 76, (896,), geometry)
    assert make_plan(wish, 30, 1024, (640,), geometry) == plan_resume(
        1030, 1024, 924, (640,), geometry
    )


@given(
    n_tokens=st.integers(1, 3000),
    hit=st.integers(0, 24),
    keep=st.integers(64, 400),
    layers=st.integers(1, 6),
    delivered=st.sets(st.integers(1, 23), max_size=2),
    stored=st.sets(st.integers(1, 23)),
)
def test_the_candidates_hold_the_record_that_the_plan_would_choose(
    n_tokens: int, hit: int, keep: int, layers: int, delivered: set[int], stored: set[int]
) -> None:
    geometry = Geometry(64, layers, layers)
    wish = request(n_tokens, keep)
    hit_tokens = min(hit, n_tokens // 128) * 128
    have = tuple(128 * x for x in delivered if 128 * x <= n_tokens)
    more = tuple(128 * x for x in stored if 128 * x <= n_tokens)
    plan = make_plan(wish, 0, hit_tokens, have, geometry)
    candidates = window_candidates(plan, wish.digests, geometry, above=plan.window_position)
    newest = next((p for p, _ in candidates if p in more), None)
    found = make_plan(wish, 0, hit_tokens, (*have, *((newest,) if newest else ())), geometry)
    assert found == make_plan(wish, 0, hit_tokens, (*have, *more), geometry)
    assert all(digest == wish.digests[p // 128 - 1] for p, digest in candidates)


@given(st.integers(64, 600), st.integers(1, 4000), st.integers(0, 3000))
def test_enough_windows_are_held_for_any_end_of_the_answer(
    keep: int, n_tokens: int, generated: int
) -> None:
    # All grains crossed while decoding, of which the newest are held; a next turn's p lies at or
    # above floor(length - keep), and none of those that were crossed may be gone.
    length = n_tokens + generated
    crossed = [x for x in range(128, length + 1, 128) if x > n_tokens]
    held = crossed[-windows_to_hold(keep) :]
    first = max(0, length - keep) // 128 * 128
    assert [x for x in crossed if x >= first] == [x for x in held if x >= first]


def test_the_example_of_the_documentation(root: Path) -> None:
    geometry = Geometry(32, 6, 6)  # T1
    first = plan_prefill(1000, 0, 44, (), geometry)
    whole = plan_decode(1000, 896, 44, (896,), geometry)
    without = plan_decode(1000, 896, 44, (), geometry)
    assert (first.encoder_rows, first.decoder_rows, record_position(1000, 44)) == (896, 0, 896)
    assert (whole.encoder_rows, whole.decoder_rows, whole.decoder_start) == (104, 44, 956)
    assert (without.start, without.encoder_rows, without.decoder_rows) == (710, 290, 44)
    text = (root / "docs/handoff.md").read_text("utf-8")
    for said in ("896 encoder rows", "104 encoder rows", "290 encoder rows", "44 decoder rows"):
        assert said in text
    assert f"(here {without.encoder_rows - whole.encoder_rows})" in text


# ---- frames before their job ------------------------------------------------------------------


def test_early_frames_come_back_in_order_and_only_for_their_key() -> None:
    digests, other = chain(700), JobKey(RequestId("other"), 0)
    early = EarlyFrames(30.0)
    first, done = ready(digests, 0, 2), PrefillDone(KEY, 1, 0, 0.1)
    assert early.hold(first, 0.0) and early.hold(PrefillDone(other, 9, 0, 0.1), 0.0)
    assert early.hold(done, 1.0)
    assert early.take(KEY) == [first, done]
    assert early.take(KEY) == []
    assert len(early) == 1


def test_early_frames_expire_by_their_first_frame() -> None:
    early = EarlyFrames(30.0)
    early.hold(PrefillDone(KEY, 1, 0, 0.1), 100.0)
    later = JobKey(RequestId("later"), 0)
    early.hold(PrefillDone(later, 1, 0, 0.1), 120.0)
    early.hold(PrefillDone(KEY, 1, 0, 0.1), 129.0)
    assert early.expire(130.0) == 0
    assert early.expire(130.1) == 2
    assert len(early.take(later)) == 1
    assert len(early) == 0


def test_early_frames_are_bounded_in_frames_and_in_blocks() -> None:
    digests = chain(2000)
    early = EarlyFrames(30.0, max_frames=3, max_blocks=10)
    assert early.hold(ready(digests, 0, 8), 0.0)
    assert not early.hold(ready(digests, 8, 3), 0.0)
    assert early.hold(ready(digests, 8, 2), 0.0)
    assert early.hold(PrefillDone(KEY, 1, 0, 0.1), 0.0)
    assert not early.hold(PrefillDone(KEY, 1, 0, 0.1), 0.0)
    assert len(early.take(KEY)) == 3
    assert early.hold(ready(digests, 0, 10), 0.0)
