"""The HTTP edge under the application: uvicorn with h11, and what it lacks against slow peers.

uvicorn has no deadline for a request's head and reads on for ever after an early answer; both are
added here. Deadlines for the body, and every rule that can be told from a parsed head, live in
`app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from headrace.core.errors import HeadraceError, InvalidRequest, PayloadTooLarge, RequestTimeout
from headrace.core.limits import EdgeLimits

log = logging.getLogger(__name__)
LINGER_S = 2.0  # how long the rest of a refused body is read and dropped,
LINGER_BODIES = 4  # and how much of it, in bodies of the largest size
SEND_BUFFER_BYTES = 256 << 10
IDLE_S = 20.0  # an idle keep-alive connection is closed after this


class HeadTooLarge(HeadraceError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


def check_fields(
    fields: Collection[tuple[bytes, bytes]], limits: EdgeLimits, other_bytes: int = 0
) -> None:
    """Raises `HeadTooLarge` for the fields of a head or trailer, `other_bytes` besides them."""
    if len(fields) > limits.header_fields:
        raise HeadTooLarge(
            f"header fields are limited to {limits.header_fields}, got {len(fields)}"
        )
    size = other_bytes + sum(len(name) + len(value) + 4 for name, value in fields)
    if size > limits.header_bytes:
        raise HeadTooLarge(
            f"a request's head is limited to {limits.header_bytes} bytes, got {size}"
        )


class _Refused(h11.RemoteProtocolError):
    """What the parser took and we do not; carries our error through uvicorn's except clause."""

    def __init__(self, error: HeadraceError) -> None:
        super().__init__(error.message, error_status_hint=error.status)
        self.error = error


class _Parser(h11.Connection):
    """h11's server side with bounds on what a chunked body announces: the size of a chunk, refused
    before its bytes come, and the trailer, which uvicorn drops."""

    def __init__(self, limits: EdgeLimits) -> None:
        super().__init__(h11.SERVER, limits.header_bytes)
        self._limits = limits
        self._body_bytes = 0  # of this request, so far

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._body_bytes += len(event.data)
        # h11 has no name for what is left of a chunk; a test notices if this one changes.
        announced = self._body_bytes + getattr(self._reader, "_bytes_in_chunk", 0)
        # After an answer the body is dropped anyhow, and the answer must still arrive.
        if announced > self._limits.body_bytes and self.our_state is h11.SEND_RESPONSE:
            limit = self._limits.body_bytes
            raise _Refused(PayloadTooLarge(f"a body is limited to {limit} bytes, got more"))
        if isinstance(event, h11.EndOfMessage):
            try:
                check_fields(event.headers, self._limits)
            except HeadTooLarge as error:
                raise _Refused(error) from None
        return event


def protocol_class(limits: EdgeLimits) -> type[H11Protocol]:
    """uvicorn's h11 protocol with these limits bound in (uvicorn constructs it itself)."""

    class Protocol(EdgeProtocol):
        edge = limits

    return Protocol


class EdgeProtocol(H11Protocol):
    """One connection. Adds four things to uvicorn's protocol:

    a deadline for a request's head, counted from the connection's first moment or, on a reused one,
    from the first byte of the next request; errors of the HTTP parser as our JSON error body; an
    end for a client that takes nothing for `stall_s` while we have something to send (the
    application sees it leave); and a lingering end: after an answer that came before the body was
    read, the body is dropped for `LINGER_S` and a few times `body_bytes`, since closing at once
    would reset the connection and take the answer from the client."""

    edge: EdgeLimits
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _dropped_bytes: int | None = None  # set while lingering

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Parser(self.edge)
        self._arm(self.edge.header_deadline_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.edge.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._dropped_bytes is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BODIES * self.edge.body_bytes:
                self.transport.abort()
                return
        elif self._deadline is None and self.conn.their_state is h11.IDLE:
            self._arm(self.edge.header_deadline_s, self._head_is_late)
        super().data_received(data)
        if self._dropped_bytes is None:
            if self.conn.their_state is not h11.IDLE:
                self._disarm()
        elif self.conn.their_state is not h11.SEND_BODY:  # all of the unwanted body has passed
            self._dropped_bytes = None
            self._disarm()

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._dropped_bytes = 0
            self._arm(LINGER_S, self.transport.abort)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 refused (called by uvicorn inside its except clause)."""
        cause = sys.exc_info()[1]
        error: HeadraceError = InvalidRequest("not a valid HTTP request")
        if isinstance(cause, _Refused):
            error = cause.error
        elif getattr(cause, "error_status_hint", 400) == 431:
            error = HeadTooLarge(f"a request's head is limited to {self.edge.header_bytes} bytes")
        cycle = self.cycle
        if self._answering() and cycle.more_body and not cycle.response_started:
            # The application waits for a body that will not come: it sees its client leave.
            cycle.disconnected = True
            cycle.message_event.set()
        self._answer_and_close(error)

    def _head_is_late(self) -> None:
        self._answer_and_close(
            RequestTimeout(
                f"a request's head is limited to {self.edge.header_deadline_s:g} s, got longer"
            )
        )

    def _answer_and_close(self, error: HeadraceError) -> None:
        """Send an error outside of any request, if the connection's state lets us, and close."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self._answering():
            body = orjson.dumps(error.body())
            response = h11.Response(
                status_code=error.status,
                headers=[
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                    (b"connection", b"close"),
                ],
                reason=STATUS_PHRASES[error.status],
            )
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _answering(self) -> bool:
        """Whether the application already owns an answer on this connection."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.disconnected

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class EdgeServer(uvicorn.Server):
    """uvicorn's server without signal handlers: the process belongs to whoever started the role."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, limits: EdgeLimits) -> EdgeServer:
    """A server for `app`; `await server.serve(sockets=[...])` runs it, `should_exit` ends it."""
    config = uvicorn.Config(
        app,
        http=protocol_class(limits),
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=1,
        backlog=1024,
    )
    return EdgeServer(config)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, not yet accepting. Raises `OSError` when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without a bound a client that reads nothing costs 4 MB of kernel
        # memory before the stall limit begins to count; events are small.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
