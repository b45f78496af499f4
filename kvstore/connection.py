"""One connection of a client to a store: attaching, questions and answers, noticing silence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.core.errors import WireError
from headrace.core.frames import HEADER_BYTES, FrameCodec
from headrace.core.ids import BootId
from headrace.core.limits import WireLimits
from headrace.core.link import Link, parse_address
from headrace.core.messages import Place
from headrace.kvstore.ahead import Stock
from headrace.kvstore.arena import Arena, Region
from headrace.kvstore.layout import Buffer, checksum
from headrace.kvstore.messages import (
    STORE_MESSAGES,
    Abandon,
    Attach,
    Attached,
    Cancel,
    Ping,
    Reserved,
    unpack_pairs,
    unpack_places,
)

T = TypeVar("T")
_TICK_S = 0.5
_PING_TICKS = 2  # a store that answered nothing for so long is asked whether it is there
_SILENT_TICKS = 6  # and given up after this


class StoreGone(Exception):
    """The connection ended before the answer came. Never leaves the room."""


class Connection:
    """An attached link. Made by `attach`; `serve` must run as long as it is used.

    `arena` stays readable after the connection ended, for as long as somebody keeps it."""

    def __init__(
        self, link: Link, boot: BootId, arena: Arena, namespace: bytes, reserve_s: float
    ) -> None:
        self.boot = boot
        self.arena = arena
        self.namespace = namespace
        self.reserve_s = reserve_s
        self.ahead = Stock(self)  # slots that this client holds in advance
        self._link = link
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._until_s: dict[int, float] = {}  # of questions that somebody awaits
        self._numbers = itertools.count(1)
        self._heard = False

    @property
    def open(self) -> bool:
        return not self._link.closed

    async def serve(self) -> None:
        """Take answers until the connection ends; then every open question is answered with
        `StoreGone`. Raises nothing."""
        watch = asyncio.create_task(self._watch(), name="store-watch")
        try:
            async for message in self._link:
                self._heard = True
                self._answer(message)
        except WireError:
            pass  # the link is closed; the keeper attaches anew
        finally:
            watch.cancel()
            self.abort()

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self._link.abort()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(StoreGone())
        self._calls.clear()
        self.ahead.end()

    def post(self, message: Any) -> None:
        """Send without waiting for anything; lost when the connection has ended."""
        self._link.post(message)

    async def ask(self, make: Callable[[int], Any], expect: type[T], limit_s: float) -> T:
        """Send `make(call)` and return the answer, an `expect`. Raises `StoreGone` when the store
        goes away or is silent, or does not answer so within `limit_s` and a tick. A cancelled
        question is withdrawn."""
        if not self.open:
            raise StoreGone
        call, future = self._pose(make)
        self._until_s[call] = asyncio.get_running_loop().time() + limit_s
        try:
            answer = await future
        finally:
            del self._until_s[call]
            if self._calls.pop(call, None) is not None and self.open:
                self._link.post(Cancel(call))  # the answer never came
        if not isinstance(answer, expect):
            self.abort()
            raise StoreGone
        return answer

    def submit(self, make: Callable[[int], Any]) -> asyncio.Future[Any]:
        """Send `make(call)`; its answer, or `StoreGone`, comes to the future, which nobody has to
        await: whoever gets it reads its exception."""
        call, future = self._pose(make)
        if not self.open:
            self._calls.pop(call, None)
            future.set_exception(StoreGone())
        return future

    def _pose(self, make: Callable[[int], Any]) -> tuple[int, asyncio.Future[Any]]:
        call = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._link.post(make(call))
        return call, future

    def fill(self, offset: int, source: Buffer) -> int:
        """Copy a payload into a granted slot; the checksum of the source, so that a torn copy does
        not verify. Raises `StoreGone` for a grant that is none."""
        found = self.arena.locate(offset)
        if found is None or len(source) > found[0].payload_bytes:
            self.abort()
            raise StoreGone
        region, slot = found
        self.arena.payload(region, slot, len(source))[:] = source
        return checksum(source)

    def places(self, packed: bytes) -> tuple[Place | None, ...]:
        """Places of an answer. Raises `StoreGone` for what is none."""
        try:
            return unpack_places(packed, self.boot)
        except WireError:
            self.abort()
            raise StoreGone from None

    def pairs(self, packed: bytes) -> tuple[tuple[int, int], ...]:
        """Grants of an answer. Raises `StoreGone` for what is none."""
        try:
            return unpack_pairs(packed)
        except WireError:
            self.abort()
            raise StoreGone from None

    def _answer(self, message: Any) -> None:
        future = self._calls.pop(getattr(message, "call", 0), None)
        if future is not None and not future.done():
            future.set_result(message)
            return
        if isinstance(message, Reserved):  # nobody waits for it: give the room back
            unused = tuple(number for number, _ in unpack_pairs(message.grants) if number)
            if unused:
                self._link.post(Abandon(unused))

    async def _watch(self) -> None:
        """A store that is stopped (SIGSTOP, a swapping host) keeps its socket open and answers
        nothing: while questions are open, silence ends the connection. Counted in ticks of this
        loop, so that a loop which itself stood still does not take the store for dead. Looks after
        the limits of questions too: a timer for each costs as much as the rest of asking."""
        silent_ticks = 0
        while True:
            self._heard = False
            await asyncio.sleep(_TICK_S)
            now_s = asyncio.get_running_loop().time()
            for call in [call for call, until_s in self._until_s.items() if until_s <= now_s]:
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_exception(StoreGone())
            silent_ticks = 0 if self._heard or not self._calls else silent_ticks + 1
            if silent_ticks >= _SILENT_TICKS:
                self.abort()
                return
            if silent_ticks >= _PING_TICKS:
                self._link.post(Ping(0))


async def attach(
    address: str, token: str, name: str, namespace: bytes, limits: WireLimits
) -> Connection:
    """Connect to the store at `address` and map its arena.

    Raises `ConnectionError` when nobody answers within `connect_s`, or answers otherwise than a
    store does."""
    _, path, _ = parse_address(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    descriptors: list[int] = []
    try:
        async with asyncio.timeout(limits.connect_s):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, path)
            codec = FrameCodec(token, limits.frame_bytes)
            hello = STORE_MESSAGES.encode(Attach(name, namespace))
            await loop.sock_sendall(sock, codec.encode(hello))
            head = await _receive(sock, HEADER_BYTES, descriptors)
            body = await _receive(sock, codec.payload_bytes(head), descriptors)
            attached = STORE_MESSAGES.decode(body)
        if not isinstance(attached, Attached) or len(descriptors) != 1:
            raise ConnectionAbortedError("the store did not hand over its arena")
        # The thread gets a descriptor of its own: a cancelled caller closes the others here.
        arena = await asyncio.to_thread(_map, os.dup(descriptors[0]), attached.regions)
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        link = Link(reader, writer, STORE_MESSAGES, token, limits)
        return Connection(link, attached.boot, arena, namespace, attached.reserve_s)
    except BaseException as error:
        sock.close()
        if isinstance(error, ConnectionError | asyncio.CancelledError):
            raise
        if isinstance(error, Exception):
            raise ConnectionRefusedError(f"no store ({type(error).__name__})") from None
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)  # the mapping keeps the memory


def _map(descriptor: int, regions: tuple[Region, ...]) -> Arena:
    try:
        return Arena(descriptor, regions)
    finally:
        os.close(descriptor)


async def _receive(sock: socket.socket, count: int, descriptors: list[int]) -> bytes:
    """Exactly `count` bytes; descriptors that come with them are added to `descriptors`."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        try:
            part, received, _, _ = socket.recv_fds(
                sock, count - len(data), 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(sock.fileno(), _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(sock.fileno())
            continue
        descriptors += received
        if not part:
            raise ConnectionResetError("the store closed the connection")
        data += part
    return data


def _set(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(None)
