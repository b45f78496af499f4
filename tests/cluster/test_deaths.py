"""A death is told once, with its cause: real processes, ended by signals and by themselves."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cluster.config import load_config
from headrace.cluster.deaths import Deaths, how_it_ended
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import Phase, RunDir, RunState
from headrace.cluster.session import Process, machine_boot_id, read_process
from headrace.cluster.status import collect
from headrace.cluster.supervisor import SupervisorThread
from headrace.core.card import Member, Role
from headrace.core.ids import BootId
from headrace.core.states import ReplicaState
from headrace.kvstore import MemberBoard, embedded_valkey

LOGGER = "headrace.cluster.deaths"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends as it is told, 7 when its input closes. Reaped by `wait` only."""
    code = "import sys; sys.stdin.read(); sys.exit(7)"
    started = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.wait()
    assert started.stdin is not None
    started.stdin.close()


def ticks(pid: int) -> int:
    process = read_process(pid)
    assert process is not None
    return process.started_ticks


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def first_warning(caplog: pytest.LogCaptureFixture) -> list[str]:
    async with asyncio.timeout(120.0):
        while not (told := warnings(caplog)):
            await asyncio.sleep(0.01)
    return told


@pytest.mark.parametrize(
    ("restarts", "then"),
    [
        (True, "it is started again, as life 4"),
        (False, "it is not started again, Ray's head is gone"),
    ],
)
async def test_a_killed_replica_is_told_once_with_its_signal(
    child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture, restarts: bool, then: str
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    deaths = Deaths(lambda: restarts)
    started = ticks(child.pid)
    deaths.follow("decode-0", child.pid, started, 3)
    deaths.follow("decode-0", child.pid, started, 3)
    assert [r.getMessage() for r in caplog.records] == [f"decode-0 serves: pid {child.pid}, life 3"]
    child.send_signal(signal.SIGKILL)
    line = f"decode-0 (pid {child.pid}, life 3) was killed by SIGKILL; {then}"
    assert await first_warning(caplog) == [line]
    # Its lease has not run out: it is still a member, and its process not yet reaped.
    deaths.follow("decode-0", child.pid, started, 3)
    assert child.wait(60) == -signal.SIGKILL
    deaths.follow("decode-0", child.pid, started, 3)
    await asyncio.sleep(0)
    assert warnings(caplog) == [line]
    deaths.close()


async def test_the_next_life_does_not_hide_the_death_before_it(
    child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    deaths = Deaths(lambda: True)
    deaths.follow("prefill-0", child.pid, ticks(child.pid), 1)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    deaths.follow("prefill-0", os.getpid(), ticks(os.getpid()), 2)  # before the loop ran
    line = "ended with exit status 7; it is started again, as life 2"
    assert warnings(caplog) == [f"prefill-0 (pid {child.pid}, life 1) {line}"]
    deaths.close()


async def test_a_reused_process_id_is_not_followed(
    child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    deaths = Deaths(lambda: True)
    deaths.follow("decode-0", child.pid, ticks(child.pid) - 1, 1)
    assert caplog.records == []
    deaths.close()


def test_how_a_reaped_process_ended_is_told_as_far_as_the_kernel_knows(
    child: subprocess.Popen[bytes],
) -> None:
    pidfd = os.pidfd_open(child.pid)
    try:
        child.send_signal(signal.SIGKILL)
        assert select.select([pidfd], [], [], 120.0)[0]
        assert how_it_ended(child.pid, pidfd) == "was killed by SIGKILL"
        assert child.wait(60) == -signal.SIGKILL
        assert read_process(child.pid) is None
        kernel = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
        known = (
            "was killed by SIGKILL"
            if kernel >= (6, 15)
            else "ended (this kernel does not tell how)"
        )
        assert how_it_ended(child.pid, pidfd) == known
    finally:
        os.close(pidfd)


@pytest.fixture
def run(short_temp: Path, leader: Process) -> Iterator[RunDir]:
    """A run with a Valkey of its own and nothing in its session but `leader`."""
    run = RunDir(short_temp, "local")
    run.create()
    run.config_file.write_text("cluster: local\nprocesses: one\n")
    session = (leader.pid, leader.sid, leader.started_ticks, machine_boot_id())
    run.write_state(RunState("local", Phase.READY, "", "", *session, "one", "t1", "", "b"))
    valkey = embedded_valkey(str(run.sockets))
    yield run
    valkey.stop()


async def test_the_supervisor_tells_a_death_and_status_the_life(
    run: RunDir,
    child: subprocess.Popen[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    config = load_config(run.config_file)
    board = MemberBoard.of(role_settings(config, run, Role.SUPERVISOR, "test"))
    one = Member(
        *(Role.DECODE, "decode-0", BootId("b1"), "tcp://127.0.0.1:1", child.pid, "b"),
        *(ReplicaState.READY, None, 1, 1, 1),
    )
    assert await board.announce(one)
    supervisor = SupervisorThread(config, run, lambda role, name: None)

    async def life(number: int) -> dict[str, object]:
        """What status shows of the replica when it is in this life."""
        async with asyncio.timeout(120.0):
            while True:
                view = await asyncio.to_thread(collect, run)
                (role,) = (role for role in view["roles"] if role["name"] == "decode-0")
                if role["lives"] == number:
                    return dict(role)
                assert await board.announce(one)  # the lease may be shorter than a busy second

    try:
        assert (await life(1))["pid"] == child.pid
        child.send_signal(signal.SIGKILL)
        (line,) = await first_warning(caplog)
        # no Ray runs here, so the supervisor sees nobody who would start it again
        told = f"decode-0 (pid {child.pid}, life 1) was killed by SIGKILL; it is not started again"
        assert line.startswith(told)
        one = replace(one, boot_id=BootId("b2"), pid=os.getpid())
        assert await board.announce(one)
        assert (await life(2))["pid"] == os.getpid()
        # the next supervisor of this run goes on counting, that of the next run begins anew
        for ticks_later, lives in ((0, 2), (1, 1)):
            assert await asyncio.to_thread(supervisor.stop, 60.0)
            state = run.read_state()
            assert state is not None
            run.write_state(replace(state, started_ticks=state.started_ticks + ticks_later))
            caplog.clear()
            supervisor = SupervisorThread(config, run, lambda role, name: None)
            async with asyncio.timeout(120.0):
                while not caplog.messages:
                    assert await board.announce(one)
                    await asyncio.sleep(0.01)
            assert caplog.messages == [f"decode-0 serves: pid {os.getpid()}, life {lives}"]
    finally:
        assert await asyncio.to_thread(supervisor.stop, 60.0)
        await board.close()
