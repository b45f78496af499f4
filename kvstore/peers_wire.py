"""Between two stores: messages, and a plain socket on which payloads follow them.

    asking store -> store   Fetch, Doubt
    store -> asking store   Offer, then the payloads of what it offers, in its order

Every message is a frame of `core.frames`: the cluster's tag is compared before anything is decoded.
Payloads are bare bytes, received where they belong. Blocking: used from threads of their own.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError, WireError
from headrace.core.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from headrace.core.frames import FrameCodec
from headrace.core.ids import DIGEST_BYTES
from headrace.core.limits import WireLimits
from headrace.core.link import parse_address
from headrace.core.wire import MessageTable
from headrace.kvstore.copies import offered_copies
from headrace.kvstore.layout import checksum
from headrace.kvstore.messages import cut_digests
from headrace.kvstore.objects import Entry
from headrace.kvstore.settings import Kind

MOST_OBJECTS = 1024  # of one Fetch
# Of an offered object: digest | block | payload bytes | checksum | written at | parent | domain
FACTS = struct.Struct("<32sIIQQ32s16s")
# The largest frames that either end has a use for; a peer that announces more is refused before
# anything is set aside for it. 256 bytes are room for a message's other fields.
ASK_BYTES = MOST_OBJECTS * 32 + 256
OFFER_BYTES = MOST_OBJECTS * (1 + FACTS.size) + 256
_VIEWS = 512  # of one sendmsg; the kernel takes 1,024
# The kernel takes twice this. What waits in larger ones has left the processor's cache when it is
# copied; while one transfer verifies, the other's keeps the sender busy.
_BUFFER_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Fetch:
    """Digests joined, 32 bytes each, at most `MOST_OBJECTS`. Blocks are a run of one chain."""

    call: int
    kind: Kind
    namespace: bytes
    digests: bytes


GONE = 0  # not here: a record that says so led astray
FOLLOWS = 1
STAYS = 2  # here, and not sent: behind a hole, or not to be had in the arena now


@dataclass(frozen=True, slots=True)
class Offer:
    """One byte a digest of Fetch: `FOLLOWS`, `STAYS` or `GONE`; and what the sender knows of those
    that follow, as `FACTS` one after another, with the checksum of all of them."""

    call: int
    kind: Kind
    namespace: bytes
    present: bytes
    facts: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """What was received under this digest did not verify. No answer: the sender looks itself."""

    kind: Kind
    namespace: bytes
    digest: bytes


PEER_MESSAGES = MessageTable({1: Fetch, 3: Doubt, 4: Offer})  # 2: headers in full, until then


class PeerGone(Exception):
    """The connection ended, was silent for too long, or spoke otherwise. Never leaves the room."""


class PeerSocket:
    """One connected TCP socket. Used by one thread at a time, except `abort`."""

    def __init__(
        self, sock: socket.socket, token: str, limits: WireLimits, most_bytes: int = ASK_BYTES
    ) -> None:
        """`most_bytes`: of a frame that is received."""
        self._sock = sock
        self._out = FrameCodec(token, limits.frame_bytes)
        self._in = FrameCodec(token, min(most_bytes, limits.frame_bytes))
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, name, _BUFFER_BYTES)
        # The kernel's own limits: with settimeout the socket would not block, and each receive
        # would take what is there instead of all.
        self._limit(socket.SO_SNDTIMEO, limits.send_s)
        self._silent_s = limits.send_s

    @staticmethod
    def connect(address: str, token: str, limits: WireLimits) -> PeerSocket:
        """Raises `PeerGone` when nobody answers at `address` within `connect_s`."""
        try:
            scheme, host, port = parse_address(address)
            if scheme != "tcp":
                raise PeerGone("a store listens to others on tcp")
            made = socket.create_connection((host, port), timeout=limits.connect_s)
        except (OSError, ConfigError) as error:
            raise PeerGone(f"no answer ({type(error).__name__})") from None
        return PeerSocket(made, token, limits, OFFER_BYTES)

    def send(self, message: Any, payloads: Sequence[memoryview] = ()) -> None:
        """Send a message and what follows it. Raises `PeerGone`."""
        frame = self._out.encode(PEER_MESSAGES.encode(message))
        views = [memoryview(frame), *payloads]
        try:
            while views:
                sent = self._sock.sendmsg(views[:_VIEWS])
                views = _rest(views, sent)
        except OSError as error:
            raise self._gone(error) from None

    def receive(self, *, idle: bool = False) -> Any:
        """The next message; None when the peer closed between two. With `idle` it may be as long
        in coming as it likes, once begun it may not. Raises `PeerGone`, and `WireError` for what
        is no frame of this cluster."""
        self._limit(socket.SO_RCVTIMEO, 0.0 if idle else self._silent_s)
        head = memoryview(bytearray(FRAME_HEADER_BYTES))
        got = self._receive(head)  # mostly all of it: each call costs a turn of this thread
        if not got:
            return None
        if idle:
            self._limit(socket.SO_RCVTIMEO, self._silent_s)
        self._fill(head[got:3])
        self._in.check_start(bytes(head[:3]))  # what is no frame is told by its first bytes
        self._fill(head[max(got, 3) :])
        body = bytearray(self._in.payload_bytes(bytes(head)))
        self._fill(memoryview(body))
        return PEER_MESSAGES.decode(bytes(body))

    def receive_into(self, dests: Sequence[memoryview]) -> int:
        """Fill `dests`, one after the other, with the bytes that follow: in as few calls as can be,
        since every return to Python may wait for another thread's turn. How many are full: all,
        unless the connection ended or was silent for too long; the others hold garbage."""
        left = list(dests)
        with contextlib.suppress(OSError):
            while left:
                part = self._sock.recvmsg_into(left[:_VIEWS], 0, socket.MSG_WAITALL)[0]
                if part == 0:
                    break
                left = _rest(left, part)
        return len(dests) - len(left)

    def _fill(self, dest: memoryview) -> None:
        got = 0
        while got < len(dest):
            part = self._receive(dest[got:], socket.MSG_WAITALL)
            if not part:
                raise PeerGone("the connection ended")
            got += part

    def _receive(self, dest: memoryview, flags: int = 0) -> int:
        try:
            return self._sock.recv_into(dest, 0, flags)
        except OSError as error:
            raise self._gone(error) from None

    def _limit(self, name: int, seconds: float) -> None:
        whole = int(seconds)
        with contextlib.suppress(OSError):  # closed meanwhile: the next call says so
            self._sock.setsockopt(
                socket.SOL_SOCKET, name, struct.pack("@ll", whole, int((seconds - whole) * 1e6))
            )

    def _gone(self, error: OSError) -> PeerGone:
        return PeerGone(type(error).__name__)

    def abort(self) -> None:
        """End it from any thread: whoever sends or receives gets `PeerGone` at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent; called by the thread that uses it."""
        self._sock.close()


def pack_facts(entry: Entry) -> bytes:
    """What an Offer says of one object."""
    facts = entry.facts
    return FACTS.pack(
        facts.digest,
        facts.block,
        facts.payload_bytes,
        entry.checksum,
        entry.written_at_s,
        facts.parent,
        facts.domain,
    )


def read_offer(offer: Offer, fetch: Fetch, most_bytes: int) -> list[Entry | None]:
    """What an offer says of each digest of its question: an entry that no state knows yet, or None
    for what does not follow. Raises `WireError` for an offer that does not fit its question or of
    an object of more than `most_bytes`."""
    if (
        (offer.call, offer.kind, offer.namespace) != (fetch.call, fetch.kind, fetch.namespace)
        or len(offer.present) * DIGEST_BYTES != len(fetch.digests)
        or offer.present.strip(bytes((GONE, FOLLOWS, STAYS)))
        or len(offer.facts) != FACTS.size * offer.present.count(FOLLOWS)
        or offer.checksum != checksum(offer.facts)
    ):
        raise WireError(f"an offer of {len(offer.facts)} bytes that does not fit its question")
    rows = list(FACTS.iter_unpack(offer.facts))
    asked = zip(cut_digests(fetch.digests), offer.present, strict=True)
    if [row[0] for row in rows] != [digest for digest, present in asked if present == FOLLOWS]:
        raise WireError("an offer of something that was not asked for")
    if not all(0 < row[2] <= most_bytes for row in rows):
        raise WireError("an offer of something that fits no slot")
    row = iter(rows)
    told = [next(row) if present == FOLLOWS else None for present in offer.present]
    return offered_copies(fetch.kind, fetch.namespace, told)


def refuse_odd_fetch(fetch: Fetch) -> None:
    """Raises `WireError` for lengths that are none."""
    count, rest = divmod(len(fetch.digests), 32)
    if rest or not 0 < count <= MOST_OBJECTS or len(fetch.namespace) != 32:
        raise WireError(
            f"Fetch names 1 to {MOST_OBJECTS} digests of 32 bytes, got {len(fetch.digests)} bytes"
        )


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of `views` after `moved` bytes."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
