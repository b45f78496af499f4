"""A whole service in one process, for faults: a real store, one prefill and two decode replicas,
each behind a frame proxy, and a real router that is spoken to over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import httpx

from headrace.core.request import Sampling
from headrace.router.keys import ApiKey
from headrace.router.role import RouterProcess
from headrace.router.settings import RouterSettings
from headrace.router.tokens import TextStream, Vocabulary

TENANTS = 600
TOKENIZER = {"toy": "tokenizer-1024", "t1": "tokenizer-4096"}
JOB_TASKS = ("decode ", "prefill ", "load ", "close ", "vision ")  # names of a job's own tasks


@dataclass(frozen=True)
class Answer:
    """What a client heard: a text up to `finish`, or up to an explicit `error`."""

    text: str
    finish: str | None = None
    error: str | None = None  # a code, of a status or of an error event
    status: int = 200
    done: bool = False  # [DONE] came

    def check(self, expected: str) -> None:
        """The whole text, or the beginning of it and one explicit error."""
        if self.error is None:
            assert (self.text, self.done) == (expected, True) and self.finish is not None, self
        else:
            assert expected.startswith(self.text.rstrip("\ufffd")) and not self.done, self


@dataclass(eq=False)
class Service:
    """`cluster` as in tests/flow/roles; `traffic` rules every frame between roles."""

    cluster: Any
    router: RouterProcess
    http: httpx.AsyncClient
    yardstick: Any
    traffic: Any
    proxies: dict[str, Any]
    vocabulary: Vocabulary
    model: str
    tenants: Any = field(default_factory=lambda: itertools.count(1))

    async def ask(
        self,
        ids: Sequence[int],
        max_tokens: int = 8,
        *,
        tenant: int | None = None,
        sampling: Sampling | None = None,
        within_s: float = 40.0,
    ) -> Answer:
        """A streamed completion by a tenant that has nothing stored. A hang is a `TimeoutError`."""
        tenant = next(self.tenants) if tenant is None else tenant
        sampling = sampling or Sampling()
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {key_of(tenant)}"}
        text, finish, error, done = "", None, None, False
        async with (
            asyncio.timeout(within_s),
            self.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]["code"]
                return Answer("", None, error, answer.status_code)
            async for line in answer.aiter_lines():
                if not line:
                    continue
                data = line.removeprefix("data: ")
                done = done or data == "[DONE]"
                value = json.loads(data) if data.startswith("{") else {}
                assert error is None, "something came after an error event"
                error = value["error"]["code"] if "error" in value else None
                for choice in value.get("choices", ()):
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
        return Answer(text, finish, error, 200, done)

    async def expected(
        self, ids: Sequence[int], max_tokens: int = 8, sampling: Sampling | None = None
    ) -> str:
        """The text of one engine with the same keep, cold and alone."""
        sampling = sampling or Sampling()
        tokens = list(await self.yardstick.text(ids, max_tokens, None, sampling))
        end = self.cluster.card.eos_token_id
        tokens = tokens[: tokens.index(end)] if end in tokens else tokens
        spoken = TextStream(self.vocabulary)
        return spoken.push(tokens) + spoken.finish()

    async def check(
        self, ids: Sequence[int], max_tokens: int = 8, *, exactly: bool = True, **options: Any
    ) -> Answer:
        """Ask; the answer must be the reference text, or with `exactly=False` an explicit error."""
        expected = await self.expected(ids, max_tokens, options.get("sampling"))
        answer = await self.ask(ids, max_tokens, **options)
        answer.check(expected)
        assert not exactly or answer.error is None, answer
        return answer

    async def routable(self, prefills: int = 1, decodes: int = 2, within_s: float = 60.0) -> None:
        from headrace.core.card import Role

        wanted = {Role.PREFILL: prefills, Role.DECODE: decodes}
        replicas = self.router.replicas
        async with asyncio.timeout(within_s):
            while any(len(replicas.routable(role)) != n for role, n in wanted.items()):
                await asyncio.sleep(0.01)

    async def at_rest(self, within_s: float = 5.0) -> None:
        """Nothing is held anywhere: router, engines, store, tasks of jobs."""
        async with asyncio.timeout(within_s):
            while self._held_by_router() or self._job_tasks():
                await asyncio.sleep(0.01)
        await self.cluster.at_rest(within_s)

    async def pulse(self, _: object = None) -> None:
        """The service is as before: healthy, nothing held, a normal request gives its text by
        hand-off, and again nothing is held."""
        self.traffic.reset()
        await self.routable()
        await self.at_rest(within_s=10.0)
        assert (await self.http.get("/health")).status_code == 200
        await self.check(PULSE)
        await self.at_rest()

    def _held_by_router(self) -> bool:
        desk = self.router.desk
        held = (desk.live_requests, desk.waiting_requests, desk.open_requests)
        return held != (0, 0, 0) or self.router.ledger.open_charges != 0

    @staticmethod
    def _job_tasks() -> list[str]:
        return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith(JOB_TASKS)]


PULSE = tuple(range(310, 610))  # a prompt of two blocks and a rest


def key_of(tenant: int) -> str:
    return f"key-of-tenant-{tenant:04}"


@contextlib.asynccontextmanager
async def running(
    flow: ModuleType,
    proxy: ModuleType,
    roles: Any,
    settings: Any,
    yardstick: Any,
    router_end: Any,
    salts: str,
    engine: Any = None,
    **router: Any,
) -> AsyncIterator[Service]:
    """A running service: `roles(name)` gives settings, `settings` are the store's, `engine` those
    of the engines, `router` goes to RouterSettings."""
    engine = engine or flow.ENGINE
    traffic = proxy.Traffic()
    names = ("prefill-0", "decode-0", "decode-1")
    proxies = {name: proxy.FrameProxy(name, traffic, roles(name).token) for name in names}
    end = router_end()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(flow.store_task(roles("store"), settings))
        replicas = [flow.PrefillReplica(roles(names[0]), engine)]
        replicas += [flow.DecodeReplica(roles(name), engine) for name in names[1:]]
        for name, replica in zip(names, replicas, strict=True):
            await proxies[name].start()
            stack.push_async_callback(proxies[name].close)
            proxies[name].stand_before(replica)
            stack.push_async_callback(replica.close)
        await asyncio.gather(*(replica.start() for replica in replicas))
        peers = [await end.connect(proxies[name].target) for name in names]
        stack.push_async_callback(end.close)
        cluster = flow.Cluster(
            replicas[0], replicas[1:], end, peers[0], peers[1:], yardstick.keep_tokens
        )
        process, http = await stack.enter_async_context(
            serving(roles("router-faults"), salts, yardstick.model, **router)
        )
        vocabulary = Vocabulary(TOKENIZER[yardstick.model])
        parts = (cluster, process, http, yardstick, traffic, proxies, vocabulary, yardstick.model)
        service = Service(*parts)
        await service.routable()
        yield service


@contextlib.asynccontextmanager
async def serving(
    role: Any, salts: str, model: str, **router: Any
) -> AsyncIterator[tuple[RouterProcess, httpx.AsyncClient]]:
    """A router on a port of its own, and a client of it."""
    settings = RouterSettings(
        salt_directory=salts,
        keys=tuple(ApiKey(key_of(i), f"tenant-{i}") for i in range(TENANTS)),
        **{"port": 0, "drain_s": 0.2, "retry_share": 1.0, "tokenizer": TOKENIZER[model]} | router,
    )
    process, stop, up = RouterProcess(role, settings), asyncio.Event(), asyncio.Event()
    members: list[Any] = []
    task = asyncio.create_task(process.serve(lambda m: (members.append(m), up.set())[1], stop))
    ready = asyncio.create_task(up.wait())
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if not up.is_set():
        task.result()  # says why it did not start
    url = members[0].address.replace("tcp://", "http://")
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
            yield process, http
    finally:
        stop.set()
        await task
        await process.close()
