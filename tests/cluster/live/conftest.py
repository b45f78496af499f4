"""One real cluster under Ray for the whole session, and hands to look into it and to harm it.

The files of this folder run in the order of their names: the later ones kill more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.cluster.rundir import RunDir, RunState
from headrace.cluster.session import Process, read_process, run_members
from headrace.cluster.status import collect
from headrace.core.chain import as_token_ids, block_digests, root_digest
from headrace.core.ids import Digest
from headrace.engine import LLM
from headrace.kvstore import SaltBook, StoreClient, StoreStat

T = TypeVar("T")
HEADRACE = str(Path(sys.executable).parent / "headrace")
ORDINARY_IDS = range(300, 4000)  # of the 4,096-id tokenizer: no special token among them


@pytest.fixture(autouse=True)
def short_temp() -> None:
    """Switches the parent folder's fixture off: a live cluster's folders outlast a test."""


@dataclass(frozen=True)
class Answer:
    """One finished completion, and what the router recorded of it."""

    text: str
    finish: str
    usage: dict[str, Any]
    record: dict[str, Any]


class Live:
    """A cluster started with `headrace up` in a home of its own."""

    def __init__(self, home: Path, values: dict[str, Any]) -> None:
        self.run = RunDir(home, values["cluster"])
        self.tenants: list[str] = [entry["tenant"] for entry in values["keys"]]
        self._file = home / f"{values['cluster']}.yaml"
        self._file.write_text(yaml.safe_dump(values))
        self._environment = {**os.environ, "HEADRACE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._environment.pop("TMPDIR", None)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._store: StoreClient | None = None

    # command line

    def command(self, *words: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
        """Run `headrace ...` from the repository's top folder, as a newcomer would."""
        return subprocess.run(
            [HEADRACE, *words],
            env=self._environment,
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def up(self) -> subprocess.CompletedProcess[str]:
        done = self.command("up", str(self._file))
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.command("down", "--name", self.run.cluster)

    def close(self) -> None:
        """End the cluster if it runs, without asserting anything."""
        if self.state is not None and self.members():
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

    def members(self) -> list[Process]:
        state = self.state
        return run_members(state) if state is not None else []

    def view(self) -> dict[str, Any]:
        """What `headrace status --json` shows."""
        return collect(self.run)

    def role(self, name: str) -> dict[str, Any]:
        return next(role for role in self.view()["roles"] if role["name"] == name)

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
        answer = httpx.get(
            f"{self.url}/metrics",
            headers={"Authorization": f"Bearer {self.key()}"},
            trust_env=False,
        )
        answer.raise_for_status()
        return sum(
            sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

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
        until(lambda: len(self.records()) > known, within_s, "no record was written")
        records = self.records()
        assert len(records) == known + 1
        return records[known]

    def in_background(self, prompt: Sequence[int], max_tokens: int) -> Background:
        return Background(self, prompt, max_tokens)

    # the store

    def store(self) -> StoreClient:
        if self._store is None:
            self._store = StoreClient(
                self.run.store_address, self.run.cluster_token(), b"", name="test"
            )
            assert self.wait(self._store.connect(10.0))
        return self._store

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

    def kill(self, pid: int) -> None:
        """SIGKILL, verified: the process is gone when this returns."""
        before = read_process(pid)
        assert before is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: _gone(before), 5.0, f"process {pid} lives on")

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """SIGSTOP for the length of the block, verified at both ends."""
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: _letter(pid) == "T", 2.0, f"process {pid} did not stop")
            yield
            assert _letter(pid) == "T"
        finally:
            os.kill(pid, signal.SIGCONT)

    def settled(self, within_s: float = 45.0) -> None:
        """Until everything is as in an idle cluster: all roles ready, `/ready` true, no request
        open, no lease, no reservation, no engine block held. Asserts which of these fails."""
        why: list[str] = []

        def quiet() -> bool:
            why[:] = self._unsettled()
            return not why

        until(quiet, within_s, lambda: f"not settled: {why}")

    def _unsettled(self) -> list[str]:
        view = self.view()
        why = [role["name"] for role in view["roles"] if role["state"] != "ready"]
        why += [] if view["ready"] else ["/ready"]
        if why:
            return why
        if self.metric("headrace_requests_open"):
            why.append("requests open")
        stat = self.wait(self.store().stat())
        if stat is None:
            return [*why, "store away"]
        if stat.leases or stat.reservations:
            why.append(f"{stat.leases} leases, {stat.reservations} reservations")
        for role in view["roles"]:
            if role["role"] in ("prefill", "decode") and role["requests"]:
                why.append(f"{role['name']} holds {role['requests']} requests")
        return why


class Background:
    """A streamed completion in a thread: its text so far, and a way to leave."""

    def __init__(self, live: Live, prompt: Sequence[int], max_tokens: int) -> None:
        self.known = len(live.records())
        self.text = ""
        self.done = False  # [DONE] arrived
        self.error: dict[str, Any] | None = None
        self._live = live
        self._left = False
        self._client = live.client()
        self._body = live.body(prompt, max_tokens, True)
        self._socket: Any = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._thread.is_alive()

    def finish(self, within_s: float = 60.0) -> dict[str, Any]:
        """Wait for the end; the router's record of it."""
        self._thread.join(within_s)
        assert not self.open, "the stream hangs"
        return self._live.next_record(self.known)

    def leave(self) -> dict[str, Any]:
        """Close the connection from the client's side; the router's record of it."""
        assert self.open
        self._left = True
        until(lambda: self._socket is not None, 5.0, "no connection")
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        assert not self.open
        return self._live.next_record(self.known)

    def _read(self) -> None:
        def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                self._socket = info["return_value"].get_extra_info("socket")

        try:
            with self._client.stream(
                "POST", "/v1/completions", json=self._body, extensions={"trace": trace}
            ) as answer:
                if answer.status_code != 200:
                    self.error = json.loads(answer.read())["error"]
                    return
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.HTTPError:
            if not self._left:
                self.error = {"message": "the connection broke"}

    def _take(self, line: str) -> None:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]


def until(condition: Callable[[], bool], within_s: float, message: str | Callable[[], str]) -> None:
    """Wait for a condition; fails with the message when it does not come in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(message if isinstance(message, str) else message())
        time.sleep(0.02)


def _gone(before: Process) -> bool:
    now = read_process(before.pid)
    return now is None or now.state in "ZX" or now.started_ticks != before.started_ticks


def _letter(pid: int) -> str:
    process = read_process(pid)
    return process.state if process else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def values(cluster: str, **changes: Any) -> dict[str, Any]:
    """A small cluster on T1 in `invariant` numerics, hand-off forced."""
    return {
        "cluster": cluster,
        "deployment": {"model": "t1", "numerics": "invariant", "local_prefill_rows": 0},
        "engine": {"n_blocks": 160, "n_slots": 8},
        "store": {"arena_bytes": 64 << 20, "ssd_bytes": 128 << 20, "segment_bytes": 8 << 20},
        "router": {"port": free_port()},
        "keys": [{"tenant": "one"}, {"tenant": "two"}],
        **changes,
    }


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def live(home: Path) -> Iterator[Live]:
    """One prefill, two decode, store, router, supervisor under Ray; started once."""
    cluster = Live(home, values("live"))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def beside(home: Path) -> Iterator[Live]:
    """A second cluster in one process, without Ray, that nobody may touch."""
    cluster = Live(home, values("beside", processes="one", pools={"prefill": 1, "decode": 1}))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The yardstick: one engine in this process, cold for every prompt, same keep."""
    return LLM("t1", numerics="invariant")


@pytest.fixture(scope="session")
def ids() -> Callable[[str, int], list[int]]:
    """`ids(name, count)`: the same random ordinary token ids for the same name."""

    def make(name: str, count: int) -> list[int]:
        chance = random.Random(name)
        return [chance.choice(ORDINARY_IDS) for _ in range(count)]

    return make


@pytest.fixture(scope="session", name="until")
def until_fixture() -> Callable[[Callable[[], bool], float, str], None]:
    return until
