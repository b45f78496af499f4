"""One log line for every death of a replica: which, how it ended, and whether it comes back.

The supervisor is no parent of the replicas, so it can wait for none of them. A pidfd tells at once
that a process ended; how it ended stands in /proc while nobody has reaped it, and afterwards (from
Linux 6.15 on) in what the kernel keeps for holders of a pidfd. An older kernel does not tell it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import select
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.cluster.session import read_process

log = logging.getLogger(__name__)
_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO with its first struct of 64 bytes, linux/pidfd.h
_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60  # in that struct
_STAT_EXIT_CODE = 49  # in /proc/PID/stat behind the name, an entry of its own: field 52


@dataclass(frozen=True, slots=True)
class _Followed:
    pid: int
    life: int
    pidfd: int


class Deaths:
    """Follows processes by their names, in the running asyncio loop; not thread-safe.

    `restarts` is asked at a death whether anybody starts the role again."""

    def __init__(self, restarts: Callable[[], bool]) -> None:
        self._restarts = restarts
        self._followed: dict[str, _Followed] = {}
        self._last: dict[str, tuple[int, int]] = {}  # pid and life, kept when the process ended

    def follow(self, name: str, pid: int, started_ticks: int, life: int) -> None:
        """Follow this process as `name`, in place of the one before. Nothing is done for one that
        is followed already, and for a process of another session or host, which is not ours."""
        if self._last.get(name) == (pid, life):
            return
        self._last[name] = pid, life
        old = self._followed.get(name)
        if old is not None and select.select([old.pidfd], [], [], 0)[0]:
            self._ended(name)
        elif old is not None:
            self._forget(name)
        process = read_process(pid)
        if process is None or process.started_ticks != started_ticks or process.sid != os.getsid(0):
            return
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            self._followed[name] = _Followed(pid, life, pidfd)
            asyncio.get_running_loop().add_reader(pidfd, self._ended, name)
            log.info("%s serves: pid %d, life %d", name, pid, life)

    def close(self) -> None:
        """Follow nobody any more."""
        for name in list(self._followed):
            self._forget(name)

    def _ended(self, name: str) -> None:
        one = self._followed[name]
        how = how_it_ended(one.pid, one.pidfd)
        self._forget(name)
        then = (
            f"it is started again, as life {one.life + 1}"
            if self._restarts()
            else "it is not started again, Ray's head is gone"
        )
        log.warning("%s (pid %d, life %d) %s; %s", name, one.pid, one.life, how, then)

    def _forget(self, name: str) -> None:
        one = self._followed.pop(name)
        asyncio.get_running_loop().remove_reader(one.pidfd)
        os.close(one.pidfd)


def how_it_ended(pid: int, pidfd: int) -> str:
    """How the ended process behind `pidfd` ended, in words; `pid` is its id."""
    status = _status_in_proc(pid)
    if status is None:
        status = _status_kept(pidfd)
    if status is None:
        return "ended (this kernel does not tell how)"
    if os.WIFSIGNALED(status):
        return f"was killed by {_signal_name(os.WTERMSIG(status))}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _status_in_proc(pid: int) -> int | None:
    """The wait status of a dead process that nobody has reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    rest = text[text.rindex(")") + 2 :].split()
    return int(rest[_STAT_EXIT_CODE]) if rest[0] in "ZX" else None


def _status_kept(pidfd: int) -> int | None:
    """The wait status that the kernel keeps of a reaped process; None when it keeps none."""
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info, True)
    except OSError:
        return None
    (given,) = struct.unpack_from("Q", info, 0)
    (status,) = struct.unpack_from("i", info, _EXIT_CODE_AT)
    return int(status) if given & _INFO_EXIT else None
