"""A prefill or decode replica as a process of its own, behind a proxy: `process.py '{...}'`.

It listens where it is told and lets others know the proxy's address. Prints one line of JSON, its
own address and pid, when it serves."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from headrace.core.deployment import Deployment
from headrace.core.limits import LeaseTimes
from headrace.core.role import RoleSettings
from headrace.decode import DecodeReplica
from headrace.engine import EngineSettings
from headrace.prefill import PrefillReplica


async def main(what: dict[str, Any]) -> None:
    deployment = Deployment(leases=LeaseTimes(**what["leases"]), **what["deployment"])
    role = RoleSettings(deployment=deployment, **what["role"])
    kind = PrefillReplica if what["kind"] == "prefill" else DecodeReplica
    replica = kind(role, EngineSettings(**what["engine"]))
    listen, own = replica.shell.listen, []

    async def listen_behind() -> None:
        await listen()
        own.append(replica.shell.address)
        replica.shell.address = what["proxy"]
        print(json.dumps({"address": own[0], "pid": replica.member().pid}), flush=True)

    replica.shell.listen = listen_behind  # type: ignore[method-assign]
    try:
        await replica.start()
        await replica.run()
    finally:
        await replica.close()


asyncio.run(main(json.loads(sys.argv[1])))
