"""The life of a replica: in which order it opens and gives back, whatever ends it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from headrace.core import replica as replicas
from headrace.core.card import Member, ModelCard, Role
from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.ids import JobKey, RequestId, new_boot_id
from headrace.core.messages import Hello, LoadReport, PrefillJob
from headrace.core.peers import Peer, introduce
from headrace.core.replica import Opened, Replica, ReplicaSizes
from headrace.core.role import RoleSettings
from headrace.core.states import ReplicaState

KEY = JobKey(RequestId("r"), 0)
CARD = ModelCard("m", "w", bytes(32), "invariant-fp64", 16, 64, 4, 2, 2, 512, 64, 0, 1, 2)


class Board:
    """Membership that writes down what is said to it."""

    def __init__(self, log: list[str], member) -> None:
        self.log, self.member = log, member

    async def start(self) -> bool:
        self.log.append(f"announced {self.member().state}")
        return True

    async def now(self) -> bool:
        self.log.append(f"announced {self.member().state}")
        return True

    async def stop(self) -> None:
        self.log.append("withdrawn")


class Jobs:
    draining = False

    def __init__(self, log: list[str], ended) -> None:
        self.log, self.ended, self.jobs = log, ended, {KEY: object()}

    def accept(self, router: Peer, message: PrefillJob) -> None: ...

    def cancel(self, key: JobKey) -> None:
        del self.jobs[key]
        self.ended()

    def peer_left(self, peer: Peer) -> None: ...

    async def keep(self) -> None: ...

    async def stop(self, reason: str) -> None:
        self.log.append(reason)


class Small(Replica[Jobs]):
    def __init__(self, role: RoleSettings, breaks_at: str = "") -> None:
        self.log: list[str] = []
        sizes = ReplicaSizes(1, 1, 1)
        super().__init__(role, Role.PREFILL, sizes, PrefillJob, partial(Board, self.log))
        self.breaks_at = breaks_at

    async def _open(self, held: AsyncExitStack) -> Opened[Jobs]:
        for part in ("model", "store", "links"):
            if part == self.breaks_at:
                raise ConfigError(f"{part}: not there")
            self.log.append(f"open {part}")
            held.callback(self.log.append, f"close {part}")
        return Opened(Jobs(self.log, self.on_ended), CARD)

    def load_report(self, last_dispatch: int) -> LoadReport:
        return LoadReport(last_dispatch, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)


@pytest.fixture
def role(tmp_path: Path) -> RoleSettings:
    return RoleSettings(
        name="prefill-0",
        listen="tcp://127.0.0.1:0",
        token="a token of this test",
        redis_url="",
        store_address="",
        run_dir=str(tmp_path),
        build="test",
        deployment=Deployment(model="t1"),
    )


OPENED = ["open model", "open store", "open links"]
CLOSED = ["close links", "close store", "close model"]


async def test_what_was_opened_is_given_back_in_reverse_after_the_jobs_ended(role) -> None:
    replica, stop, told = Small(role), asyncio.Event(), []

    def ready(member: Member) -> None:
        told.append(member.state)
        stop.set()

    await replica.serve(ready, stop)
    assert told == [ReplicaState.READY]
    serving = ["announced joining", *OPENED, "announced ready"]
    ending = ["withdrawn", "the prefill replica stops", *CLOSED]
    assert replica.log == serving + ending
    assert replica.work is None
    await replica.close()  # once more: nothing is given back twice
    assert replica.log == serving + ending + ["withdrawn"]


@pytest.mark.parametrize(("breaks_at", "opened"), [("model", 0), ("store", 1), ("links", 2)])
async def test_a_start_that_fails_gives_back_what_it_had(role, breaks_at, opened) -> None:
    replica = Small(role, breaks_at)
    with pytest.raises(ConfigError, match=f"{breaks_at}: not there"):
        await replica.serve(None, None)
    closed = CLOSED[len(CLOSED) - opened :]
    assert replica.log == ["announced joining", *OPENED[:opened], "withdrawn", *closed]


async def test_a_drain_ends_it_when_its_last_job_ended(role) -> None:
    replica = Small(role)
    await replica.start()
    running = asyncio.create_task(replica.run())
    replica.shell.drain(grace_s=60.0)
    assert replica.work is not None and replica.work.draining
    await asyncio.sleep(0)
    assert not running.done()
    replica.work.cancel(KEY)
    await asyncio.wait_for(running, 30.0)
    await replica.close()


async def test_a_failure_of_what_it_serves_with_ends_it(role) -> None:
    replica = Small(role)
    await replica.start()
    replica.shell.end(ValueError("accounts"))
    with pytest.raises(HeadraceError, match="prefill-0 ended by itself"):
        await replica.run()
    await replica.close()
    assert replica.log[-3:] == CLOSED


async def test_a_router_is_told_the_load_when_it_joins(role, monkeypatch) -> None:
    monkeypatch.setattr(replicas, "REPORT_S", 3600.0)  # so that none comes by the clock
    replica = Small(role)
    await replica.start()
    heard: dict[Role, list[LoadReport]] = {Role.DECODE: [], Role.ROUTER: []}
    readers = []
    for kind, messages in heard.items():
        hello = Hello(kind, f"{kind}-9", new_boot_id(), "test", CARD)
        peer = await introduce(replica.shell.address, hello, role.token, role.deployment.wire)
        readers.append(asyncio.create_task(read_all(peer, messages)))
    async with asyncio.timeout(30.0):
        while not heard[Role.ROUTER]:
            await asyncio.sleep(0.005)
        replica.shell.dispatched(replica.shell.server.routers()[0], 7)
        replica.on_ended()
        while len(heard[Role.ROUTER]) < 2:
            await asyncio.sleep(0.005)
    await replica.close()
    await asyncio.gather(*readers)
    assert [report.last_dispatch for report in heard[Role.ROUTER]] == [0, 7]
    assert heard[Role.DECODE] == []


async def read_all(peer: Peer, messages: list[LoadReport]) -> None:
    """What a peer sends until it cuts the link."""
    async for message in peer.link:
        messages.append(message)
