"""An exception and a NaN in steps of live decode replicas that run several streams."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.fault
Plain = Any  # the cluster of plain.py
Questions = Any  # of crowd.py
Begin = Callable[..., Any]
Ids = Callable[[str, int], list[int]]

HIT = 30  # steps of the process: its streams have all begun, and none has ended


@pytest.mark.slow  # by default tests/faults/roles/test_guilty.py and tests/engine/test_faults.py
def test_a_bad_step_costs_at_most_the_one_at_fault(
    plain: Plain, questions: Questions, begin: Begin, ask: Any, ids: Ids
) -> None:
    plain.just("decode-0")
    plain.start("decode-1", faults=f"engine.step=raise@{HIT}", wait=False)
    plain.start("decode-2", faults=f"engine.step=nan@{HIT}")
    plain.settled()
    pids = {name: plain.pid(name) for name in ("decode-1", "decode-2")}
    known = len(plain.records())
    *together, after = questions.plain([ids(f"steps {i}", 100) for i in range(10)], 50)
    answers = [one.end() for one in [begin(plain, question) for question in together]]
    plain.until(lambda: len(plain.records()) == known + 9, 10.0, "no records")
    ran = {record["decode"] for record in plain.records()[known:]}
    assert ran == {"decode-0", "decode-1", "decode-2"}

    # the exception hit several streams at once: each ran the step again, alone
    assert re.search(r"a step of [2-9] sequences failed", plain.log("decode-1"))
    assert "fault point engine.step fired" in plain.log("decode-1")
    # the NaN was one stream's own: that one is told, with what it had until then
    failed = [answer for answer in answers if not answer.right]
    assert [answer.error for answer in failed] == ["internal_error"], failed
    assert {name: plain.pid(name) for name in pids} == pids
    assert all(plain.announced(name) == "ready" for name in pids)
    plain.settled()
    assert ask(plain, after).right
    plain.settled()
