"""Files of a run: where a cluster keeps its state, secrets, sockets and logs.

    <home>/<cluster>/
        state.json        who leads this cluster and how far it is (written by the leader)
        lock              held (flock) by the leader for as long as it lives
        token             the cluster token of our frames                     mode 600
        ray-token         the token of Ray's own control plane                mode 600
        api_key[-TENANT]  generated API keys                                  mode 600
        config.yaml       the configuration the run was started with          mode 600
        sizes.json        largest payloads of the store's objects, from the model
        valkey.sock, store.sock, store/, logs/, records.jsonl, supervisor.json

`home` is $HEADRACE_HOME, or ~/.headrace. Nothing of a run lies elsewhere, but for Ray's session
files and for sockets whose path would be too long here: see `short_dir`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from headrace.core.errors import ConfigError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
SOCKET_PATH_BYTES = 107  # sun_path without its terminating zero
_RAY_ADDS_BYTES = 69  # to a short folder, for its longest socket: /ray/session_.../sockets/...


class Phase(StrEnum):
    """How far a cluster is, as its leader writes it."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunState:
    """Contents of state.json. `sid` with `started_ticks` and `boot_id` name the leader's session
    for good: process ids are reused, and nobody else's session may ever be ended by `down`."""

    cluster: str
    phase: Phase
    progress: str
    error: str
    pid: int
    sid: int
    started_ticks: int  # start of the leader, in clock ticks since boot (/proc/<pid>/stat)
    boot_id: str  # of the machine
    processes: str  # "ray" or "one"
    model: str
    url: str
    build: str


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Largest payloads of the store's kinds for the served model: one block, one window record, the
    rows of the largest picture (0 without vision replicas), a sequence's state (0 unless hand-offs
    send it)."""

    block_bytes: int
    window_bytes: int
    picture_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one cluster's run. Creates nothing until asked."""

    home: Path
    cluster: str

    def __post_init__(self) -> None:
        check_name(self.cluster)

    @property
    def path(self) -> Path:
        return self.home / self.cluster

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def records_file(self) -> Path:
        return self.path / "records.jsonl"

    @property
    def report_file(self) -> Path:
        return self.path / "supervisor.json"

    @property
    def store_directory(self) -> Path:
        return self.path / "store"

    @property
    def sockets(self) -> Path:
        """Folder of the unix sockets: the run's own, or a short one where that is too long."""
        longest = self.path / "valkey.sock.tmp"
        return self.path if len(os.fsencode(longest)) <= SOCKET_PATH_BYTES else self.short_dir

    @property
    def store_address(self) -> str:
        return f"unix://{self.sockets / 'store.sock'}"

    @property
    def valkey_socket(self) -> Path:
        return self.sockets / "valkey.sock"

    @property
    def short_dir(self) -> Path:
        """A folder of few characters that belongs to this run alone, for unix sockets: below the
        temporary folder, or below /tmp where that leaves Ray too few."""
        mark = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()[:10]
        below = Path(f"headrace-{os.getuid()}", mark)
        folder = tempfile.gettempdir() / below
        fits = len(os.fsencode(folder)) + _RAY_ADDS_BYTES <= SOCKET_PATH_BYTES
        return folder if fits else "/tmp" / below

    def create(self) -> tuple[Path, ...]:
        """Make the folders, readable by their owner only; returns those that were not there, inner
        ones last. Raises `ConfigError` for a folder that cannot be made, or when a short folder of
        that name belongs to somebody else."""
        own = (self.path, self.logs, self.store_directory)
        short = (self.short_dir.parent, self.short_dir)
        made = [one for one in (*reversed(self.path.parents), *own, *short) if not one.exists()]
        for folder in (*own, *short):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        for folder in short:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise ConfigError("the folder for short socket paths belongs to another user")
            folder.chmod(0o700)
        return tuple(made)

    def cluster_token(self) -> str:
        """The token every frame carries; made at first use, kept for later runs."""
        return _secret(self.path / "token")

    def ray_token_file(self) -> Path:
        """File with the token of Ray's control plane (64 hex digits, as Ray wants it)."""
        path = self.path / "ray-token"
        _secret(path)
        return path

    def api_key(self, tenant: str, *, first: bool = True) -> str:
        """The generated key of `tenant`; made at first use, kept for later runs."""
        return _secret(self.api_key_file(tenant, first=first), prefix="hr-", random_bytes=24)

    def api_key_file(self, tenant: str, *, first: bool = True) -> Path:
        """Where a generated key lies: `api_key` for the first tenant of the configuration."""
        return self.path / ("api_key" if first else f"api_key-{check_name(tenant)}")

    def write_sizes(self, model: str, sizes: SlotSizes) -> None:
        """Keep the slot sizes of a model for the store of this run."""
        write_file(self.path / "sizes.json", json.dumps({"model": model, **asdict(sizes)}))

    def read_sizes(self, model: str) -> SlotSizes | None:
        """The sizes kept last, if they were of this model."""
        try:
            values = json.loads((self.path / "sizes.json").read_text())
            if values.pop("model") == model:
                return SlotSizes(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return None

    def read_state(self) -> RunState | None:
        """What the leader wrote last, or None. Says nothing of whether that leader still lives."""
        try:
            values = json.loads(self.state_file.read_text())
            values["phase"] = Phase(values["phase"])
            return RunState(**{field.name: values[field.name] for field in fields(RunState)})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_state(self, state: RunState) -> None:
        """Replace state.json in one step: a reader sees the old one or the new one."""
        write_file(self.state_file, json.dumps(asdict(state), indent=1))


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of `folders`, outer ones first as `RunDir.create` returns them, that hold
    nothing; the others stay."""
    for folder in reversed(list(folders)):
        with contextlib.suppress(OSError):
            folder.rmdir()


def headrace_home() -> Path:
    """$HEADRACE_HOME, or ~/.headrace."""
    configured = os.environ.get("HEADRACE_HOME", "")
    return Path(configured).absolute() if configured else Path.home() / ".headrace"


def check_name(name: str) -> str:
    """`name` if it may name a cluster or a tenant's key file. Raises `ConfigError`."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a name has 1 to 32 of the characters a-z 0-9 - and no - in front, got {name[:40]!r}"
        )
    return name


def known_clusters(home: Path) -> list[RunDir]:
    """Every cluster that has a state file under `home`, by name."""
    found = sorted(path.parent.name for path in home.glob("*/state.json"))
    return [RunDir(home, name) for name in found if NAME.fullmatch(name)]


def lock_run(run: RunDir) -> int | None:
    """Take the run's lock and return its descriptor, or None when a living leader holds it.

    The descriptor is close-on-exec: the lock ends with the calling process alone, or with whom it
    hands the descriptor to. Raises `FileNotFoundError` when the folder is not there (any more)."""
    handle = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    if os.fstat(handle).st_nlink == 0:  # its holder removed the whole folder meanwhile
        os.close(handle)
        raise FileNotFoundError(run.path)
    return handle


def write_file(path: Path, text: str) -> None:
    """Replace a file that only its owner may read, in one step."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(draft, path)


def _secret(path: Path, *, prefix: str = "", random_bytes: int = 32) -> str:
    """The secret in `path`; made there when the file is absent, whoever comes first."""
    for _ in range(100):
        try:
            if text := path.read_text().strip():
                if stat.S_IMODE(path.stat().st_mode) & 0o077:
                    path.chmod(0o600)
                return text
        except FileNotFoundError:
            pass
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        write_file(draft, prefix + secrets.token_hex(random_bytes))
        try:
            os.link(draft, path)  # fails when another process was faster: its secret counts
        except FileExistsError:
            if not path.read_text().strip():
                os.replace(draft, path)
                continue
        finally:
            draft.unlink(missing_ok=True)
    raise ConfigError(f"cannot make the secret file {path.name}")
