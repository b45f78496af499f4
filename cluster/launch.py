"""Starting and ending a cluster from outside: what `headrace up` and `headrace down` do.

`up` writes the run's config.yaml, starts the leader in a session of its own and follows its state
file. `down` ends the members of that session, and only these.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from headrace.cluster.config import ClusterConfig, Processes, check_weights, keep_copy, load_config
from headrace.cluster.holders import ray_auth_mode
from headrace.cluster.leader import REFUSED
from headrace.cluster.rundir import (
    Phase,
    RunDir,
    RunState,
    headrace_home,
    known_clusters,
    lock_run,
    remove_empty,
)
from headrace.cluster.session import (
    Process,
    end_run,
    leader_alive,
    machine_boot_id,
    read_process,
    run_members,
)
from headrace.core.errors import ConfigError, HeadraceError

Say = Callable[[str], None]
LOOK_EVERY_S = 0.1
SILENT_S = 10.0  # after so long what is being done is said again
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOCK_TRIES = 100
MEMBERS_S = 3.0  # for SIGTERM to work on what the leader left, before SIGKILL


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """What would interrupt is delivered at the end: nothing is started and then not known of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in INTERRUPTS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


class LaunchError(HeadraceError):
    """A cluster that did not start or did not end; the message says what to do."""

    code = "launch_error"


class Launch:
    """One `up`. The constructor checks the configuration's own keys and that no cluster of that
    name runs; raises `ConfigError` or `LaunchError` before anything is started."""

    def __init__(
        self,
        config: Path,
        name: str = "",
        *,
        port: int | None = None,
        foreground: bool = False,
        insecure: bool = False,
    ) -> None:
        """`name` and `port` replace the file's own cluster name and router.port."""
        self.config: ClusterConfig = load_config(config, cluster=name, port=port)
        check_weights(self.config.deployment)  # the leader's own checks begin with importing torch
        self.run = RunDir(headrace_home(), self.config.cluster)
        if self.config.processes is Processes.RAY:
            ray_auth_mode(os.environ, insecure=insecure)
        self._source = config
        self._foreground = foreground
        self._insecure = insecure
        self._leader: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None  # the leader, by id and start
        self._made: tuple[Path, ...] = ()  # folders that were not there before
        state = self.run.read_state()
        if state is not None and leader_alive(state):
            raise LaunchError(
                f"cluster {state.cluster} is already {state.phase} at {state.url or 'no URL yet'}"
                f" (leader {state.pid}): `headrace down --name {state.cluster}` ends it,"
                " `headrace up ... --name OTHER --port N` starts a second one"
            )

    def start(self, say: Say) -> None:
        """Start the leader and return when the cluster is ready.

        Raises `LaunchError` with the leader's reason when it fails, or when another process leads
        or starts this cluster: of two launches one has the run's lock, and only that one removes
        or writes anything. The leader inherits the lock."""
        lock = self._lock()
        try:
            self._clear(say)
            self._start_leader(lock)
        finally:
            os.close(lock)  # the leader's own descriptor goes on holding it
        self._follow(say)

    def _lock(self) -> int:
        for _ in range(LOCK_TRIES):
            made = self.run.create()
            try:
                lock = lock_run(self.run)
            except FileNotFoundError:  # a refused launch just removed the folder that it had made
                continue
            except OSError as error:
                raise ConfigError(
                    f"cannot write in {self.run.path} ({error.strerror}): HEADRACE_HOME names"
                    " another folder"
                ) from None
            if lock is None:
                raise LaunchError(
                    f"cluster {self.run.cluster} is led by another process, or already starting:"
                    f" `headrace status --name {self.run.cluster}` shows it"
                )
            self._made = made
            return lock
        raise LaunchError(f"the folder {self.run.path} is removed again and again")

    def _clear(self, say: Say) -> None:
        """Take away what a former run left. The lock is held, so no leader of it lives."""
        run = self.run
        state = run.read_state()
        if state is not None and run_members(state):
            say("ending what a former run left behind")
            _end_members(run, state, say)
        shutil.rmtree(run.short_dir, ignore_errors=True)  # Ray's files of a former life
        run.create()
        keep_copy(self._source, self.config, run)
        run.state_file.unlink(missing_ok=True)

    def _start_leader(self, lock: int) -> None:
        run = self.run
        command = [sys.executable, "-P", "-m", "headrace.cluster.leader", str(run.home)]
        command += [run.cluster, "--lock", str(lock)]
        command += ["--insecure"] if self._insecure else []
        command += ["--with-parent", str(os.getpid())] if self._foreground else []
        with open(run.logs / "leader.out", "wb") as output, deferred_interrupts():
            self._leader = subprocess.Popen(
                command,
                cwd=run.path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
            self._process = read_process(self._leader.pid)  # not reaped yet: the id is its own

    def _own_state(self) -> RunState | None:
        """The state if the leader of this launch wrote it."""
        state, mine = self.run.read_state(), self._process
        if state is None or mine is None:
            return None
        same = (state.pid, state.started_ticks) == (mine.pid, mine.started_ticks)
        return state if same and state.boot_id == machine_boot_id() else None

    def _follow(self, say: Say) -> None:
        assert self._leader is not None
        shown, said_s = "", time.monotonic()
        while True:
            ended = self._leader.poll() is not None  # before reading: its last word counts
            state = self._own_state()
            if state is not None and state.phase is Phase.READY:
                return
            failed = state is not None and state.phase is Phase.FAILED  # told as the error, once
            if state is not None and state.progress != shown and not failed:
                shown, said_s = state.progress, time.monotonic()
                say(shown)
            elif shown and time.monotonic() - said_s > SILENT_S:
                said_s = time.monotonic()
                say(shown)
            if ended:
                if state is not None:
                    _end_run_of(self.run, state, say)
                reason = self._reason(state)
                if self._leader.returncode != REFUSED:
                    self._forget_store()
                elif self._forget():
                    reason = state.error if state is not None else reason
                raise LaunchError(reason)
            time.sleep(LOOK_EVERY_S)

    def _forget(self) -> bool:
        """Remove the run's folder if this launch made it: nothing was started, and the reason is
        told. False when it stays, because it is older or somebody leads a run there by now."""
        lock = lock_run(self.run) if self.run.path in self._made else None
        if lock is None:
            return False
        try:
            shutil.rmtree(self.run.path, ignore_errors=True)
        finally:
            os.close(lock)
        remove_empty(self._made)
        return True

    def _forget_store(self) -> None:
        """Remove the store's folder if this launch made it: nobody was ever served from it, and its
        segments take `store.ssd_bytes`. Logs and keys stay."""
        if self.run.store_directory not in self._made:
            return
        with contextlib.suppress(FileNotFoundError):  # somebody removed the run itself
            lock = lock_run(self.run)
            if lock is not None:
                shutil.rmtree(self.run.store_directory, ignore_errors=True)
                os.close(lock)

    def _reason(self, state: RunState | None) -> str:
        if state is not None and state.error:
            return f"{state.error}\n(logs: {self.run.logs})"
        tail = (self.run.logs / "leader.out").read_text(errors="replace").strip()[-600:]
        return f"the leader ended before the cluster was ready\n{tail}\n(logs: {self.run.logs})"

    def wait(self) -> None:
        """Until the leader ends because `headrace down` told it to.

        Raises `LaunchError` when it ends for another reason."""
        assert self._leader is not None
        if self._leader.wait() != 0:
            raise LaunchError(f"the leader ended by itself; see {self.run.logs / 'leader.log'}")

    def abandon(self, say: Say) -> None:
        """End whatever this launch started. Raises `LaunchError` when something stays."""
        if self._leader is None:
            return
        state = self._own_state()
        if state is None:
            self._leader.terminate()
        else:
            _end_run_of(self.run, state, say)
        self._leader.wait()

    def state(self) -> RunState:
        """The state last written. Raises `LaunchError` before there is one."""
        state = self.run.read_state()
        if state is None:
            raise LaunchError("the leader has written no state yet")
        return state

    def first_key(self) -> str:
        """The API key of the first tenant of the configuration."""
        return self.config.api_keys(self.run)[0].key


def end_cluster(run: RunDir, say: Say) -> int:
    """End every process of a run; returns how many there were (0: it did not run).

    Raises `LaunchError` naming what is left, if the kernel holds on to a process."""
    state = run.read_state()
    return 0 if state is None else _end_run_of(run, state, say)


def _end_run_of(run: RunDir, state: RunState, say: Say) -> int:
    """End the run whose leader wrote `state`, and none that began in the same folder since."""
    found = _end_members(run, state, say)
    try:
        lock = lock_run(run)
    except FileNotFoundError:
        return found
    if lock is None:  # somebody leads a run there by now: the files are theirs
        return found
    try:
        shutil.rmtree(run.short_dir, ignore_errors=True)
        after = run.read_state() or state
        if after.phase not in (Phase.STOPPED, Phase.FAILED):  # its leader could not write that
            run.write_state(_stopped(after))
    finally:
        os.close(lock)
    return found


def _end_members(run: RunDir, state: RunState, say: Say) -> int:
    found = len(run_members(state))
    if found:
        left = end_run(state, leader_s=_patience_s(run), members_s=MEMBERS_S, progress=say)
        if left:
            names = ", ".join(f"{process.pid} ({process.name})" for process in left)
            raise LaunchError(f"these processes of {run.cluster} do not end: {names}")
    return found


def running_clusters(home: Path) -> list[RunDir]:
    """Clusters with at least one living process."""
    found = []
    for run in known_clusters(home):
        state = run.read_state()
        if state is not None and run_members(state):
            found.append(run)
    return found


def _patience_s(run: RunDir) -> float:
    try:
        drain_s = load_config(run.config_file).times.drain_s
    except ConfigError:
        drain_s = 10.0
    return drain_s + 45.0  # the leader gives itself less


def _stopped(state: RunState) -> RunState:
    return replace(state, phase=Phase.STOPPED, progress="ended by its session")
