"""Links: typed messages over one stream socket (TCP or unix), on asyncio.

The only place in `core` that meets a socket (docs/decisions/0002): five rooms speak frames, and
rooms side by side may not import each other. A link is owned by one task that reads; any task may
send. Addresses are `tcp://host:port` and `unix:///path`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from headrace.core import faults
from headrace.core.errors import ConfigError, WireError
from headrace.core.frames import HEADER_BYTES, FrameCodec
from headrace.core.limits import WireLimits
from headrace.core.wire import MessageTable

log = logging.getLogger(__name__)
Handler = Callable[["Link"], Awaitable[None]]
_READ_BYTES = 1 << 18
_TOGETHER_BYTES = 64 << 10


class Link:
    """One connection. `async for message in link` ends when the peer closes.

    Raises `WireError` out of iteration on a bad frame, after closing the connection. A frame that
    has begun must be complete within `send_s`; between frames a link may be idle for ever. With
    `first_s`, the first frame must be complete within so much of the first `receive`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        table: MessageTable,
        token: str,
        limits: WireLimits,
        first_s: float | None = None,
    ) -> None:
        self._first_s = first_s
        self._reader = reader
        self._writer = writer
        self._table = table
        self._codec = FrameCodec(token, limits.frame_bytes)
        self._limits = limits
        self._send_lock = asyncio.Lock()
        self._received = bytearray()  # read from the socket and not yet a whole frame
        self._posted: list[bytes] = []  # frames that leave when this turn of the loop ends
        self._posted_bytes = 0
        self._finished = False
        self.closed = False

    async def send(self, message: Any) -> None:
        """Send one message; returns when the socket buffer took it.

        Raises `ConnectionError` when the peer is gone or took nothing for `send_s`."""
        if self.closed or self._finished or self._writer.is_closing():
            raise ConnectionResetError("the link is closed")
        frame = self._codec.encode(self._table.encode(message))
        action = faults.hit("link.send")
        if action == "drop":
            return
        async with self._send_lock:
            self._flush()
            # While we waited for our turn; uvloop would raise.
            if self._finished or self._writer.is_closing():
                raise ConnectionResetError("the link is closed")
            self._writer.write(frame if action != "duplicate" else frame * 2)
            try:
                # Not wait_for: on Python 3.11 it swallows a cancellation that arrives as it ends.
                async with asyncio.timeout(self._limits.send_s):
                    await self._writer.drain()
            except TimeoutError:
                self.abort()
                raise ConnectionAbortedError("the peer took nothing in time") from None

    def post(self, message: Any) -> None:
        """Queue one message without waiting, for callers inside callbacks. Drops it silently when
        the link is closed: whoever must know watches the link's end. A peer that leaves more than
        `unsent_bytes` untaken is cut off, so that a stopped one costs bounded memory."""
        # Small frames of one turn of the loop leave together: a system call costs more than they.
        # is_closing: the peer may be gone before our reader knows, and uvloop then raises.
        if not self.closed and not self._finished and not self._writer.is_closing():
            frame = self._codec.encode(self._table.encode(message))
            if not self._posted:
                asyncio.get_running_loop().call_soon(self._flush)
            self._posted.append(frame)
            self._posted_bytes += len(frame)
            if self._posted_bytes > _TOGETHER_BYTES:
                self._flush()

    def _flush(self) -> None:
        frames, self._posted, self._posted_bytes = self._posted, [], 0
        if not frames or self.closed or self._writer.is_closing():
            return
        self._writer.write(b"".join(frames) if len(frames) > 1 else frames[0])
        if self._writer.transport.get_write_buffer_size() > self._limits.unsent_bytes:
            log.warning("cut off a peer that leaves %d bytes untaken", self._limits.unsent_bytes)
            self.abort()

    async def receive(self) -> Any | None:
        """The next message, or None when the peer closed. Raises `WireError` on a bad or late
        frame."""
        first_s, self._first_s = self._first_s, None
        try:
            payload = self._cut()
            if payload is None and first_s is not None:
                async with asyncio.timeout(first_s):
                    payload = await self._frame()
            elif payload is None:
                payload = await self._frame()
            return self._table.decode(payload)
        except TimeoutError:
            self.abort()
            raise WireError("a frame was not complete in time") from None
        except asyncio.IncompleteReadError:
            self._take_leave()
            return None
        except (ConnectionError, OSError):
            self.abort()
            return None
        except WireError:
            self.abort()
            raise

    async def _frame(self) -> bytes:
        """The next frame's payload, of which nothing or a part was received."""
        if not self._received:
            await self._more()
        payload = self._cut()
        if payload is None:
            async with asyncio.timeout(self._limits.send_s):
                while (payload := self._cut()) is None:
                    await self._more()
        return payload

    async def _more(self) -> None:
        part = await self._reader.read(_READ_BYTES)
        if not part:
            raise asyncio.IncompleteReadError(b"", None)
        self._received += part

    def _cut(self) -> bytes | None:
        """The payload of the first frame if all of it was received. What is no frame is told by
        its first bytes: raises `WireError`."""
        data = self._received
        if not data:
            return None
        head = bytes(data[:HEADER_BYTES])
        self._codec.check_start(head)
        if len(head) < HEADER_BYTES:
            return None
        end = HEADER_BYTES + self._codec.payload_bytes(head)
        if len(data) < end:
            return None
        payload = bytes(data[HEADER_BYTES:end])
        del data[:end]
        return payload

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.receive()) is not None:
            yield message

    def finish(self) -> None:
        """Send nothing more, which the peer sees as this link's end, and go on receiving until it
        closes its own: so that nothing that it had sent is lost. Idempotent."""
        if not self.closed and not self._finished and not self._writer.is_closing():
            self._flush()
            self._finished = True
            with contextlib.suppress(OSError):  # the peer is gone already
                self._writer.write_eof()

    def _take_leave(self) -> None:
        """The peer sends no more, but may still read: what was posted goes out within `send_s`."""
        if self.closed:
            return
        self._flush()
        transport = self._writer.transport
        if not transport.get_write_buffer_size():
            self.abort()
            return
        self.closed = True
        self._writer.close()
        asyncio.get_running_loop().call_later(self._limits.send_s, transport.abort)

    def abort(self) -> None:
        """Close at once, dropping what was not yet sent. Idempotent."""
        if not self.closed:
            self.closed = True
            self._writer.transport.abort()

    async def close(self) -> None:
        """Flush and close; what the peer does not take within `send_s` is dropped. Idempotent."""
        if not self.closed:
            with contextlib.suppress(ConnectionError, OSError):
                self._flush()
            self.closed = True
            with contextlib.suppress(ConnectionError, OSError):
                self._writer.close()
                try:
                    async with asyncio.timeout(self._limits.send_s):
                        await self._writer.wait_closed()
                except TimeoutError:
                    self._writer.transport.abort()

    @property
    def socket(self) -> socket.socket:
        """The underlying socket, for passing descriptors over a unix link."""
        return self._writer.get_extra_info("socket")  # type: ignore[no-any-return]  # asyncio gives Any


async def open_link(
    address: str, table: MessageTable, token: str, limits: WireLimits | None = None
) -> Link:
    """Connect to `address`. Raises `ConnectionError` when nobody answers within `connect_s`."""
    limits = limits or WireLimits()
    scheme, host, port = parse_address(address)
    opening = (
        asyncio.open_unix_connection(host)
        if scheme == "unix"
        else asyncio.open_connection(host, port)
    )
    try:
        async with asyncio.timeout(limits.connect_s):
            reader, writer = await opening
    except (TimeoutError, OSError) as error:
        raise ConnectionRefusedError(f"no answer ({type(error).__name__})") from None
    _no_delay(writer)
    return Link(reader, writer, table, token, limits)


async def serve_links(
    address: str,
    handler: Handler,
    table: MessageTable,
    token: str,
    limits: WireLimits | None = None,
) -> tuple[asyncio.Server, str]:
    """Listen on `address` (port 0 picks one) and run `handler(link)` for every connection.

    Returns the server and the address it really listens on. A handler that raises `WireError`
    ends its connection only; anything else is logged with its traceback and ends it too. Who
    connects must have sent a first frame within `connect_s`."""
    limits = limits or WireLimits()
    scheme, host, port = parse_address(address)

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _no_delay(writer)
        link = Link(reader, writer, table, token, limits, first_s=limits.connect_s)
        try:
            await handler(link)
        except WireError as error:
            log.warning("closed a connection: %s", error.message)
        except (ConnectionError, asyncio.CancelledError):
            pass
        except Exception:
            log.exception("connection handler failed")
        finally:
            await link.close()

    if scheme == "unix":
        return await asyncio.start_unix_server(on_connect, host), address
    server = await asyncio.start_server(on_connect, host, port)
    actual = server.sockets[0].getsockname()
    return server, f"tcp://{actual[0]}:{actual[1]}"


def parse_address(address: str) -> tuple[str, str, int]:
    """("tcp", host, port) or ("unix", path, 0). Raises `ConfigError` on anything else."""
    if address.startswith("unix://") and len(address) > len("unix://"):
        path = address.removeprefix("unix://")
        if len(path.encode()) > 107:
            raise ConfigError(f"a unix socket path has at most 107 bytes, got {len(path.encode())}")
        return "unix", path, 0
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if host and port.isdigit() and int(port) < 65536:
            return "tcp", host.strip("[]"), int(port)
    raise ConfigError(f"an address is tcp://host:port or unix:///path, got {address!r}")


def _no_delay(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
