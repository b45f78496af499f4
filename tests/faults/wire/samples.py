"""One healthy message of every kind, and ways to spoil frames of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgpack

from headrace.core.card import ModelCard, Role
from headrace.core.chain import as_token_ids
from headrace.core.frames import FrameCodec
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.images import ImageSpan
from headrace.core.messages import (
    MESSAGES,
    BindDecode,
    BlocksReady,
    Cancel,
    DecodeJob,
    HandoffAck,
    Hello,
    JobFailed,
    LoadReport,
    Place,
    PrefillDone,
    PrefillJob,
    PrefillProgress,
    StageTimes,
    StateReady,
    TokenBatch,
    TokenItem,
    VisionDone,
    VisionJob,
    WindowReady,
)
from headrace.core.request import FinishReason, GenRequest, HandoffMode, Sampling

KEY = JobKey(RequestId("ab" * 16), 2)
DIGEST = Digest(b"d" * 32)
PLACE = Place(BootId("s" * 16), 4096, 17920, 1, 2**64 - 1)
CARD = ModelCard(
    "t1", "w", b"\1" * 32, "invariant-fp64", 4096, 4096, 32, 6, 6, 17920, 12276, 0, 1, 9
)
REQUEST = GenRequest(
    KEY.request_id, 2, as_token_ids(range(200)), Digest(b"r" * 32), (DIGEST,), 44, 16,
    Sampling(0.7, 0.9, 5), (1,), HandoffMode.EXACT, "tenant-a", 30.0,
    (ImageSpan(10, 3, DIGEST),), DIGEST,
)  # fmt: skip
MESSAGES_OF_ALL_KINDS = [
    Hello(Role.DECODE, "decode-0", BootId("b" * 16), "dev", CARD),
    DecodeJob(REQUEST, as_token_ids([5, 6]), True, "prefill-0", 7),
    Cancel(KEY, "client gone"),
    BlocksReady(KEY, 3, (DIGEST,), (PLACE,)),
    WindowReady(KEY, 128, DIGEST, PLACE),
    StateReady(KEY, 200, DIGEST, PLACE, 7, 1),
    PrefillDone(KEY, 128, 0, 0.5),
    JobFailed(KEY, "replica_lost", "gone", True),
    HandoffAck(KEY),
    TokenBatch((TokenItem(KEY, 0, (1, 2), FinishReason.STOP, StageTimes(load_s=0.5)),)),
    LoadReport(1, 2, 3, 4, 5, 6, 7, 8, 9.5, 10),
    VisionJob(KEY, DIGEST, b"\x89PNG", 12, 1),
    VisionDone(KEY, DIGEST, True, 0.1),
    PrefillProgress(KEY, 128, True),
    BindDecode(KEY, 3, "tcp://127.0.0.1:1", "decode-0"),
]
JOBS = (DecodeJob, PrefillJob, VisionJob)  # what makes a role begin something


def _made(kind: type[Any]) -> Any:
    """A message from values of its fields' types."""
    values = {"request": REQUEST, "str": "tcp://127.0.0.1:1", "int": 1, "bool": True}
    return kind(*(values.get(field.name, values.get(field.type)) for field in fields(kind)))


MESSAGES_OF_ALL_KINDS.append(_made(PrefillJob))
HOSTILE = (-1, 0, 1, 2**31, 2**63 - 1, -(2**63), 0.0, -1e308, 1e308, "", "\0" * 300, b"", b"x" * 33)
RAW = {
    "nothing": b"",
    "an extension": msgpack.packb([4, msgpack.ExtType(5, b"x"), "r"]),
    "a thousand deep": b"\x91" * 1000 + b"\xc0",
    "a thousand deep and wide": b"\xdd\x00\x10\x00\x00" * 1000,
    "a huge promise": b"\xdd\xff\xff\xff\xff",
    "a map": msgpack.packb({"kind": 4}),
    "an unknown kind": msgpack.packb([99, 1, 2]),
    "a true kind": msgpack.packb([True, 1]),
    "two messages": MESSAGES.encode(Cancel(KEY, "a")) * 2,
    "not a number": MESSAGES.encode(PrefillDone(KEY, 1, 0, float("nan"))),
}


def spoiled(draw: random.Random) -> bytes:
    """A payload with a few bytes changed, cut off, doubled or put in."""
    data = bytearray(MESSAGES.encode(draw.choice(MESSAGES_OF_ALL_KINDS)))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data)) if data else 0
        match draw.randrange(4):
            case 0 if data:
                data[at] = draw.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 9))
            case _:
                data[at:at] = data[at : at + draw.randint(1, 40)]
    return bytes(data)


def twisted(draw: random.Random, message: Any) -> bytes:
    """The message with one value, somewhere in it, of another size or type."""
    values = msgpack.unpackb(MESSAGES.encode(message))
    inner = values
    at = draw.randrange(1, len(inner))
    while isinstance(inner[at], list) and inner[at] and draw.random() < 0.8:
        inner = inner[at]
        at = draw.randrange(len(inner))
    inner[at] = draw.choice(HOSTILE)
    return bytes(msgpack.packb(values))


def bad_frames(codec: FrameCodec, other: FrameCodec) -> Iterator[tuple[str, bytes]]:
    """Whole frames that must not be decoded, by name."""
    healthy = codec.encode(MESSAGES.encode(Cancel(KEY, "x")))
    yield "wrong token", other.encode(MESSAGES.encode(Cancel(KEY, "x")))
    yield "no token", healthy[:8] + bytes(16) + healthy[24:]
    yield "wrong version", healthy[:2] + b"\x09" + healthy[3:]
    yield "flags", healthy[:3] + b"\x01" + healthy[4:]
    yield "oversized", healthy[:4] + (2**32 - 1).to_bytes(4, "little") + healthy[8:]
    yield "HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    for name, payload in RAW.items():
        yield name, codec.encode(payload)
