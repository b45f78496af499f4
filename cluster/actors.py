"""The Ray side of a cluster: one local Ray, and one thin actor a role.

Ray places, starts, restarts and names processes; no token and no tensor passes through it. An actor
brings its role to serving from `__init__` alone, because after a death Ray runs `__init__` again
and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle

from headrace.cluster.config import load_config
from headrace.cluster.roles import RoleThread, prepare_process
from headrace.cluster.rundir import RunDir
from headrace.cluster.supervisor import SupervisorThread
from headrace.core.card import Role

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 100 << 20  # near Ray's minimum: nothing of ours is put there
RESTART_PAUSE_S = 1.0
START_ATTEMPTS = 6  # on a busy machine Ray misses its own start limit, which has no setting


def start_ray(run: RunDir) -> None:
    """Start a local Ray that belongs to this process, which must have been given `ray_environment`
    before this module was imported. Changes the working directory: Ray puts the driver's on every
    worker's sys.path, and in a checkout our rooms would shadow other packages."""
    os.chdir(run.path)
    for attempt in range(1, START_ATTEMPTS + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            _init_ray(run)
            return
        except Exception as error:  # Ray raises a bare Exception when its own 30 s are over
            ray.shutdown()
            _kill_since(before)
            if attempt == START_ATTEMPTS or "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start within its 30 s; attempt %d follows", attempt + 1)


def _kill_since(before: set[psutil.Process]) -> None:
    """End the processes that a failed start left: Ray forgets them until this process exits, and
    each further attempt would share the machine with all those before it."""
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def _init_ray(run: RunDir) -> None:
    ray.init(
        address="local",  # never join what RAY_ADDRESS names
        namespace=run.cluster,
        num_cpus=os.cpu_count(),  # actors ask for 0; more only prestarts more idle workers
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _temp_dir=str(run.short_dir / "ray"),
    )


class RoleActor:
    """A serving role as a Ray actor. Everything after `__init__` is control, not data."""

    def __init__(self, home: str, cluster: str, role: str, name: str) -> None:
        run = RunDir(Path(home), cluster)
        prepare_process(run, name)
        self._thread = RoleThread(
            load_config(run.config_file), run, Role(role), name, on_end=_leave_after_failure
        )

    def ping(self) -> None:
        """Nothing: a caller's first call makes Ray look the actor up, so that later ones need no
        head for it."""

    def stop(self, wait_s: float) -> bool:
        """End the role in its orderly way; the process stays until the actor is killed."""
        return self._thread.stop(wait_s)


class SupervisorActor:
    """The supervisor as a Ray actor; see `headrace.cluster.supervisor`."""

    def __init__(self, home: str, cluster: str) -> None:
        run = RunDir(Path(home), cluster)
        prepare_process(run, "supervisor-0")
        config = load_config(run.config_file)
        self._thread = SupervisorThread(
            config, run, lambda role, name: ensure_role(run, role, name)
        )

    def ping(self) -> None:
        """As `RoleActor.ping`."""

    def stop(self, wait_s: float) -> bool:
        """Stop watching, so that roles may be ended without being brought back."""
        return self._thread.stop(wait_s)


def ensure_role(run: RunDir, role: Role, name: str) -> ActorHandle[Any]:
    """The actor `name`, created unless Ray has it already.

    An actor that Ray has is either serving or being restarted by Ray itself."""
    cls, arguments = (
        (SupervisorActor, (str(run.home), run.cluster))
        if role is Role.SUPERVISOR
        else (RoleActor, (str(run.home), run.cluster, str(role), name))
    )
    try:
        found: ActorHandle[Any] = ray.get_actor(name, namespace=run.cluster)
        return found
    except ValueError:  # Ray knows no living one
        pass
    remote: Any = ray.remote(cls)
    created: ActorHandle[Any] = remote.options(
        name=name,
        namespace=run.cluster,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
    ).remote(*arguments)
    return created


def stop_roles(handles: Iterable[ActorHandle], wait_s: float) -> None:
    """End roles in their orderly way, side by side; actors that do not answer are left. Takes
    handles, not names: names are looked up at Ray's head, which may be gone."""
    answers: list[Any] = [handle.stop.remote(wait_s) for handle in handles]
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=wait_s + 1.0)


def stop_ray() -> None:
    """End the local Ray with all its actors."""
    ray.shutdown()


def _leave_after_failure(error: BaseException | None) -> None:
    """A role that failed takes its process along: then Ray starts it anew. A pause keeps a role
    that cannot start from spinning."""
    if error is not None:
        time.sleep(RESTART_PAUSE_S)
        logging.shutdown()
        os._exit(1)
