"""The tests' end of `mother.py`: stores as processes, without an import for each."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Fork:
    """A store in a process of its own. `status` None while it runs."""

    pid: int
    log: Path
    said: queue.Queue[str] = field(default_factory=queue.Queue)  # "ready", "ended"
    status: int | None = None

    def ended(self, limit_s: float = 20.0) -> int:
        """Wait for its end by itself; its exit status."""
        while self.status is None:
            self.said.get(timeout=limit_s)
        assert not Path(f"/proc/{self.pid}").exists()
        return self.status

    def kill(self) -> None:
        """SIGKILL, and see that it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL


class Mother:
    """Starts the process that forks; `close` ends it and all that it has forked."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("mother.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._forked: queue.Queue[int] = queue.Queue()
        self._forks: dict[int, Fork] = {}
        self._early: list[dict[str, int]] = []
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, home: str, settings: Any, die_at: int = 0, half: bool = False) -> Fork:
        """Returns when the store serves, or has ended. `die_at`: SIGKILL before that op."""
        log = Path(home) / f"process-{len(self._forks)}.log"
        told = {
            "home": home,
            "redis_url": "",
            "die_at": die_at,
            "half": half,
            "settings": asdict(settings),
            "log": str(log),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._forked.get(timeout=60)
        made = Fork(pid, log)
        with self._lock:
            self._forks[pid] = made
            for line in self._early:
                self._take(line)
            self._early.clear()
        made.said.get(timeout=60)
        return made

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            if "forked" in line:
                self._forked.put(line["forked"])
                continue
            with self._lock:
                self._take(line)

    def _take(self, line: dict[str, int]) -> None:
        pid = line.get("ready", line.get("ended", 0))
        fork = self._forks.get(pid)
        if fork is None:  # a child may be faster than its mother
            self._early.append(line)
            return
        if "ended" in line:
            fork.status = line["status"]
        fork.said.put("ended" if "ended" in line else "ready")

    def close(self) -> None:
        for fork in self._forks.values():
            if fork.status is None:
                fork.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._reader.join(20)
        self._process.stdout.close()
