"""Twenty times what a cluster can take. For half a minute: bench/end_to_end/overload.py."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from headrace.core.metrics import Metric

pytestmark = pytest.mark.fault
Plain = Any  # the cluster of plain.py

SECONDS, TIMES = 3.0, 20.0
RECOVERY_S = 5.0  # a promise
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
        overload.overload(
            plain.url, plain.key(), prompts, seconds=SECONDS, times=TIMES, measure_s=2.0, look=look
        )
    )
    print(report.capacity_per_s, report.refusal_ms(), report.recovery_s, len(report.shots))
    shots, refused, answered = report.shots, report.refused, report.answered
    # one of the two for each: nobody was left without an answer
    assert len(refused) + len(answered) == len(shots) >= 0.9 * report.offered_per_s * SECONDS
    assert len(refused) > len(shots) / 2
    assert all(int(shot.retry_after) >= 1 for shot in refused)
    # early: not after a wait in line. The promised 100 ms are the bench's to measure, on a machine
    # that does nothing else
    answer_ms = statistics.median(shot.took_ms for shot in answered)
    assert report.refusal_ms()["p99"] < answer_ms / 2
    # what was let in is answered as ever, and work was done all the time
    assert [shot.text for shot in answered] == [texts[shot.prompt] for shot in answered]
    queued = plain.values["deployment"]["edge"]["queued_requests"]
    assert len(answered) >= plain.values["engine"]["n_slots"] + queued
    # bounds that were reached and held
    assert report.most("waiting") == queued
    for name in pids:
        assert report.most(name) - before[name] < GROWTH_BYTES
    # what stands in line before it takes as long as it took all the others
    assert report.recovery_s <= RECOVERY_S + max(shot.took_ms for shot in answered) / 1e3
    plain.settled()
