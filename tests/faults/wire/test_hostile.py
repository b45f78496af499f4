"""Bytes that no peer of ours sends (H3, H4), and places that no store gave (H5): the connection is
closed and counted, or the announcement is of no use, and every role lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.core.card import Role
from headrace.core.errors import WireError
from headrace.core.frames import HEADER_BYTES, FrameCodec
from headrace.core.ids import BootId
from headrace.core.limits import WireLimits
from headrace.core.link import parse_address
from headrace.core.messages import (
    MESSAGES,
    BlocksReady,
    Hello,
    LoadReport,
    PrefillDone,
    WindowReady,
)
from headrace.core.peers import introduce
from headrace.core.rows import record_position
from headrace.core.states import ReplicaState
from headrace.vision import VisionReplica, VisionSettings

MODEL = "toy"
pytestmark = pytest.mark.fault
on_one_loop = pytest.mark.asyncio(loop_scope="module")
CASES = 10_000
SEED = 20261130
CAP = WireLimits().frame_bytes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def targets(service: Any, roles: Any) -> AsyncIterator[dict[str, Any]]:
    """Every role that listens to others, by its pool."""
    vision = VisionReplica(roles("vision-0"), VisionSettings())
    await vision.start()
    cluster = service.cluster
    yield {"prefill": cluster.prefill, "decode": cluster.decodes[0], "vision": vision}
    await vision.close()


@pytest.fixture(scope="module", params=["prefill", "decode", "vision"])
def target(request: pytest.FixtureRequest, targets: dict[str, Any]) -> Any:
    return targets[request.param]


class Stranger:
    """A raw connection to a role, past its proxy."""

    def __init__(self, service: Any, replica: Any) -> None:
        name = replica.role.name
        proxied = service.proxies.get(name)
        self._address = proxied.target if proxied else replica.shell.address
        self.codec = FrameCodec(replica.role.token, CAP)
        self._hello = Hello(Role.ROUTER, "router-9", BootId("x"), "test", None)

    async def say(self, *frames: bytes, greet: bool = True) -> list[Any]:
        """Send, and read until the role closes; what it said beside its Hello and its load."""
        _, host, port = parse_address(self._address)
        async with asyncio.timeout(15):
            reader, writer = await asyncio.open_connection(host, port)
            if greet:
                writer.write(self.codec.encode(MESSAGES.encode(self._hello)))
                header = await reader.readexactly(HEADER_BYTES)
                await reader.readexactly(self.codec.payload_bytes(header))
            for frame in frames:
                writer.write(frame)
            try:
                rest = await reader.read()
            except ConnectionError:
                rest = b""
            writer.transport.abort()
        said = []
        while len(rest) >= HEADER_BYTES:
            end = HEADER_BYTES + self.codec.payload_bytes(rest[:HEADER_BYTES])
            said.append(MESSAGES.decode(rest[HEADER_BYTES:end]))
            rest = rest[end:]
        return [message for message in said if not isinstance(message, LoadReport)]


def test_ten_thousand_spoiled_messages_are_messages_or_wire_errors(samples: Any) -> None:
    draw = random.Random(SEED)
    refused = 0
    for number in range(CASES):
        message = draw.choice(samples.MESSAGES_OF_ALL_KINDS)
        payload = samples.twisted(draw, message) if number % 2 else samples.spoiled(draw)
        try:
            again = MESSAGES.encode(MESSAGES.decode(payload))
        except WireError as error:
            assert len(error.message) < 300
            refused += 1
        else:
            assert MESSAGES.encode(MESSAGES.decode(again)) == again
    assert CASES * 0.5 < refused < CASES, refused


@on_one_loop
async def test_bad_frames_close_their_connection_and_are_counted(
    service: Any, samples: Any, target: Any
) -> None:
    """H4: with a wrong token nothing is decoded, or the payload would not matter."""
    stranger, server = Stranger(service, target), target.shell.server
    other = FrameCodec("another token of the same length.", CAP)
    for greet in (True, False):
        for name, frame in samples.bad_frames(stranger.codec, other):
            before, peers = server.refused, len(server.peers)
            assert await stranger.say(frame, greet=greet) == [], name
            assert (server.refused, len(server.peers)) == (before + 1, peers), name
    # The header alone ends it: no byte of the payload is waited for.
    before = server.refused
    assert await stranger.say(other.encode(b"x" * 100)[:HEADER_BYTES]) == []
    assert server.refused == before + 1
    await service.pulse()


@on_one_loop
async def test_spoiled_messages_over_a_socket_leave_the_role_alive(
    service: Any, samples: Any, target: Any
) -> None:
    """Behind a good greeting. What decodes is for this role or not; neither ends more than its
    connection, and what the spoiled jobs began is given back when their router leaves."""
    stranger, server = Stranger(service, target), target.shell.server
    draw, counted, gone = random.Random(SEED + 1), server.refused, server.failed
    end = stranger.codec.encode(b"\xc1")  # so that the role closes in any case
    jobs = [m for m in samples.MESSAGES_OF_ALL_KINDS if isinstance(m, samples.JOBS)]
    for number in range(160):
        message = draw.choice(jobs if number % 2 else samples.MESSAGES_OF_ALL_KINDS[1:])
        twist = samples.twisted(draw, message) if number % 3 else samples.spoiled(draw)
        await stranger.say(stranger.codec.encode(twist), end)
    assert server.refused == counted + 160
    assert server.failed == gone, "a handler raised"
    assert target.shell.state is ReplicaState.READY
    await service.pulse()


@on_one_loop
async def test_a_handler_that_fails_harms_one_job(
    service: Any, prompt: Any, monkeypatch: Any
) -> None:
    """P4, in the place where it would hurt most: the loop that reads a router's link."""
    decode = service.cluster.decodes[0]
    runs = asyncio.create_task(service.check(prompt(40, "goes on"), 60))
    request = service.cluster.request(prompt(40, "harmful"))
    accept = decode.work.accept

    def failing(router: Any, message: Any) -> None:
        if message.request.key == request.key:
            raise RuntimeError("a bug")
        accept(router, message)

    monkeypatch.setattr(decode.work, "accept", failing)
    failed = await (await service.cluster.local(request)).failure()
    assert (failed.code, failed.message, failed.retryable) == (
        "internal_error", "internal error", False,
    )  # fmt: skip
    assert decode.shell.server.failed == 1
    assert not service.cluster.to_decode[0].link.closed
    await runs
    await service.pulse()


@pytest.mark.parametrize(
    "change",
    [
        *({"offset": -1}, {"offset": 2**62}, {"payload_bytes": -1}, {"payload_bytes": 2**40}),
        *({"generation": -1}, {"checksum": 0}, {"store": BootId("of another store")}),
        "overlapping",
        "of another block",
    ],
    ids=str,
)
@on_one_loop
async def test_places_that_no_store_gave_are_of_no_use(
    service: Any, prompt: Any, change: Any
) -> None:
    """Decode writes only into blocks that it chose itself, and only what verifies. Places of
    another store say nothing here: decode asks its own store for the digests, which has them."""
    cluster, decode = service.cluster, service.cluster.decodes[0]
    ids, domain = prompt(300, "places"), f"places {change}"
    # Places as a store gives them, of this very prompt: by way of the other decode replica.
    request = cluster.request(ids, domain=domain)
    await (await cluster.local(request, decode=1)).result()
    await cluster.at_rest(5.0)
    await cluster.written()
    places = await cluster.prefill.store.open_prefix(request.digests, None)
    assert len(places) == 2
    if change == "overlapping":
        wrong = (places[0], replace(places[0], offset=places[0].offset + 64))
    elif change == "of another block":
        wrong = (places[1], places[0])
    else:
        wrong = tuple(replace(place, **change) for place in places)
    beside = asyncio.create_task(service.check(prompt(60, "beside"), 30))
    liar = await introduce(
        service.proxies["decode-0"].target,
        Hello(Role.PREFILL, "prefill-9", BootId("y"), "test", cluster.card),
        decode.role.token,
        WireLimits(),
    )
    counts = decode.work.counts
    damaged, fetched = counts.damaged, counts.fetched_blocks
    again = cluster.request(ids, domain=domain)
    call = await cluster.router.send(again, cluster.to_decode[0], prefill_name="prefill-9")
    p = record_position(300, again.keep_tokens)
    await liar.link.send(BlocksReady(again.key, 0, again.digests, wrong))
    if p:
        await liar.link.send(WindowReady(again.key, p, request.digests[0], wrong[0]))
    await liar.link.send(PrefillDone(again.key, 0, 0, 0.0))
    assert await call.result() == await service.yardstick.text(ids, 8)
    elsewhere = "store" in change if isinstance(change, dict) else False
    good = 2 if elsewhere else 1 if change == "overlapping" else 0
    assert counts.damaged == damaged + 2 - good
    assert counts.fetched_blocks == fetched + 2 * elsewhere
    assert call.times.hit_tokens == 128 * good
    liar.link.abort()
    await beside
    await cluster.at_rest(5.0)


def test_every_kind_of_message_is_spoiled(samples: Any, root: Path) -> None:
    kinds = {type(message) for message in samples.MESSAGES_OF_ALL_KINDS}
    left = {cls.__name__ for cls in MESSAGES.classes() if cls not in kinds}
    assert left == {"Drain"}  # which would end the role
