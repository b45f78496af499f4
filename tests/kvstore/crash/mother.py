"""A process that has imported the store and forks one for every line on its stdin.

    in    {"home": ..., "redis_url": ..., "settings": {...}, "die_at": n, "half": bool}
    out   {"forked": pid}, then from the child "ready" as {"ready": pid}, at last {"ended": pid,
          "status": exit status, below 0 the signal}

What a start costs is importing; a fork of this process, which runs no thread and no loop, is a
store as a start of its own would be. Its end is its own: SIGKILL takes the child alone.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import select
import sys
from pathlib import Path
from typing import Any


def say(**values: Any) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")  # one write: lines of several stay whole


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def child(stores: Any, told: dict[str, Any]) -> int:
    log = os.open(told.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    stores.say = lambda value: say(**{value: os.getpid()})
    return int(stores.serve(told))


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    stores = load("store_process", Path(__file__).parents[1] / "store_process.py")
    stores.dying(0, False)  # imports the file layer
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    children: dict[int, int] = {}  # pid by the descriptor of its end
    pending = b""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                pid = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                say(ended=pid, status=os.waitstatus_to_exitcode(status))
                continue
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if not pid:
                    status = 1
                    try:
                        status = child(stores, json.loads(line))
                    finally:
                        os._exit(status)
                end = os.pidfd_open(pid)
                children[end] = pid
                poll.register(end, select.POLLIN)
                say(forked=pid)


if __name__ == "__main__":
    main()
