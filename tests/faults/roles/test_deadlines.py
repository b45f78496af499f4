"""F6: the time runs out in each stage, which is seen to have been reached: 504, or one error event
once something was sent, and everything is free again while the frame still stands."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core import faults
from headrace.core.limits import EdgeLimits, LeaseTimes

MODEL = "toy"
DEADLINE_S = 3.0
DEPLOYMENT = {
    "leases": LeaseTimes(handoff_s=8.0, member_s=8.0),
    "edge": EdgeLimits(request_deadline_s=DEADLINE_S),
}
ROUTER = {"queue_ahead": 0}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]

STAGES = {
    "on its way to prefill": ("PrefillJob", 1, "prefill", 504),
    "in the middle of prefill": ("BlocksReady", 1, "decode", 504),
    "transfer": ("PrefillDone", 1, "decode", 504),
    "before the first token": ("TokenBatch", 1, "router", 504),
    "in the middle of the answer": ("TokenBatch", 3, "router", 200),
}


async def test_the_time_runs_out_in_every_stage(
    service: Any, proxy: Any, prompt: Any, kinds: Any
) -> None:
    """One request a stage, side by side. Behind a frame that stands still so does the Cancel: the
    roles end what they hold by their own clocks."""
    prompts = [prompt(300 + i, f"time runs out {stage}") for i, stage in enumerate(STAGES)]
    expected = [await service.expected(ids, 20) for ids in prompts]
    labels = [".".join(map(str, ids[:3])) for ids in prompts]
    release, stuck = asyncio.Event(), set()

    def rule(seen: Any) -> Any:
        for label, (kind, nth, towards, _) in zip(labels, STAGES.values(), strict=True):
            if label in seen.labels and (seen.kind, seen.towards) == (kind, towards):
                first = seen.message.items[0].first_index if kind == "TokenBatch" else 0
                if first + 1 >= nth:
                    stuck.add(label)
                    return proxy.held(release)
        return proxy.PASS

    service.traffic.reset(rule)
    reached = kinds.by_rule("all stages", lambda: stuck == set(labels))

    async def load() -> list[Any]:
        # The last one first, so that its tokens share no frame with those that stand still.
        speaks = asyncio.create_task(service.ask(prompts[-1], 20))
        await kinds.until(lambda: labels[-1] in stuck or speaks.done(), 30, "it never spoke")
        others = await asyncio.gather(*(service.ask(ids, 20) for ids in prompts[:-1]))
        return [*others, await speaks]

    answers = await kinds.Scenario(load, [reached], []).run()
    for answer, text, (*_, status) in zip(answers, expected, STAGES.values(), strict=True):
        assert (answer.error, answer.status) == ("deadline_exceeded", status)
        answer.check(text)
        assert bool(answer.text) == (status == 200)
    await service.at_rest(6.0)  # the frames still stand
    release.set()
    await service.pulse()


async def test_the_time_runs_out_while_blocks_are_loaded(
    service: Any, prompt: Any, kinds: Any
) -> None:
    ids = prompt(300, "loading")
    fault = kinds.at_point("decode.load=sleep@1")  # five seconds, in the copying thread
    answer = await kinds.Scenario(lambda: service.ask(ids), [fault], []).run()
    assert (answer.error, answer.status) == ("deadline_exceeded", 504)
    faults.disarm()
    await service.cluster.at_rest(5.0)  # blocks, slot and leases, without waiting for the thread
    await service.pulse()  # which waits for it: what it writes is nobody's


async def test_the_time_runs_out_in_line(service: Any, proxy: Any, prompt: Any, kinds: Any) -> None:
    """Both decode replicas have their four slots taken by requests that get no word out."""
    release = asyncio.Event()
    service.traffic.reset(
        lambda seen: proxy.held(release) if seen.kind == "TokenBatch" else proxy.PASS
    )
    desk = service.router.desk
    prompts = [prompt(20 + i, f"line {i}") for i in range(10)]
    in_line = kinds.by_rule("in line", lambda: desk.waiting_requests == 2)

    async def load() -> list[Any]:
        return list(await asyncio.gather(*(service.ask(ids) for ids in prompts)))

    answers = await kinds.Scenario(load, [in_line], []).run()
    assert [(a.error, a.status) for a in answers] == [("deadline_exceeded", 504)] * 10
    await service.at_rest(6.0)
    release.set()
    await service.pulse()
