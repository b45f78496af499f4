"""SIGTERM with streams open: nothing new is taken in, what can end does, the rest is told."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headrace.core.states import ReplicaState

pytestmark = pytest.mark.fault
Plain = Any  # the cluster of plain.py
Questions = Any  # of crowd.py
Begin = Callable[..., Any]
Ids = Callable[[str, int], list[int]]

ENDLESS_TOKENS = 3000  # minutes


def streaming(plain: Plain, asked: list[Any]) -> None:
    plain.until(lambda: all(one.answer.text for one in asked), 60.0, "no text came")
    assert all(one.open for one in asked), "one is over already"


def test_a_router_drains(
    plain: Plain, questions: Questions, begin: Begin, ask: Any, ids: Ids
) -> None:
    """Its grace is `times.drain_s`; it ends by itself, with 0, when that is over."""
    plain.just("decode-0", "decode-1")
    grace_s = plain.values["times"]["drain_s"]
    short, late = questions.plain([ids("drains", 100), ids("late", 100)], 12)
    endless = questions.endless(ids("endless", 100), ENDLESS_TOKENS)
    url = plain.url
    asked = [begin(plain, endless), begin(plain, short)]
    streaming(plain, asked[:1])
    plain.signal("router-0", signal.SIGTERM)
    begun_s = time.monotonic()
    plain.until(
        lambda: plain.announced("router-0") == ReplicaState.DRAINING, grace_s, "not announced"
    )
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 503
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    refused = ask(plain, late)
    assert (refused.status, refused.ends[0]["error"]["message"]) == (
        503,
        "this router is shutting down",
    )
    assert int(refused.headers["retry-after"]) >= 1
    assert asked[0].open  # it still has its grace
    assert asked[1].end().right
    told = asked[0].end().ends
    assert [event["error"]["message"] for event in told] == ["this router is shutting down"]
    assert asked[0].answer.text
    assert plain.exit_status("router-0", 30.0) == 0
    assert time.monotonic() - begun_s >= grace_s  # the endless one got all of it
    finishes = [record["finish"] for record in plain.records()[-2:]]
    assert sorted(finishes) == ["length", "no_replica"]
    plain.start("router-0")
    plain.settled()
    assert ask(plain, late).right


@pytest.fixture(scope="module")
def three(questions: Questions, ids: Ids) -> list[Any]:
    made: list[Any] = questions.plain([ids(f"ends {i}", 300) for i in range(3)], 60)
    return made


@pytest.mark.parametrize("others", [True, False], ids=["another", "nobody"])
def test_a_decode_replica_ends_with_streams_open(
    plain: Plain, three: list[Any], begin: Begin, others: bool
) -> None:
    """They go on with the same text: on another one, or on the next life of the only one."""
    plain.just("decode-0", *["decode-1"] * others)
    asked = [begin(plain, one) for one in three]
    streaming(plain, asked)
    name = next(r["name"] for r in plain.roles() if r["role"] == "decode" and r["requests"])
    known = plain.metric("headrace_retries_total")
    assert plain.end(name) == 0
    if others:
        answers = [one.end() for one in asked]
        plain.start(name)
    else:
        plain.start(name)
        answers = [one.end() for one in asked]
    assert all(answer.right for answer in answers), answers
    assert any(record["resumes"] for record in plain.records()[-3:])
    assert plain.metric("headrace_retries_total") == known  # resumed: no budget was spent
    plain.settled()
