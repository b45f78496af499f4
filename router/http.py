"""One HTTP exchange over ASGI: reading within limits, answering once, streaming events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import orjson

from headrace.core.errors import (
    Cancelled,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from headrace.core.limits import EdgeLimits
from headrace.router.server import check_fields

Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

JSON_TYPE: Header = (b"content-type", b"application/json")
EVENT_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front must not collect events
)


class Exchange:
    """A request and its one answer. Used by one task; `gone` may wait in another."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: EdgeLimits) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._raw_headers: list[Header] = list(scope["headers"])
        self._headers = dict(self._raw_headers)
        self._target_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        self._body_read = False
        self.extra: list[Header] = []  # headers of whatever answer comes
        self.accepted = False  # a ticket was made: its end is counted by its record
        self.streaming = False
        self.left = False  # set by `gone`
        self.complete = False  # set before the last byte is given away

    def header(self, name: bytes) -> bytes | None:
        """The value of a header (the last one if it stands twice), by its lower-case name."""
        return self._headers.get(name)

    def check_head(self) -> None:
        """Refuse what can be told from the head alone, before any route or key is looked at."""
        check_fields(self._raw_headers, self._limits, self._target_bytes)
        if b"transfer-encoding" in self._headers and b"content-length" in self._headers:
            # Two readers of such a message may disagree on where it ends.
            self.extra.append((b"connection", b"close"))
            raise InvalidRequest("Content-Length and Transfer-Encoding exclude each other")

    def check_json_body(self) -> None:
        """Raises `UnsupportedMediaType` unless the body is announced as plain JSON, and
        `PayloadTooLarge` when its announced length exceeds the cap: nothing is read then."""
        media = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if media != b"application/json":
            raise UnsupportedMediaType("the body must be application/json")
        if self.header(b"content-encoding") not in (None, b"", b"identity"):
            raise UnsupportedMediaType("an encoded body is not accepted")
        announced = self.header(b"content-length")
        if announced is not None and int(announced) > self._limits.body_bytes:
            raise self._too_large()

    async def read_body(self) -> bytes:
        """The whole body. Raises `PayloadTooLarge` at the first byte beyond the cap,
        `RequestTimeout` when it takes longer than allowed, `Cancelled` when the client left."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_deadline_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client left")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        self._body_read = True
                        return b"".join(parts)
        except TimeoutError:
            self.extra.append((b"connection", b"close"))
            raise RequestTimeout(
                f"a body is limited to {self._limits.body_deadline_s:g} s, got longer"
            ) from None

    async def gone(self) -> None:
        """Returns when the client has left (or when the answer is complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = not self.complete

    async def answer(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """The whole answer at once."""
        if self.header(b"expect") is not None and not self._body_read:
            # The client waits for leave to send its body and will not get it.
            self.extra.append((b"connection", b"close"))
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length, *self.extra])
        self.complete = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_json(self, value: Any, status: int = 200) -> None:
        await self.answer(status, orjson.dumps(value), [JSON_TYPE])

    async def error(self, error: HeadraceError) -> None:
        """Tell the client: as an answer, or inside a stream that has begun as one last event, after
        which the stream ends without its end mark. No-op once the answer is complete."""
        if self.complete:
            return
        if self.streaming:
            await self.end_events([orjson.dumps(error.body())], done=False)
            return
        headers = [JSON_TYPE]
        if isinstance(error, Overloaded):
            headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
        await self.answer(error.status, orjson.dumps(error.body()), headers)

    async def events(self, payloads: Iterable[bytes]) -> None:
        """Send server-sent events, starting the stream with the first.

        Raises `Cancelled` when the client left meanwhile: `send` itself returns as if all was well,
        and a sender that had waited for a client to read would go on with what has piled up."""
        await self._body(b"".join(b"data: " + payload + b"\n\n" for payload in payloads), more=True)
        if self.left:
            raise Cancelled("the client left")

    async def comment(self) -> None:
        """An event that clients skip; keeps proxies from closing a silent stream."""
        await self._body(b": keepalive\n\n", more=True)

    async def end_events(self, payloads: Iterable[bytes], *, done: bool) -> None:
        """The last events, and `[DONE]` if the stream came to its proper end."""
        last = [*payloads, b"[DONE]"] if done else list(payloads)
        await self._body(b"".join(b"data: " + payload + b"\n\n" for payload in last), more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        if not self.streaming:
            self.streaming = True
            await self._start(200, [*EVENT_HEADERS, *self.extra])
        self.complete = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: list[Header]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"a body is limited to {self._limits.body_bytes} bytes, got more")
