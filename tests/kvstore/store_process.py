"""A store or a client as a process of its own, started by the fixtures of this folder."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.loops import new_event_loop
from headrace.core.role import RoleSettings
from headrace.kvstore import Kind, StoreClient, StoreSettings, ahead, embedded_valkey, run_store
from headrace.kvstore.messages import Ahead

TOKEN = "a cluster token of tests"


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def dying(at: int, half: bool) -> Any:
    spec = importlib.util.spec_from_file_location("disk", Path(__file__).with_name("disk.py"))
    assert spec is not None and spec.loader is not None
    sys.modules["disk"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Dying(at, half)


def serve(told: dict[str, Any]) -> int:
    home = told["home"]
    role = RoleSettings(
        name=told.get("name", "store-0"),
        listen=f"unix://{home}/store.sock",
        token=TOKEN,
        redis_url=told["redis_url"],
        store_address=f"unix://{home}/store.sock",
        run_dir=home,
        build="test",
        deployment=Deployment(),
    )
    settings = StoreSettings(**told["settings"])
    calls = dying(told["die_at"], told["half"]) if told.get("die_at") else None
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run_store(role, settings, ready=lambda member: say("ready"), calls=calls))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


async def put(told: dict[str, Any]) -> None:
    """Put objects, say their places, and hold on until stdin closes."""
    client = StoreClient(told["address"], TOKEN, bytes.fromhex(told["namespace"]))
    assert await client.connect(10)
    items = [(Digest(bytes.fromhex(d)), bytes.fromhex(p)) for d, p in told["items"]]
    lease = JobKey(RequestId(told["lease"]), 0) if told["lease"] else None
    places = await client.put(Kind(told["kind"]), items, lease=lease, wait_s=5.0)
    say(
        [
            None if p is None else [p.store, p.offset, p.payload_bytes, p.generation, p.checksum]
            for p in places
        ]
    )
    await asyncio.to_thread(sys.stdin.read)
    await client.close()


async def late(told: dict[str, Any]) -> None:
    """Put block after block; stop as soon as the first question for slots in advance has left,
    and when somebody lets this process go on, put some more."""
    client = StoreClient(told["address"], TOKEN, bytes.fromhex(told["namespace"]))
    assert await client.connect(10)
    ahead.WAIT_S = 60.0  # else that time is over first, and the answer comes to nobody
    connection, asked = client._connection, 0
    assert connection is not None
    submit, loop = connection.submit, asyncio.get_running_loop()

    def watched(make: Any) -> Any:
        nonlocal asked
        if isinstance(make(0), Ahead):
            asked += 1
            if asked == 1:  # after the turn of the loop at whose end the question leaves
                stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
                loop.call_soon(loop.call_soon, stop)
        return submit(make)

    connection.submit = watched
    block, until = 0, 0
    while not asked or block < until:
        digests = [hashlib.sha256(b"late %d" % (block + at)).digest() for at in range(4)]
        items = [(Digest(digest), bytes(3000)) for digest in digests]
        await client.put(Kind.KV, items, first_block=block)
        block += 4
        until = until or (asked and block + 120)
    say({"asked": asked})
    await client.close()


def hold_valkey(told: dict[str, Any]) -> None:
    """Start an embedded server and wait to be killed."""
    server = embedded_valkey(told["home"])
    say(server.process.pid)
    sys.stdin.read()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    if what == "store":
        sys.exit(serve(arguments))
    elif what == "put":
        asyncio.run(put(arguments))
    elif what == "late":
        asyncio.run(late(arguments))
    elif what == "valkey":
        hold_valkey(arguments)
