"""The store of a run and its Valkey, in a session of their own, as a leader would have them;
without Ray and without a model. `store_of_run.py HOME CLUSTER`: says "ready", ends with SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from headrace.cluster.config import load_config
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import RunDir
from headrace.core.card import Role
from headrace.kvstore import StoreSettings, embedded_valkey, run_store


async def serve(run: RunDir) -> None:
    role = role_settings(load_config(run.config_file), run, Role.STORE, "store-0")
    settings = StoreSettings(
        directory=str(run.store_directory),
        arena_bytes=1 << 20,
        ssd_bytes=2 << 20,
        segment_bytes=256 << 10,
        block_bytes=3000,
        window_bytes=3000,
        group_s=0.01,
        index_deadline_s=1.0,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_store(role, settings, ready=lambda member: print("ready", flush=True), stop=stop)


if __name__ == "__main__":
    own = RunDir(Path(sys.argv[1]), sys.argv[2])
    server = embedded_valkey(str(own.sockets))
    asyncio.run(serve(own))
    server.stop()
