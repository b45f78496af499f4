"""A cluster some of whose pools are empty at the start: it says so, and needs no restart later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.fault
Plain = Any  # the cluster of plain.py
Questions = Any  # of crowd.py
Ids = Callable[[str, int], list[int]]


def test_a_pool_that_is_empty_at_start(
    plain: Plain, questions: Questions, ask: Any, ids: Ids
) -> None:
    one, other, third = questions.plain([ids(f"growing {i}", 300) for i in range(3)], 6)
    plain.start("store-0", "router-0")
    assert httpx.get(f"{plain.url}/health", trust_env=False).status_code == 200
    ready = httpx.get(f"{plain.url}/ready", trust_env=False)
    assert (ready.status_code, ready.json()["replicas"]["decode"]) == (503, 0)
    refused = ask(plain, one)
    assert (refused.status, refused.error) == (503, "no_replica")
    assert int(refused.headers["retry-after"]) >= 1

    plain.start("decode-0")
    plain.until(plain.ready, 10.0, "the router does not see decode-0")
    known = len(plain.records())
    assert ask(plain, other).right
    record = plain.next_record(known)
    assert (record["prefill"], record["prefill_rows"], record["encoder_rows"]) == ("", 0, 300)

    plain.start("prefill-0")
    plain.settled()  # the router reaches it too
    assert ask(plain, third).right
    record = plain.next_record(known + 1)
    assert (record["prefill"], record["prefill_rows"]) == ("prefill-0", 256)
    plain.settled()
