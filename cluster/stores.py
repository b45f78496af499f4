"""Which store a command means: a directory that nobody serves, or a running cluster's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headrace.cluster.config import ClusterConfig, load_config
from headrace.cluster.launch import running_clusters
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import RunDir, headrace_home, known_clusters
from headrace.core.card import Role
from headrace.core.economics import Economics, of_records
from headrace.core.errors import ConfigError
from headrace.core.records import RequestRecord
from headrace.kvstore.workshop.live import LiveStore

MAX_RECORDS = 20_000  # newest requests that the economics are made of


@dataclass(frozen=True, slots=True)
class Target:
    """One store. `live` is None when nobody serves `directory`, as far as the cluster's state says;
    `run` is None for a directory that was named by its path."""

    directory: Path
    live: LiveStore | None = None
    run: RunDir | None = None
    domains: tuple[str, ...] = ()  # names behind the tags that a store keeps

    def must_be_live(self, what: str) -> LiveStore:
        """Raises `ConfigError` saying what to do instead."""
        if self.live is None:
            raise ConfigError(
                f"{what} asks a running store, and none serves {self.directory}: `headrace up`"
                " starts one"
            )
        return self.live


def find_target(directory: Path | None, name: str) -> Target:
    """The store at a path; else that of a cluster by name, of the only one that runs, or of the
    only one there is. Raises `ConfigError` when that is nobody or not clear."""
    if directory is not None:
        if name:
            raise ConfigError("name a directory or a cluster (--name), not both")
        return Target(directory)
    home = headrace_home()
    running = running_clusters(home)
    known = known_clusters(home)
    if name:
        chosen = [run for run in known if run.cluster == name]
        if not chosen:
            raise ConfigError(f"there is no cluster {name} under {home}")
    else:
        chosen = running or known
    if not chosen:
        raise ConfigError(
            f"there is no cluster under {home}: name the store's directory, or set HEADRACE_HOME"
        )
    if len(chosen) > 1:
        names = ", ".join(run.cluster for run in chosen)
        raise ConfigError(f"which store? Say --name, one of {names}, or name a directory")
    run = chosen[0]
    config = load_config(run.config_file)
    where = Path(str(config.store.get("directory") or run.store_directory))
    live = None
    if run in running:
        role = role_settings(config, run, Role.SUPERVISOR, "headrace store")
        live = LiveStore(role.store_address, role.token)
    return Target(where, live, run, _domains(config))


def _domains(config: ClusterConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for key in config.keys for name in (key.domain, key.tenant)))


def economics(run: RunDir | None) -> Economics | None:
    """What hits saved and cost by the newest requests of a run; None without any."""
    if run is None:
        return None
    import json

    known = {field.name for field in fields(RequestRecord)}
    records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
    try:
        with open(run.records_file, encoding="utf-8") as lines:
            for line in lines:
                try:
                    values = json.loads(line)
                    records.append(RequestRecord(**{k: v for k, v in values.items() if k in known}))
                except (ValueError, TypeError, AttributeError):
                    continue  # a line that is being written, or of another version
    except OSError:
        return None
    return of_records(records) if records else None


def economics_values(found: Economics | None) -> dict[str, Any] | None:
    """As plain values, for JSON. `row_s` is null while none is measured."""
    if found is None:
        return None
    names: dict[str, Callable[[Economics], float | None]] = {
        "hits": lambda e: e.hits,
        "found_tokens": lambda e: e.found_tokens,
        "saved_rows": lambda e: e.saved_rows,
        "again_rows": lambda e: e.again_rows,
        "row_s": lambda e: e.row_s,
        "saved_s": lambda e: e.saved_s,
        "load_s": lambda e: e.load_s,
        "verify_s": lambda e: e.verify_s,
        "replay_s": lambda e: e.replay_s,
        "net_s": lambda e: e.net_s,
    }
    return {name: get(found) for name, get in names.items()}
