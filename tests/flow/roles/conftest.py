"""A small cluster in one process: a real store, a real Valkey, one prefill and two decode replicas
on real sockets, and a scripted router end that dispatches what a test tells it to."""

from __future__ import annotations

import asyncio
import functools
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from headrace.core import faults
from headrace.core.card import ModelCard, Role
from headrace.core.chain import as_token_ids, block_digests, root_digest, window_digest
from headrace.core.deployment import Deployment
from headrace.core.ids import BootId, Digest, JobKey, RequestId, new_request_id
from headrace.core.limits import LeaseTimes, WireLimits
from headrace.core.messages import (
    Cancel,
    DecodeJob,
    Hello,
    JobFailed,
    LoadReport,
    PrefillDone,
    PrefillJob,
    StageTimes,
    TokenBatch,
)
from headrace.core.peers import Peer, introduce
from headrace.core.request import FinishReason, GenRequest, HandoffMode, Sampling
from headrace.core.role import RoleSettings
from headrace.decode import DecodeReplica
from headrace.engine import LLM, EngineSettings
from headrace.kvstore import EmbeddedRedis, Kind, StoreSettings, embedded_valkey, run_store
from headrace.prefill import PrefillReplica

TOKEN = "a token of tests, 32 characters.."
# Small steps, so that a prompt takes several and something can happen in between.
ENGINE = EngineSettings(n_blocks=160, n_slots=4, max_rows_per_step=128, replay_rows_per_step=128)
LEASES = LeaseTimes(handoff_s=5.0)


@pytest.fixture(scope="session")
def run_dir() -> Iterator[str]:
    """A short path: sockets lie in it."""
    path = tempfile.mkdtemp(prefix="hr-", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey(run_dir: str) -> Iterator[EmbeddedRedis]:
    server = embedded_valkey(run_dir)
    yield server
    server.stop()


class Yardstick:
    """What one engine with the same keep answers, cold and alone."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._llm = LLM(model, settings=EngineSettings(n_blocks=64, n_slots=1))
        self._turn = asyncio.Lock()
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.keep_tokens = self._llm.keep_tokens
        self.geometry = self._llm.engine.geometry
        self.layout = self._llm.engine.state.layout

    async def text(
        self, prompt: Sequence[int], max_tokens: int, keep_tokens: int | None = None
    ) -> tuple[int, ...]:
        keep_tokens = keep_tokens or self.keep_tokens
        asked = (tuple(prompt), keep_tokens)
        async with self._turn:
            if len(self._known.get(asked, ())) < max_tokens:
                # In a thread: a loop that stands still looks like a dead store and dead peers.
                self._known[asked] = await asyncio.to_thread(self._run, *asked, max_tokens)
        return self._known[asked][:max_tokens]

    def _run(self, prompt: tuple[int, ...], keep_tokens: int, max_tokens: int) -> tuple[int, ...]:
        self._llm.keep_tokens = keep_tokens
        (done,) = self._llm.generate([prompt], max_tokens=max_tokens, stop_token_ids=())
        return done.token_ids


@pytest.fixture(scope="module")
def yardstick(request: pytest.FixtureRequest) -> Yardstick:
    """Of the model that the module names as MODEL, as the whole cluster of the module is."""
    return Yardstick(request.module.MODEL)


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """`prompt(n, seed)`: n token ids that no other seed shares a block with."""

    def make(n_tokens: int, seed: int | str = 0) -> list[int]:
        source = random.Random(f"{seed}/prompt")
        return [source.randrange(300, 900) for _ in range(n_tokens)]

    return make


@dataclass(eq=False)
class Call:
    """One attempt of a request, as its router sees it."""

    request: GenRequest
    prefill: Peer | None
    decode: Peer
    offset: int = 0  # tokens that a former attempt generated
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    times: StageTimes | None = None
    prefilled: PrefillDone | None = None
    failures: list[JobFailed] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> JobKey:
        return self.request.key

    async def result(self, within_s: float = 30.0) -> tuple[int, ...]:
        """The tokens of an attempt that must finish."""
        async with asyncio.timeout(within_s):
            await self.ended.wait()
        assert not self.failures, self.failures
        return tuple(self.token_ids)

    async def failure(self, within_s: float = 30.0) -> JobFailed:
        """Why an attempt ended that must fail."""
        async with asyncio.timeout(within_s):
            await self.ended.wait()
        assert self.failures and self.finish is None
        return self.failures[0]


class RouterEnd:
    """Connections to replicas and the calls made over them. Asserts what every router relies on:
    tokens in order without a gap, one end, and nothing after it."""

    def __init__(self, name: str = "router-0") -> None:
        self._hello = Hello(Role.ROUTER, name, BootId(name), "test", None)
        self._readers: list[asyncio.Task[None]] = []
        self._peers: list[Peer] = []
        self._dispatch = 0
        self.calls: dict[JobKey, Call] = {}
        self.loads: dict[str, LoadReport] = {}
        self.frames: list[TokenBatch] = []
        self.stray: list[Any] = []
        self.errors: list[BaseException] = []

    async def connect(self, address: str) -> Peer:
        peer = await introduce(address, self._hello, TOKEN, WireLimits())
        self._peers.append(peer)
        self._readers.append(asyncio.create_task(self._read(peer)))
        return peer

    async def close(self) -> None:
        for peer in self._peers:
            peer.link.abort()
        await asyncio.gather(*self._readers, return_exceptions=True)
        assert not self.errors, self.errors

    async def send(
        self,
        request: GenRequest,
        decode: Peer,
        prefill: Peer | None = None,
        *,
        decode_address: str = "",
        generated: Sequence[int] = (),
        decode_first: bool = True,
    ) -> Call:
        """Dispatch one attempt; with `prefill` it waits for a hand-off."""
        call = Call(request, prefill, decode, len(generated))
        self.calls[call.key] = call
        name = prefill.name if prefill else ""
        self._dispatch += 1
        job = DecodeJob(
            request, as_token_ids(list(generated)), prefill is not None, name, self._dispatch
        )
        if decode_first:
            await decode.link.send(job)
        if prefill is not None:
            await prefill.link.send(
                PrefillJob(request, decode_address, decode.name, self._dispatch)
            )
        if not decode_first:
            await asyncio.sleep(0.3)
            await decode.link.send(job)
        return call

    async def cancel(self, call: Call) -> None:
        for peer in filter(None, (call.prefill, call.decode)):
            if not peer.link.closed:
                await peer.link.send(Cancel(call.key, "test"))
        call.ended.set()

    async def _read(self, peer: Peer) -> None:
        try:
            async for message in peer.link:
                self._take(peer, message)
        except BaseException as error:
            self.errors.append(error)
            raise

    def _take(self, peer: Peer, message: Any) -> None:
        if isinstance(message, LoadReport):
            self.loads[peer.name] = message
        elif isinstance(message, TokenBatch):
            self.frames.append(message)
            keys = [item.key for item in message.items]
            assert len(keys) == len(set(keys)), "two items of one sequence in a step"
            for item in message.items:
                self._take_item(item)
        elif isinstance(message, PrefillDone | JobFailed) and message.key in self.calls:
            call = self.calls[message.key]
            if isinstance(message, PrefillDone):
                call.prefilled = message
            else:
                call.failures.append(message)
                call.ended.set()
        else:
            self.stray.append(message)

    def _take_item(self, item: Any) -> None:
        call = self.calls[item.key]
        if call.ended.is_set():
            self.stray.append(item)
            return
        expected = call.offset + len(call.token_ids)
        assert item.first_index == expected, (item, expected)
        call.token_ids += item.token_ids
        call.begun.set()
        if item.finish is not None:
            assert item.times is not None
            call.finish, call.times = item.finish, item.times
            call.ended.set()


@dataclass(eq=False)
class Cluster:
    """Everything in one process. `prefill` and `decodes` are the replicas themselves, so that a
    test can look at their engines and counts; `to_*` are the router end's connections."""

    run_dir: str
    prefill: PrefillReplica
    decodes: list[DecodeReplica]
    router: RouterEnd
    to_prefill: Peer
    to_decode: list[Peer]
    stop_store: asyncio.Event
    store_task: asyncio.Task[None]
    keep_tokens: int

    @property
    def card(self) -> ModelCard:
        card = self.prefill.shell.card
        assert card is not None
        return card

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        domain: str = "tenant-a",
        keep_tokens: int | None = None,
        epoch: int = 0,
        request_id: RequestId | None = None,
        deadline_s: float = 60.0,
        stop: tuple[int, ...] = (),
    ) -> GenRequest:
        root = root_digest(self.card.namespace().digest(), domain.encode().ljust(32, b"."))
        ids = as_token_ids(list(prompt))
        return GenRequest(
            request_id=request_id or new_request_id(),
            epoch=epoch,
            token_ids=ids,
            chain_root=root,
            digests=block_digests(root, ids),
            keep_tokens=keep_tokens or self.keep_tokens,
            max_tokens=max_tokens,
            sampling=Sampling(),
            stop_token_ids=stop,
            mode=HandoffMode.EXACT,
            domain=domain,
            deadline_s=deadline_s,
        )

    async def handoff(self, request: GenRequest, decode: int = 0, **options: Any) -> Call:
        """Dispatch with prefill."""
        address = self.decodes[decode].shell.address
        to = self.to_decode[decode]
        return await self.router.send(
            request, to, self.to_prefill, decode_address=address, **options
        )

    async def local(self, request: GenRequest, decode: int = 0, **options: Any) -> Call:
        """Dispatch to decode alone."""
        return await self.router.send(request, self.to_decode[decode], **options)

    async def damage(self, kind: Kind, digest: Digest) -> None:
        """Flip one bit of a stored object in the arena, where every process maps it, and see that
        it is no longer readable."""
        store = self.prefill.store
        if kind is Kind.KV:
            (place,) = await store.open_prefix([digest], None)
            own = digest
        else:
            found = await store.open_windows([(0, digest)], None)
            assert found is not None, "no such window record"
            place, own = found[1], window_digest(digest)
        buffer = bytearray(place.payload_bytes)
        assert store.read_into(place, own, buffer), "nothing to damage"
        boot, arena = store._mapped
        assert boot == place.store
        region, slot = arena.locate(place.offset)
        arena.payload(region, slot, place.payload_bytes)[place.payload_bytes // 3] ^= 0x10
        assert not arena.read(place, self.card.namespace().digest(), own, None)

    async def written(self) -> None:
        """All write-behind of the decode replicas has reached the store."""
        for decode in self.decodes:
            assert decode.work is not None
            assert await decode.work.committer.flush(5.0)

    async def at_rest(self, within_s: float = 1.0) -> None:
        """Within `within_s` every engine block and slot, job, lease and reservation is back."""
        problem: str | None = "not looked"
        try:
            async with asyncio.timeout(within_s):
                while (problem := await self._held()) is not None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not at rest after {within_s} s: {problem}") from None
        for replica in (self.prefill, *self.decodes):
            await replica.driver.call(replica.engine.check_integrity)

    async def _held(self) -> str | None:
        for replica in (self.prefill, *self.decodes):
            assert replica.work is not None
            name, stats = replica.role.name, replica.driver.stats
            if replica.work.jobs:
                return (
                    f"{name} has jobs {[(str(k), j.state) for k, j in replica.work.jobs.items()]}"
                )
            held = (stats.waiting, stats.running, stats.held_blocks)
            if held != (0, 0, 0) or stats.free_slots != replica.settings.n_slots:
                return f"{name}: {stats}"
            # What prefill sealed for a finished hand-off is decode's to release; the store's own
            # account below covers it.
            if replica is not self.prefill and replica.store.held:
                return f"{name} holds {replica.store.held} of the store"
        stat = await self.prefill.store.stat()
        if stat is not None and (stat.leases or stat.reservations or stat.leased_objects):
            return f"store: {stat}"
        return None


@pytest.fixture(scope="session")
def role_settings(run_dir: str, valkey: EmbeddedRedis) -> Callable[..., RoleSettings]:
    def make(name: str, tag: str, **deployment: Any) -> RoleSettings:
        options = {"leases": LEASES, **deployment}
        return RoleSettings(
            name=name,
            listen=f"unix://{run_dir}/{tag}.store" if name == "store" else "tcp://127.0.0.1:0",
            token=TOKEN,
            redis_url=valkey.url,
            store_address=f"unix://{run_dir}/{tag}.store",
            run_dir=run_dir,
            build="test",
            deployment=Deployment(**options),
        )

    return make


@pytest.fixture(scope="module")
def store_settings(run_dir: str, yardstick: Yardstick) -> Callable[..., StoreSettings]:
    layout = yardstick.layout

    def make(tag: str, **sizes: Any) -> StoreSettings:
        options = {
            "directory": f"{run_dir}/{tag}",
            "arena_bytes": 16 << 20,
            "ssd_bytes": 32 << 20,
            "segment_bytes": 4 << 20,
            "block_bytes": layout.block_bytes,
            "window_bytes": layout.window_record_bytes,
            **sizes,
        }
        return StoreSettings(**options)

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest,
    run_dir: str,
    role_settings: Callable[..., RoleSettings],
    store_settings: Callable[..., StoreSettings],
    yardstick: Yardstick,
) -> AsyncIterator[Cluster]:
    """One cluster for the tests of a module, which must leave it at rest."""
    tag = request.module.__name__.rsplit("_", 1)[-1][:12]
    roles = functools.partial(role_settings, tag=tag, model=yardstick.model)
    stop = asyncio.Event()
    up = asyncio.Event()
    task = asyncio.create_task(
        run_store(
            roles("store"),
            store_settings(tag),
            ready=lambda member: up.set(),
            stop=stop,
        )
    )
    await asyncio.wait([task, asyncio.ensure_future(up.wait())], return_when="FIRST_COMPLETED")
    assert not task.done(), task
    prefill = PrefillReplica(roles("prefill-0"), ENGINE)
    decodes = [DecodeReplica(roles(f"decode-{i}"), ENGINE) for i in (0, 1)]
    router = RouterEnd()
    try:
        await asyncio.gather(*(replica.start() for replica in (prefill, *decodes)))
        yield Cluster(
            run_dir,
            prefill,
            decodes,
            router,
            await router.connect(prefill.shell.address),
            [await router.connect(decode.shell.address) for decode in decodes],
            stop,
            task,
            yardstick.keep_tokens,
        )
    finally:
        await router.close()
        await asyncio.gather(*(replica.close() for replica in (prefill, *decodes)))
        stop.set()
        await task
