"""A running cluster, and hands to look into it and to harm it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from headrace.cluster.config import ClusterConfig, load_config
from headrace.cluster.http import ApiError, HttpApi
from headrace.cluster.roles import role_settings
from headrace.cluster.rundir import RunDir, RunState
from headrace.cluster.session import Process, read_process, run_members
from headrace.cluster.status import collect
from headrace.core.card import Member, Role
from headrace.core.chain import as_token_ids, block_digests, root_digest
from headrace.core.errors import HeadraceError
from headrace.core.ids import Digest, new_boot_id
from headrace.core.limits import WireLimits
from headrace.core.messages import Hello, LoadReport
from headrace.core.peers import introduce
from headrace.engine import LLM
from headrace.kvstore import MemberBoard, SaltBook, StoreClient, StoreStat

T = TypeVar("T")
Until = Callable[[Callable[[], bool], float, str | Callable[[], str]], None]
HEADRACE = str(Path(sys.executable).parent / "headrace")
ENGINE_POOLS = (Role.VISION, Role.PREFILL, Role.DECODE)
START_S = 420.0  # of a whole cluster: on a busy machine Ray needs several tries
BACK_S = 240.0  # of one role, likewise
SUSPECT_S = 2.0  # a promise: so soon nobody is sent to a killed replica any more


@dataclass(frozen=True)
class Answer:
    """One finished completion, and what the router recorded of it."""

    text: str
    finish: str
    usage: dict[str, Any]
    record: dict[str, Any]


class Live:
    """A cluster started with `headrace up` in a home of its own."""

    def __init__(self, home: Path, values: dict[str, Any], until: Until) -> None:
        self.until = until
        self.values = values
        self.run = RunDir(home, values["cluster"])
        self.n_blocks, self.n_slots = values["engine"]["n_blocks"], values["engine"]["n_slots"]
        self.tenants: list[str] = [entry["tenant"] for entry in values["keys"]]
        self._fresh = iter(self.tenants[2:])
        self.file = home / f"{values['cluster']}.yaml"
        self.file.write_text(yaml.safe_dump(values))
        self.environment = {**os.environ, "HEADRACE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.environment.pop("TMPDIR", None)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._store: StoreClient | None = None
        self._config: ClusterConfig | None = None

    # command line

    def command(self, *words: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
        """Run `headrace ...` from the repository's top folder, as a newcomer would."""
        return subprocess.run(
            [HEADRACE, *words],
            env=self.environment,
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def up(self) -> subprocess.CompletedProcess[str]:
        done = self.command("up", str(self.file), timeout_s=START_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.command("down", "--name", self.run.cluster)

    def close(self) -> None:
        """End the cluster if it runs, without asserting anything."""
        if self._store is not None:
            self.wait(self._store.close())
        if self.members():
            self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # what is there

    @property
    def state(self) -> RunState | None:
        return self.run.read_state()

    @property
    def url(self) -> str:
        state = self.state
        assert state is not None
        return state.url

    def key(self, tenant: str = "") -> str:
        tenant = tenant or self.tenants[0]
        return self.run.api_key(tenant, first=tenant == self.tenants[0])

    def fresh_tenant(self) -> str:
        """One that nobody asked as before: whatever it asks, nothing is stored for it."""
        return next(self._fresh)

    def members(self) -> list[Process]:
        state = self.state
        return run_members(state) if state is not None else []

    def view(self) -> dict[str, Any]:
        """What `headrace status --json` shows."""
        return collect(self.run)

    def roles(self) -> list[dict[str, Any]]:
        """Every expected role as `headrace status` shows it."""
        roles: list[dict[str, Any]] = self.view()["roles"]
        return roles

    def role(self, name: str) -> dict[str, Any]:
        return next(role for role in self.roles() if role["name"] == name)

    def process(self, name: str) -> Process:
        """The one process of the run with this name in the process table."""
        found = [member for member in self.members() if member.name == name]
        assert len(found) == 1, (name, found)
        return found[0]

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and at least these labels."""
        samples = HttpApi(self.url, self.key()).metrics()
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    def changes(self, name: str) -> list[tuple[float, str]]:
        """When (Unix seconds) which state came, for one replica, as the router wrote it down."""
        found = []
        for line in (self.run.logs / "router-0.log").read_text().splitlines():
            stamp, _, said = line.partition(f" INFO headrace.router.replicas {name}: ")
            if " -> " in said:
                at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found.append((at, said.partition(" -> ")[2]))
        return found

    def assert_suspected(self, name: str, killed_s: float) -> None:
        """That the router sent nobody to a replica any more soon after it was killed."""
        since_s = [when - killed_s for when, state in self.changes(name) if state == "suspect"]
        assert any(-0.01 < one < SUSPECT_S for one in since_s), since_s

    def records(self) -> list[dict[str, Any]]:
        """Every record the router wrote so far."""
        try:
            lines = self.run.records_file.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    # requests

    def client(self, tenant: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key(tenant)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=100.0, trust_env=False)

    def body(self, prompt: Sequence[int], max_tokens: int, stream: bool) -> dict[str, Any]:
        state = self.state
        assert state is not None
        return {
            "model": state.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }

    def complete(self, prompt: Sequence[int], max_tokens: int, tenant: str = "") -> Answer:
        """One plain completion of a prompt given as token ids. Raises on an error answer."""
        known = len(self.records())
        with self.client(tenant) as client:
            answer = client.post("/v1/completions", json=self.body(prompt, max_tokens, False))
        assert answer.status_code == 200, answer.text
        values = answer.json()
        choice = values["choices"][0]
        record = self.next_record(known)
        return Answer(choice["text"], choice["finish_reason"], values["usage"], record)

    def next_record(self, known: int, within_s: float = 10.0) -> dict[str, Any]:
        """The one record after the first `known`."""
        self.until(lambda: len(self.records()) > known, within_s, "no record was written")
        records = self.records()
        assert len(records) == known + 1
        return records[known]

    # the store

    def store(self) -> StoreClient:
        if self._store is None:
            card = next(m.card for m in self.board_members() if m.card is not None)
            self._store = StoreClient(
                self.run.store_address,
                self.run.cluster_token(),
                card.namespace().digest(),
                name="test",
            )
            assert self.wait(self._store.connect(10.0))
        return self._store

    def board_members(self) -> tuple[Member, ...]:
        """The membership as routers read it."""
        return self.wait(self._members())

    async def _members(self) -> tuple[Member, ...]:
        config = self._config = self._config or load_config(self.run.config_file)
        board = MemberBoard.of(role_settings(config, self.run, Role.SUPERVISOR, "test"))
        try:
            return await board.members()
        finally:
            await board.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, run on this object's own event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def stat(self) -> StoreStat:
        stat = self.wait(self.store().stat())
        assert stat is not None
        return stat

    def digests(self, llm: LLM, prompt: Sequence[int], tenant: str = "") -> tuple[Digest, ...]:
        """Block digests of a prompt in this cluster's namespace and a tenant's domain."""
        state = self.state
        assert state is not None
        namespace = llm.engine.card(state.model).namespace().digest()
        salt = SaltBook.ensure(str(self.run.store_directory)).salt(tenant or self.tenants[0])
        return block_digests(root_digest(namespace, salt), as_token_ids(prompt))

    # harm, and after it

    def kill(self, *pids: int) -> None:
        """SIGKILL, verified: the processes are gone when this returns."""
        before = [read_process(pid) for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for process in before:
            assert process is not None
            self.until(lambda one=process: gone(one), 20.0, f"{process} lives on")  # type: ignore[misc]

    @contextlib.contextmanager
    def frozen(self, pid: int) -> Iterator[None]:
        """SIGSTOP for the length of the block, verified at its begin; SIGCONT if it still lives."""
        before = read_process(pid)
        assert before is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            self.until(lambda: letter(pid) == "T", 2.0, f"process {pid} did not stop")
            yield
        finally:
            if not gone(before):
                os.kill(pid, signal.SIGCONT)

    @staticmethod
    def process_state(pid: int) -> str:
        """One letter: T is stopped."""
        return letter(pid)

    def exists(self, role: dict[str, Any]) -> bool:
        """Whether the process of a role, as `role` showed it, is still a member of the run."""
        return role["pid"] in {process.pid for process in self.members()}

    def settled(self, within_s: float = 45.0) -> None:
        """Until everything is as in an idle cluster: first, however long a start takes here, all
        roles ready and reached by the router; then, `within_s` (more than the time of a lease), no
        request open, no lease, no reservation, no engine block held. Asserts which of these
        fails."""
        self._none(self._missing, BACK_S)
        self._none(self._left, within_s)

    def _none(self, look: Callable[[], list[str]], within_s: float) -> None:
        why: list[str] = []

        def quiet() -> bool:
            try:
                why[:] = look()
            except ApiError as error:  # the router is away
                why[:] = [error.message]
            return not why

        self.until(quiet, within_s, lambda: f"not settled: {why}")

    def _missing(self) -> list[str]:
        roles = self.roles()
        why = [role["name"] for role in roles if role["state"] != "ready"]
        why += [] if self.ready() else ["/ready"]
        if why:
            return why
        reached = HttpApi(self.url, self.key()).ready_replicas(ENGINE_POOLS)
        wanted = [sum(role["role"] == pool for role in roles) for pool in ENGINE_POOLS]
        return [
            f"the router does not reach all of {pool}"
            for pool, n, n_wanted in zip(ENGINE_POOLS, reached, wanted, strict=True)
            if n != n_wanted
        ]

    def _left(self) -> list[str]:
        why, roles = [], self.roles()
        if self.metric("headrace_requests_open"):
            why.append("requests open")
        stat = self.wait(self.store().stat())
        if stat is None:
            return [*why, "store away"]
        if stat.leases or stat.reservations:
            why.append(f"{stat.leases} leases, {stat.reservations} reservations")
        engines = [role for role in roles if role["role"] in ENGINE_POOLS]
        why += [f"{role['name']} is charged" for role in engines if role["requests"]]
        if why:
            return why
        for role, load in zip(engines, self.wait(self._loads(engines)), strict=True):
            if load is None:
                why.append(f"{role['name']} reports nothing")
            elif self._held(role["role"], load):
                why.append(f"{role['name']} holds something: {load}")
        return why

    def _held(self, pool: str, load: LoadReport) -> bool:
        room = (0, 0) if pool == Role.VISION else (self.n_blocks, self.n_slots)
        open_requests = load.waiting_requests + load.running_requests
        held = (load.held_leases, load.backlog_rows, open_requests)
        return (load.free_blocks, load.free_slots) != room or held != (0, 0, 0)

    async def _loads(self, engines: list[dict[str, Any]]) -> list[LoadReport | None]:
        """What the engines report to a router that has just connected: their own account."""
        return await asyncio.gather(*(self._load(role["address"]) for role in engines))

    async def _load(self, address: str) -> LoadReport | None:
        hello = Hello(Role.ROUTER, "onlooker", new_boot_id(), "test", None)
        try:
            peer = await introduce(address, hello, self.run.cluster_token(), WireLimits())
        except (ConnectionError, HeadraceError):
            return None
        try:
            async with asyncio.timeout(3.0):
                async for message in peer.link:
                    if isinstance(message, LoadReport):
                        return message
        except TimeoutError:
            pass
        finally:
            peer.link.abort()
        return None


def gone(before: Process) -> bool:
    """Whether this process is dead, its id perhaps used anew."""
    now = read_process(before.pid)
    return now is None or now.state in "ZX" or now.started_ticks != before.started_ticks


def letter(pid: int) -> str:
    """The state of a process as /proc shows it: T is stopped."""
    process = read_process(pid)
    return process.state if process else ""
