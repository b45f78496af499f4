"""J2, J3: a process killed or stopped at each step of a hand-off. The step is where a frame stands
still in the proxy before it, so it is known to have been reached. Every client gets its text."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from headrace_tests import module

from headrace.core.card import Role
from headrace.core.limits import EdgeLimits, LeaseTimes

forks = module("tests/beside/forks.py")

MODEL = "toy"
LEASES = LeaseTimes(handoff_s=3.0, member_s=3.0, member_beat_s=0.3)
DEPLOYMENT = {"leases": LEASES, "edge": EdgeLimits(request_deadline_s=55.0)}
ROUTER = {"crashes": 4}  # these tests kill; which request is to blame is another's business
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.fault,
    pytest.mark.timeout(600),  # two processes import torch: 5 s, or minutes on a busy machine
]


class Victim:
    """A replica process behind a proxy. `pid` while it runs."""

    def __init__(self, name: str, role: Any, proxy: Any, engine: Any) -> None:
        self.name, self.proxy = name, proxy
        settings = dataclasses.asdict(role)
        deployment = settings.pop("deployment")
        what = {
            "kind": name.partition("-")[0],
            "role": settings,
            "leases": deployment.pop("leases"),
            "deployment": {k: deployment[k] for k in ("model", "local_prefill_rows")},
            "engine": dataclasses.asdict(engine),
            "proxy": proxy.address,
        }
        self._command = [str(Path(__file__).with_name("process.py")), json.dumps(what)]
        self.process: Any = None

    async def start(self) -> None:
        started = asyncio.to_thread(forks.fork_and_hear, self._command, os.environ)
        self.process, line = await started
        said = json.loads(line)
        self.pid, self.proxy.target = said["pid"], said["address"]
        assert self.pid == self.process.pid

    async def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait, 20.0)
        self.proxy.target = ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def victims(service: Any, roles: Any, proxy: Any) -> AsyncIterator[dict[str, Victim]]:
    """A third replica of each pool, as processes; `ready` starts one that was killed again."""
    engine = service.cluster.prefill.settings
    made = {}
    for name in ("prefill-9", "decode-9"):
        before = await proxy.FrameProxy(name, service.traffic, roles(name).token).start()
        made[name] = Victim(name, roles(name), before, engine)
    await asyncio.gather(*(victim.start() for victim in made.values()))
    yield made
    for victim in made.values():
        await victim.end()
        await victim.proxy.close()


async def ready(service: Any, victim: Victim) -> None:
    """It runs, and the router may choose it."""
    if victim.process is None or victim.process.returncode is not None:
        await victim.start()
    role = Role(victim.name.partition("-")[0])
    async with asyncio.timeout(60):
        while victim.name not in {r.name for r in service.router.replicas.routable(role)}:
            await asyncio.sleep(0.02)


def waits_at(proxy: Any, kind: str, nth: int, towards: str, victim: str) -> Any:
    """(rule, moment, release): the nth such frame of a job that the victim has stands still."""
    event, stuck = asyncio.Event(), []
    has: set[Any] = set()

    def rule(seen: Any) -> Any:
        if seen.kind in ("PrefillJob", "DecodeJob") and seen.before == victim:
            has.add(seen.key.request_id)
        named = (seen.kind, seen.towards, seen.nth) == (kind, towards, nth)
        if named and seen.key.request_id in has:
            stuck.append(seen)
            return proxy.held(event)
        return proxy.PASS

    return rule, lambda: bool(stuck), event


STEPS = {
    "prefill, before it offers": ("prefill-9", "PrefillJob", 1, "prefill"),
    "prefill, in the middle of sending": ("prefill-9", "BlocksReady", 2, "decode"),
    "prefill, before the ack": ("prefill-9", "HandoffAck", 1, "prefill"),
    "decode, before it accepts": ("decode-9", "DecodeJob", 1, "decode"),
    "decode, in the middle of receiving": ("decode-9", "BlocksReady", 2, "decode"),
    "decode, in the middle of the answer": ("decode-9", "TokenBatch", 5, "router"),
}


# By default one kind of fault each. More kills are in tests/flow/roles/test_{lost,resume}.py, and
# tests/cluster/live stops every pool.
KILLS = ("prefill, in the middle of sending", "decode, in the middle of receiving")
SLOW_STOPS = (*KILLS, "prefill, before the ack", "decode, before it accepts")
CASES = [
    *(pytest.param(s, "stop", marks=pytest.mark.slow if s in SLOW_STOPS else []) for s in STEPS),
    *((step, "kill") for step in KILLS),
]


def prefers(service: Any, name: str, monkeypatch: Any) -> None:
    """To the router every other replica looks busier than it is."""
    real = service.router.replicas.candidate

    def candidate(replica: Any) -> Any:
        found = real(replica)
        if replica.name == name:
            return found
        load = replace(found.load, requests=found.load.requests + 2, backlog_rows=1e5)
        return replace(found, load=load)

    monkeypatch.setattr(service.router.replicas, "candidate", candidate)


@pytest.mark.parametrize(("step", "kind"), CASES)
async def test_every_client_gets_its_text(
    service: Any,
    victims: Any,
    proxy: Any,
    prompt: Any,
    kinds: Any,
    monkeypatch: Any,
    step: str,
    kind: str,
) -> None:
    name, frame, nth, towards = STEPS[step]
    victim = victims[name]
    await ready(service, victim)
    rule, moment, release = waits_at(proxy, frame, nth, towards, name)
    prompts = [prompt(460 + i, f"stages {i}") for i in range(4)]
    for ids in prompts:
        await service.expected(ids, 12)
    service.traffic.reset(rule)
    prefers(service, name, monkeypatch)

    async def load() -> list[Any]:
        return list(
            await asyncio.gather(*(service.check(ids, 12, within_s=60.0) for ids in prompts))
        )

    fault = {"stop": kinds.stop, "kill": kinds.kill}[kind](victim.pid, moment)
    back = kinds.go_on(release)
    try:
        answers = await kinds.Scenario(load, [fault, back], []).run()
        assert all(answer.finish for answer in answers)
    finally:
        release.set()
        service.traffic.reset()
    if kind == "kill":
        status = await asyncio.to_thread(victim.process.wait, 20.0)
        assert status == -9 and not Path(f"/proc/{victim.pid}").exists()
    else:
        # It goes on, finds its router gone, and gives back what it held.
        await ready(service, victim)
        assert os.path.exists(f"/proc/{victim.pid}")
        (replica,) = [r for r in service.router.replicas.all() if r.name == name]
        async with asyncio.timeout(60):
            while not at_rest(service, replica):
                await asyncio.sleep(0.05)
    await service.at_rest(10.0)  # leases of the dead end after handoff_s
    await service.check(prompt(300, "after"))
    await service.at_rest(10.0)


def at_rest(service: Any, replica: Any) -> bool:
    """Whether another process says that it holds nothing."""
    report = service.router.ledger.last_report(replica.key)
    if report is None:
        return False
    held = (report.waiting_requests, report.running_requests, report.held_leases)
    whole = (replica.member.n_blocks, replica.member.n_slots)
    return held == (0, 0, 0) and (report.free_blocks, report.free_slots) == whole
