"""What `headrace status` shows: membership, processes, the supervisor's report, router metrics."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headrace.cluster.chat import api_of
from headrace.cluster.config import ClusterConfig, Processes, load_config
from headrace.cluster.holders import head_of_ray_lives
from headrace.cluster.http import ApiError
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import Phase, RunDir
from headrace.cluster.session import run_members
from headrace.core.card import Member, Role
from headrace.core.errors import ConfigError
from headrace.core.metrics import Metric
from headrace.core.states import ReplicaState

STORE_WAIT_S = 1.0
WIDEST = 10_000  # columns, to measure a table that nothing presses


@dataclass(frozen=True, slots=True)
class Facts:
    """What the notes about a run with living processes go by."""

    cluster: str
    stale: bool  # Redis does not answer
    ready: bool  # the router takes requests
    leader: bool  # the leader lives
    restarts: bool  # nothing that restarts replicas is missing: Ray's head, where Ray has them


def notes_of(facts: Facts) -> list[str]:
    """What an operator must know of a run, and what to do."""
    down = f"`headrace down --name {facts.cluster}`"
    notes = []
    if facts.stale:
        notes.append("Redis does not answer: the membership shown is not known to be true")
    if not facts.leader and not facts.ready:
        notes.append(f"the leader is gone and no request is served; {down} ends the rest")
    elif not facts.leader:
        notes.append(
            f"the leader is gone: requests are served until a part dies; {down} and `up` again"
        )
    elif not facts.restarts and facts.ready:
        notes.append(
            "Ray's head is gone: serving goes on, but dead replicas are not restarted;"
            f" {down} and `up` again when convenient"
        )
    elif not facts.restarts:
        notes.append(
            "Ray's head is gone, no request is served and no dead replica is restarted;"
            f" {down} and `up` again"
        )
    return notes


def collect(run: RunDir) -> dict[str, Any]:
    """One view of a run, plain values only. Raises `ConfigError` when nothing of it is there."""
    state = run.read_state()
    if state is None:
        raise ConfigError(f"there is no state of cluster {run.cluster}")
    config = load_config(run.config_file)
    processes = run_members(state)
    members, stale = asyncio.run(_members(config, run)) if processes else ((), True)
    store = asyncio.run(_store(config, run)) if processes else None
    samples, ready, notes = _samples(run, config) if processes else ({}, False, [])
    if processes:
        up = state.phase is Phase.READY and config.processes is Processes.RAY  # before it starts
        facts = Facts(
            cluster=run.cluster,
            stale=stale,
            ready=ready,
            leader=state.pid in {process.pid for process in processes},
            restarts=not up or head_of_ray_lives(state.sid),
        )
        notes += notes_of(facts)
    report = _report(run)
    return {
        "cluster": run.cluster,
        "phase": str(state.phase) if processes or state.phase is Phase.FAILED else "not running",
        "progress": state.progress,
        "error": state.error,
        "url": state.url,
        "model": state.model,
        "build": state.build,
        "leader_pid": state.pid,
        "processes": len(processes),
        "ready": ready,
        "roles": _roles(
            config, members, samples, {process.pid for process in processes}, report or {}
        ),
        "store": store,
        "supervisor": report,
        "notes": notes,
    }


def table(view: dict[str, Any], width: int | None = None) -> Table:
    """The view as a table. In fewer columns than it needs it has no addresses: role, state and
    process stay whole."""
    whole, console = _role_table(view, addresses=True), Console()
    wide = console.measure(whole, options=console.options.update(width=WIDEST)).maximum
    return whole if width is None or wide <= width else _role_table(view, addresses=False)


def _role_table(view: dict[str, Any], *, addresses: bool) -> Table:
    colour = "green" if view["ready"] else "red"
    words = [f"{view['cluster']}: [{colour}]{escape(_condition(view))}[/]"]
    words += [f"at {view['url']}"] if view["url"] and view["processes"] else []
    words += [f"model {view['model']}", f"{view['processes']} processes", f"build {view['build']}"]
    shown = Table(
        title=", ".join(words),
        title_justify="left",
        caption=f"pools: {_pools(view['roles'])}" + ("" if addresses else "; addresses: --json"),
        caption_justify="left",
    )
    for column in ("role", "state", "pid", "life", *(["address"] if addresses else [])):
        shown.add_column(column, no_wrap=True)
    for column in ("requests", "parked", "backlog\nms", "free\nblocks"):
        shown.add_column(column)
    for role in view["roles"]:
        colour = "green" if role["state"] == "ready" and role["alive"] else "red"
        # Its lease outlives it for a few seconds.
        state = role["state"] if role["alive"] or not role["pid"] else "gone"
        shown.add_row(
            role["name"],
            f"[{colour}]{state}[/]",
            str(role["pid"] or ""),
            str(role["lives"] or ""),
            *([role["address"]] if addresses else []),
            *(_number(role[key]) for key in ("requests", "parked", "backlog_ms", "free_blocks")),
        )
    return shown


def _up(roles: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """How many replicas of each pool take requests, of how many."""
    up: Counter[str] = Counter()
    all_: Counter[str] = Counter()
    for role in roles:
        all_[role["role"]] += 1
        up[role["role"]] += role["state"] == ReplicaState.READY and role["alive"]
    wanted = [r.value for r in (Role.VISION, Role.PREFILL, Role.DECODE, Role.ROUTER)]
    return {name: (up[name], all_[name]) for name in wanted}


def _pools(roles: Iterable[dict[str, Any]]) -> str:
    counts = _up(roles).items()
    return ", ".join(f"{name} {up} of {all_}" for name, (up, all_) in counts) + " ready"


def _condition(view: dict[str, Any]) -> str:
    """How a cluster is, in one phrase."""
    if view["phase"] == Phase.FAILED:
        return f"failed: {view['error']}"
    if view["phase"] == Phase.READY:
        nobody = [name for name, (up, all_) in _up(view["roles"]).items() if all_ and not up]
        without = f" without {' and '.join(nobody)}" if nobody else ""
        return ("ready" if view["ready"] else "not ready") + without
    if view["phase"] == Phase.STARTING:
        return f"starting ({view['progress']})"
    return str(view["phase"])


def store_table(store: dict[str, Any]) -> Group:
    """What the store holds, by tier: memory of the host, and what is safe on disk."""
    # A line of its own: as the table's title it would fold at the table's width.
    line = Text(
        f"store: {_number_of(store['blocks'], 'block')},"
        f" {_number_of(store['windows'], 'window record')},"
        f" {_number_of(store['pictures'], 'picture')},"
        f" {_number_of(store['states'], 'state')}; index {store['index']}",
        style="table.title",
    )
    shown = Table()
    for column in ("tier", "objects", "MB", "room", "waiting"):
        shown.add_column(column)
    room = f"{store['arena_free']} of {store['arena_slots']} slots free"
    shown.add_row("host", str(store["arena_resident"]), _megabytes(store["arena_bytes"]), room, "")
    room = f"{store['ssd_segments_free']} of {store['ssd_segments']} segments unused"
    ssd, pending = str(store["ssd_objects"]), str(store["pending"])
    shown.add_row("ssd", ssd, _megabytes(store["ssd_bytes"]), room, pending)
    return Group(line, shown)


def _number_of(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f}"


async def _store(config: ClusterConfig, run: RunDir) -> dict[str, Any] | None:
    """The store's own account as plain values; None when it does not answer."""
    from headrace.kvstore import StoreClient

    role = role_settings(config, run, Role.SUPERVISOR, "status")
    client = StoreClient(role.store_address, role.token, bytes(32), name="status")
    try:
        if not await client.connect(STORE_WAIT_S):
            return None
        stat = await client.stat()
        return None if stat is None else asdict(stat)
    finally:
        await client.close()


async def _members(config: ClusterConfig, run: RunDir) -> tuple[tuple[Member, ...], bool]:
    from headrace.kvstore import MemberBoard

    board = MemberBoard.of(role_settings(config, run, Role.SUPERVISOR, "status"))
    try:
        return await board.members(), board.stale
    finally:
        await board.close()


def _samples(
    run: RunDir, config: ClusterConfig
) -> tuple[dict[tuple[str, str], float], bool, list[str]]:
    """{(metric, replica): value}, whether the router says ready, and notes."""
    try:
        api = api_of(run, config)
        ready, found = api.ready(), api.metrics()
    except (ApiError, ConfigError) as error:
        return {}, False, [error.message]
    samples = {
        (sample.name, sample.labels["replica"]): sample.value
        for sample in found
        if "replica" in sample.labels
    }
    return samples, ready, []


def _roles(
    config: ClusterConfig,
    members: Iterable[Member],
    samples: dict[tuple[str, str], float],
    pids: set[int],
    report: dict[str, Any],
) -> list[dict[str, Any]]:
    by_name = {member.name: member for member in members}
    lives = {one["name"]: one["lives"] for one in report.get("roles", ())} if pids else {}
    rows = []
    for role, name in config.expected_roles():
        member = by_name.get(name)
        rows.append(
            {
                "role": str(role),
                "name": name,
                "state": str(member.state) if member else "absent",
                "alive": bool(member and member.pid in pids),
                "pid": member.pid if member else 0,
                "lives": lives.get(name),
                "boot_id": member.boot_id if member else "",
                "build": member.build if member else "",
                "address": member.address if member else "",
                "requests": _count(samples.get((Metric.REPLICA_REQUESTS, name))),
                # only decode replicas park anything
                "parked": _count(samples.get((Metric.REPLICA_PARKED, name)))
                if role is Role.DECODE
                else None,
                "backlog_ms": samples.get((Metric.BACKLOG_MS, name)),
                # a vision replica has no blocks: its 0 is not "none left"
                "free_blocks": None
                if role is Role.VISION
                else _count(samples.get((Metric.REPLICA_FREE_BLOCKS, name))),
            }
        )
    return rows


def _report(run: RunDir) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(run.report_file.read_text())
        return report
    except (OSError, ValueError):
        return None


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)  # a metric is a float, whatever it counts


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
