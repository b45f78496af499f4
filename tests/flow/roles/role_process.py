"""A role as a process, for tests that kill it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from headrace_tests import module

from headrace.core.role import RoleSettings

forks = module("tests/beside/forks.py")


class RoleProcess:
    """A role as a process of its own, killed at the latest by the fixture that made it."""

    def __init__(self, kind: str, role: RoleSettings, settings: Any, faults: str) -> None:
        what = dataclasses.asdict(role)
        deployment = what.pop("deployment")
        what["leases"] = deployment.pop("leases")
        for name in ("wire", "edge", "handoff_mode", "handoff_bind"):
            del deployment[name]
        what |= {"deployment": deployment, "kind": kind, "settings": dataclasses.asdict(settings)}
        script = str(Path(__file__).with_name("process.py"))
        self._command = [script, json.dumps(what)]
        self._environment = {**os.environ, "HEADRACE_FAULTS": faults}
        self._process: Any = None

    async def start(self) -> None:
        said = await asyncio.to_thread(self._start)
        self.address, self.pid = said["address"], said["pid"]
        assert self.pid == self._process.pid

    def _start(self) -> Any:
        self._process, line = forks.fork_and_hear(self._command, self._environment)
        return json.loads(line)

    async def ended(self, within_s: float = 60.0) -> int:
        """Its exit code; below 0 for a signal."""
        status: int = await asyncio.to_thread(self._process.wait, within_s)
        return status

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, 20.0)
