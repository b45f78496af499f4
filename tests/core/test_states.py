"""State tables: every pair of state and event has an answer, and terminal states stay terminal."""

from __future__ import annotations

import pytest

from headrace.core.errors import IllegalTransition
from headrace.core.states import (
    REQUEST_TABLE,
    TERMINAL_REQUEST_STATES,
    VISIBILITY_TABLE,
    ReplicaEvent,
    ReplicaState,
    RequestEvent,
    RequestState,
    StateTable,
    Visibility,
    VisibilityEvent,
)


@pytest.mark.parametrize("state", sorted(TERMINAL_REQUEST_STATES))
def test_nothing_leaves_a_terminal_request_state(state: RequestState) -> None:
    for event in RequestEvent:
        step = REQUEST_TABLE.step(state, event)
        assert step.ignored
        assert step.state is state


def test_a_request_that_sent_bytes_is_never_retried() -> None:
    with pytest.raises(IllegalTransition, match="retry is impossible in state streaming"):
        REQUEST_TABLE.step(RequestState.STREAMING, RequestEvent.RETRY, "r")


def test_a_request_that_sent_bytes_is_resumed_and_streams_again() -> None:
    state = RequestState.STREAMING
    for event in (RequestEvent.RESUME, RequestEvent.RESUME, RequestEvent.TOKENS):
        state = REQUEST_TABLE.step(state, event).state
        assert state is RequestState.RESUMING
    for sent in (RequestEvent.SENT_TO_DECODE, RequestEvent.SENT_TO_PREFILL):
        assert REQUEST_TABLE.step(state, sent).state is RequestState.STREAMING
    with pytest.raises(IllegalTransition):
        REQUEST_TABLE.step(RequestState.ACCEPTED, RequestEvent.RESUME, "nothing was received")
    with pytest.raises(IllegalTransition):
        REQUEST_TABLE.step(state, RequestEvent.RETRY, "what was sent cannot be taken back")


def test_only_sealed_objects_become_visible() -> None:
    with pytest.raises(IllegalTransition):
        VISIBILITY_TABLE.step(Visibility.RESERVED, VisibilityEvent.LIST)
    with pytest.raises(IllegalTransition):
        VISIBILITY_TABLE.step(Visibility.RESERVED, VisibilityEvent.SYNC)


def test_a_pair_cannot_be_both_moved_and_ignored() -> None:
    pair = (ReplicaState.READY, ReplicaEvent.WARM)
    with pytest.raises(ValueError, match="both"):
        StateTable("t", {pair: ReplicaState.GONE}, frozenset({pair}))
