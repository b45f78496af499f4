"""Other stores that die, stop, lie, are late, or are none: a miss each time, and nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from headrace.core.errors import ConfigError
from headrace.core.frames import FrameCodec
from headrace.core.ids import Digest
from headrace.core.limits import WireLimits
from headrace.kvstore import Kind, StoreClient
from headrace.kvstore.layout import NO_DIGEST, checksum
from headrace.kvstore.peers_wire import (
    FACTS,
    PEER_MESSAGES,
    Doubt,
    Fetch,
    Offer,
    PeerGone,
    PeerSocket,
)
from headrace.kvstore.records import (
    ARENA_SEGMENT,
    IndexRecord,
    LiveStore,
    digest_tail,
    record_key,
    store_key,
)
from headrace.kvstore.settings import Tier

TOKEN = "a cluster token of tests"
pytestmark = pytest.mark.fault


@pytest.fixture
def plain(valkey):
    client = redis.Redis.from_url(valkey.url)
    yield client
    client.close()


class FakePeer:
    """Another store as the index and the wire know it; `answer(fetch)` gives the raw answer."""

    number, epoch = 777, 4242

    def __init__(self, plain, things) -> None:
        self.plain, self.things = plain, things
        self.asked: list[Fetch] = []
        self.doubts: list[bool] = []  # whether what was doubted was listed when we were told
        self.answer = lambda fetch: b""
        self.pause_s = 0.0
        self.silent = threading.Event()  # accept and say nothing, until set
        self.silent.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def list(self, *numbers: int, size: int = 3000, **changes) -> None:
        host, port = self._listening.getsockname()
        live = LiveStore(self.epoch, 1, b"fakefake", f"tcp://{host}:{port}").pack()
        self.plain.set(store_key(self.number), live, px=60_000)
        for number in numbers:
            digest = self.things.digest(number)
            record = IndexRecord(
                self.number, Tier.HOST, Kind.KV, self.epoch, ARENA_SEGMENT, 0, 1, size, 5, 6,
                digest_tail(digest),
            )  # fmt: skip
            self.plain.set(
                record_key(Kind.KV, self.things.namespace, digest),
                replace(record, **changes).pack(),
            )

    def listed(self, number: int) -> bool:
        return self.stands(self.things.digest(number))

    def stands(self, digest: Digest) -> bool:
        return bool(self.plain.exists(record_key(Kind.KV, self.things.namespace, digest)))

    def facts(self, number: int, **changes) -> bytes:
        payload = self.things.payload(number)
        told = {
            "digest": self.things.digest(number),
            "block": number,
            "payload_bytes": len(payload),
            "checksum": checksum(payload),
            "written_at_s": 6,
            "parent": NO_DIGEST,
            "domain": bytes(16),
        }
        return FACTS.pack(*{**told, **changes}.values())

    def offer(self, call: int, present: bytes, facts: bytes, **changes) -> bytes:
        right = Offer(call, Kind.KV, self.things.namespace, present, facts, checksum(facts))
        return self.frame(replace(right, **changes))

    def frame(self, message) -> bytes:
        return FrameCodec(TOKEN, 1 << 20).encode(PEER_MESSAGES.encode(message))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                self._ends.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        peer = PeerSocket(sock, TOKEN, WireLimits())
        with contextlib.suppress(PeerGone, OSError):
            while (fetch := peer.receive(idle=True)) is not None:
                if isinstance(fetch, Doubt):
                    self.doubts.append(self.stands(Digest(fetch.digest)))
                if not isinstance(fetch, Fetch):
                    continue
                self.asked.append(fetch)
                self.silent.wait(20)
                time.sleep(self.pause_s)
                answer = self.answer(fetch)
                sock.sendall(answer)
                if not answer:
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.silent.set()
        self._listening.close()
        for sock in self._ends:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def fake(plain, things):
    made = FakePeer(plain, things)
    yield made
    made.close()


async def _nothing_held(client, when_idle) -> None:
    stat = await when_idle(client)
    assert stat.arena_free + stat.arena_resident == stat.arena_slots
    assert (stat.leased_objects, stat.reservations) == (0, 0)


async def test_a_fake_that_answers_rightly_is_believed(pair, things, fake):
    """The control: what the others below get wrong, and nothing else, is why they miss."""
    await pair.start()
    b = await pair.b.client()
    fake.list(0)
    fake.answer = lambda fetch: fake.offer(fetch.call, b"\1", fake.facts(0)) + things.payload(0)
    (place,) = await b.open_prefix([things.digest(0)], None)
    dest = bytearray(3000)
    assert b.read_into(place, things.digest(0), dest) and bytes(dest) == things.payload(0)


LIES = {
    "a bit of the payload": lambda f, t, c: (
        f.offer(c, b"\1", f.facts(0)) + bytes([t.payload(0)[0] ^ 1]) + t.payload(0)[1:]
    ),
    "another object's bytes": lambda f, t, c: f.offer(c, b"\1", f.facts(0)) + t.payload(1),
    "another object": lambda f, t, c: f.offer(c, b"\1", f.facts(1)) + t.payload(1),
    "another namespace": lambda f, t, c: (
        f.offer(c, b"\1", f.facts(0), namespace=bytes(32)) + t.payload(0)
    ),
    "another kind": lambda f, t, c: f.offer(c, b"\1", f.facts(0), kind=Kind.SWA) + t.payload(0),
    "longer than a slot": lambda f, t, c: (
        f.offer(c, b"\1", f.facts(0, payload_bytes=1 << 30)) + t.payload(0)
    ),
    "no length": lambda f, t, c: f.offer(c, b"\1", f.facts(0, payload_bytes=0)),
    "damaged facts": lambda f, t, c: (
        f.offer(c, b"\1", f.facts(0, block=7), checksum=checksum(f.facts(0))) + t.payload(0)
    ),
    "more facts than asked": lambda f, t, c: f.offer(c, b"\1\1", f.facts(0) * 2) + t.payload(0) * 2,
    "fewer facts than said": lambda f, t, c: f.offer(c, b"\1", b"") + t.payload(0),
    "an answer to another": lambda f, t, c: f.offer(c + 1, b"\1", f.facts(0)) + t.payload(0),
    "a strange mark": lambda f, t, c: f.offer(c, b"\7", f.facts(0)) + t.payload(0),
    "half a payload": lambda f, t, c: f.offer(c, b"\1", f.facts(0)) + t.payload(0)[:1000],
    "noise": lambda f, t, c: os.urandom(600),
    "a question": lambda f, t, c: f.frame(Fetch(c, Kind.KV, bytes(32), bytes(32))),
    "nothing": lambda f, t, c: b"",
}
COSTS_ITS_RECORD = {"a bit of the payload", "another object's bytes"}


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_lies_is_a_miss(pair, things, fake, when_idle, wait_until, lie):
    await pair.start()
    b = await pair.b.client()
    fake.list(0)
    fake.answer = lambda fetch: LIES[lie](fake, things, fetch.call)
    assert await b.open_prefix([things.digest(0)], things.lease()) == ()
    assert len(fake.asked) >= 1, "nobody was asked: no fault"
    stat = await b.stat()
    assert stat.peer_fetched == 0 and stat.peer_failed >= 1 and stat.blocks == 0
    await _nothing_held(b, when_idle)

    async def settled() -> bool:
        return fake.listed(0) != (lie in COSTS_ITS_RECORD)

    async def told() -> bool:
        return fake.doubts == [False]  # first the record, then its owner, who may list it anew

    await wait_until(settled)
    if lie in COSTS_ITS_RECORD:
        await wait_until(told)
    # The store serves on, and so does another peer.
    assert None not in await b.put(Kind.KV, things.blocks(5))


async def test_what_a_peer_has_not_costs_its_record(pair, things, fake, wait_until):
    """Compare-and-delete: a record that changed meanwhile stays."""
    await pair.start()
    b = await pair.b.client()
    fake.list(0, 1)

    def answer(fetch: Fetch) -> bytes:
        if things.digest(1) in fetch.digests:
            fake.list(1, generation=9)  # written anew while we asked
        return fake.offer(fetch.call, b"\0" * (len(fetch.digests) // 32), b"")

    fake.answer = answer
    assert await b.open_prefix([things.digest(0), things.digest(1)], None) == ()

    async def gone() -> bool:
        return not fake.listed(0)

    await wait_until(gone)
    assert fake.listed(1)
    assert (await b.stat()).peer_failed == 2


async def test_a_record_of_an_earlier_life_is_not_asked_for(pair, things, fake):
    await pair.start()
    b = await pair.b.client()
    fake.list(0, epoch=fake.epoch - 1)
    assert await b.open_prefix([things.digest(0)], None) == ()
    assert not fake.asked


async def test_no_longer_than_computing_it_would_take(pair, things, fake, when_idle):
    """Four blocks at 250 tokens a second are two seconds, whatever the peer does."""
    await pair.start(recompute_tokens_per_s=250.0)
    b = await pair.b.client()
    fake.list(*range(4))
    fake.silent.clear()
    began_s = time.monotonic()
    assert await b.open_prefix([things.digest(n) for n in range(4)], None) == ()
    took_s = time.monotonic() - began_s
    assert len(fake.asked) == 1 and took_s >= 2.0
    assert took_s < 8.0  # not the 10 s of the wire
    await _nothing_held(b, when_idle)
    assert (await b.stat()).peer_failed >= 4


async def test_slots_come_back_only_when_the_transfer_has_let_go(pair, things, fake, when_idle):
    """Late bytes must not land in somebody else's object."""
    await pair.start(recompute_tokens_per_s=200.0)
    b = await pair.b.client()
    fake.list(0)
    sent = threading.Event()

    def answer(fetch: Fetch) -> bytes:
        sent.set()
        return fake.offer(fetch.call, b"\1", fake.facts(0)) + things.payload(0)[:2000]

    fake.answer = answer
    assert await b.open_prefix([things.digest(0)], None) == ()
    assert sent.is_set()
    slots = (await when_idle(b)).arena_slots
    numbers = range(100, 100 + slots)
    places = []
    for number in numbers:  # whatever slot that was, it is somebody's now
        places += await b.put(Kind.KV, things.blocks(number))
    for sock in fake._ends:
        with contextlib.suppress(OSError):
            sock.sendall(things.payload(0)[2000:] + b"\xff" * 5000)
    await asyncio.sleep(0.05)
    dest = bytearray(3000)
    good = 0
    for number, place in zip(numbers, places, strict=True):
        if place is not None and b.read_into(place, things.digest(number), dest):
            assert bytes(dest) == things.payload(number)
            good += 1
    assert good > 0 and (await b.stat()).damaged == 0


async def test_after_three_failures_a_peer_is_left_alone(pair, things, fake):
    await pair.start()
    b = await pair.b.client()
    fake.list(*range(20))
    for number in range(20):
        assert await b.open_prefix([things.digest(number)], None) == ()
    assert len(fake.asked) == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_other_store_dies_or_stops(
    pair, things, start_process, valkey, home, wait_until, when_idle, how
):
    """A third store in a process of its own, gone while its records still stand."""
    await pair.start(recompute_tokens_per_s=400.0)
    b = await pair.b.client()
    other = start_process(valkey.url, peer_listen="tcp://127.0.0.1:0")
    third = StoreClient(f"unix://{home}/store.sock", TOKEN, things.namespace)
    assert await third.connect(10)
    await third.put(Kind.KV, things.blocks(*range(8)))
    await pair.listed(third)
    digests = [things.digest(n) for n in range(8)]
    assert len(await b.open_prefix(digests[:4], None)) == 4
    await third.close()
    os.kill(other.pid, how)
    if how is signal.SIGKILL:
        other.process.wait(10)
    else:

        async def stopped() -> bool:
            stat = Path(f"/proc/{other.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"

        await wait_until(stopped, "state T")
    began_s = time.monotonic()
    places = await b.open_prefix(digests, None)
    assert len(places) == 4 and time.monotonic() - began_s < 5.0
    await when_idle(b)


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(64),
        FrameCodec("another cluster", 1 << 20).encode(
            PEER_MESSAGES.encode(Fetch(1, Kind.KV, bytes(32), bytes(32)))
        ),
        FrameCodec(TOKEN, 1 << 20).encode(
            PEER_MESSAGES.encode(Fetch(1, Kind.KV, bytes(31), bytes(32)))
        ),
        FrameCodec(TOKEN, 1 << 20).encode(
            PEER_MESSAGES.encode(Fetch(1, Kind.KV, bytes(32), bytes(33)))
        ),
        FrameCodec(TOKEN, 1 << 20).encode(PEER_MESSAGES.encode(Fetch(1, Kind.KV, bytes(32), b""))),
        FrameCodec(TOKEN, 1 << 20).encode(
            PEER_MESSAGES.encode(Offer(1, Kind.KV, bytes(32), b"", b"", 0))
        ),
        FrameCodec(TOKEN, 1 << 20).encode(b"\xc1"),
    ],
    ids=["http", "noise", "token", "namespace", "digests", "none", "offer", "msgpack"],
)
async def test_who_does_not_speak_rightly_is_cut_off(pair, things, wait_until, frame):
    """H3, H4: closed, counted, and the others are served."""
    await pair.start()
    a, b = await pair.clients()
    await a.put(Kind.KV, things.blocks(0))
    await pair.listed(a)
    client = redis.Redis.from_url(pair.a.role.redis_url)
    lives = [LiveStore.unpack(client.get(key)) for key in client.keys("kv:store:*")]
    client.close()
    for live in lives:
        host, _, port = live.address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frame)
        with contextlib.suppress(ConnectionResetError):  # what was not read ends it so
            assert await asyncio.wait_for(reader.read(), 15) == b""  # nothing but the end
        writer.close()
    assert len(await b.open_prefix([things.digest(0)], None)) == 1


async def test_an_address_that_cannot_be_had_is_said_at_start(pair):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="peer_listen: .* cannot be had"):
            await pair.a.start(peer_listen=f"tcp://127.0.0.1:{port}")
        pair.a.task = None
    with pytest.raises(ConfigError, match="peer_listen must be tcp"):
        await pair.b.start(peer_listen="unix:///tmp/x")
    pair.b.task = None
