"""One role as a process of its own, for tests that kill it: `process.py '{"kind": ..., ...}'`.

Prints one line of JSON, its address and pid, when it serves."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from headrace.core.deployment import Deployment
from headrace.core.limits import LeaseTimes
from headrace.core.role import RoleSettings


async def main(what: dict[str, Any]) -> None:
    deployment = Deployment(leases=LeaseTimes(**what.pop("leases")), **what.pop("deployment"))
    kind, settings = what.pop("kind"), what.pop("settings")
    role = RoleSettings(deployment=deployment, **what)

    def ready(member: Any) -> None:
        print(json.dumps({"address": member.address, "pid": member.pid}), flush=True)

    if kind == "store":
        from headrace.kvstore import StoreSettings, run_store

        await run_store(role, StoreSettings(**settings), ready=ready)
        return
    if kind == "vision":
        from headrace.vision import VisionSettings, run_vision

        await run_vision(role, VisionSettings(), ready=ready)
        return
    from headrace.engine import EngineSettings

    if kind == "prefill":
        from headrace.prefill import run_prefill

        await run_prefill(role, EngineSettings(**settings), ready=ready)
    else:
        from headrace.decode import run_decode

        await run_decode(role, EngineSettings(**settings), ready=ready)


asyncio.run(main(json.loads(sys.argv[1])))
