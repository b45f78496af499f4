"""The roles of a cluster as plain processes, each started and ended by the test. No Ray."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from headrace_tests import module
from headrace_tests_cluster_live_cluster import HEADRACE, Live  # type: ignore[import-not-found]

from headrace.core.card import Member
from headrace.core.metrics import Metric
from headrace.core.states import ReplicaState
from headrace.kvstore import embedded_valkey

forks = module("tests/beside/forks.py")


class Plain(Live):  # type: ignore[misc]
    """As a live cluster, but its processes come and go when the test says so."""

    def __init__(self, home: Path, values: dict[str, Any], until: Any) -> None:
        super().__init__(home, values, until)
        self.model: str = values["deployment"]["model"]
        self.run.create()
        self.run.config_file.write_text(self.file.read_text())
        self._valkey = embedded_valkey(str(self.run.sockets))
        self._processes: dict[str, Any] = {}

    # processes

    def start(
        self, *names: str, faults: str = "", wait: bool = True, ready_s: float = 180.0
    ) -> None:
        """Start roles, `decode-0` a decode one, and wait until they are announced as ready."""
        environment = self.environment | ({"HEADRACE_FAULTS": faults} if faults else {})
        for name in names:
            command = [HEADRACE, "role", name.partition("-")[0], "--config", str(self.file)]
            self._processes[name] = forks.fork(
                [*command, "--name", name], environment, new_session=True
            )
        if not wait:
            return
        self.until(
            lambda: all(self.announced(name) == ReplicaState.READY for name in names),
            ready_s,
            lambda: f"not ready: {[(role['name'], role['state']) for role in self.roles()]}",
        )

    def just(self, *decodes: str) -> None:
        """Have one of every other role and these decode replicas running, and all at rest."""
        wanted = {"store-0", "prefill-0", "router-0", *decodes}
        for name in sorted(self._processes.keys() - wanted):
            self.end(name)
        self.start(*sorted(wanted - self._processes.keys()))
        self.settled()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        self._processes[name].send_signal(number)

    def exit_status(self, name: str, within_s: float) -> int:
        """Wait for the end of a process, and forget it."""
        return self._processes.pop(name).wait(within_s)

    def end(self, name: str, within_s: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        self.signal(name)
        return self.exit_status(name, within_s)

    def close(self) -> None:
        if self._store is not None:
            self.wait(self._store.close())
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._valkey.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # what is there

    @property
    def url(self) -> str:
        """Of the router that was announced last."""
        member = self._by_name()["router-0"]
        return str(member.address).replace("tcp://", "http://")

    def announced(self, name: str) -> str:
        """The state in a role's membership record; "" without one, or with one of a former life."""
        member, process = self._by_name().get(name), self._processes.get(name)
        return str(member.state) if member and process and member.pid == process.pid else ""

    def roles(self) -> list[dict[str, Any]]:
        """Every started role, with what `settled` looks at."""
        members = self._by_name()
        return [
            {
                "role": name.partition("-")[0],
                "name": name,
                "state": self.announced(name),
                "pid": process.pid,
                "boot_id": members[name].boot_id if name in members else "",
                "address": members[name].address if name in members else "",
                "requests": self.metric(Metric.REPLICA_REQUESTS, replica=name)
                if "router-0" in self._processes
                else 0,
            }
            for name, process in self._processes.items()
        ]

    def _by_name(self) -> dict[str, Member]:
        return {member.name: member for member in self.board_members()}

    def log(self, name: str) -> str:
        return (self.run.logs / f"{name}.log").read_text()
