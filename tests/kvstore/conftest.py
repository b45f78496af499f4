"""Real stores, a real Valkey, real processes; what the tests of this room share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis
from headrace_tests import module

from headrace.core import faults
from headrace.core.chain import window_digest
from headrace.core.deployment import Deployment
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.limits import LeaseTimes
from headrace.core.loops import new_event_loop
from headrace.core.role import RoleSettings
from headrace.kvstore import (
    EmbeddedRedis,
    StoreClient,
    StoreSettings,
    embedded_valkey,
    run_store,
)

Hanging = module("tests/kvstore/disk.py").Hanging
module("tests/kvstore/wire.py")

TOKEN = "a cluster token of tests"
BLOCK_BYTES = 3000
WINDOW_BYTES = 7000
PROCESS = Path(__file__).with_name("store_process.py")


class Things:
    """Made-up content: every number has one digest and one payload, in one namespace."""

    namespace = hashlib.sha256(b"namespace").digest()
    other_namespace = hashlib.sha256(b"another namespace").digest()

    @staticmethod
    def digest(number: int) -> Digest:
        return Digest(hashlib.sha256(b"block %d" % number).digest())

    def window(self, number: int) -> Digest:
        return window_digest(self.digest(number))

    @staticmethod
    def payload(number: int, count: int = BLOCK_BYTES) -> bytes:
        return random.Random(number).randbytes(count)

    def blocks(self, *numbers: int) -> list[tuple[Digest, bytes]]:
        return [(self.digest(number), self.payload(number)) for number in numbers]

    def windows(self, *numbers: int) -> list[tuple[Digest, bytes]]:
        return [(self.window(n), self.payload(n, WINDOW_BYTES)) for n in numbers]

    @staticmethod
    def lease(name: str = "request", epoch: int = 0) -> JobKey:
        return JobKey(RequestId(name), epoch)


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A store is tested on the loop that it runs on."""
    return {"uvloop": new_event_loop}


@pytest.fixture
def things() -> Things:
    return Things()


@pytest.fixture(scope="session")
def all_things() -> Things:
    return Things()


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def home() -> Iterator[str]:
    """A folder with a short path (sockets lie in it), gone afterwards."""
    path = tempfile.mkdtemp(prefix="hs-", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[EmbeddedRedis]:
    path = tempfile.mkdtemp(prefix="hv-", dir="/tmp")
    server = embedded_valkey(path)
    yield server
    server.stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def valkey(shared_valkey: EmbeddedRedis) -> EmbeddedRedis:
    """An empty server. Not to be stopped or killed; `own_valkey` is for that."""
    client = redis.Redis.from_url(shared_valkey.url)
    client.flushall()
    client.close()
    return shared_valkey


@pytest.fixture
def own_valkey(home: str) -> Iterator[EmbeddedRedis]:
    server = embedded_valkey(home)
    yield server
    server.stop()


@dataclass
class Rig:
    """A store that runs as a task of the test, and clients of it."""

    home: str
    role: RoleSettings
    settings: StoreSettings
    options: dict[str, Any] = field(default_factory=dict)
    clients: list[StoreClient] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    halt: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)
        self.halt = asyncio.Event()
        serving = asyncio.Event()
        self.task = asyncio.create_task(
            run_store(
                self.role,
                self.settings,
                ready=lambda member: serving.set(),
                stop=self.halt,
                **self.options,
            )
        )
        waiting = asyncio.create_task(serving.wait())
        done, _ = await asyncio.wait({self.task, waiting}, return_when="FIRST_COMPLETED")
        if self.task in done:
            waiting.cancel()
            self.task.result()

    async def client(self, namespace: bytes = Things.namespace, **options: Any) -> StoreClient:
        options.setdefault("times", self.role.deployment.leases)
        made = StoreClient(self.role.listen, TOKEN, namespace, **options)
        self.clients.append(made)
        assert await made.connect(10.0)
        return made

    async def stop(self) -> None:
        """In order: what was sealed becomes durable."""
        self.halt.set()
        if self.task is not None:
            await self.task
            self.task = None

    async def cut(self) -> None:
        """At once, as by cancellation: what was not synced may be lost."""
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
            self.task = None

    async def restart(self, **changes: Any) -> None:
        await self.stop()
        await self.start(**changes)
        for client in self.clients:
            await until(lambda c=client: _now(c.connected))

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.cut()


async def _now(value: bool) -> bool:
    return value


async def until(
    condition: Callable[[], Awaitable[Any]], what: str = "the condition", limit_s: float = 15.0
) -> Any:
    """Wait for an awaitable condition; its first true value."""
    deadline_s = time.monotonic() + limit_s
    while not (value := await condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come about in {limit_s} s"
        await asyncio.sleep(0.01)
    return value


@pytest.fixture
def wait_until() -> Callable[..., Awaitable[Any]]:
    return until


def make_role(home: str, redis_url: str = "", leases: LeaseTimes | None = None) -> RoleSettings:
    return RoleSettings(
        name="store-0",
        listen=f"unix://{home}/store.sock",
        token=TOKEN,
        redis_url=redis_url,
        store_address=f"unix://{home}/store.sock",
        run_dir=home,
        build="test",
        deployment=Deployment(leases=leases or LeaseTimes()),
    )


def make_settings(home: str, **changes: Any) -> StoreSettings:
    values: dict[str, Any] = {
        "directory": f"{home}/store",
        "arena_bytes": 1 << 20,
        "ssd_bytes": 2 << 20,
        "segment_bytes": 256 << 10,
        "block_bytes": BLOCK_BYTES,
        "window_bytes": WINDOW_BYTES,
        "group_s": 0.02,
        "index_deadline_s": 1.0,  # 50 ms pass on a busy machine, and the breaker rests a second
    }
    return StoreSettings(**{**values, **changes})


@pytest.fixture
def settings_for(home: str) -> Callable[..., StoreSettings]:
    return lambda **changes: make_settings(home, **changes)


@pytest.fixture
def role_for(home: str) -> Callable[..., RoleSettings]:
    return lambda **changes: make_role(home, **changes)


@pytest.fixture(scope="session")
def new_rig() -> Callable[..., Rig]:
    """`new_rig(home, redis_url="", **settings)`: not started; the caller closes it."""
    return lambda home, redis_url="", **changes: Rig(
        home, make_role(home, redis_url), make_settings(home, **changes)
    )


@pytest_asyncio.fixture
async def rig(home: str) -> AsyncIterator[Rig]:
    """A store without Redis, not yet started."""
    made = Rig(home, make_role(home), make_settings(home))
    yield made
    await made.close()


@pytest.fixture
def disk(rig: Rig) -> Iterator[Any]:
    """Under `rig`: counts reads of segments, and holds them when told to."""
    calls = Hanging()
    rig.options = {"calls": calls}
    yield calls
    calls.go.set()


@pytest_asyncio.fixture
async def listed_rig(home: str, valkey: EmbeddedRedis) -> AsyncIterator[Rig]:
    """A store with the shared Valkey, not yet started."""
    made = Rig(home, make_role(home, valkey.url), make_settings(home))
    yield made
    await made.close()


async def idle(client: StoreClient) -> Any:
    """Wait until nothing is pending or under way; the store's account then, conserved."""

    async def settled() -> Any:
        stat = await client.stat()
        calm = stat is not None and not stat.pending and not stat.arena_reserved
        return stat if calm else None

    stat = await until(settled, "an idle store")
    assert stat.arena_free + stat.arena_reserved + stat.arena_resident == stat.arena_slots
    assert stat.reservations == 0
    return stat


@pytest.fixture(scope="session")
def wait_idle() -> Callable[[StoreClient], Awaitable[Any]]:
    return idle


@pytest.fixture
def when_idle() -> Callable[[StoreClient], Awaitable[Any]]:
    return idle


@dataclass
class StoreProcess:
    """A store in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and see that it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        assert self.process.returncode == -signal.SIGKILL
        assert not Path(f"/proc/{self.pid}").exists()

    def ended(self, limit_s: float = 20.0) -> int:
        """Wait for its end by itself; its exit status."""
        return self.process.wait(limit_s)

    def text(self) -> str:
        return self.log.read_text("utf-8")


@pytest.fixture
def start_process(home: str) -> Iterator[Callable[..., StoreProcess]]:
    """`start(redis_url="", fault="", **settings)`: returns when the store serves, or has ended."""
    started: list[StoreProcess] = []

    def start(redis_url: str = "", fault: str = "", **changes: Any) -> StoreProcess:
        log = Path(home) / f"process-{len(started)}.log"
        told = {
            "home": home,
            "redis_url": redis_url,
            "settings": asdict(make_settings(home, **changes)),
        }
        environment = {**os.environ, "HEADRACE_FAULTS": fault}
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", str(PROCESS), "store", json.dumps(told)],
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment,
            )
        made = StoreProcess(process, log)
        started.append(made)
        assert process.stdout is not None
        process.stdout.readline()  # "ready", or the end
        return made

    yield start
    for made in started:
        if made.process.poll() is None:
            made.process.send_signal(signal.SIGCONT)
            made.process.kill()
        made.process.wait(10)
        if made.process.stdout is not None:
            made.process.stdout.close()
