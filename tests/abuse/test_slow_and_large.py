"""Clients that are slow, large, silent, or speak half of HTTP (A2, A3, A4, F2), on raw sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"model": "scripted", "prompt": "a"}
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    "authorization: Bearer key-of-tenant-a-0123\r\n"
)
BODY_CAP = 8 << 20


class Socket:
    """A raw connection. `status` reads an answer's first line; None: closed without one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def open(port: int) -> Socket:
        return Socket(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: str | bytes) -> bool:
        """Whether the other side was still there to take it."""
        try:
            self.writer.write(data.encode() if isinstance(data, str) else data)
            await asyncio.wait_for(self.writer.drain(), 10)
            return True
        except (ConnectionError, TimeoutError, RuntimeError):  # the last is uvloop's way
            return False

    async def status(self, seconds: float = 5.0) -> int | None:
        try:
            line = await asyncio.wait_for(self.reader.readline(), seconds)
        except ConnectionError:
            return None
        return int(line.split()[1]) if line else None

    async def rest(self, seconds: float = 5.0) -> bytes:
        return await asyncio.wait_for(self.reader.read(), seconds)

    def close(self) -> None:
        self.writer.transport.abort()


async def normal_request(rig: Any) -> float:
    begun = time.monotonic()
    answer = await rig.client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    return time.monotonic() - begun


async def test_half_a_head_is_closed_with_408(rig: Any) -> None:
    for part in ("", "GET /health HT", HEAD, "GET /health HTTP/1.1\r\nhost: x\r\nx-y: "):
        sock = await Socket.open(rig.port)
        begun = time.monotonic()
        await sock.send(part)
        assert await sock.status() == 408
        rest = await sock.rest()
        assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert time.monotonic() - begun > 0.45  # the deadline of this rig is 0.5 s
        sock.close()
    await rig.pulse()


async def test_a_head_fed_byte_by_byte_meets_the_same_deadline(rig: Any) -> None:
    sock = await Socket.open(rig.port)
    status = asyncio.create_task(sock.status())
    for byte in "GET /health HTTP/1.1\r\nx: " + "y" * 200:
        if status.done() or not await sock.send(byte):
            break
        await asyncio.sleep(0.02)
    assert await status == 408
    sock.close()


async def test_the_deadline_counts_again_on_a_reused_connection(rig: Any) -> None:
    sock = await Socket.open(rig.port)
    for _ in range(3):
        await sock.send("GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await sock.status() == 200
        await sock.reader.readuntil(b'{"status":"ok"}')
        await asyncio.sleep(0.3)  # idle between requests is no late head
    await sock.send("GET /hea")
    assert await sock.status() == 408
    sock.close()


async def test_a_slow_body_is_closed_with_408(rig: Any) -> None:
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + "content-length: 100\r\n\r\n")

    async def drip() -> None:
        while await sock.send("x"):
            await asyncio.sleep(0.05)

    task = asyncio.create_task(drip())
    assert await sock.status() == 408
    task.cancel()
    sock.close()
    await rig.pulse()


async def test_a_long_answer_is_no_late_head(rig: Any) -> None:
    """The control of the deadlines: a request that takes longer than both is served."""
    gate = asyncio.Event()
    rig.decodes[0].script.gate = lambda index: gate
    task = asyncio.create_task(normal_request(rig))
    await asyncio.sleep(1.0)
    rig.decodes[0].script.gate = lambda index: None
    gate.set()
    assert await task > 0.9


async def test_500_idle_connections_leave_others_alone(rig: Any) -> None:
    idle = [await Socket.open(rig.port) for _ in range(500)]
    for _ in range(5):
        await normal_request(rig)  # they are served at all; a measured figure is not asserted
    statuses = await asyncio.gather(*(sock.status() for sock in idle))
    assert statuses == [408] * 500
    for sock in idle:
        sock.close()
    await rig.pulse()


async def test_a_lying_content_length_is_refused_before_reading(rig: Any) -> None:
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + f"content-length: {BODY_CAP + 1}\r\n\r\n")
    assert await sock.status() == 413
    sock.close()
    # Less than the body has: the rest is the next request, and no valid one.
    body = json.dumps(BODY)
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + f"content-length: {len(body) - 5}\r\n\r\n{body}")
    assert await sock.status() == 400
    sock.close()
    # More than the body has: the deadline of the body ends it.
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + f"content-length: {len(body) + 5}\r\n\r\n{body}")
    assert await sock.status() == 408
    sock.close()
    await rig.pulse()


async def test_a_chunked_body_without_length_stops_at_the_cap(rig: Any) -> None:
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + "transfer-encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status = asyncio.create_task(sock.status())
    sent = 0
    while sent < 10 * BODY_CAP and await sock.send(piece):
        sent += 0x10000
    assert await status == 413
    # The cap, four times as much that is dropped, and what socket buffers hold.
    assert BODY_CAP <= sent < 7 * BODY_CAP
    sock.close()
    await rig.pulse()


async def test_a_chunk_larger_than_any_body_is_refused_by_its_size(rig: Any) -> None:
    """A2: the size alone is enough; not a byte of the chunk was sent."""
    cap = BODY_CAP
    head = HEAD + "transfer-encoding: chunked\r\n\r\n"
    for size in (f"{2**64 - 1:x}", f"{cap + 1:x}", f"2\r\n{{}}\r\n{cap - 1:x}"):
        sock = await Socket.open(rig.port)
        await sock.send(head + size + "\r\n")
        assert await sock.status() == 413  # waiting for it would end in the control's 408
        assert b"payload_too_large" in await sock.rest()
        sock.close()
    sock = await Socket.open(rig.port)
    await sock.send(head + f"2\r\n{{}}\r\n{cap - 2:x}\r\n")
    assert await sock.status() == 408  # the control: it may still come, and does not
    sock.close()
    await rig.pulse()


async def test_an_answer_before_the_body_reaches_a_client_that_still_sends(rig: Any) -> None:
    """Closing at once would reset the connection and take the answer away."""
    sock = await Socket.open(rig.port)
    head = HEAD.replace("0123", "9999") + f"content-length: {4 << 20}\r\n\r\n"
    await sock.send(head)
    for _ in range(64):
        assert await sock.send(b"x" * 0x10000)
    assert await sock.status() == 401
    # All of the body has passed: the connection may be used again.
    head, _, _ = (await sock.reader.readuntil(b"}}")).partition(b"\r\n\r\n")
    await sock.send("GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await sock.status() == 200
    sock.close()


async def test_two_lengths_are_refused(rig: Any) -> None:
    for extra in (
        "content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        "transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "content-length: -1\r\n\r\n",
        "content-length: 0x10\r\n\r\n",
    ):
        sock = await Socket.open(rig.port)
        await sock.send(HEAD + extra)
        assert await sock.status() in (400, 501), extra
        sock.close()
    await rig.pulse()


LARGE_HEADS = {
    "header of 1 MB": ("GET /health HTTP/1.1\r\nhost: x\r\nx-a: ", b"a" * 0x4000, 64),
    "header of 40 MB": ("GET /health HTTP/1.1\r\nhost: x\r\nx-a: ", b"a" * 0x4000, 2560),
    "10,000 headers": ("GET /health HTTP/1.1\r\nhost: x\r\n", b"x-a: aaaaaaaa\r\n" * 100, 100),
    "URL of 1 MB": ("GET /health?", b"a" * 0x4000, 64),
    "query below the buffer's size": ("GET /health?", b"a" * 0x4400, 4),
}


@pytest.mark.parametrize("name", LARGE_HEADS)
async def test_a_large_head_costs_nothing(rig: Any, name: str) -> None:
    start, piece, times = LARGE_HEADS[name]
    process = psutil.Process()
    await rig.pulse()
    gc.collect()
    before = process.memory_info().rss
    sock = await Socket.open(rig.port)
    await sock.send(start)
    for _ in range(times):
        if not await sock.send(piece):
            break
    await sock.send(" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await sock.status() in (400, 431, None)
    sock.close()
    gc.collect()
    assert process.memory_info().rss - before < 5 << 20
    await rig.pulse()


def fields(n: int, value_bytes: int = 1) -> str:
    return "".join(f"x-{i:05}: {'a' * value_bytes}\r\n" for i in range(n))


async def refused(rig: Any, data: str, status: int, words: str) -> None:
    """`data` is answered with this error, in one JSON body, and the connection ends."""
    sock = await Socket.open(rig.port)
    await sock.send(data)
    assert await sock.status() == status
    head, _, body = (await sock.rest()).partition(b"\r\n\r\n")
    assert b"application/json" in head and b"connection: close" in head.lower()
    assert words in json.loads(body)["error"]["message"]
    sock.close()


async def test_header_fields_are_counted(rig: Any) -> None:
    start = "GET /health HTTP/1.1\r\nconnection: close\r\nhost: x\r\n"
    sock = await Socket.open(rig.port)
    await sock.send(start + fields(126) + "\r\n")
    assert await sock.status() == 200  # the control: 128 in all
    sock.close()
    for more in (127, 10_000):
        words = f"limited to 128, got {more + 2}"
        await refused(rig, start + fields(more) + "\r\n", 431, words)
    # 8 bytes of a name, 4 around it: only with these is it above the 64 KiB.
    await refused(rig, start + fields(120, 540) + "\r\n", 431, "limited to 65536 bytes, got")
    assert 120 * 540 < 65536 < 120 * 552


async def test_the_trailer_of_a_chunked_body_is_bounded_likewise(rig: Any) -> None:
    body = json.dumps(BODY)
    start = HEAD + f"transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n"
    sock = await Socket.open(rig.port)
    await sock.send(start + fields(128) + "\r\n")
    assert await sock.status() == 200
    sock.close()
    await refused(rig, start + fields(129) + "\r\n", 431, "limited to 128, got 129")
    await refused(rig, start + fields(100, 700) + "\r\n", 431, "65536 bytes")
    await rig.until(rig.nothing_held)
    await rig.pulse()


async def test_a_bad_chunk_is_a_400_of_ours(rig: Any) -> None:
    start = HEAD + "transfer-encoding: chunked\r\n\r\n"
    for bad in ("zz\r\n{}\r\n0\r\n\r\n", "2\r\n{}zz\r\n", "-1\r\n", "2\r\n{}\r\n0x10\r\n"):
        await refused(rig, start + bad, 400, "not a valid HTTP request")
        # The same where the application already waits for the body.
        sock = await Socket.open(rig.port)
        await sock.send(start)
        await rig.until(lambda: rig.router.desk.open_requests == 1)
        await sock.send(bad)
        assert await sock.status() == 400
        sock.close()
        await rig.until(rig.nothing_held)
    await rig.pulse()


async def test_garbage_is_a_400_of_ours(rig: Any) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"HELO x\r\n\r\n", b"\r\n\r\n\r\n \r\n\r\n"):
        sock = await Socket.open(rig.port)
        await sock.send(garbage + b"\r\n\r\n")
        assert await sock.status() in (400, 408)
        rest = await sock.rest()
        assert b"application/json" in rest and b'"error"' in rest
        sock.close()
    await rig.pulse()


async def test_garbage_behind_a_running_answer_harms_only_its_connection(rig: Any) -> None:
    gate = asyncio.Event()
    rig.decodes[0].script.gate = lambda index: gate if index else None
    body = json.dumps(BODY | {"stream": True})
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + f"content-length: {len(body)}\r\n\r\n{body}")
    assert await sock.status() == 200
    await sock.send(b"\x00\x01garbage\r\n\r\n")
    await asyncio.sleep(0.05)
    rig.decodes[0].script.gate = lambda index: None
    gate.set()
    await sock.rest()
    sock.close()
    await rig.pulse()


async def test_a_client_that_reads_nothing_is_cancelled_after_the_stall_limit(rig: Any) -> None:
    """F2. The answer must exceed what socket buffers hold, so it is a long one; decode holds its
    end back, or it could have said everything before the client counts as stalled."""
    decode, never = rig.decodes[0], asyncio.Event()
    decode.script.token_ids = rig.reference_ids * 1000
    decode.script.gate = lambda index: never if index >= 6900 else None
    cancels = len(decode.cancels)
    body = json.dumps(BODY | {"stream": True, "max_tokens": 7000, "prompt": "a"})
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before connecting, or it is late
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", rig.port))
    sock = Socket(*await asyncio.open_connection(sock=raw))
    sock.writer.transport.pause_reading()
    await sock.send(HEAD + f"content-length: {len(body)}\r\n\r\n{body}")
    await rig.until(lambda: decode.running)
    try:
        await rig.until(rig.nothing_held, 30.0)
        assert rig.records()[-1]["finish"] == "cancelled"
        await rig.until(lambda: len(decode.cancels) > cancels)
        assert len(decode.cancels) == cancels + 1
        assert 0 < rig.records()[-1]["completion_tokens"] <= 7000
    finally:
        decode.script.token_ids = None
        decode.script.gate = lambda index: None
        sock.close()
    await rig.pulse()


async def test_half_closed_is_gone(rig: Any) -> None:
    """A client that shuts its sending side down counts as one that left: we cannot tell them
    apart, and a cancelled request can be asked again."""
    gate = asyncio.Event()
    rig.decodes[0].script.gate = lambda index: gate
    body = json.dumps(BODY)
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + f"content-length: {len(body)}\r\n\r\n{body}")
    await rig.until(lambda: rig.decodes[0].running)
    sock.writer.write_eof()
    await rig.until(rig.nothing_held, 1.0)
    rig.decodes[0].script.gate = lambda index: None
    gate.set()
    sock.close()
    await rig.pulse()


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(rig: Any) -> None:
    sock = await Socket.open(rig.port)
    await sock.send(HEAD + "content-length: 100\r\n\r\n{")
    await rig.until(lambda: rig.router.desk.open_requests == 1)
    sock.close()
    await rig.until(rig.nothing_held, 1.0)
    await rig.pulse()
