"""Roles as processes without the imports of a start: the tests' end of `mother.py`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_LOCK = threading.Lock()
STARTED_S = 300.0  # of the first one, which waits for the imports of `mother.py`


class Forked:
    """A process, used as one of `subprocess`: `pid`, `wait`, `kill`."""

    def __init__(self, pipe: int) -> None:
        self._pipe = open(pipe, "rb", buffering=0)  # noqa: SIM115  # closed at the end
        self._status: int | None = None
        self.pid = int(self._line())

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            part = self._pipe.read(1)
            assert part, "the process that forks is gone"
            line += part
        return line

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, below 0 for a signal. Raises `subprocess.TimeoutExpired`."""
        if self._status is None:
            if not _readable(self._pipe.fileno(), timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._status = int(self._line())
            self._pipe.close()
        return self._status

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        if self._status is None and _readable(self._pipe.fileno(), 0.0):
            self.wait()
        return self._status

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | None = None,
    new_session: bool = False,
) -> Forked:
    """Run the Python script `command[0]` with its arguments. `stdout`: a descriptor, still to be
    closed by the caller. Nothing of the interpreter's own is read from `environment` any more."""
    told = {
        "command": list(command),
        "environment": dict(environment),
        "new_session": new_session,
    }
    ours, theirs = os.pipe()
    try:
        passed = [theirs] if stdout is None else [theirs, stdout]
        with _LOCK:
            socket.send_fds(_mother(), [json.dumps(told).encode()], passed)
    finally:
        os.close(theirs)
    assert _readable(ours, STARTED_S), "nothing was forked"
    return Forked(ours)


def fork_and_hear(
    command: Sequence[str], environment: Mapping[str, str], *, new_session: bool = False
) -> tuple[Forked, bytes]:
    """As `fork`, and the first line that the process says on its stdout."""
    ours, theirs = os.pipe()
    with open(ours, "rb") as said:
        try:
            process = fork(command, environment, stdout=theirs, new_session=new_session)
        finally:
            os.close(theirs)
        assert _readable(ours, STARTED_S), "it said nothing"
        return process, said.readline()


@cache
def _mother() -> socket.socket:
    """A socket to the process that forks, which ends with this one."""
    # Whole requests: a stream would run two of them together.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = str(Path(__file__).with_name("mother.py"))
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen([sys.executable, "-P", script, str(number)], pass_fds=[number])

    def end() -> None:
        ours.close()
        process.wait(20)

    atexit.register(end)
    return ours


def _readable(descriptor: int, within_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))
