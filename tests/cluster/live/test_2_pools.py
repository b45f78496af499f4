"""Every pool killed and stopped under load. All other requests are answered as if nothing happened;
those in flight there go on elsewhere with the same text, or end with one explicit error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.fault]
Live = Any  # the cluster of conftest.py
Questions = Any  # of crowd.py
Ids = Callable[[str, int], list[int]]
Until = Callable[..., None]

SUSPECT_S = 2.0  # a promise: so soon nobody is sent to a killed replica any more
FREEZE_S = 5.0  # longer than a member's lease (3 s), shorter than the supervisor's patience
PICTURE_ERRORS = ("replica_lost", "no_replica", "pictures_missing", "overloaded")


def mixed(questions: Questions, ids: Ids, name: str, *, pictures: int = 4) -> list[Any]:
    """Questions that nobody asked before: most are handed over, every third shows a picture."""
    asked = questions.plain([ids(f"{name} {i}", 300) for i in range(8)], 24)
    shown = [questions.shown(hash_of(name) + i, "word " * 60, 8) for i in range(pictures)]
    for at, question in enumerate(shown):
        asked.insert(3 * at, question)
    return asked


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-3:], "big") * 100


def needs_pictures(answer: Any) -> bool:
    """Who may fail where the only vision replica is away, or the store, where rows of pictures
    lie."""
    return answer.question.shows and answer.error in PICTURE_ERRORS


def reborn(live: Live, before: dict[str, Any]) -> bool:
    """Whether a role is announced that is another life of this one."""
    return live.role(before["name"])["boot_id"] not in ("", before["boot_id"])


def busy(live: Live, name: str, until: Until) -> None:
    """Until the replica has work of ours; for store and router there is always some."""
    if name.partition("-")[0] in ("prefill", "decode"):
        until(lambda: bool(live.role(name)["requests"]), 60.0, f"{name} gets nothing")


def serves(live: Live, questions: Questions, ask: Any, ids: Ids, name: str) -> None:
    """The replica, and not another one, takes part in an answer."""
    for i in range(12):
        text = f"served by {name} {live.role(name)['boot_id']} {i}"
        question = (
            questions.shown(hash(text) % 10**6, "word " * 60, 4)
            if name == "vision-0"
            else questions.plain([ids(text, 300)], 4)[0]
        )
        known = len(live.records())
        answer = ask(live, question)
        assert answer.right, answer
        record = live.next_record(known)
        took_part = {
            "vision-0": record["pictures_made"] == 1,
            "prefill-0": record["prefill_rows"] > 0,
            record["decode"]: True,
            "store-0": record["prefill_rows"] > 0,
            "router-0": True,
        }
        if took_part.get(name):
            return
    pytest.fail(f"{name} takes no part in anything")


@pytest.mark.parametrize("name", ["vision-0", "prefill-0", "decode-0", "store-0"])
def test_killed_under_load(
    live: Live, questions: Questions, crowd: Any, ask: Any, ids: Ids, until: Until, name: str
) -> None:
    live.settled()
    before = live.role(name)
    with crowd(live, mixed(questions, ids, f"killed {name}")) as load:
        load.more(2)
        busy(live, name, until)
        at_s = time.time()
        live.kill(before["pid"])
        load.more(4)
        until(lambda: reborn(live, before), 120.0, "not back")
        load.more(4)
    failed = load.check(needs_pictures if name in ("vision-0", "store-0") else lambda answer: False)
    assert len(failed) < len(load.answers) / 2
    if name != "store-0":  # routers have no link to it
        suspected = [when for when, state in live.changes(name) if state == "suspect"]
        assert suspected and -0.01 < suspected[-1] - at_s < SUSPECT_S
    live.settled()
    assert live.role(name)["pid"] != before["pid"]
    serves(live, questions, ask, ids, name)
    live.settled()


@pytest.mark.parametrize("name", ["vision-0", "prefill-0", "decode-0", "store-0", "router-0"])
def test_stopped_under_load_and_let_go(
    live: Live, questions: Questions, crowd: Any, ask: Any, ids: Ids, until: Until, name: str
) -> None:
    live.settled()
    before = live.role(name)
    with crowd(live, mixed(questions, ids, f"stopped {name}")) as load:
        load.more(2)
        busy(live, name, until)
        with live.frozen(before["pid"]):  # state T is verified there
            time.sleep(FREEZE_S)
            assert live.process_state(before["pid"]) == "T"
        load.more(4)
    load.check(needs_pictures if name in ("vision-0", "store-0") else lambda answer: False)
    live.settled()
    after = live.role(name)
    assert (after["pid"], after["boot_id"]) == (before["pid"], before["boot_id"])
    serves(live, questions, ask, ids, name)
    live.settled()


def test_router_killed_under_load(
    live: Live, questions: Questions, crowd: Any, ask: Any, ids: Ids, until: Until
) -> None:
    """Its streams break and are seen to break; the replicas let go what they held for it."""
    live.settled()
    before = live.role("router-0")
    with crowd(live, mixed(questions, ids, "router killed", pictures=1)) as load:
        load.more(2)
        live.kill(before["pid"])
        until(lambda: reborn(live, before), 120.0, "not back")
        load.more(4)
    for answer in load.answers:
        assert answer.right or answer.broken or answer.error == "no_replica", answer
        assert answer.question.text.startswith(answer.text.rstrip("\ufffd"))
    live.settled()
    serves(live, questions, ask, ids, "router-0")
