"""Messages and frames: exact round trips, and refusal of everything else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.card import Member, ModelCard, Role
from headrace.core.chain import as_token_ids
from headrace.core.errors import ConfigError, WireError
from headrace.core.frames import HEADER_BYTES, FrameCodec
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.limits import WireLimits
from headrace.core.link import Link, open_link, parse_address, serve_links
from headrace.core.messages import (
    MESSAGES,
    BlocksReady,
    Cancel,
    DecodeJob,
    Hello,
    LoadReport,
    Place,
    StageTimes,
    TokenBatch,
    TokenItem,
)
from headrace.core.request import FinishReason, GenRequest, HandoffMode, Sampling
from headrace.core.states import ReplicaState

TOKEN = "cluster-token"
KEY = JobKey(RequestId("ab" * 16), 2)
CARD = ModelCard(
    "t1", "w", b"\x01" * 32, "invariant-fp64", 4096, 4096, 32, 6, 6, 17920, 12276, 0, 1, 4001
)
REQUEST = GenRequest(
    request_id=KEY.request_id,
    epoch=2,
    token_ids=as_token_ids(range(200)),
    chain_root=Digest(b"r" * 32),
    digests=(Digest(b"d" * 32),),
    keep_tokens=44,
    max_tokens=16,
    sampling=Sampling(0.7, 0.9, 5),
    stop_token_ids=(1,),
    mode=HandoffMode.EXACT,
    domain="tenant-a",
    deadline_s=30.0,
)
SAMPLES = [
    Hello(Role.DECODE, "decode-0", BootId("b" * 16), "dev", CARD),
    Hello(Role.ROUTER, "router-0", BootId("c" * 16), "dev", None),
    DecodeJob(REQUEST, as_token_ids([5, 6]), True, "prefill-0", 7),
    Cancel(KEY, "client gone"),
    BlocksReady(KEY, 3, (Digest(b"x" * 32),), (Place(BootId("s"), 4096, 17920, 1, 2**64 - 1),)),
    TokenBatch((TokenItem(KEY, 0, (1, 2), FinishReason.STOP, StageTimes(load_s=0.5)),)),
    LoadReport(1, 2, 3, 4, 5, 6, 7, 8, 9.5, 10),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_messages_round_trip(message: object) -> None:
    assert MESSAGES.decode(MESSAGES.encode(message)) == message


def test_member_records_round_trip_and_refuse_others() -> None:
    member = Member(
        Role.DECODE, "d0", BootId("b"), "tcp://127.0.0.1:1", 5, "dev", ReplicaState.READY, CARD,
        512, 64, 8,
    )  # fmt: skip
    assert Member.decode(member.encode()) == member
    with pytest.raises(WireError):
        Member.decode(b"\xc1")
    with pytest.raises(WireError, match="Member"):
        Member.decode(msgpack.packb([1, 2]))


def test_wrong_types_are_refused_with_the_fields_name() -> None:
    values = msgpack.unpackb(MESSAGES.encode(Cancel(KEY, "x")))
    values[2] = 5
    with pytest.raises(WireError, match=r"Cancel\.reason: expected str, got int"):
        MESSAGES.decode(msgpack.packb(values))
    values[2], values[1] = "x", [KEY.request_id, True]
    with pytest.raises(WireError, match=r"JobKey\.epoch: expected int, got bool"):
        MESSAGES.decode(msgpack.packb(values))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb([99]),
        msgpack.packb([-1]),
        msgpack.packb({"kind": 1}),
        msgpack.packb([4, msgpack.ExtType(5, b"x"), "r"]),
        msgpack.packb([4]) + b"\x00",
        b"\x91" * 2000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=[
        "empty",
        "invalid",
        "no-kind",
        "unknown",
        "negative",
        "map",
        "ext",
        "tail",
        "deep",
        "huge",
    ],
)
def test_what_is_not_exactly_one_message_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        MESSAGES.decode(payload)


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_but_a_wire_error(payload: bytes) -> None:
    try:
        MESSAGES.decode(payload)
    except WireError:
        return
    # the few random payloads that are messages are legal ones


def test_mutated_messages_raise_nothing_but_wire_errors() -> None:
    source = random.Random(20261129)
    for _ in range(3000):
        data = bytearray(MESSAGES.encode(source.choice(SAMPLES)))
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        try:
            MESSAGES.decode(bytes(data))
        except WireError:
            continue


def test_frames_refuse_before_decoding() -> None:
    codec = FrameCodec(TOKEN, 1000)
    header = codec.encode(b"x" * 10)[:HEADER_BYTES]
    assert codec.payload_bytes(header) == 10
    with pytest.raises(WireError, match="wrong cluster token"):
        FrameCodec("other", 1000).payload_bytes(header)
    with pytest.raises(WireError, match="version 9"):
        codec.payload_bytes(header[:2] + b"\x09" + header[3:])
    with pytest.raises(WireError, match="not a frame"):
        codec.payload_bytes(b"GET / HTTP/1.1\r\nHost: x\r\n"[:HEADER_BYTES])
    with pytest.raises(WireError, match="1000 bytes, 1001 announced"):
        codec.payload_bytes(header[:4] + (1001).to_bytes(4, "little") + header[8:])
    with pytest.raises(WireError, match="1000 bytes, got 1001"):
        codec.encode(b"x" * 1001)


async def _echo(link: Link) -> None:
    async for message in link:
        await link.send(message)


async def test_links_carry_messages_both_ways_and_end_cleanly() -> None:
    server, address = await serve_links("tcp://127.0.0.1:0", _echo, MESSAGES, TOKEN)
    link = await open_link(address, MESSAGES, TOKEN)
    for message in SAMPLES:
        await link.send(message)
        assert await link.receive() == message
    await link.close()
    with pytest.raises(ConnectionError):
        await link.send(SAMPLES[0])
    server.close()


async def test_a_peer_with_another_token_is_cut_off_and_the_server_lives() -> None:
    server, address = await serve_links("tcp://127.0.0.1:0", _echo, MESSAGES, TOKEN)
    stranger = await open_link(address, MESSAGES, "guess")
    await stranger.send(SAMPLES[0])
    assert await stranger.receive() is None
    _, host, port = parse_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(random.Random(1).randbytes(500))
    assert await reader.read() == b""
    writer.close()
    friend = await open_link(address, MESSAGES, TOKEN)
    await friend.send(SAMPLES[3])
    assert await friend.receive() == SAMPLES[3]
    await friend.close()
    server.close()


FAST = WireLimits(connect_s=1, send_s=1)  # seconds, the least that limits may be


@pytest.fixture(params=["tcp", "unix"])
async def fast_server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The address of an echo with short deadlines, on either kind of socket."""
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/s"
    server, address = await serve_links(address, _echo, MESSAGES, TOKEN, FAST)
    yield address
    server.close()


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, host, port = parse_address(address)
    if scheme == "unix":
        return await asyncio.open_unix_connection(host)
    return await asyncio.open_connection(host, port)


FRAME = FrameCodec(TOKEN, 1000).encode(MESSAGES.encode(Cancel(KEY, "gone")))


async def test_a_begun_frame_must_be_completed(fast_server: str) -> None:
    """Nothing, parts of a header, parts of a payload: first, and behind a whole frame."""
    peers = []
    for sent in (0, 1, 3, HEADER_BYTES - 1, HEADER_BYTES, len(FRAME) - 1):
        for before in (b"", FRAME):
            if sent or not before:
                peers.append((await raw(fast_server), before, FRAME[:sent]))
    for (_, writer), before, part in peers:
        writer.write(before + part)
    async with asyncio.timeout(60):  # against hangs
        for (reader, writer), before, _ in peers:
            assert await reader.read() == before  # the echo of it, then the end
            writer.close()


async def test_a_frame_fed_byte_by_byte_meets_the_same_deadline(fast_server: str) -> None:
    reader, writer = await raw(fast_server)
    ended = asyncio.create_task(reader.read())
    sent = 0
    while not ended.done() and sent < len(FRAME):
        writer.write(FRAME[sent : sent + 1])
        sent += 1
        await asyncio.sleep(0.05)
    with contextlib.suppress(ConnectionError):
        assert await ended == b""
    assert 3 < sent < len(FRAME)
    writer.close()


async def test_an_idle_link_stays_open(fast_server: str) -> None:
    """The control: the deadlines count begun frames only."""
    link = await open_link(fast_server, MESSAGES, TOKEN, FAST)
    for _ in range(2):
        await link.send(SAMPLES[3])
        assert await link.receive() == SAMPLES[3]
        await asyncio.sleep(1.3)
    await link.send(SAMPLES[0])
    assert await link.receive() == SAMPLES[0]
    await link.close()


@pytest.mark.parametrize("start", [b"G", b"HX", b"HR\x09"])
async def test_the_first_wrong_byte_ends_a_connection(start: bytes) -> None:
    slow = WireLimits(connect_s=60, send_s=60)  # so that no deadline does it
    server, address = await serve_links("tcp://127.0.0.1:0", _echo, MESSAGES, TOKEN, slow)
    reader, writer = await raw(address)
    writer.write(start)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    server.close()


async def test_closing_does_not_wait_for_a_peer_that_takes_nothing() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=here)
    link = Link(reader, writer, MESSAGES, TOKEN, FAST)
    link.post(Cancel(KEY, "x" * (4 << 20)))
    assert writer.transport.get_write_buffer_size() > 0
    async with asyncio.timeout(60):
        await link.close()
    assert writer.transport.get_write_buffer_size() == 0
    there.close()


async def test_an_oversized_frame_closes_only_its_own_link() -> None:
    small = WireLimits(frame_bytes=2000)
    server, address = await serve_links("tcp://127.0.0.1:0", _echo, MESSAGES, TOKEN, small)
    link = await open_link(address, MESSAGES, TOKEN)
    await link.send(Cancel(KEY, "y" * 5000))
    assert await link.receive() is None
    server.close()


async def test_nobody_listening_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError):
        await open_link("tcp://127.0.0.1:1", MESSAGES, TOKEN, WireLimits(connect_s=1))


@pytest.mark.parametrize("bad", ["", "http://x", "tcp://x", "tcp://h:99999", "unix://", "tcp://:5"])
def test_bad_addresses_are_named(bad: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(bad)


def test_long_unix_paths_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="107 bytes, got 120"):
        parse_address("unix://" + "/" + "a" * 119)


def test_requests_check_their_own_consistency() -> None:
    for wrong in (
        {"digests": ()},
        {"max_tokens": 0},
        {"token_ids": as_token_ids([])},
        {"chain_root": Digest(b"short")},
    ):
        with pytest.raises(Exception, match="digest|max_tokens|token"):
            replace(REQUEST, **wrong)
