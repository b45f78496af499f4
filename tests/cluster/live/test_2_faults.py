"""Faults that a cluster survives by itself. Each one is verified to have taken effect, and after
each everything held is back: leases, engine blocks, slots, and `/ready`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine import LLM

pytestmark = [pytest.mark.ray, pytest.mark.fault]
Live = Any  # the cluster of conftest.py
Ids = Callable[[str, int], list[int]]
Until = Callable[..., None]
Stream = Callable[..., Any]

LONG = 3500  # tokens: some seconds of prefill, time to do harm in


def sealing(live: Live, until: Until, *, blocks: int = 2) -> None:
    """Until the prefill of a prompt that was just sent has sealed a few blocks of many."""
    before = live.stat().blocks
    until(lambda: live.stat().blocks >= before + blocks, 30.0, "no block was sealed")
    assert live.stat().blocks < before + LONG // 128, "it is over already"


def sent(live: Live, until: Until) -> None:
    """Until a replica has the one open request: prefill, since decode is bound late."""
    until(lambda: any(role["requests"] for role in live.roles()), 30.0, "nobody has the request")


def charged(live: Live, until: Until) -> str:
    """The decode replica that the one open request was given to."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [
            role["name"]
            for role in live.view()["roles"]
            if role["role"] == "decode" and role["requests"]
        ]
        return len(found) == 1

    until(look, 10.0, "no decode replica has a request")
    return found[0]


@pytest.mark.parametrize("stage", ["sent", "prefill", "decode"])
def test_client_gone(live: Live, ids: Ids, stream: Stream, until: Until, stage: str) -> None:
    live.settled()
    request = stream(live, ids(f"gone {stage}", LONG), 400)
    if stage == "sent":
        sent(live, until)
        assert request.text == ""
    elif stage == "prefill":
        sealing(live, until)
        assert request.text == ""
    else:
        until(lambda: request.text != "", 60.0, "no text came")
    record = request.leave()
    assert record["finish"] == "cancelled"
    assert record["completion_tokens"] < 400
    live.settled(within_s=10.0)  # nothing waits for a lease to run out


def test_redis_frozen_during_a_hand_off(
    live: Live, llm: LLM, ids: Ids, stream: Stream, until: Until
) -> None:
    prompt = ids("frozen", LONG)
    request = stream(live, prompt, 4)
    sealing(live, until)
    valkey = live.process("valkey-server")
    with live.frozen(valkey.pid):
        record = request.finish()
        assert live.ready()
        fresh = ids("while frozen", 700)  # and one that begins without Redis
        other = live.complete(fresh, 4)
        assert live.process("valkey-server").state == "T"
    assert (request.text, request.done) == (llm.generate([prompt], max_tokens=4)[0].text, True)
    assert record["prefill_rows"] == LONG - LONG % 128
    assert other.text == llm.generate([fresh], max_tokens=4)[0].text
    assert other.record["prefill_rows"] == 640
    live.settled()


@pytest.mark.slow  # tests/flow/roles/test_lost.py shows it without Ray
def test_prefill_killed_mid_request(
    live: Live, llm: LLM, ids: Ids, stream: Stream, until: Until
) -> None:
    prompt = ids("prefill killed", LONG)
    before = live.role("prefill-0")
    request = stream(live, prompt, 4)
    sealing(live, until)
    live.kill(before["pid"])
    assert request.open and request.text == ""
    record = request.finish()
    assert (request.text, request.done) == (llm.generate([prompt], max_tokens=4)[0].text, True)
    assert record["attempts"] >= 2
    live.settled()
    after = live.role("prefill-0")
    assert after["boot_id"] != before["boot_id"]
    assert after["pid"] != before["pid"]


@pytest.mark.slow  # likewise
def test_decode_killed_before_its_first_token(
    live: Live, llm: LLM, ids: Ids, stream: Stream, until: Until
) -> None:
    prompt = ids("decode killed", LONG)
    request = stream(live, prompt, 4)
    sealing(live, until, blocks=14)
    # decode is bound when prefill is nearly done, a moment before its first token: the moment is
    # held open by stopping both replicas until one of them has the request
    with live.frozen(live.role("decode-0")["pid"]), live.frozen(live.role("decode-1")["pid"]):
        name = charged(live, until)
        before = live.role(name)
        live.kill(before["pid"])
    assert request.open and request.text == ""
    record = request.finish()
    assert (request.text, request.done) == (llm.generate([prompt], max_tokens=4)[0].text, True)
    assert record["attempts"] >= 2
    assert record["decode"] != name
    live.settled()
    assert live.role(name)["boot_id"] != before["boot_id"]


def test_killed_supervisor_comes_back(live: Live, until: Until) -> None:
    before = live.view()["supervisor"]
    live.kill(before["pid"])
    until(lambda: live.view()["supervisor"]["pid"] != before["pid"], 45.0, "no new report")
    assert live.exists({"pid": live.view()["supervisor"]["pid"]})
    live.settled()
    # nobody else began a new life: the count goes on where it was
    lives = lambda report: {role["name"]: role["lives"] for role in report["roles"]}  # noqa: E731
    assert lives(live.view()["supervisor"]) == lives(before)
    assert min(lives(before).values()) >= 1


def report(live: Live, name: str) -> dict[str, Any]:
    """What the supervisor wrote of a role."""
    roles: list[dict[str, Any]] = live.view()["supervisor"]["roles"]
    return next(role for role in roles if role["name"] == name)


def test_a_frozen_replica_is_replaced_by_the_supervisor(
    live: Live, llm: LLM, ids: Ids, until: Until
) -> None:
    before = live.role("decode-0")
    until(lambda: report(live, "decode-0")["pid"] == before["pid"], 10.0, "not looked at yet")
    reported = report(live, "decode-0")
    with live.frozen(before["pid"]):
        # Ray sees a living process; only its silence tells
        until(lambda: live.role("decode-0")["state"] == "absent", 10.0, "still a member")
        prompt = ids("while frozen, decode", 500)
        assert live.complete(prompt, 4).text == llm.generate([prompt], max_tokens=4)[0].text
        until(lambda: not live.exists(before), 30.0, "nobody ended it")
    live.settled()
    assert live.role("decode-0")["boot_id"] != before["boot_id"]
    expected = (reported["revived"] + 1, reported["lives"] + 1)

    def told() -> bool:
        after = report(live, "decode-0")
        return (after["revived"], after["lives"]) == expected

    until(told, 10.0, "the supervisor has not looked since")
