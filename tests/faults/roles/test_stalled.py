"""F2: a client that reads nothing of a long answer, and one that is gone without a word (half-open
TCP): until the stall limit a bounded number of bytes waits for it, then it counts as one that left;
others notice nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.core.card import Role
from headrace.core.limits import EdgeLimits
from headrace.kvstore import embedded_valkey
from headrace.router.server import EdgeProtocol
from headrace.router.tokens import Vocabulary

pytestmark = pytest.mark.fault
TOKENS = 64_000
BUFFER_BYTES = 128 << 10  # writing pauses at 64 KiB; the whole answer is 1 MB of events
REFERENCE = "The river runs to the mill, and the mill grinds.\n"


@pytest.fixture
def edges(monkeypatch: pytest.MonkeyPatch) -> list[EdgeProtocol]:
    """Every connection that a router took."""
    made: list[EdgeProtocol] = []
    connection_made = EdgeProtocol.connection_made

    def note(edge: EdgeProtocol, transport: Any) -> None:
        made.append(edge)
        connection_made(edge, transport)

    monkeypatch.setattr(EdgeProtocol, "connection_made", note)
    return made


@pytest.fixture
async def rig(router_rig: ModuleType, tmp_path: Path) -> AsyncIterator[Any]:
    """A router with two scripted decodes; the first speaks for ever, for whom asks it long."""
    server = embedded_valkey(str(tmp_path / "vk"))
    edge = EdgeLimits(stall_s=1.5)
    vocabulary = Vocabulary("tokenizer-4096")
    scripted = router_rig.scripted
    async with router_rig.running_rig(
        server.url, tmp_path, vocabulary, decodes=0, edge=edge
    ) as made:
        for i in (0, 1):
            card = replace(scripted.CARD, max_position_tokens=100_000)
            replica = scripted.ScriptedReplica(made, Role.DECODE, f"decode-{i}", card)
            replica.n_blocks = 2048
            replica.script.together = 16
            made.decodes.append(await replica.start())
        await made.until_routable(2, 0)
        yield made
    server.stop()


async def ask_and_read_nothing(rig: Any, port: int) -> socket.socket:
    body = {"model": "scripted", "prompt": "a", "max_tokens": TOKENS, "stream": True}
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    key = rig.settings.keys[0].key
    data = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(raw, (head + data).encode())
    return raw


class Vanishing:
    """A wire to the router's port that can be cut without a word: nobody is told, bytes that were
    sent are taken by nobody."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.cut = asyncio.Event()
        self.passed_bytes = 0

    async def __aenter__(self) -> Vanishing:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: Any, writer: Any) -> None:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self._port))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(raw, await reader.read(1 << 16))
        while not self.cut.is_set():
            data = await loop.sock_recv(raw, 1 << 12)
            self.passed_bytes += len(data)
            if self.passed_bytes > 20_000:
                self.cut.set()
        await asyncio.sleep(20)  # both sockets stay open, and silent
        raw.close()


@pytest.mark.parametrize("how", ["reads nothing", "half-open"])
async def test_who_takes_nothing_is_cancelled_and_costs_nobody(
    edges: list[EdgeProtocol], rig: Any, how: str
) -> None:
    long = rig.reference_ids * (TOKENS // len(rig.reference_ids) + 1)
    for decode in rig.decodes:
        decode.script.token_ids = long
    async with Vanishing(rig.port) as wire:
        port = wire.port if how == "half-open" else rig.port
        raw = await ask_and_read_nothing(rig, port)
        await rig.until(lambda: any(decode.running for decode in rig.decodes))
        if how == "half-open":
            await rig.until(wire.cut.is_set)
        for decode in rig.decodes:  # what others ask for is short
            decode.script.token_ids = None
        buffered = [0]
        while not rig.nothing_held():
            answer = await rig.client.post(
                "/v1/completions", json={"model": "scripted", "prompt": "x", "max_tokens": 64}
            )
            assert answer.json()["choices"][0]["text"] == REFERENCE
            buffered += [edge.transport.get_write_buffer_size() for edge in edges]
            await asyncio.sleep(0.05)
        assert 0 < max(buffered) < BUFFER_BYTES
        stalled = [r for r in rig.records() if r["finish"] == "cancelled"]
        assert len(stalled) == 1 and 0 < stalled[0]["completion_tokens"] < TOKENS
        raw.close()
    await rig.pulse()
