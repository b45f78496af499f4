"""Pictures in a running cluster: made once, found afterwards, and never taken for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.rows import floor_grain

pytestmark = pytest.mark.ray
Live = Any  # the cluster of conftest.py
Questions = Any  # of crowd.py
Ask = Callable[..., Any]
Until = Callable[..., None]

WORDS = "word " * 60


def test_a_picture_is_made_once_and_another_one_shares_nothing_behind_it(
    live: Live, questions: Questions, ask: Ask, until: Until
) -> None:
    one = questions.shown(101, WORDS, 6, before=WORDS * 3)
    other = questions.shown(102, WORDS, 6, before=WORDS * 3)
    (span,) = one.spans
    assert span.start > 128 and one.prompt_tokens == other.prompt_tokens
    full = floor_grain(one.prompt_tokens)
    assert full > span.end

    found = {}
    for name, question in (("first", one), ("again", one), ("other", other)):
        known = len(live.records())
        answer = ask(live, question)
        assert answer.right, answer
        found[name] = record = live.next_record(known)
        assert record["cached_tokens"] == answer.usage["prompt_tokens_details"]["cached_tokens"]
        until(lambda: not live.stat().index_unlisted, 20.0, "not listed")
        live.settled()

    first, again, another = found["first"], found["again"], found["other"]
    assert (first["pictures"], first["pictures_made"], first["cached_tokens"]) == (1, 1, 0)
    assert first["prefill_rows"] == full
    # all blocks are found, and nobody opens the file again
    assert (again["pictures"], again["pictures_made"]) == (1, 0)
    assert (again["cached_tokens"], again["prefill_rows"]) == (full, 0)
    assert (another["pictures_made"], another["cached_tokens"]) == (1, floor_grain(span.start))
    assert live.stat().pictures >= 2
