"""Twenty times what a cluster can take. For half a minute: bench/end_to_end/overload.py."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from headrace.core.metrics import Metric

pytestmark = pytest.mark.fault
Plain = Any  # the cluster of plain.py

SECONDS, TIMES = 12.0, 20.0
RECOVERY_S = 5.0  # a promise
REFUSAL_MS = 100.0  # a promise; held here by the half of them, as the client shares the cores
GROWTH_BYTES = 48 << 20


def test_overload_is_said_early_and_passes(plain: Plain, llm: Any, overload: Any) -> None:
    plain.just("decode-0")
    prompts = overload.small_prompts(8)
    texts = [one.text for one in llm.generate(prompts, max_tokens=overload.ANSWER_TOKENS)]
    pids = {name: plain.pid(name) for name in ("router-0", "decode-0")}

    def look() -> dict[str, float]:
        memory = {name: overload.resident_bytes(pid) for name, pid in pids.items()}
        return memory | {"waiting": plain.metric(Metric.REQUESTS_WAITING)}

    before = look()
    report = asyncio.run(
        overload.overload(plain.url, plain.key(), prompts, seconds=SECONDS, times=TIMES, look=look)
    )
    print(report.capacity_per_s, report.refusal_ms(), report.recovery_s, len(report.shots))
    shots, refused, answered = report.shots, report.refused, report.answered
    # one of the two for each: nobody was left without an answer
    assert len(refused) + len(answered) == len(shots) >= 0.9 * report.offered_per_s * SECONDS
    assert len(refused) > len(shots) / 2
    assert all(int(shot.retry_after) >= 1 for shot in refused)
    assert statistics.median(shot.took_ms for shot in refused) <= REFUSAL_MS
    # what was let in is answered as ever, and work was done all the time
    assert [shot.text for shot in answered] == [texts[shot.prompt] for shot in answered]
    assert len(answered) >= 0.5 * report.capacity_per_s * SECONDS
    # bounds that were reached and held
    queued = plain.values["deployment"]["edge"]["queued_requests"]
    assert report.most("waiting") == queued
    for name in pids:
        assert report.most(name) - before[name] < GROWTH_BYTES
    # what stood before it, at the rate measured before, is not the router's to shorten
    before_it = plain.values["engine"]["n_slots"] + queued
    assert report.recovery_s <= RECOVERY_S + before_it / report.capacity_per_s
    plain.settled()
