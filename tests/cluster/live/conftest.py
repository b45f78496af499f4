"""One real cluster under Ray for the whole session, and hands to look into it and to harm it.

The files of this folder run in the order of their names: the later ones kill more.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace_tests import module

from headrace.engine import LLM

Live: Any = module("tests/cluster/live/cluster.py").Live
crowds = module("tests/cluster/live/crowd.py")
Until = Callable[..., None]


@pytest.fixture(autouse=True)
def short_temp() -> None:
    """Switches the parent folder's fixture off: a live cluster's folders outlast a test."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def values(cluster: str, **changes: Any) -> dict[str, Any]:
    """A small cluster on T1 in `invariant` numerics.

    171 = keep + 127 is the most that a second turn of few new tokens runs: it stays on decode,
    while a prompt that gains from a hand-off at all (keep + 128 tokens) goes to prefill."""
    return {
        "cluster": cluster,
        "deployment": {
            "model": "t1",
            "numerics": "invariant",
            "local_prefill_rows": 171,
            # What a killed replica leased of the store is held for so long, and a silent one is a
            # member: the former longer than anybody is frozen here, the latter shorter, and neither
            # the 30 and 3 s of every cluster, which tests would wait out.
            "leases": {"handoff_s": 6.0, "member_s": 2.0, "member_beat_s": 0.5},
        },
        "engine": {"n_blocks": 160, "n_slots": 8},
        "store": {"arena_bytes": 64 << 20, "ssd_bytes": 128 << 20, "segment_bytes": 8 << 20},
        # On a busy machine a start takes minutes, and an answer of Redis longer than 50 ms.
        "router": {"port": free_port(), "resume_wait_s": 180, "lookup_s": 0.5},
        "keys": [{"tenant": name} for name in ("one", "two", *(f"fresh-{i}" for i in range(100)))],
        "times": {"restart_after_s": 5, "ready_s": 300, "drain_s": 40},
        **changes,
    }


@pytest.fixture(scope="session")
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    yield folder
    if request.session.testsfailed:
        print(f"the clusters' files and logs are kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def live(home: Path, until: Until) -> Iterator[Live]:
    """One vision, one prefill, two decode, store, router, supervisor under Ray; started once."""
    cluster = Live(home, values("live", pools={"vision": 1, "prefill": 1, "decode": 2}), until)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def beside(home: Path, until: Until) -> Iterator[Live]:
    """A second cluster in one process, without Ray, that nobody may touch."""
    one = {"processes": "one", "pools": {"prefill": 1, "decode": 1}}
    cluster = Live(home, values("beside", **one), until)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def questions(llm: LLM) -> Any:
    """Makes questions with their answers; see `crowd.py`."""
    return crowds.Questions(llm)


@pytest.fixture(scope="session")
def image_part() -> Callable[[bytes], dict[str, Any]]:
    """`image_part(png_bytes)`: a picture as a part of a message."""
    made: Callable[[bytes], dict[str, Any]] = crowds.image_part
    return made


@pytest.fixture(scope="session")
def seeded() -> Any:
    """A sampling that draws."""
    return crowds.SEEDED


@pytest.fixture(scope="session")
def crowd() -> Callable[..., Any]:
    """`with crowd(live, questions, clients=3) as load`: asked by tenants of its own."""

    def make(live: Any, asked: Any, clients: int = 3) -> Any:
        return crowds.Crowd(live, asked, clients)

    return make


@pytest.fixture(scope="session")
def mixed(questions: Any, ids: Callable[[str, int], list[int]]) -> list[Any]:
    """A load: prompts that are handed over, and among them chats about pictures."""
    asked: list[Any] = questions.plain([ids(f"mixed {i}", 300) for i in range(8)], 24)
    for i in range(4):
        asked.insert(3 * i, questions.shown(i, "word " * 60, 8))
    return asked


@pytest.fixture(scope="session")
def probes(questions: Any, ids: Callable[[str, int], list[int]]) -> tuple[Any, Any]:
    """Two short questions: one is handed over, one shows a picture."""
    (plain,) = questions.plain([ids("probe", 300)], 4)
    return plain, questions.shown(99, "word " * 60, 4)


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """`ask(live, question, tenant="")`: one answer."""

    def once(live: Any, question: Any, tenant: str = "") -> Any:
        with live.client(tenant) as client:
            return crowds.ask(client, question)

    return once


@pytest.fixture(scope="session")
def begin() -> Callable[..., Any]:
    """`begin(live, question)`: an answer that grows."""
    made: Callable[..., Any] = crowds.Asked
    return made
