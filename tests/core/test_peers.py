"""Greeting and pairing over real sockets: Hello first, the right pair, the right messages."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from headrace.core.card import ModelCard, Role
from headrace.core.errors import ConfigError, Unavailable, WireError
from headrace.core.frames import FrameCodec
from headrace.core.ids import BootId, JobKey, RequestId
from headrace.core.limits import WireLimits
from headrace.core.link import Link, open_link
from headrace.core.messages import MESSAGES, Cancel, Hello, JobFailed, LoadReport
from headrace.core.peers import NO_JOB, Peer, PeerServer, introduce, refusal

TOKEN = "t" * 32
LIMITS = WireLimits(connect_s=60)  # a busy machine is no peer that does not greet
IMPATIENT = WireLimits(connect_s=1)
CARD = ModelCard("m", "w", bytes(32), "invariant-fp64", 16, 64, 4, 2, 2, 512, 64, 0, 1, 2)
OTHER_LAYOUT = replace(CARD, layout_id=b"\1" * 32)
OTHER_WEIGHTS = replace(CARD, weights="other")


def hello(role: Role, card: ModelCard | None = CARD) -> Hello:
    return Hello(role, f"{role}-0", BootId("b"), "dev", card)


class Seen:
    """A listening role that notes what reaches it."""

    def __init__(self, mine: Hello, limits: WireLimits = LIMITS) -> None:
        self.messages: list[object] = []
        self.left: list[str] = []
        self.server = PeerServer(
            lambda: mine,
            {Cancel: lambda peer, message: self.messages.append(message)},
            lambda peer: self.left.append(peer.name),
            TOKEN,
            limits,
        )

    async def __aenter__(self) -> Seen:
        self.address = await self.server.listen("tcp://127.0.0.1:0")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()


async def until(condition) -> None:
    async with asyncio.timeout(60):  # against hangs
        while not condition():
            await asyncio.sleep(0.005)


CANCEL = Cancel(JobKey(RequestId("r"), 1), "gone")


async def test_a_greeted_peer_is_listed_heard_and_missed() -> None:
    async with Seen(hello(Role.DECODE)) as seen:
        peer = await introduce(seen.address, hello(Role.ROUTER, None), TOKEN, LIMITS)
        assert peer.hello == hello(Role.DECODE)
        await peer.link.send(CANCEL)
        await until(lambda: seen.messages)
        assert seen.messages == [CANCEL]
        assert [p.name for p in seen.server.routers()] == ["router-0"]
        await peer.link.close()
        await until(lambda: seen.left)
        assert seen.left == ["router-0"] and not seen.server.peers


@pytest.mark.parametrize(
    ("mine", "theirs", "error", "words"),
    [
        (CARD, OTHER_LAYOUT, ConfigError, "layout id 0101010101010101 of decode-0"),
        (CARD, OTHER_WEIGHTS, ConfigError, "namespace"),
        (CARD, None, Unavailable, "decode-0 has not loaded its model"),
        (None, CARD, Unavailable, "prefill-0 has not loaded its model"),
    ],
)
async def test_engines_that_must_not_pair_are_refused_at_both_ends(mine, theirs, error, words):
    async with Seen(hello(Role.DECODE, theirs)) as seen:
        with pytest.raises(error, match=words):
            await introduce(seen.address, hello(Role.PREFILL, mine), TOKEN, LIMITS)
        # The listening end tells it too, for peers that do not look.
        link = await open_link(seen.address, MESSAGES, TOKEN, LIMITS)
        await link.send(hello(Role.PREFILL, mine))
        assert await link.receive() == hello(Role.DECODE, theirs)
        told = await link.receive()
        assert isinstance(told, JobFailed) and told.key == NO_JOB
        assert told.retryable is (error is Unavailable)
        assert await link.receive() is None
        assert not seen.server.peers and not seen.left


def test_routers_need_no_card_and_equal_engines_pair() -> None:
    assert refusal(hello(Role.DECODE), hello(Role.ROUTER, None)) is None
    assert refusal(hello(Role.DECODE, None), hello(Role.ROUTER, None)) is None
    assert refusal(hello(Role.DECODE), hello(Role.PREFILL)) is None
    assert refusal(hello(Role.DECODE), hello(Role.ROUTER, OTHER_LAYOUT)) is not None


async def test_whoever_does_not_greet_first_is_cut_off() -> None:
    async with Seen(hello(Role.DECODE)) as seen:
        link = await open_link(seen.address, MESSAGES, TOKEN, LIMITS)
        await link.send(CANCEL)
        assert await link.receive() is None
        assert not seen.messages and not seen.server.peers
    async with Seen(hello(Role.DECODE), IMPATIENT) as seen:
        silent = await open_link(seen.address, MESSAGES, TOKEN, LIMITS)
        assert await asyncio.wait_for(silent.receive(), 30) is None
        assert not seen.messages and not seen.server.peers


async def test_a_message_for_another_role_ends_the_connection() -> None:
    async with Seen(hello(Role.DECODE)) as seen:
        peer = await introduce(seen.address, hello(Role.ROUTER, None), TOKEN, LIMITS)
        await peer.link.send(LoadReport(0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0))
        assert await peer.link.receive() is None
        await until(lambda: seen.left == ["router-0"])


async def test_introduce_says_what_is_wrong_at_the_other_end() -> None:
    with pytest.raises(ConnectionError):
        await introduce("tcp://127.0.0.1:1", hello(Role.PREFILL), TOKEN, LIMITS)

    async def listen(act) -> tuple[asyncio.Server, str]:
        server = await asyncio.start_server(act, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        return server, f"tcp://{host}:{port}"

    async def wrong(reader, writer) -> None:
        writer.write(FrameCodec(TOKEN, 1 << 20).encode(MESSAGES.encode(CANCEL)))

    server, address = await listen(wrong)
    with pytest.raises(WireError, match="expected Hello first, got Cancel"):
        await introduce(address, hello(Role.PREFILL), TOKEN, LIMITS)
    server.close()

    async def mute(reader, writer) -> None:
        await asyncio.sleep(60)

    server, address = await listen(mute)
    with pytest.raises(ConnectionError, match="did not greet in time"):
        await introduce(address, hello(Role.PREFILL), TOKEN, IMPATIENT)
    server.close()


async def test_a_peer_that_takes_nothing_is_cut_off_at_the_bound() -> None:
    limits = WireLimits(unsent_bytes=200_000)
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=here)
    peer = Peer(Link(reader, writer, MESSAGES, TOKEN, limits), hello(Role.ROUTER, None))
    message = Cancel(JobKey(RequestId("r"), 1), "x" * 10_000)
    posts = 0
    while not peer.link.closed and posts < 1000:
        peer.post(message)
        posts += 1
    # The kernel's buffers take some first; after the bound nothing more is kept.
    assert posts >= 20 and peer.link.closed
    peer.post(message)  # silently dropped
    there.close()
