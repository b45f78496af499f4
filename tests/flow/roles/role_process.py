"""A role as a process, for tests that kill it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from headrace.core.role import RoleSettings


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
        self._command = [sys.executable, "-P", script, json.dumps(what)]
        self._environment = {**os.environ, "HEADRACE_FAULTS": faults}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 300)
        said = json.loads(line)
        self.address, self.pid = said["address"], said["pid"]
        assert self.pid == self._process.pid

    async def ended(self, within_s: float = 20.0) -> int:
        """Its exit code; below 0 for a signal."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), within_s)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
