"""A cluster of plain processes that grows test by test, and the pieces of tests/cluster/live.

The files of this folder run in the order of their names, on one cluster."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from headrace_tests import module

from headrace.engine import LLM

ROOT = Path(__file__).resolve().parents[3]
ORDINARY_IDS = range(300, 4000)  # of the 4,096-id tokenizer: no special token among them


module("tests/cluster/live/cluster.py")  # `plain` builds on it
Plain: Any = module("tests/faults/live/plain.py").Plain
crowds = module("tests/cluster/live/crowd.py")


def until(condition: Callable[[], bool], within_s: float, message: str | Callable[[], str]) -> None:
    """Wait for a condition; fails with the message when it does not come in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(message if isinstance(message, str) else message())
        time.sleep(0.02)


@pytest.fixture(scope="session", name="until")
def until_fixture() -> Callable[..., None]:
    return until


@pytest.fixture(scope="session")
def ids() -> Callable[[str, int], list[int]]:
    """`ids(name, count)`: the same random ordinary token ids for the same name."""

    def make(name: str, count: int) -> list[int]:
        chance = random.Random(name)
        return [chance.choice(ORDINARY_IDS) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The yardstick: one engine in this process, cold for every prompt, same keep."""
    return LLM("t1", numerics="invariant")


@pytest.fixture(scope="session")
def questions(llm: LLM) -> Any:
    """Makes questions with their answers; see tests/cluster/live/crowd.py."""
    return crowds.Questions(llm)


@pytest.fixture(scope="session")
def begin() -> Callable[..., Any]:
    """`begin(plain, question)`: an answer that grows."""
    made: Callable[..., Any] = crowds.Asked
    return made


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """`ask(plain, question)`: one answer."""

    def once(plain: Any, question: Any) -> Any:
        with plain.client() as client:
            return crowds.ask(client, question)

    return once


@pytest.fixture(scope="session")
def overload() -> ModuleType:
    """The module bench/end_to_end/overload.py."""
    return module("bench/end_to_end/overload.py")


VALUES: dict[str, Any] = {
    "cluster": "plain",
    "deployment": {
        "model": "t1",
        "numerics": "invariant",
        "local_prefill_rows": 171,
        "edge": {"queued_requests": 4},
    },
    "engine": {"n_blocks": 64, "n_slots": 4},
    "store": {"arena_bytes": 32 << 20, "ssd_bytes": 64 << 20, "segment_bytes": 8 << 20},
    "router": {"port": 0, "queue_ahead": 0, "resume_wait_s": 180},
    "keys": [{"tenant": "one"}],
    "times": {"drain_s": 3},
}


@pytest.fixture(scope="session")
def plain() -> Iterator[Any]:
    """Begins without any process but a Valkey; the tests start what they need."""
    home = Path(tempfile.mkdtemp(prefix="hr-"))
    cluster = Plain(home, VALUES, until)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(home, ignore_errors=True)
