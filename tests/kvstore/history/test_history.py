"""I10: under kills, stops, damage and a Redis that forgets, every get is right or a miss."""

from __future__ import annotations

import os
import random

import pytest
from headrace_tests import module

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]
SECONDS = float(os.environ.get("HEADRACE_HISTORY_SECONDS", "6"))


@pytest.fixture(scope="module")
def play():
    return module("tests/kvstore/history/history.py").play


@pytest.fixture
def seed() -> int:
    """Another one every time, printed; HEADRACE_HISTORY_SEED plays one again."""
    told = os.environ.get("HEADRACE_HISTORY_SEED")
    return int(told) if told else random.SystemRandom().randrange(1 << 32)


def _check(report) -> None:
    print(report.text())
    assert not report.wrong, "\n".join([report.text(), *report.wrong[:10]])
    assert report.words["got"] > 20 * report.seconds and report.words["miss"] > 0
    assert report.words["put"] > 10 * report.seconds and report.words["scribbled"] > 0
    assert sum(report.deeds.values()) > 0 and report.objects > 0


def test_a_short_history(play, seed):
    _check(play(seed, SECONDS))


def test_a_short_history_of_two_hosts(play, seed):
    report = play(seed, SECONDS, n_stores=2)
    _check(report)
    assert report.from_others > 0


def test_a_wrong_answer_would_be_noticed(play, seed):
    """The control: clients that lie about every twentieth get."""
    report = play(seed, 3.0, lie=True)
    assert report.wrong and all(line.startswith("worker") for line in report.wrong)


@pytest.mark.slow
@pytest.mark.parametrize("n_stores", [1, 2])
def test_a_history_of_a_minute(play, seed, n_stores):
    report = play(seed, 60.0, n_stores=n_stores)
    _check(report)
    assert {"store killed", "client killed", "Redis flushed"} <= set(report.deeds)
