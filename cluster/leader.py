"""The leader: the one process that starts a cluster, holds it, and ends it.

It runs in a session of its own, so that its session id names every process of the run, and writes
how far it is into state.json. Starting: check the configuration and the ports, start the embedded
Valkey, bring up the roles (as Ray actors, or as tasks right here), wait until the router says
ready. Then it watches Valkey and waits. SIGTERM or SIGINT ends everything in order: the router
first, so that open answers finish, the store last, so that everything becomes durable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.config import ENGINE_POOLS, ClusterConfig, Processes, load_config
from headrace.cluster.holders import LocalRoles, RayRoles, Roles
from headrace.cluster.http import ApiError, HttpApi
from headrace.cluster.roles import build_id, prepare_process, role_settings
from headrace.cluster.rundir import Phase, RunDir, RunState, lock_run
from headrace.cluster.session import (
    die_with_parent,
    end_others,
    machine_boot_id,
    read_process,
    session_members,
)
from headrace.cluster.sockets import listeners, refuse_open_listeners
from headrace.cluster.supervisor import check_builds
from headrace.core.card import Member, Role
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.states import ReplicaState

if TYPE_CHECKING:
    from headrace.kvstore import EmbeddedRedis

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.1
REFUSED = 3  # exit status; 1 and 2 are also Python's own


class Stopped(Exception):
    """Somebody asked the leader to end while it was still starting."""


class Leader:
    """One run of one cluster. `run` returns the exit status."""

    def __init__(self, config: ClusterConfig, run: RunDir, *, insecure: bool = False) -> None:
        self._config = config
        self._run = run
        self._insecure = insecure
        self._stop = threading.Event()
        self._valkey: EmbeddedRedis | None = None
        self._roles: Roles | None = None
        me = read_process(os.getpid())
        assert me is not None
        self._state = RunState(
            cluster=run.cluster,
            phase=Phase.STARTING,
            progress="checking the configuration",
            error="",
            pid=me.pid,
            sid=me.sid,
            started_ticks=me.started_ticks,
            boot_id=machine_boot_id(),
            processes=str(config.processes),
            model=config.deployment.model,
            url="",
            build=build_id(),
        )

    def run(self) -> int:
        """Lead until asked to stop. 0 after an orderly end, REFUSED when the configuration or the
        port was refused before anything was started, 1 when the cluster failed later."""
        self._catch_signals()
        failed, status = "", 0
        try:
            self._start()
            self._say(Phase.READY, "serving")
            self._watch()
        except Stopped:
            pass
        except HeadraceError as error:
            failed = error.message
            status = REFUSED if self._valkey is None and self._roles is None else 1
        except Exception as error:
            log.exception("the leader failed")
            status = 1
            failed = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            )
        if failed:
            log.error("%s", failed)
        self._end()
        phase = Phase.FAILED if failed else Phase.STOPPED
        self._state = replace(self._state, error=failed)
        self._say(phase, failed or "stopped")
        return status

    def _start(self) -> None:
        config, run = self._config, self._run
        self._say(Phase.STARTING, "checking the configuration")
        router = config.router_settings(run)
        check_port_free(router.host, router.port)
        config.check(run)
        if not config.redis.url:
            self._say(Phase.STARTING, "starting the embedded Valkey")
            self._start_valkey()
        if config.processes is Processes.RAY:
            self._roles = RayRoles(config, run, insecure=self._insecure)
            self._say(Phase.STARTING, "starting Ray")
        else:
            self._roles = LocalRoles(config, run)
            self._say(Phase.STARTING, "starting the roles in this process")
        self._roles.start()
        self._catch_signals()  # ray.init installs handlers of its own
        asyncio.run(self._wait_ready())
        if not self._insecure:
            members = [process.pid for process in session_members(self._state.sid)]
            refuse_open_listeners(members, {config.listen_host, router.host})

    async def _wait_ready(self) -> None:
        """Until every expected role is a ready member and the router reaches all of them.

        Raises `ConfigError` for mixed builds and when `times.ready_s` is over."""
        from headrace.kvstore import MemberBoard

        settings = role_settings(self._config, self._run, Role.SUPERVISOR, "leader")
        board = MemberBoard.of(settings)
        expected = [name for _, name in self._config.expected_roles()]
        deadline = time.monotonic() + self._config.times.ready_s
        try:
            while True:
                if self._stop.is_set():
                    raise Stopped
                members = {member.name: member for member in await board.members()}
                serving = [name for name in expected if _serves(members.get(name))]
                missing = [name for name in expected if name not in serving]
                if not missing and await asyncio.to_thread(self._router_ready, members):
                    check_builds(members.values())
                    return
                waiting = ", ".join(missing) or "the router to reach them"
                self._say(
                    Phase.STARTING, f"{len(serving)}/{len(expected)} roles, waiting for {waiting}"
                )
                problems = self._roles.problems() if self._roles else []
                if problems and self._state.processes == "one":
                    raise ConfigError(f"a role did not start: {'; '.join(problems)}")
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"a role did not start: {'; '.join(problems)}"
                        if problems
                        else f"not ready within {self._config.times.ready_s:.0f} s"
                        f" (times.ready_s), waiting for {waiting}; see the logs of the run"
                    )
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await board.close()

    def _router_ready(self, members: dict[str, Member]) -> bool:
        router = self._config.router_settings(self._run)
        port = router.port or int(members["router-0"].address.rpartition(":")[2])
        api = HttpApi(f"http://{_dialable(router.host)}:{port}", router.keys[0].key)
        self._state = replace(self._state, url=api.url)
        # `/ready` wants one decode replica; a cluster is up when the router can reach them all
        wanted = Counter(role for role, _ in self._config.expected_roles())
        with contextlib.suppress(ApiError):
            found = api.ready_replicas(ENGINE_POOLS) if api.ready() else ()
            return found == tuple(wanted[pool] for pool in ENGINE_POOLS)
        return False

    def _watch(self) -> None:
        """Until asked to stop: bring back the Valkey if it dies. From the main thread only, since
        the server ends with the thread that started it."""
        while not self._stop.wait(LOOK_EVERY_S):
            if self._valkey is not None and self._valkey.process.poll() is not None:
                log.warning("valkey ended with code %s", self._valkey.process.returncode)
                with contextlib.suppress(ConfigError):
                    self._start_valkey()
            if self._roles is not None:
                self._roles.tend()

    def _start_valkey(self) -> None:
        from headrace.kvstore import embedded_valkey

        self._valkey = embedded_valkey(str(self._run.sockets))

    def _end(self) -> None:
        drain_s = self._config.times.drain_s if self._state.phase is Phase.READY else 0.0
        self._say(Phase.STOPPING, "stopping")
        if self._roles is not None:
            self._roles.stop(drain_s)
        if self._valkey is not None:
            self._valkey.stop()
        end_others(self._state)

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop.set())

    def _say(self, phase: Phase, progress: str) -> None:
        if (phase, progress) != (self._state.phase, self._state.progress):
            log.info("%s: %s", phase, progress)
            if phase is Phase.STARTING and self._stop.is_set():
                raise Stopped
        self._state = replace(self._state, phase=phase, progress=progress)
        self._run.write_state(self._state)


def check_port_free(host: str, port: int) -> None:
    """Raises `ConfigError` when something listens where the router's HTTP is to be, or when that
    is no address of this machine."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no host name"
        raise ConfigError(f"router.host {ascii(host)[:80]} does not resolve ({why})") from None
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the router binds
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"router.port {port} on {host} cannot be used ({error.strerror}{_holder(port)});"
                " free it, or choose another: `headrace up ... --port N`, or router.port in the"
                " cluster file"
            ) from None


def _holder(port: int) -> str:
    for one in listeners():
        if one.port == port and (process := read_process(one.pid)) is not None:
            return f", held by process {one.pid} ({process.name})"
    return ""


def _dialable(host: str) -> str:
    """The address to reach a listening address of this host by."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(
        host, f"[{host}]" if ":" in host else host
    )


def _serves(member: Member | None) -> bool:
    return member is not None and member.state is ReplicaState.READY


def main() -> None:
    """`python -P -m headrace.cluster.leader RUN_HOME CLUSTER`: lead the run whose config.yaml is in
    place. Started by the command line in a new session, with the run's folder as working
    directory."""
    parser = argparse.ArgumentParser(description="lead one cluster; use `headrace up`")
    parser.add_argument("home", type=Path)
    parser.add_argument("cluster")
    parser.add_argument("--lock", type=int, help="inherited descriptor that holds the run's lock")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--with-parent", type=int, default=0, help="end when this parent ends")
    arguments = parser.parse_args()
    run = RunDir(arguments.home, arguments.cluster)
    if arguments.with_parent:
        die_with_parent()
        if os.getppid() != arguments.with_parent:  # gone before the line above
            sys.exit("the parent is gone")
    if arguments.lock is not None:
        os.set_inheritable(arguments.lock, False)  # it ends with this process alone
    elif lock_run(run) is None:
        sys.exit(f"cluster {run.cluster} is led by another process")
    prepare_process(run, "leader")
    config = load_config(run.config_file)
    status = Leader(config, run, insecure=arguments.insecure).run()
    logging.shutdown()
    os._exit(status)  # everything is ended: Ray's exit hooks would only wait for it once more


if __name__ == "__main__":
    main()
