"""A router over real sockets with scripted replicas: real frames, real HTTP, a real Valkey.

tests/abuse uses this file too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from headrace_tests import module

from headrace.core.card import Member, Role
from headrace.core.deployment import Deployment
from headrace.core.limits import EdgeLimits, LeaseTimes
from headrace.core.request import HandoffBind
from headrace.core.role import RoleSettings
from headrace.kvstore import MemberBoard, embedded_valkey
from headrace.router.keys import ApiKey
from headrace.router.role import RouterProcess
from headrace.router.settings import RouterSettings
from headrace.router.tokens import Vocabulary

scripted = module("tests/router/scripted.py")

KEY, OTHER_KEY = "key-of-tenant-a-0123", "key-of-tenant-b-0123"
REFERENCE = "The river runs to the mill, and the mill grinds.\n"


@dataclass
class Rig:
    """A router and its scripted replicas; `client` speaks HTTP to it with a valid key."""

    redis_url: str
    folder: Path
    deployment: Deployment
    settings: RouterSettings
    vocabulary: Vocabulary
    decodes: list[Any] = field(default_factory=list)
    prefills: list[Any] = field(default_factory=list)
    routers: list[RouterProcess] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    _stops: list[tuple[asyncio.Event, asyncio.Task[None]]] = field(default_factory=list)
    _clients: list[httpx.AsyncClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = MemberBoard.of(self.role("board"))
        self.reference_ids = list(self.vocabulary.encode_plain(REFERENCE))

    @property
    def token(self) -> str:
        """Another one for each rig: the membership is told apart by it."""
        return f"cluster-token-of-{self.folder.name}"

    def role(self, name: str) -> RoleSettings:
        return RoleSettings(
            name=name,
            listen="tcp://127.0.0.1:0",
            token=self.token,
            redis_url=self.redis_url,
            store_address=f"unix://{self.folder}/none.sock",
            run_dir=str(self.folder),
            build="test",
            deployment=self.deployment,
        )

    @property
    def router(self) -> RouterProcess:
        return self.routers[0]

    @property
    def client(self) -> httpx.AsyncClient:
        return self._clients[0]

    @property
    def port(self) -> int:
        return int(self.urls[0].rpartition(":")[2])

    async def add(self, role: Role, name: str = "", card: Any = None) -> Any:
        pool = self.decodes if role is Role.DECODE else self.prefills
        name = name or f"{role.value}-{len(pool)}"
        replica = scripted.ScriptedReplica(self, role, name, card or scripted.CARD)
        pool.append(replica)
        return await replica.start()

    async def start_router(self) -> RouterProcess:
        process = RouterProcess(self.role(f"router-{len(self.routers)}"), self.settings)
        stop, ready = asyncio.Event(), asyncio.Event()
        members: list[Member] = []
        serving = asyncio.create_task(
            process.serve(lambda member: (members.append(member), ready.set())[1], stop)
        )
        await asyncio.wait(
            {serving, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if serving.done():
            serving.result()
        self.routers.append(process)
        self._stops.append((stop, serving))
        self.urls.append(members[0].address.replace("tcp://", "http://"))
        self._clients.append(self.new_client(self.urls[-1]))
        return process

    def stop_router(self, router: int = 0) -> None:
        self._stops[router][0].set()

    def new_client(self, url: str = "", key: str = KEY) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        # verify=False: no TLS here, and reading certificates costs more than most tests.
        return httpx.AsyncClient(
            base_url=url or self.urls[0], headers=headers, timeout=60.0, verify=False
        )

    async def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Wait for something that other tasks bring about; the bound is against hangs."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "did not come about"
            await asyncio.sleep(0.005)

    async def until_routable(self, decodes: int, prefills: int, router: int = 0) -> None:
        replicas = self.routers[router].replicas
        wanted = {Role.DECODE: decodes, Role.PREFILL: prefills}
        await self.until(
            lambda: all(len(replicas.routable(role)) == n for role, n in wanted.items())
        )

    @staticmethod
    def gate_at(index: int) -> tuple[asyncio.Event, Any]:
        """An event, and a script's gate that waits for it from token `index` on."""
        event = asyncio.Event()
        return event, lambda i: event if i >= index else None

    @staticmethod
    def texts(lines: list[str]) -> tuple[str, list[Any]]:
        """Text of a completion stream's lines, and everything in them that is not text."""
        text, rest = "", []
        for line in filter(None, lines):
            data = line.removeprefix("data: ")
            value = data if not data.startswith("{") else json.loads(data)
            if isinstance(value, dict) and "choices" in value:
                text += value["choices"][0]["text"]
                if value["choices"][0]["finish_reason"]:
                    rest.append(value["choices"][0]["finish_reason"])
            else:
                rest.append(value)
        return text, rest

    async def read_stream(self, body: dict[str, Any]) -> tuple[str, list[Any]]:
        """`texts` of a whole streamed completion."""
        body = body | {"stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            return self.texts([line async for line in answer.aiter_lines()])

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "records.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def nothing_held(self, router: int = 0) -> bool:
        process = self.routers[router]
        desk = process.desk
        held = (desk.live_requests, desk.waiting_requests, process.ledger.open_charges)
        return held == (0, 0, 0) and desk.open_requests == 0

    async def pulse(self, model: str = "scripted") -> None:
        """The service is as before: healthy, the reference text, nothing held."""
        assert (await self.client.get("/health")).status_code == 200
        body = {"model": model, "prompt": "pulse", "max_tokens": 64}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == REFERENCE
        await self.until(self.nothing_held)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        for stop, _ in self._stops:
            stop.set()
        for _, serving in self._stops:
            await serving
        for process in self.routers:
            await process.close()
        for replica in (*self.decodes, *self.prefills):
            await replica.stop()
        await self.board.close()


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A router is tested on the loop that it runs on; it differs from asyncio's in what closed
    transports do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey of its own for all tests of a session; each rig is another cluster in it."""
    server = embedded_valkey(str(tmp_path_factory.mktemp("vk")))
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary("tokenizer-4096")


@contextlib.asynccontextmanager
async def running_rig(
    redis_url: str,
    folder: Path,
    vocabulary: Vocabulary,
    *,
    decodes: int = 1,
    prefills: int = 0,
    edge: EdgeLimits | None = None,
    local_prefill_rows: int = 512,
    bind: str = "late",
    member_s: float = 5.0,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A running rig. `settings` go to RouterSettings."""
    deployment = Deployment(
        leases=LeaseTimes(member_s=member_s, member_beat_s=0.2, member_poll_s=0.02),
        edge=edge or EdgeLimits(),
        local_prefill_rows=local_prefill_rows,
        handoff_bind=HandoffBind(bind),
    )
    values: dict[str, Any] = {"port": 0, "drain_s": 0.2, "model_aliases": ("alias",)} | settings
    router = RouterSettings(
        salt_directory=str(folder / "store"),
        keys=(ApiKey(KEY, "a"), ApiKey(OTHER_KEY, "b")),
        **values,
    )
    rig = Rig(redis_url, folder, deployment, router, vocabulary)
    try:
        for role, n in ((Role.DECODE, decodes), (Role.PREFILL, prefills)):
            for _ in range(n):
                await rig.add(role)
        await rig.start_router()
        await rig.until_routable(decodes, prefills)
        yield rig
    finally:
        await rig.close()


@pytest.fixture
async def rigs(redis_url: str, tmp_path: Path, vocabulary: Vocabulary) -> AsyncIterator[Any]:
    """`async with rigs(decodes=2, ...) as rig`."""

    def make(**options: Any) -> contextlib.AbstractAsyncContextManager[Rig]:
        return running_rig(redis_url, tmp_path, vocabulary, **options)

    yield make


@pytest.fixture
def make_rig() -> Any:
    """The same with a Valkey of the test's own: `make_rig(url, folder, vocabulary, ...)`."""
    return running_rig
