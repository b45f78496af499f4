"""The two ways to hold the serving roles of a run: Ray actors, or threads of the leader.

Nothing here imports ray before its variables are set: its native part reads them once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from headrace.cluster.config import ENGINE_POOLS, ClusterConfig
from headrace.cluster.roles import RoleThread
from headrace.cluster.rundir import RunDir
from headrace.cluster.session import session_members
from headrace.core.card import Role
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger(__name__)
RESTART_PAUSE_S = 1.0
# Nobody is to bring back what is being ended; open answers finish before their replicas go; and the
# store makes durable what the replicas left there.
STOP_ORDER = ((Role.SUPERVISOR,), (Role.ROUTER,), ENGINE_POOLS, (Role.STORE,))


class Roles(Protocol):
    """How the serving roles of a run are held: by Ray, or in this process."""

    def start(self) -> None:
        """Bring all roles up; returns before they serve. Raises `ConfigError`."""

    def problems(self) -> list[str]:
        """What keeps roles from serving, in words, as far as it is known."""

    def tend(self) -> None:
        """Called now and then: bring back what nobody else brings back. Raises nothing."""

    def stop(self, drain_s: float) -> None:
        """End all roles in order. Raises nothing; what is left is the session sweep's."""


class RayRoles:
    """One detached actor a role, on a local Ray that this process holds."""

    def __init__(self, config: ClusterConfig, run: RunDir, *, insecure: bool) -> None:
        for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS"):  # of another Ray
            os.environ.pop(name, None)
        os.environ.update(ray_environment(run, os.environ, insecure=insecure))
        from headrace.cluster import actors  # imports ray: only here and only now

        self._actors = actors
        self._config = config
        self._run = run
        self._handles: list[tuple[Role, ActorHandle]] = []
        self._pings: list[object] = []  # answered when the actors are there; see RoleActor.ping

    def start(self) -> None:
        self._actors.start_ray(self._run)
        roles = [*self._config.expected_roles(), (Role.SUPERVISOR, "supervisor-0")]
        for role, name in roles:
            handle = self._actors.ensure_role(self._run, role, name)
            self._handles.append((role, handle))
            self._pings.append(handle.ping.remote())

    def problems(self) -> list[str]:
        found = []
        for _, name in self._config.expected_roles():
            error = _last_error(self._run, name)
            if error:
                found.append(f"{name}: {error}")
        return found

    def tend(self) -> None:
        pass  # Ray restarts actors, and the supervisor what Ray does not

    def stop(self, drain_s: float) -> None:
        with _no_longer_than(drain_s + 20.0, "stopping the actors"):
            for wave in STOP_ORDER:
                handles = [handle for role, handle in self._handles if role in wave]
                self._actors.stop_roles(handles, drain_s + 3.0)
        if head_of_ray_lives(os.getsid(0)):  # without it the shutdown would wait for it in vain
            with _no_longer_than(15.0, "Ray's shutdown"):
                self._actors.stop_ray()


class LocalRoles:
    """Every role in a thread of this process, each with its own event loop. No Ray."""

    def __init__(self, config: ClusterConfig, run: RunDir) -> None:
        self._config = config
        self._run = run
        self._threads: list[tuple[Role, RoleThread]] = []

    def start(self) -> None:
        for role, name in self._config.expected_roles():
            self._threads.append((role, RoleThread(self._config, self._run, role, name)))

    def problems(self) -> list[str]:
        states = [thread.status() for _, thread in self._threads]
        return [f"{state.name}: {state.error}" for state in states if state.ended]

    def tend(self) -> None:
        for i, (role, thread) in enumerate(self._threads):
            status = thread.status()
            if status.ended:
                log.warning("%s ended (%s), starting it anew", status.name, status.error)
                time.sleep(RESTART_PAUSE_S)
                self._threads[i] = (role, RoleThread(self._config, self._run, role, status.name))

    def stop(self, drain_s: float) -> None:
        for role, thread in reversed(self._threads):  # router, decode, prefill, vision, store
            if not thread.stop(drain_s + 5.0):
                log.warning("%s did not end in time", role)


def head_of_ray_lives(sid: int) -> bool:
    """Whether the session still has Ray's head, the process that knows names and restarts."""
    return any(member.name == "gcs_server" for member in session_members(sid))


def ray_auth_mode(environ: Mapping[str, str], *, insecure: bool) -> str:
    """How Ray's control plane authenticates: by token, whatever Ray's own default is.

    Raises `ConfigError` when `environ` turns authentication off and `insecure` is not given:
    whoever reaches an open Ray may run any code in this cluster."""
    asked = environ.get("RAY_AUTH_MODE", "token")
    if asked != "token" and not insecure:
        raise ConfigError(
            f"RAY_AUTH_MODE is {asked!r:.40} in the environment, but a cluster starts with token"
            " authentication only: unset it, or say --insecure"
        )
    return asked


def ray_environment(run: RunDir, environ: Mapping[str, str], *, insecure: bool) -> dict[str, str]:
    """Variables that Ray must find *when it is imported*: its native part reads them once."""
    return {
        "RAY_AUTH_MODE": ray_auth_mode(environ, insecure=insecure),
        "RAY_AUTH_TOKEN_PATH": str(run.ray_token_file()),
        # The one switch that keeps *all* of Ray's sockets on loopback; single host only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Raylet and actors outlive their head for a week: open streams and new requests go on
        # without it (default 60 s). What stops is restarting replicas.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "604800",
        # Ray would kill the actor that uses most memory when the host runs low; ours have budgets.
        "RAY_memory_monitor_refresh_ms": "0",
        "OMP_NUM_THREADS": "1",
    }


def _last_error(run: RunDir, name: str) -> str:
    """The last line of a role's log that reports an error, shortened."""
    with contextlib.suppress(OSError):
        lines = (run.logs / f"{name}.log").read_text(errors="replace").splitlines()[-200:]
        for line in reversed(lines):
            if "Error" in line and not line.startswith(" "):
                return line[:300]
    return ""


@contextlib.contextmanager
def _no_longer_than(seconds: float, what: str) -> Iterator[None]:
    """Run the body, but leave this process when it hangs: the session sweep ends the rest."""

    def give_up() -> None:
        log.error("%s took longer than %.0f s", what, seconds)
        logging.shutdown()
        os._exit(2)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        log.warning("%s: %s: %s", what, type(error).__name__, error)
    finally:
        timer.cancel()
