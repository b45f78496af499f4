"""The prefill job as an automaton, and which window records it asks the store for."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chain import as_token_ids, block_digests
from headrace.core.errors import IllegalTransition
from headrace.core.ids import Digest, RequestId
from headrace.core.request import GenRequest
from headrace.core.rows import Geometry, plan_prefill, record_position
from headrace.prefill.jobs import (
    JOB_TABLE,
    NOT_ADMITTED,
    TERMINAL,
    JobEvent,
    JobState,
    window_candidates,
)

ROOT = Digest(hashlib.sha256(b"root of a test").digest())
FROM_OUTSIDE = (JobEvent.AGAIN, JobEvent.CANCEL, JobEvent.ACK)
FROM_THE_ENGINE = (JobEvent.PRODUCT, JobEvent.ROWS_DONE, JobEvent.ERROR)


def request(n_tokens: int, keep_tokens: int) -> GenRequest:
    ids = as_token_ids(range(n_tokens))
    return GenRequest.offline(ROOT, ids, keep_tokens=keep_tokens, max_tokens=1, name=RequestId("r"))


@pytest.mark.parametrize("state", JobState)
def test_what_others_send_is_answered_in_every_state(state: JobState) -> None:
    for event in FROM_OUTSIDE:
        JOB_TABLE.step(state, event)
    if state not in TERMINAL:
        assert JOB_TABLE.step(state, JobEvent.CANCEL).state is JobState.CANCELLED


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_nothing_leaves_an_end_and_what_was_under_way_is_late(state: JobState) -> None:
    for event in JobEvent:
        step = JOB_TABLE.step(state, event)
        assert step.ignored and step.state is state


def test_only_what_is_sealed_to_the_end_can_be_acknowledged() -> None:
    for state in JobState:
        moved = not JOB_TABLE.step(state, JobEvent.ACK).ignored
        assert moved == (state is JobState.HELD)


def test_the_engine_cannot_speak_of_a_job_that_it_was_not_given() -> None:
    for state in (*NOT_ADMITTED, JobState.FILLING):
        for event in (JobEvent.PRODUCT, JobEvent.ROWS_DONE):
            with pytest.raises(IllegalTransition):
                JOB_TABLE.step(state, event)


@given(
    n_tokens=st.integers(1, 3000),
    hit=st.integers(0, 24),
    keep=st.integers(64, 400),
    layers=st.integers(1, 6),
    stored=st.sets(st.integers(1, 23)),
)
def test_the_candidates_hold_the_record_that_the_plan_would_choose(
    n_tokens: int, hit: int, keep: int, layers: int, stored: set[int]
) -> None:
    geometry = Geometry(64, layers, layers)
    hit_tokens = min(hit, n_tokens // 128) * 128
    candidates = window_candidates(request(n_tokens, keep), hit_tokens, geometry)
    windows = tuple(128 * x for x in stored if 128 * x <= n_tokens)
    wanted = plan_prefill(n_tokens, hit_tokens, keep, windows, geometry)
    newest = next((p for p, _ in candidates if p in windows), None)
    found = plan_prefill(n_tokens, hit_tokens, keep, (newest,) if newest else (), geometry)
    # A record above R can save nothing but the run that makes it, which must happen for the
    # blocks anyway; so asking for the newest candidate alone loses nothing.
    assert found == wanted
    assert [p for p, _ in candidates] == sorted((p for p, _ in candidates), reverse=True)
    digests = block_digests(ROOT, as_token_ids(range(n_tokens)))
    assert all(digest == digests[p // 128 - 1] for p, digest in candidates)


def test_a_full_hit_with_its_record_runs_nothing_and_without_it_the_rows_up_to_p() -> None:
    geometry = Geometry(64, 4, 4)
    wish = request(1000, 76)
    p = record_position(1000, 76)
    assert window_candidates(wish, 896, geometry)[0][0] == p == 896
    assert plan_prefill(1000, 896, 76, (p,), geometry).encoder_rows == 0
    without = plan_prefill(1000, 896, 76, (), geometry)
    assert (without.start, without.end) == (896 - 4 * 63, 896)
