"""A router over real sockets with scripted replicas: real frames, real HTTP, a real Valkey.

A scripted replica is an asyncio server that speaks core.peers; what it answers to a job is the text
of `REFERENCE`, or whatever the test put into its `script`. tests/abuse uses this file too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.core.card import Member, ModelCard, Role
from headrace.core.deployment import Deployment
from headrace.core.ids import BootId, JobKey, new_boot_id
from headrace.core.limits import EdgeLimits, LeaseTimes
from headrace.core.messages import (
    Cancel,
    DecodeJob,
    Drain,
    Hello,
    JobFailed,
    LoadReport,
    PrefillDone,
    PrefillJob,
    StageTimes,
    TokenBatch,
    TokenItem,
)
from headrace.core.peers import Peer, PeerServer, introduce
from headrace.core.request import FinishReason
from headrace.core.role import RoleSettings
from headrace.core.states import ReplicaState
from headrace.kvstore import Beat, MemberBoard, embedded_valkey
from headrace.router.keys import ApiKey
from headrace.router.role import RouterProcess
from headrace.router.settings import RouterSettings
from headrace.router.tokens import Vocabulary

KEY, OTHER_KEY = "key-of-tenant-a-0123", "key-of-tenant-b-0123"
REFERENCE = "The river runs to the mill, and the mill grinds.\n"

CARD = ModelCard(
    name="scripted",
    weights="seed-0",
    layout_id=b"L" * 32,
    numerics="invariant-fp64",
    vocab_size=4096,
    max_position_tokens=16_384,
    window_tokens=8,
    n_encoder_layers=2,
    n_decoder_layers=2,
    block_bytes=1024,
    window_record_bytes=256,
    bos_token_id=0,
    eos_token_id=1,
    image_token_id=4001,
)


@dataclass
class Script:
    """What a scripted replica does with a job. `token_ids` None: the reference text's, cut to
    max_tokens. `gate`: waits before each token (decode) or before being done (prefill)."""

    token_ids: Sequence[int] | None = None
    gate: Callable[[int], asyncio.Event | None] = lambda index: None
    fail: JobFailed | None = None  # instead of an answer; its key is filled in
    fail_after: int = 0
    hit_tokens: int = 0
    together: int = 1  # tokens a batch


class MortalBeat(Beat):
    async def die(self) -> None:
        """Stop beating without withdrawing, as a killed process does."""
        if self._task is not None:
            self._task.cancel()


class ScriptedReplica:
    """One replica. `jobs`, `cancels` and `running` are what it saw and holds."""

    def __init__(self, rig: Rig, role: Role, name: str, card: ModelCard = CARD) -> None:
        self.rig = rig
        self.role, self.name, self.card = role, name, card
        self.boot = new_boot_id()
        self.says: BootId | None = None  # another boot id in its Hello than in its record
        self.script = Script()
        self.jobs: list[DecodeJob | PrefillJob] = []
        self.cancels: list[Cancel] = []
        self.running: dict[JobKey, asyncio.Task[None]] = {}
        self.state = ReplicaState.READY
        self.address = ""
        self.n_blocks, self.n_slots = 64, 8
        self._prefilled: dict[JobKey, asyncio.Event] = {}
        handlers: dict[type[Any], Callable[[Peer, Any], None]] = {
            DecodeJob: self._on_job,
            PrefillJob: self._on_job,
            Cancel: self._on_cancel,
            Drain: lambda peer, message: None,
            PrefillDone: lambda peer, message: self._done_event(message.key).set(),
        }
        limits = rig.deployment.wire
        self.server = PeerServer(self.hello, handlers, self._on_left, rig.token, limits)
        self._beat: MortalBeat | None = None

    def hello(self) -> Hello:
        return Hello(self.role, self.name, self.says or self.boot, "test", self.card)

    def member(self) -> Member:
        return Member(
            role=self.role,
            name=self.name,
            boot_id=self.boot,
            address=self.address,
            pid=os.getpid(),
            build="test",
            state=self.state,
            card=self.card,
            max_rows_per_step=512,
            n_blocks=self.n_blocks,
            n_slots=self.n_slots,
        )

    async def start(self) -> ScriptedReplica:
        self.address = await self.server.listen("tcp://127.0.0.1:0")
        self._beat = MortalBeat(self.rig.board, self.member, self.rig.deployment.leases)
        await self._beat.start()
        return self

    async def announce(self) -> None:
        assert self._beat is not None
        await self._beat.now()

    async def die(self) -> None:
        """As a killed process: sockets close at once, the record runs out by itself."""
        if self._beat is not None:
            await self._beat.die()
        for task in self.running.values():
            task.cancel()
        self.running.clear()
        await self.server.close()

    async def fall_silent(self) -> None:
        """As a stopped process: the sockets stay open, nothing is said on them."""
        if self._beat is not None:
            await self._beat.die()
        for task in self.running.values():
            task.cancel()

    async def stop(self) -> None:
        if self._beat is not None:
            await self._beat.stop()
        await self.die()

    def report(self, **values: Any) -> None:
        """Send a load report to every router."""
        base = LoadReport(0, 0, 0, 0, 0, 0, self.n_blocks, self.n_slots, 0.0, 0)
        for peer in self.server.routers():
            peer.post(replace(base, **values))

    def say(self, item: TokenItem) -> None:
        """Send tokens that no job asked for."""
        for peer in self.server.routers():
            peer.post(TokenBatch((item,)))

    def _on_job(self, peer: Peer, job: DecodeJob | PrefillJob) -> None:
        self.jobs.append(job)
        run = self._decode if isinstance(job, DecodeJob) else self._prefill
        task = asyncio.create_task(run(peer, job))  # type: ignore[arg-type]
        self.running[job.request.key] = task
        task.add_done_callback(lambda _: self.running.pop(job.request.key, None))

    def _on_cancel(self, peer: Peer, message: Cancel) -> None:
        self.cancels.append(message)
        task = self.running.pop(message.key, None)
        if task is not None:
            task.cancel()

    def _on_left(self, peer: Peer) -> None:
        if peer.hello.role is Role.ROUTER:
            for task in self.running.values():
                task.cancel()

    def _done_event(self, key: JobKey) -> asyncio.Event:
        return self._prefilled.setdefault(key, asyncio.Event())

    async def _decode(self, peer: Peer, job: DecodeJob) -> None:
        request, script = job.request, self.script
        if job.await_prefill:
            await self._done_event(request.key).wait()
        ids = self.rig.reference_ids if script.token_ids is None else list(script.token_ids)
        ids = ids[: request.max_tokens]
        finish = FinishReason.LENGTH if len(ids) == request.max_tokens else FinishReason.STOP
        for index in range(0, len(ids), script.together):
            if (event := script.gate(index)) is not None:
                await event.wait()
            if script.fail is not None and index >= script.fail_after:
                peer.post(replace(script.fail, key=request.key))
                return
            some = tuple(ids[index : index + script.together])
            peer.post(TokenBatch((TokenItem(request.key, index, some, None, None),)))
            await asyncio.sleep(0)
        if (event := script.gate(len(ids))) is not None:
            await event.wait()
        end = (request.stop_token_ids[0],) if finish is FinishReason.STOP else ()
        times = StageTimes(
            hit_tokens=script.hit_tokens, encoder_rows=7, decoder_rows=5, start_kind="cold"
        )
        peer.post(TokenBatch((TokenItem(request.key, len(ids), end, finish, times),)))

    async def _prefill(self, peer: Peer, job: PrefillJob) -> None:
        script, key = self.script, job.request.key
        if (event := script.gate(0)) is not None:
            await event.wait()
        if script.fail is not None:
            peer.post(replace(script.fail, key=key))
            return
        done = PrefillDone(key, job.request.n_tokens - script.hit_tokens, script.hit_tokens, 0.25)
        other = await introduce(
            job.decode_address, self.hello(), self.rig.token, self.rig.deployment.wire
        )
        await other.link.send(done)
        peer.post(done)
        await other.link.close()


@dataclass
class Rig:
    """A router and its scripted replicas; `client` speaks HTTP to it with a valid key."""

    redis_url: str
    folder: Path
    deployment: Deployment
    settings: RouterSettings
    vocabulary: Vocabulary
    decodes: list[ScriptedReplica] = field(default_factory=list)
    prefills: list[ScriptedReplica] = field(default_factory=list)
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

    async def add(self, role: Role, name: str = "", card: ModelCard = CARD) -> ScriptedReplica:
        pool = self.decodes if role is Role.DECODE else self.prefills
        replica = ScriptedReplica(self, role, name or f"{role.value}-{len(pool)}", card)
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
            base_url=url or self.urls[0], headers=headers, timeout=20.0, verify=False
        )

    async def until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        """Wait for something that other tasks bring about."""
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
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A running rig. `settings` go to RouterSettings."""
    deployment = Deployment(
        leases=LeaseTimes(member_s=1.0, member_beat_s=0.2, member_poll_s=0.02),
        edge=edge or EdgeLimits(),
        local_prefill_rows=local_prefill_rows,
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
