"""Starting one role, whoever asks: a Ray actor, a plain process, or a task beside others.

All three end in `run_role`; what a role needs beyond its name it reads from the configuration and
the run's folder. Rooms are imported late: a store process never loads torch, and the number of
threads must be set before torch is imported.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from headrace.cluster.config import ClusterConfig
from headrace.cluster.rundir import RunDir, remove_empty
from headrace.core.card import Member, Role
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.loops import new_event_loop
from headrace.core.role import Ready, RoleSettings

log = logging.getLogger(__name__)
SERVING_ROLES = (Role.STORE, Role.VISION, Role.PREFILL, Role.DECODE, Role.ROUTER)
LOG_BYTES = 16 << 20


def build_id() -> str:
    """What is installed here: a wheel's version carries its commit, a checkout says `dev`."""
    installed = version("headrace")
    return installed if "+" in installed else f"{installed}+dev"


def check_role(name: str) -> Role:
    """The serving role of this name. Raises `ConfigError`."""
    if name not in SERVING_ROLES:
        raise ConfigError(f"a role is one of {', '.join(SERVING_ROLES)}, got {name[:40]!r}")
    return Role(name)


def role_settings(config: ClusterConfig, run: RunDir, role: Role, name: str) -> RoleSettings:
    """Settings of one role. Reads the cluster token, making it if this is its first use."""
    # The router's HTTP port is in its own section; port 0 picks one.
    listen = run.store_address if role is Role.STORE else f"tcp://{config.listen_host}:0"
    return RoleSettings(
        name=name,
        listen=listen,
        token=run.cluster_token(),
        redis_url=config.redis_url(run),
        store_address=run.store_address,
        run_dir=str(run.path),
        build=build_id(),
        deployment=config.deployment,
    )


def prepare_process(run: RunDir, name: str) -> None:
    """Once a process, before any room is imported: one compute thread, and a log file of its own.

    Several engines share the cores; two OpenMP pools on one core were 4 to 27 times slower."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    handler = logging.handlers.RotatingFileHandler(
        run.logs / f"{name}.log", maxBytes=LOG_BYTES, backupCount=2
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


async def run_role(
    config: ClusterConfig,
    run: RunDir,
    role: Role,
    name: str,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve as `role` until `stop` is set. Raises `ConfigError` for settings it cannot start with,
    `ValueError` for a role that is not started this way."""
    settings = role_settings(config, run, role, name)
    if role is Role.STORE:
        from headrace.kvstore import run_store

        await run_store(settings, config.store_settings(run), ready=ready, stop=stop)
    elif role is Role.VISION:
        from headrace.vision import run_vision

        await run_vision(settings, config.vision_settings(), ready=ready, stop=stop)
    elif role is Role.PREFILL:
        from headrace.prefill import run_prefill

        await run_prefill(settings, config.engine_settings(), ready=ready, stop=stop)
    elif role is Role.DECODE:
        from headrace.decode import run_decode

        await run_decode(settings, config.engine_settings(), ready=ready, stop=stop)
    elif role is Role.ROUTER:
        from headrace.router import run_router

        await run_router(settings, config.router_settings(run), ready=ready, stop=stop)
    else:
        raise ValueError(f"{role} is not started as a role of its own")


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """What a role's process says of itself."""

    name: str
    pid: int
    build: str
    serving: bool
    ended: bool
    error: str


class RoleThread:
    """One role in a thread with an asyncio loop of its own.

    The constructor only starts it. `on_end` runs in that thread when the role has ended, with the
    exception that ended it, or None after `stop`. Thread-safe."""

    def __init__(
        self,
        config: ClusterConfig,
        run: RunDir,
        role: Role,
        name: str,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self._start = (config, run, role, name)
        self._on_end = on_end
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._member: Member | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def stop(self, wait_s: float) -> bool:
        """Ask the role to end in its orderly way and wait; False when it takes longer."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def status(self) -> RoleStatus:
        name = self._start[3]
        error = self._error
        told = error.message if isinstance(error, HeadraceError) else repr(error) if error else ""
        alive = self._thread.is_alive()
        return RoleStatus(
            name, os.getpid(), build_id(), alive and self._member is not None, not alive, told
        )

    def _ready(self, member: Member) -> None:
        self._member = member
        log.info("%s serves at %s", member.name, member.address)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(
                run_role(*self._start, ready=self._ready, stop=self._stop)
            )
            if not self._stop.is_set():
                raise RuntimeError("the role ended although nobody stopped it")
        except BaseException as error:  # SystemExit included: the process must learn of it
            self._error = error
            log.exception("%s ended", self._start[3])
        self._on_end(self._error)


def run_plain(
    config: ClusterConfig, run: RunDir, role: Role, name: str, say: Callable[[str], None]
) -> None:
    """Serve as one role in this process until SIGTERM or SIGINT. Needs no Ray and imports none.
    `say` is told once where it serves.

    Raises `ConfigError` before anything is made when there is no Redis to meet the other roles at,
    and what the role raises."""
    if not config.redis.url and not _answers(run.valkey_socket):
        raise ConfigError(
            f"cluster {run.cluster} has no Redis, so no other role would find this one: start it"
            f" with `headrace up`, or set redis.url in the cluster file (nothing listens at"
            f" {run.valkey_socket})"
        )
    made = run.create()
    prepare_process(run, name)

    def ready(member: Member) -> None:
        say(f"{name} of cluster {run.cluster} serves at {member.address}; logs in {run.logs}")

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await run_role(config, run, role, name, ready=ready, stop=stop)

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())
    finally:
        remove_empty(made)


def _answers(path: Path) -> bool:
    """Whether somebody listens at a unix socket: a file alone may be left by a killed server."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fsencode(path)) == 0
