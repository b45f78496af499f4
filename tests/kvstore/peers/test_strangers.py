"""Who holds connections to a store's peer port without the cluster's token keeps nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest
import redis

from headrace.core.errors import WireError
from headrace.core.frames import FrameCodec
from headrace.core.limits import WireLimits
from headrace.kvstore import Kind, peers_serve
from headrace.kvstore.peers_wire import (
    ASK_BYTES,
    FACTS,
    MOST_OBJECTS,
    PEER_MESSAGES,
    Fetch,
    Offer,
    PeerSocket,
)
from headrace.kvstore.records import LiveStore

TOKEN = "a cluster token of tests"
pytestmark = pytest.mark.fault


def peer_ports(pair) -> list[tuple[str, int]]:
    client = redis.Redis.from_url(pair.a.role.redis_url)
    lives = [LiveStore.unpack(client.get(key)) for key in client.keys("kv:store:*")]
    client.close()
    ends = [live.address.removeprefix("tcp://").rpartition(":") for live in lives]
    return [(host, int(port)) for host, _, port in ends]


def ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_strangers_who_stay_keep_no_store_out(pair, things, wait_until):
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(0, 1))
    await pair.listed(a)
    start = FrameCodec(TOKEN, 1 << 20).encode(b"")[:10]  # no token in it yet
    with contextlib.ExitStack() as stack:
        # At once: 16 must be there at one moment, and none stays longer than 3 s.
        ends = peer_ports(pair) * 40
        connects = [asyncio.to_thread(socket.create_connection, end, 30) for end in ends]
        strangers = [stack.enter_context(sock) for sock in await asyncio.gather(*connects)]
        for sock in strangers[::3]:
            with contextlib.suppress(ConnectionError):  # turned away already
                sock.sendall(start)

        async def full() -> bool:
            return sum(not ended(sock) for sock in strangers) == 2 * 16

        await wait_until(full, "16 strangers at each port")  # the fault took effect
        assert len(await b.open_prefix([things.digest(0)], None)) == 1

        async def all_ended() -> bool:
            return all(map(ended, strangers))

        await wait_until(all_ended, "the end of every stranger")
    # who has shown the token may be silent for longer than a stranger
    await asyncio.sleep(3.5)
    assert len(await b.open_prefix([things.digest(0), things.digest(1)], None)) == 2


async def test_a_byte_now_and_then_does_not_lengthen_the_stay(pair, things):
    await pair.start()
    frame = FrameCodec(TOKEN, 1 << 20).encode(bytes(64))
    with socket.create_connection(peer_ports(pair)[0], timeout=5) as sock:
        sent = 0
        with contextlib.suppress(ConnectionError):
            for n in range(24):
                if ended(sock):
                    break
                sock.send(frame[n : n + 1])
                sent += 1
                await asyncio.sleep(0.4)
        assert 2 <= sent <= 14  # 3 s of 9.6


async def test_no_more_is_announced_than_a_message_needs(pair, things, monkeypatch):
    monkeypatch.setattr(peers_serve, "_FIRST_FRAME_S", 600.0)  # it is not the deadline that ends it
    await pair.start()
    whole = PEER_MESSAGES.encode(Fetch(1 << 31, Kind.KV, bytes(32), bytes(32 * MOST_OBJECTS)))
    assert ASK_BYTES - 256 < len(whole) <= ASK_BYTES
    head = FrameCodec(TOKEN, 1 << 20).encode(bytes(ASK_BYTES + 1))[:24]
    host, port = peer_ports(pair)[0]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


def test_the_largest_offer_fits_and_one_above_its_bound_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        asking = PeerSocket.connect(f"tcp://{host}:{port}", TOKEN, WireLimits())
        answering = PeerSocket(server.accept()[0], TOKEN, WireLimits())
        facts = bytes(FACTS.size * MOST_OBJECTS)
        offer = Offer(1 << 31, Kind.KV, bytes(32), bytes(MOST_OBJECTS), facts, 1 << 63)
        answering.send(offer)
        assert asking.receive() == offer
        answering.send(replace(offer, facts=facts + bytes(3 * FACTS.size)))
        with pytest.raises(WireError, match="frame"):
            asking.receive()
        asking.close()
        answering.close()
