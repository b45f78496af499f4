"""What the tests of a whole request share: Valkey, a yardstick, and a scripted router end."""

from __future__ import annotations

import asyncio
import functools
import random
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from headrace_tests import module

from headrace.core import faults
from headrace.core.card import Role
from headrace.core.chain import as_token_ids, block_digests
from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.limits import WireLimits
from headrace.core.messages import (
    BindDecode,
    Cancel,
    DecodeJob,
    Hello,
    JobFailed,
    LoadReport,
    PrefillDone,
    PrefillJob,
    PrefillProgress,
    StageTimes,
    TokenBatch,
    TokenItem,
)
from headrace.core.peers import Peer, introduce
from headrace.core.request import FinishReason, GenRequest, Sampling
from headrace.engine import LLM, EngineSettings
from headrace.kvstore import EmbeddedRedis, embedded_valkey

module("tests/flow/engines.py")

TOKEN = "a token of tests, 32 characters.."
GREEDY = Sampling()
PREFILL_EPOCHS = 1000  # so that a test can name decode's epochs as it likes
HANG_S = 90.0  # nothing takes so long, however busy the machine is


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
    """What one engine with the same keep answers, cold and alone. It outlasts a module."""

    def __init__(self, model: str, checkpoint: str = "") -> None:
        self.model, self.checkpoint = model, checkpoint
        settings = EngineSettings(n_blocks=64, n_slots=1)
        self._llm = LLM(model, settings=settings, checkpoint=checkpoint)
        self._turn = threading.Lock()  # modules have loops of their own
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.keep_tokens = self._llm.keep_tokens
        self.geometry = self._llm.engine.geometry
        self.layout = self._llm.engine.state.layout

    async def text(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        keep_tokens: int | None = None,
        sampling: Sampling = GREEDY,
    ) -> tuple[int, ...]:
        keep_tokens = keep_tokens or self.keep_tokens
        asked = (tuple(prompt), keep_tokens, sampling)
        if len(self._known.get(asked, ())) < max_tokens:
            # In a thread: a loop that stands still looks like a dead store and dead peers.
            await asyncio.to_thread(self._run, *asked, max_tokens)
        return self._known[asked][:max_tokens]

    def shown(self, prompt: Sequence[int], max_tokens: int, pictures: Any) -> tuple[int, ...]:
        """The same of a prompt with pictures, up to its end mark; not to be run in a loop."""
        with self._turn:
            (done,) = self._llm.generate([prompt], max_tokens=max_tokens, pictures=[pictures])
        return done.token_ids

    def _run(
        self, prompt: tuple[int, ...], keep_tokens: int, sampling: Sampling, max_tokens: int
    ) -> None:
        asked = (prompt, keep_tokens, sampling)
        with self._turn:
            if len(self._known.get(asked, ())) >= max_tokens:
                return  # somebody asked for the same meanwhile
            self._llm.keep_tokens = keep_tokens
            (done,) = self._llm.generate([prompt], sampling, max_tokens, stop_token_ids=())
            self._llm.keep_tokens = self.keep_tokens
            self._known[asked] = done.token_ids


yardstick_of = functools.cache(Yardstick)


@pytest.fixture(scope="module")
def yardstick(request: pytest.FixtureRequest) -> Yardstick:
    """Of the model that the module names as MODEL, as the whole cluster of the module is; where the
    module says WITH_CHECKPOINT, of the folder that its fixture `checkpoint` makes."""
    with_weights = getattr(request.module, "WITH_CHECKPOINT", False)
    folder = request.getfixturevalue("checkpoint") if with_weights else ""
    return yardstick_of(request.module.MODEL, str(folder))


@pytest.fixture(scope="session")
def stored_blocks() -> Callable[..., Awaitable[list[bytes]]]:
    """`await stored_blocks(store, ids, root)`: the leading blocks of these tokens, as stored."""

    async def read(store: Any, ids: Sequence[int], root: Digest) -> list[bytes]:
        digests, found = block_digests(root, as_token_ids(list(ids))), []
        places = await store.open_prefix(digests, None)
        for digest, place in zip(digests, places, strict=False):
            buffer = bytearray(place.payload_bytes)
            assert store.read_into(place, digest, buffer)
            found.append(bytes(buffer))
        return found

    return read


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

    request: GenRequest  # decode's
    prefill: Peer | None
    decode: Peer
    prefill_key: JobKey | None = None
    decode_address: str = ""
    job: DecodeJob | None = None
    progress: list[PrefillProgress] = field(default_factory=list)
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

    async def result(self, within_s: float = HANG_S) -> tuple[int, ...]:
        """The tokens of an attempt that must finish."""
        async with asyncio.timeout(within_s):
            await self.ended.wait()
        assert not self.failures, self.failures
        return tuple(self.token_ids)

    async def failure(self, within_s: float = HANG_S) -> JobFailed:
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
        self.to: dict[str, Peer] = {}
        self.calls: dict[JobKey, Call] = {}
        self._of_prefill: dict[JobKey, tuple[Call, str]] = {}
        self._sent: set[JobKey] = set()  # jobs that a late bind sent to decode
        self.loads: dict[str, LoadReport] = {}
        self.frames: list[TokenBatch] = []
        self.stray: list[Any] = []
        self.errors: list[BaseException] = []

    async def connect(self, address: str) -> Peer:
        peer = await introduce(address, self._hello, TOKEN, WireLimits())
        self._peers.append(peer)
        self.to[peer.name] = peer
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
        prefill_name: str = "",
        bind: str = "late",
    ) -> Call:
        """Dispatch one attempt; with `prefill` it waits for a hand-off. With `prefill_name` alone
        decode is told of a prefill replica that this router does not speak to.

        The two ends get an epoch each: decode the request's, prefill another one. `bind`: `late`
        names decode when prefill asks, `early` at once, `never` leaves it to the test. Without
        `decode_first` the job comes to decode after the announcements."""
        epoch = PREFILL_EPOCHS + request.epoch
        call = Call(request, prefill, decode, offset=len(generated))
        self.calls[call.key] = call
        name = prefill.name if prefill else prefill_name
        self._dispatch += 1
        call.decode_address = decode_address
        call.job = DecodeJob(
            call.request, as_token_ids(list(generated)), bool(name), name, self._dispatch
        )
        if prefill is None:
            await decode.link.send(call.job)
            return call
        call.prefill_key = JobKey(request.request_id, epoch)
        self._of_prefill[call.prefill_key] = call, bind
        if bind == "early" and decode_first:
            await decode.link.send(call.job)
        await prefill.link.send(PrefillJob(replace(request, epoch=epoch), self._dispatch))
        if bind == "early":
            await prefill.link.send(self._bind_of(call))
        if not decode_first:
            await asyncio.sleep(0.3)
            await decode.link.send(call.job)
        return call

    async def rebind(self, call: Call, decode: Peer, decode_address: str) -> Call:
        """Bind another decode replica to the prefill of `call`, under the next epoch."""
        assert call.job is not None and call.prefill is not None and call.prefill_key is not None
        request = replace(call.request, epoch=call.request.epoch + 1)
        other = Call(request, call.prefill, decode, call.prefill_key, decode_address)
        other.job = replace(call.job, request=request)
        self.calls[other.key] = other
        self._of_prefill[call.prefill_key] = other, "late"
        await decode.link.send(other.job)
        await call.prefill.link.send(self._bind_of(other))
        return other

    @staticmethod
    def _bind_of(call: Call) -> BindDecode:
        assert call.prefill_key is not None
        name = call.decode.name
        return BindDecode(call.prefill_key, call.request.epoch, call.decode_address, name)

    async def cancel(self, call: Call) -> None:
        for peer, key in ((call.prefill, call.prefill_key), (call.decode, call.key)):
            if peer is not None and key is not None and not peer.link.closed:
                await peer.link.send(Cancel(key, "test"))
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
        elif isinstance(message, PrefillProgress) and message.key in self._of_prefill:
            call, bind = self._of_prefill[message.key]
            call.progress.append(message)
            if message.wanted and bind == "late" and call.job is not None:
                if call.key not in self._sent:  # prefill asks again while decode is silent
                    self._sent.add(call.key)
                    call.decode.post(call.job)
                peer.post(self._bind_of(call))
        elif isinstance(message, JobFailed) and message.key in self._of_prefill:
            call, _ = self._of_prefill[message.key]
            if call.prefilled is not None or call.begun.is_set():
                # Decode has all it needs: said of a bind that crossed decode's acknowledgement.
                self.stray.append(message)
                return
            call.failures.append(message)
            call.ended.set()
        elif isinstance(message, PrefillDone | JobFailed) and message.key in self.calls:
            call = self.calls[message.key]
            if isinstance(message, PrefillDone):
                call.prefilled = message
            else:
                call.failures.append(message)
                call.ended.set()
        else:
            self.stray.append(message)

    def _take_item(self, item: TokenItem) -> None:
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


@pytest.fixture(scope="session")
def token() -> str:
    """The cluster token that the router end speaks with."""
    return TOKEN


@pytest.fixture(scope="session")
def router_end() -> type[RouterEnd]:
    return RouterEnd
