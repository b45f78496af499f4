"""A process that has imported what roles import, and forks one for every request: `mother.py FD`.

FD is a socket; a request is a JSON object and descriptors: the child's stdout, if it is to have
one of its own, and a pipe that the child's pid is written to and, when it has ended, its exit
status, below 0 for a signal.

A start costs two seconds of processor time, nearly all of it imports. The child of this process,
which runs no thread and no loop, goes on as if it had been started with the script, the arguments
and the environment of the request. Its end is its own: a signal to its pid hits nobody else.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

MAX_REQUEST_BYTES = 1 << 18
MODULES = (
    *("headrace.cluster.cli", "headrace.cluster.roles", "headrace.kvstore", "headrace.router"),
    *("headrace.prefill", "headrace.decode", "headrace.vision", "typer", "rich", "uvicorn"),
)


class Mother:
    """The loop. `run` returns in a child, with what it shall run; None when nobody asks more."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, pipe

    def run(self) -> dict[str, Any] | None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._ended(descriptor)
                    continue
                data, passed, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 2)
                if not data:
                    self._end_all()
                    return None
                told: dict[str, Any] = json.loads(data)
                if self._fork(*passed):
                    return told

    def _fork(self, pipe: int, stdout: int | None = None) -> bool:
        """Whether this is the child."""
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the child"
        pid = os.fork()
        if pid:
            os.write(pipe, b"%d\n" % pid)
            ended = os.pidfd_open(pid)
            self._children[ended] = pid, pipe
            self._poll.register(ended, select.POLLIN)
            if stdout is not None:
                os.close(stdout)
            return False
        for descriptor, (_, other) in self._children.items():
            os.close(descriptor)
            os.close(other)
        os.close(pipe)
        self._control.close()
        if stdout is not None:
            os.dup2(stdout, 1)
            os.close(stdout)
        return True

    def _ended(self, descriptor: int) -> None:
        pid, pipe = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know
            os.write(pipe, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(pipe)

    def _end_all(self) -> None:
        for pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def become(told: dict[str, Any]) -> None:
    """Go on as the process that was asked for."""
    gc.unfreeze()
    if told["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = told["command"]
    runpy.run_path(told["command"][0], run_name="__main__")


def main() -> None:
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    told = Mother(socket.socket(fileno=int(sys.argv[1]))).run()
    if told is not None:
        become(told)


if __name__ == "__main__":
    main()
