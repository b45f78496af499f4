"""The application: a bare ASGI callable and its route table.

Deny by default: whatever is not marked open in the table needs a key, unknown paths included, and
the key is checked before a byte of the body is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.card import Role
from headrace.core.errors import Cancelled, HeadraceError, MethodNotAllowed, NotFound
from headrace.core.limits import EdgeLimits
from headrace.router.desk import Desk
from headrace.router.generate import Generator
from headrace.router.http import Exchange, Receive, Scope, Send
from headrace.router.jsonbody import Json
from headrace.router.keys import KeyRing, Principal
from headrace.router.records import Meters

log = logging.getLogger(__name__)
Handler: TypeAlias = Callable[["App", Exchange, Principal], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the route table. `path` ending in `/*` takes one more segment."""

    methods: tuple[str, ...]
    path: str
    handler: Handler
    name: str  # label of the metric
    open: bool = False  # served without a key
    json_body: bool = False

    def matches(self, path: str) -> bool:
        if self.path.endswith("/*"):
            head, _, last = path.rpartition("/")
            return bool(last) and head == self.path[:-2]
        return path == self.path


class App:
    """The ASGI callable of one router."""

    def __init__(
        self, desk: Desk, generator: Generator, keys: KeyRing, meters: Meters, edge: EdgeLimits
    ) -> None:
        self.desk = desk
        self.generator = generator
        self.meters = meters
        self._keys = keys
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._edge)
        endpoint: Endpoint | None = None
        try:
            exchange.check_head()
            endpoint = find(exchange.path)
            principal = self._principal(exchange, endpoint)
            if endpoint is None:
                raise NotFound("no such path")
            if exchange.method not in endpoint.methods:
                exchange.extra.append((b"allow", ", ".join(endpoint.methods).encode()))
                raise MethodNotAllowed(f"this path takes {' or '.join(endpoint.methods)}")
            if endpoint.json_body:
                exchange.check_json_body()
            await endpoint.handler(self, exchange, principal)
        except Cancelled:  # nobody is there to be told
            self._count(exchange, endpoint, "cancelled")
        except HeadraceError as error:
            self._count(exchange, endpoint, error.code)
            await exchange.error(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s failed", endpoint.name if endpoint else "routing")
            self._count(exchange, endpoint, HeadraceError.code)
            await exchange.error(HeadraceError("internal error"))

    def _principal(self, exchange: Exchange, endpoint: Endpoint | None) -> Principal:
        if endpoint is not None and endpoint.open:
            return Principal("", "")
        return self._keys.principal(exchange.header(b"authorization"))

    def _count(self, exchange: Exchange, endpoint: Endpoint | None, outcome: str) -> None:
        if not exchange.accepted:
            self.meters.requests.labels(endpoint.name if endpoint else "none", outcome).inc()


async def _health(app: App, exchange: Exchange, _: Principal) -> None:
    await exchange.answer_json({"status": "ok"})


async def _ready(app: App, exchange: Exchange, _: Principal) -> None:
    """200 while a request could be served; which pools, so that a person sees what is missing."""
    replicas = app.desk.replicas
    vision = (Role.VISION,) if app.generator.takes_images else ()
    roles = (*vision, Role.PREFILL, Role.DECODE)
    pools = {role.value: len(replicas.routable(role)) for role in roles}
    ready = pools["decode"] > 0 and not app.desk.draining
    body = {"status": "ready" if ready else "not ready", "replicas": pools}
    await exchange.answer_json(body, 200 if ready else 503)


async def _metrics(app: App, exchange: Exchange, _: Principal) -> None:
    kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
    await exchange.answer(200, app.meters.scrape(), [kind])


async def _models(app: App, exchange: Exchange, _: Principal) -> None:
    names = app.generator.model_names()
    await exchange.answer_json({"object": "list", "data": [_model(name) for name in names]})


async def _one_model(app: App, exchange: Exchange, _: Principal) -> None:
    name = exchange.path.rpartition("/")[2]
    app.generator.check_served(name)
    await exchange.answer_json(_model(name))


async def _chat(app: App, exchange: Exchange, principal: Principal) -> None:
    await app.generator.chat(exchange, principal)


async def _completions(app: App, exchange: Exchange, principal: Principal) -> None:
    await app.generator.completion(exchange, principal)


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headrace"}


_GET = ("GET", "HEAD")
ENDPOINTS = (
    Endpoint(_GET, "/health", _health, "health", open=True),
    Endpoint(_GET, "/ready", _ready, "ready", open=True),
    Endpoint(_GET, "/metrics", _metrics, "metrics"),
    Endpoint(_GET, "/v1/models", _models, "models"),
    Endpoint(_GET, "/v1/models/*", _one_model, "models"),
    Endpoint(("POST",), "/v1/chat/completions", _chat, "chat", json_body=True),
    Endpoint(("POST",), "/v1/completions", _completions, "completions", json_body=True),
)


def find(path: str) -> Endpoint | None:
    """The endpoint that a path names."""
    return next((endpoint for endpoint in ENDPOINTS if endpoint.matches(path)), None)
