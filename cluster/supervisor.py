"""Watching a cluster: which roles are missing from the membership, and what is done about it.

Ray restarts a process that died. What it does not see is a process that lives without serving
(frozen, wedged, its loop gone), and an actor it gave up. The rule is one pure function; the loop
round it reads the membership once a second, acts, and writes what it saw to supervisor.json.
With Redis away the membership is stale: then nothing is known, nothing is done, and the time does
not count as anybody's absence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

from headrace.cluster.config import ClusterConfig
from headrace.cluster.deaths import Deaths
from headrace.cluster.holders import head_of_ray_lives
from headrace.cluster.roles import build_id, role_settings
from headrace.cluster.rundir import RunDir, write_file
from headrace.cluster.session import read_process
from headrace.core.card import Member, Role
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.errors import ConfigError

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
# Found as top-level packages only where the working directory crept onto the path; then `kernels`
# would stand in the place of another project's.
ROOMS = (
    *("core", "kernels", "model", "engine", "kvstore"),
    *("prefill", "decode", "vision", "router", "cluster"),
)
Ensure = Callable[[Role, str], object]  # makes sure that Ray has an actor of this name


class Action(StrEnum):
    NONE = "none"
    KILL = "kill"  # the process lives but does not serve: end it, so that Ray starts it anew
    ENSURE = "ensure"  # no process is known: let Ray create the actor if it has none


@dataclass(slots=True)
class Watched:
    """What the supervisor knows of one role. Times are of its own clock."""

    role: Role
    name: str
    since_s: float  # last seen, or first expected, or last acted on
    pid: int = 0
    started_ticks: int = 0  # of the process with that id, so that a reused id is not hit
    boot_id: str = ""
    state: str = "absent"
    lives: int = 0  # boot ids seen
    revived: int = 0


_KEPT = ("pid", "started_ticks", "boot_id", "lives", "revived")  # when the supervisor starts anew


@dataclass(slots=True)
class Watch:
    """The supervisor's memory. Not thread-safe."""

    restart_after_s: float
    first_s: float  # allowance of a role that was never seen, or has just been acted on
    clock: Clock = SYSTEM_CLOCK
    roles: dict[str, Watched] = field(default_factory=dict)

    def expect(self, roles: Iterable[tuple[Role, str]]) -> None:
        now_s = self.clock.now_s()
        self.roles = {name: Watched(role, name, now_s) for role, name in roles}

    def remember(self, reported: Iterable[Mapping[str, Any]]) -> None:
        """Go on counting from `roles` of an earlier supervisor's report on this run."""
        for values in reported:
            watched = self.roles.get(values["name"])
            if watched is not None:
                for name in _KEPT:
                    setattr(watched, name, values[name])

    def look(self, members: Iterable[Member]) -> dict[str, Action]:
        """Take in a fresh membership and say what to do, for roles that need something."""
        now_s = self.clock.now_s()
        by_name = {member.name: member for member in members}
        actions = {}
        for name, watched in self.roles.items():
            member = by_name.get(name)
            if member is not None:
                _seen(watched, member, now_s)
                continue
            watched.state = "absent"
            patience_s = self.restart_after_s if watched.lives else self.first_s
            if now_s - watched.since_s > max(patience_s, self.restart_after_s):
                actions[name] = Action.KILL if _still_there(watched) else Action.ENSURE
                watched.since_s = now_s + self.first_s - self.restart_after_s
                watched.revived += 1
        return actions

    def blind(self) -> None:
        """The membership could not be read. Leases run out meanwhile: when Redis is back, the first
        list is empty, and nobody in it was missing for longer than it takes to announce again."""
        now_s = self.clock.now_s()
        for watched in self.roles.values():
            watched.since_s = max(watched.since_s, now_s)


def _seen(watched: Watched, member: Member, now_s: float) -> None:
    watched.since_s = max(now_s, 0.0)
    watched.state = str(member.state)
    if member.boot_id != watched.boot_id:
        process = read_process(member.pid)
        watched.boot_id = member.boot_id
        watched.pid = member.pid
        watched.started_ticks = process.started_ticks if process else 0
        watched.lives += 1


def _still_there(watched: Watched) -> bool:
    process = read_process(watched.pid) if watched.pid else None
    return process is not None and process.started_ticks == watched.started_ticks


def check_builds(members: Iterable[Member]) -> None:
    """Refuse replicas of different builds that would read each other's bytes differently.

    Raises `ConfigError` when builds are mixed and layout ids differ; equal layouts may mix."""
    engines = [member for member in members if member.card is not None]
    builds = {member.build for member in engines}
    layouts = {member.card.layout_id for member in engines if member.card is not None}
    if len(builds) > 1 and len(layouts) > 1:
        raise ConfigError(
            f"replicas of different builds with different layouts: {', '.join(sorted(builds))}"
        )


class SupervisorThread:
    """The loop, in a thread of its own. The constructor starts it."""

    def __init__(self, config: ClusterConfig, run: RunDir, ensure: Ensure) -> None:
        self._config = config
        self._run_dir = run
        self._ensure = ensure
        self._stop = threading.Event()
        self._error = ""
        self._watch = Watch(config.times.restart_after_s, config.times.ready_s)
        self._watch.expect(config.expected_roles())
        state = run.read_state()
        self._run_id = [state.sid, state.started_ticks, state.boot_id] if state else []
        self._watch.remember(self._reported())
        self._thread = threading.Thread(target=self._main, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self, wait_s: float) -> bool:
        """End the loop and wait; False when it takes longer."""
        self._stop.set()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        asyncio.run(self._loop())

    async def _loop(self) -> None:
        from headrace.kvstore import MemberBoard

        settings = role_settings(self._config, self._run_dir, Role.SUPERVISOR, "supervisor-0")
        board = MemberBoard.of(settings)
        deaths = Deaths(restarts=lambda: head_of_ray_lives(os.getsid(0)))
        while not self._stop.is_set():
            try:
                members = await board.members()
                if board.stale:
                    self._watch.blind()
                else:
                    actions = self._watch.look(members)
                    for one in self._watch.roles.values():
                        if one.state != "absent":
                            deaths.follow(one.name, one.pid, one.started_ticks, one.lives)
                    await self._act(actions)
                self._report(board.stale)
            except Exception as error:  # the watcher outlives whatever it watches
                self._error = f"{type(error).__name__}: {error}"
                log.exception("could not watch")
            await asyncio.sleep(LOOK_EVERY_S)
        deaths.close()

    async def _act(self, actions: Mapping[str, Action]) -> None:
        for name, action in actions.items():
            watched = self._watch.roles[name]
            log.warning("%s is missing: %s", name, action)
            if action is Action.KILL and os.getsid(watched.pid) == os.getsid(0):
                os.kill(watched.pid, signal.SIGKILL)
            elif action is Action.ENSURE:
                # Ray's calls block, and without its head for ever: not in this loop
                async with asyncio.timeout(10.0):
                    await asyncio.to_thread(self._ensure, watched.role, name)

    def _reported(self) -> list[dict[str, Any]]:
        """What a supervisor before this one, which ended, knew of the roles of this run."""
        try:
            report = json.loads(self._run_dir.report_file.read_text())
            roles: list[dict[str, Any]] = report["roles"]
            return roles if self._run_id and report["run"] == self._run_id else []
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or of another build
            return []

    def _report(self, stale: bool) -> None:
        roles = [asdict(watched) for watched in self._watch.roles.values()]
        report = {
            "wall_s": SYSTEM_CLOCK.wall_s(),
            "pid": os.getpid(),
            "run": self._run_id,
            "build": build_id(),
            "membership_stale": stale,
            "error": self._error,
            "shadowed_rooms": [room for room in ROOMS if find_spec(room) is not None],
            "roles": roles,
        }
        write_file(self._run_dir.report_file, json.dumps(report, indent=1))
