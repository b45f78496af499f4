"""Frames of a hand-off that are lost, doubled, late or overtaken, in every mode: the same text or
one explicit error, never a hang, and nothing is left.

Rules are drawn from a seed that the test's name shows; HEADRACE_FAULT_SEED=n runs that one alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.core.limits import EdgeLimits, LeaseTimes

MODEL = "toy"
DEPLOYMENT = {
    "leases": LeaseTimes(handoff_s=2.0, member_s=8.0),
    "edge": EdgeLimits(request_deadline_s=38.0),
}
ROUTER = {"retries": 6}  # an attempt that a busy machine was too slow for is not the frame's
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fault]

ONLY = os.environ.get("HEADRACE_FAULT_SEED")
SEEDS = [int(ONLY)] if ONLY else [1, 2]
LENGTHS = (172, 300, 513, 640)  # a record at p or none, a block's border, several batches of blocks
MODES = ("exact", "replay", "state")


def modes(*by_default: str) -> Any:
    """A test in all modes; by default only in these, in the others with `-m slow`."""
    slow = pytest.mark.slow
    cases = [m if m in by_default else pytest.param(m, marks=slow) for m in MODES]
    return pytest.mark.parametrize("mode", cases, indirect=True, scope="module")


def modes_and_seeds(*by_default: tuple[str, int]) -> Any:
    """All modes and seeds; by default only these, the others with `-m slow`. All of a seed that
    HEADRACE_FAULT_SEED names."""
    slow = pytest.mark.slow
    cases = [
        pytest.param(m, s, marks=[] if ONLY or (m, s) in by_default else slow)
        for m in MODES
        for s in SEEDS
    ]
    return pytest.mark.parametrize(("mode", "seed"), cases, indirect=["mode"], scope="module")


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def ask_all(service: Any, prompt: Any, exactly: bool) -> list[Any]:
    prompts = [prompt(n, f"frames {n}") for n in LENGTHS]
    calls = [service.check(ids, exactly=exactly) for ids in prompts]
    return list(await asyncio.gather(*calls))


@modes_and_seeds(*((m, 1) for m in MODES))
async def test_doubled_and_overtaken_frames_change_nothing(
    service: Any, proxy: Any, prompt: Any, kinds: Any, seed: int
) -> None:
    deeds = [lambda draw: proxy.TWICE, lambda draw: proxy.later(draw.uniform(0.0, 0.08))]
    service.traffic.reset(proxy.seeded(seed, 0.5, deeds))
    effect = kinds.by_rule("frames", lambda: service.traffic.count("twice") >= 3)
    load = lambda: ask_all(service, prompt, exactly=True)  # noqa: E731  # one line, used once
    answers = await kinds.Scenario(load, [effect], [service.pulse]).run()
    assert [answer.error for answer in answers] == [None] * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(service: Any, serving: Any, roles: Any, salts: str) -> AsyncIterator[Any]:
    """The same service by a router that waits less for what nobody misses."""
    role = roles("router-hasty", edge=EdgeLimits(request_deadline_s=12.0))
    async with serving(role, salts, MODEL) as (router, http):
        yield dataclasses.replace(service, router=router, http=http)


@modes_and_seeds(("exact", 1))  # each kind of frame by itself is lost in every mode below
async def test_lost_frames_cost_an_attempt_or_one_explicit_error(
    hasty: Any, service: Any, proxy: Any, prompt: Any, kinds: Any, seed: int
) -> None:
    await hasty.routable()
    service.traffic.reset(proxy.seeded(seed, 0.06, [lambda draw: proxy.DROP]))
    effect = kinds.by_rule("frames", lambda: service.traffic.count("drop") >= 1)
    load = lambda: ask_all(hasty, prompt, exactly=False)  # noqa: E731
    answers = await kinds.Scenario(load, [effect], [hasty.pulse, service.pulse]).run()
    assert sum(answer.error is None for answer in answers) >= 2, answers


def first(kind: str, towards: str = "") -> Any:
    """The first frame of a kind in a request's first attempt: epoch 0 is its prefill's, 1 its
    decode's."""
    return lambda seen: (
        (seen.kind, seen.nth) == (kind, 1)
        and seen.key.epoch in (0, 1)
        and towards in ("", seen.towards)
    )


def later_tokens(seen: Any) -> bool:
    """A frame with tokens from the third on. Whoever has its last one in it, whichever request that
    is, would hear no more: a decode that says nothing ends at the deadline."""
    if seen.kind != "TokenBatch" or any(i.finish is not None for i in seen.message.items):
        return False
    return any(i.first_index >= 2 for i in seen.message.items)


def product(mode: str) -> str:
    """The frame that carries what decode starts from, beside the blocks."""
    return {"exact": "WindowReady", "replay": "BlocksReady", "state": "StateReady"}[mode]


async def each_meets(
    service: Any, proxy: Any, kinds: Any, prompts: list[Any], cases: list[Any], deed: Any
) -> list[Any]:
    """One request a case, all together: `deed` is done to the first frame that the case names."""
    mine = {".".join(map(str, ids[:3])): case for ids, case in zip(prompts, cases, strict=True)}
    met: set[str] = set()

    def rule(seen: Any) -> Any:
        hit = {label for label in seen.labels if label in mine and mine[label](seen)} - met
        met.update(hit)
        return deed if hit else proxy.PASS

    async def load() -> list[Any]:
        return list(await asyncio.gather(*(service.check(ids) for ids in prompts)))

    service.traffic.reset(rule)
    effect = kinds.by_rule("frames", lambda: len(met) == len(cases))
    return await kinds.Scenario(load, [effect], [service.pulse]).run()


def one_of_each(mode: str) -> list[Any]:
    return [
        *(first("PrefillJob"), first("BlocksReady"), first(product(mode)), first("HandoffAck")),
        *(first("PrefillDone", "decode"), first("PrefillDone", "router"), later_tokens),
        *(first("PrefillProgress"), first("BindDecode")),
    ]


@modes("exact")
async def test_every_kind_of_frame_late(
    service: Any, proxy: Any, prompt: Any, kinds: Any, mode: str
) -> None:
    """Longer than every lease here: what comes then is of an older epoch, or news to nobody."""
    cases = [*one_of_each(mode), first("DecodeJob")]
    prompts = [prompt(300 + 20 * i, f"late {i}") for i in range(len(cases))]
    await each_meets(service, proxy, kinds, prompts, cases, proxy.later(3.0))


@modes(*MODES)
async def test_every_kind_of_frame_lost_once(
    service: Any, proxy: Any, prompt: Any, kinds: Any, mode: str
) -> None:
    """What decode must be told is told again by another attempt. (A decode that says nothing at all
    ends at the deadline: tests/router/test_ends.py. A socket loses no frame by itself.)"""
    cases = one_of_each(mode)
    prompts = [prompt(310 + 20 * i, f"lost {i}") for i in range(len(cases))]
    await each_meets(service, proxy, kinds, prompts, cases, proxy.DROP)


@pytest.mark.parametrize("mode", ["exact"], indirect=True, scope="module")  # one shows it
async def test_a_rule_that_meets_no_frame_is_a_fault_that_missed(
    service: Any, proxy: Any, prompt: Any, kinds: Any, mode: str
) -> None:
    """The control: aimed at a frame that this mode does not have, the load is well and the scenario
    is not."""
    kind = "WindowReady" if mode == "state" else "StateReady"
    service.traffic.reset(lambda seen: proxy.DROP if seen.kind == kind else proxy.PASS)
    effect = kinds.by_rule(kind, lambda: service.traffic.count("drop") >= 1)
    answers: list[Any] = []

    async def load() -> None:
        answers.append(await service.check(prompt(300, "control")))

    with pytest.raises(kinds.FaultMissed, match=f"{kind}: it took no effect"):
        await kinds.Scenario(load, [effect], [], within_s=1.0).run()
    await service.pulse()
