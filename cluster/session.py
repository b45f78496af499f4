"""Processes of a run: all of them share the session that their leader opened.

Ray gives its workers process groups of their own but never a new session, so the session id is
the one mark that GCS, raylet, agents, actors and the embedded Valkey have in common. A session is
named by its id *and* the leader's start: ids are reused, strangers must never be hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.cluster.rundir import RunState

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    sid: int
    state: str  # one letter as in /proc: R, S, D, T (stopped), Z (dead, not yet reaped)
    started_ticks: int
    name: str


def read_process(pid: int) -> Process | None:
    """The process with this id, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]  # may hold blanks and brackets itself
    rest = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(rest[3]), rest[0], int(rest[19]), name)


def machine_boot_id() -> str:
    """Names this life of the machine: process ids and ticks start anew with it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def session_members(sid: int) -> list[Process]:
    """All living processes of a session, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = read_process(int(entry))
            if process is not None and process.sid == sid and process.state not in "ZX":
                found.append(process)
    return found


def run_members(state: RunState) -> list[Process]:
    """Living processes of the run that wrote `state`; empty when its session id means another.

    While a member lives the kernel does not give the id to anybody else. When all are gone and the
    id is used anew, then by a process that started at another time: its leader tells."""
    if state.sid <= 1 or state.boot_id != machine_boot_id():
        return []
    leader = read_process(state.sid)
    if leader is not None and leader.started_ticks != state.started_ticks:
        return []
    members = session_members(state.sid)
    return [member for member in members if member.started_ticks >= state.started_ticks]


def leader_alive(state: RunState) -> bool:
    """Whether the leader that wrote `state` still runs."""
    return any(member.pid == state.pid for member in run_members(state))


def end_run(
    state: RunState,
    *,
    leader_s: float,
    members_s: float,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Process]:
    """End every process of the run: the leader first, in order; then the rest; SIGKILL last.

    Waits at most `leader_s` for the leader's orderly end and `members_s` for what is left after
    it. Returns the members that live on in spite of SIGKILL (none, unless the kernel holds one)."""
    if leader_alive(state):
        progress("asking the leader to stop")
        _signal(state, signal.SIGTERM, only=state.pid)
        _wait(lambda: not leader_alive(state), leader_s)
    if run_members(state):
        progress("ending what is left")
        _signal(state, signal.SIGTERM)
        _signal(state, signal.SIGCONT)  # a stopped process takes no SIGTERM before it runs again
        _wait(lambda: not run_members(state), members_s)
    deadline = time.monotonic() + 5.0
    while (left := run_members(state)) and time.monotonic() < deadline:
        _signal(state, signal.SIGKILL)  # again each time: a member may have forked meanwhile
        time.sleep(0.05)
    return left


def end_others(state: RunState) -> None:
    """End every process of the caller's own run but the caller: what an orderly end left behind.
    SIGTERM, a second of grace, SIGKILL."""

    def others() -> list[Process]:
        return [member for member in run_members(state) if member.pid != os.getpid()]

    for number, wait_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 3.0)):
        for member in others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)
        _wait(lambda: not others(), wait_s)


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when the *thread* that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _signal(state: RunState, number: int, only: int | None = None) -> None:
    for member in run_members(state):
        if only in (None, member.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
