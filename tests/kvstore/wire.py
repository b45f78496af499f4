"""A proxy before a Redis server: it passes bytes on, late, or not at all, and tells of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import redis


class Proxy:
    """Listens on loopback; `target` is a unix socket's path or (host, port).

    `delay_s` puts off every answer; `frozen` passes nothing on in either direction; `cut()` ends
    the connections there are. `on_answer` is called before an answer is passed on."""

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.target = target
        self.delay_s = 0.0
        self.moving = asyncio.Event()
        self.moving.set()
        self.on_answer: Callable[[], None] = lambda: None
        self.answers = self.delayed = self.held = 0
        self.asked_bytes = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"redis://{host}:{port}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = (
                await asyncio.open_unix_connection(self.target)
                if isinstance(self.target, str)
                else await asyncio.open_connection(*self.target)
            )
        except OSError:
            writer.close()
            return
        self._writers |= {writer, there[1]}
        pumps = {
            asyncio.create_task(self._pump(reader, there[1], answer=False)),
            asyncio.create_task(self._pump(there[0], writer, answer=True)),
        }
        self._tasks |= pumps
        await asyncio.wait(pumps, return_when="FIRST_COMPLETED")
        for task in pumps:
            task.cancel()
        self._tasks -= pumps
        self._writers -= {writer, there[1]}
        writer.close()
        there[1].close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answer: bool
    ) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(1 << 16):
                if not self.moving.is_set():
                    self.held += 1
                    await self.moving.wait()
                if answer:
                    self.answers += 1
                    self.on_answer()
                    if self.delay_s:
                        self.delayed += 1
                        await asyncio.sleep(self.delay_s)
                else:
                    self.asked_bytes += len(data)
                writer.write(data)
                await writer.drain()

    def cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self.moving.set()
        if self._server is not None:
            self._server.close()
        self.cut()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def everything(client: redis.Redis) -> dict[bytes, bytes]:
    """All string keys of a server and their values."""
    keys: list[bytes] = client.keys("*")  # type: ignore[assignment]  # the async type is meant too
    values = client.mget(keys) if keys else []
    return {k: v for k, v in zip(keys, values, strict=True) if v is not None}  # type: ignore[arg-type]
