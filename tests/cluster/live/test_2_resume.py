"""Streams whose decode replica is really killed, and times in which a whole pool is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.fault]
Live = Any  # the cluster of conftest.py
Questions = Any  # of crowd.py
Begin = Callable[..., Any]
Ids = Callable[[str, int], list[int]]
Until = Callable[..., None]

N_TOKENS = 90  # of an answer: a second or two, time to do harm in


def streaming(asked: list[Any], until: Until) -> None:
    """Until text of each has come."""
    until(lambda: all(one.answer.text for one in asked), 60.0, "no text came")
    assert all(one.open for one in asked), "one is over already"


def both_kinds(questions: Questions, seeded: Any, prompts: list[list[int]]) -> list[Any]:
    """Half of them greedy, half seeded, in turn."""
    kinds = [
        questions.plain(prompts[i::2], N_TOKENS, sampling)
        for i, sampling in ((0, None), (1, seeded))
    ]
    return [one for pair in zip(*kinds, strict=True) for one in pair]


def test_streams_outlive_their_decode_replica_and_then_all_of_them(
    live: Live, questions: Questions, begin: Begin, ask: Any, seeded: Any, ids: Ids, until: Until
) -> None:
    """With one gone they go on at the other one. With none left, what streams waits for one to come
    back and goes on, and what is new is refused with a reason."""
    live.settled()
    names = [f"{kind} {i}" for i in (0, 1) for kind in ("greedy", "seeded")]
    prompts = [ids(f"outlives {name}", 300) for name in names]  # none of these answers ends early
    asked = both_kinds(questions, seeded, prompts)
    lost = one_is_killed(live, asked, begin, until)
    until(
        lambda: live.role(lost["name"])["boot_id"] not in ("", lost["boot_id"]), 180.0, "not back"
    )
    until(lambda: routable(live) == 2, 30.0, "not reached")
    (short,) = questions.plain([ids("left", 300)], 6)
    all_are_killed(live, asked[:2], short, begin, ask, until)


def routable(live: Live) -> float:
    """Decode replicas."""
    count: float = live.metric("headrace_replicas", pool="decode", state="ready")
    return count


def one_is_killed(live: Live, long: list[Any], begin: Begin, until: Until) -> dict[str, Any]:
    """The role that was killed, as it was before."""
    known = len(live.records())
    before = {role["name"]: role for role in live.roles() if role["role"] == "decode"}
    asked = [begin(live, one) for one in long]
    streaming(asked, until)
    running = [name for name in before if live.metric("headrace_replica_requests", replica=name)]
    killed_s = time.time()
    live.kill(before[running[0]]["pid"])
    answers = [one.end() for one in asked]
    assert [answer.right for answer in answers] == [True] * 4, answers
    until(lambda: len(live.records()) == known + 4, 10.0, "no records")
    records = live.records()[known:]
    resumed = [record for record in records if record["resumes"]]
    assert resumed and all(record["completion_tokens"] == N_TOKENS for record in records)
    assert all(record["decode"] != running[0] or len(running) == 1 for record in resumed)
    live.assert_suspected(running[0], killed_s)
    lost: dict[str, Any] = before[running[0]]
    return lost


def all_are_killed(
    live: Live, long: list[Any], short: Any, begin: Begin, ask: Any, until: Until
) -> None:
    known = len(live.records())
    before = {name: live.role(name) for name in ("decode-0", "decode-1")}
    asked = [begin(live, one) for one in long]
    streaming(asked, until)
    live.kill(*(role["pid"] for role in before.values()))
    until(lambda: not live.ready(), 5.0, "still ready")
    refused = ask(live, short)
    assert (refused.status, refused.error) == (503, "no_replica")
    assert int(refused.headers["retry-after"]) >= 1
    assert all(one.open for one in asked)
    answers = [one.end() for one in asked]
    assert [answer.right for answer in answers] == [True, True], answers
    live.settled()
    resumes = [record["resumes"] for record in live.records()[known:] if record["decode"]]
    assert len(resumes) == 2 and min(resumes) >= 1
    for name, role in before.items():
        assert live.role(name)["boot_id"] != role["boot_id"]
    assert ask(live, short).right


def test_no_prefill_replica_is_left(
    live: Live, questions: Questions, ask: Any, ids: Ids, until: Until
) -> None:
    live.settled()
    one, other = questions.plain([ids(f"no prefill {i}", 400) for i in range(2)], 6)
    known = len(live.records())
    with live.frozen(live.role("prefill-0")["pid"]):
        ready = {"pool": "prefill", "state": "ready"}
        until(lambda: not live.metric("headrace_replicas", **ready), 8.0, "still routable")
        assert live.ready()
        assert ask(live, one).right
    record = live.next_record(known)
    assert (record["prefill"], record["prefill_rows"], record["encoder_rows"]) == ("", 0, 400)
    live.settled()
    assert ask(live, other).right
    assert live.next_record(known + 1)["prefill_rows"] == 384
    live.settled()
