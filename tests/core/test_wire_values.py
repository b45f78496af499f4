"""Values of the right type that are of no use, and handlers that fail."""

from __future__ import annotations

import math
import time

import msgpack
import pytest

from headrace.core.card import Role
from headrace.core.errors import InvalidRequest, WireError
from headrace.core.ids import BootId, JobKey, RequestId
from headrace.core.limits import WireLimits
from headrace.core.messages import (
    MESSAGES,
    Cancel,
    Drain,
    HandoffAck,
    Hello,
    JobFailed,
    LoadReport,
    PrefillDone,
)
from headrace.core.peers import Peer, PeerServer, introduce

TOKEN = "t" * 32
KEY = JobKey(RequestId("r" * 32), 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_with_its_field(value: float) -> None:
    """A timer set to NaN spoils the order of all timers of its loop."""
    with pytest.raises(WireError, match=r"Drain\.grace_s: expected a finite number"):
        MESSAGES.decode(MESSAGES.encode(Drain(value)))
    with pytest.raises(WireError, match=r"PrefillDone\.run_s"):
        MESSAGES.decode(MESSAGES.encode(PrefillDone(KEY, 1, 1, value)))


@pytest.mark.parametrize("deadline_s", [-1.0, math.nan, math.inf])
def test_a_request_has_a_deadline(deadline_s: float) -> None:
    from dataclasses import replace

    from headrace.core.chain import as_token_ids
    from headrace.core.ids import Digest
    from headrace.core.request import GenRequest, HandoffMode, Sampling

    ids = as_token_ids([5])
    good = GenRequest(
        KEY.request_id, 0, ids, Digest(bytes(32)), (), 44, 1, Sampling(), (), HandoffMode.EXACT,
        "d", 1.0,
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="deadline_s must be at least 0 seconds"):
        replace(good, deadline_s=deadline_s)


def test_nested_promises_of_many_items_cost_what_their_bytes_cost() -> None:
    """A thousand headers of a million items each: 5 kB. CPU seconds of this thread, since the
    machine may be busy; without the bound it took 0.7 of them."""
    payload = b"\xdd\x00\x10\x00\x00" * 1000
    began_s = time.thread_time()
    for _ in range(10):
        with pytest.raises(WireError):
            MESSAGES.decode(payload)
    assert time.thread_time() - began_s < 2.0
    # The control: as many items as there are bytes for are read.
    deep = msgpack.packb([4, [[0] * 3000], "x"])
    with pytest.raises(WireError, match="Cancel"):
        MESSAGES.decode(deep)


async def test_a_handler_that_raises_ends_its_job_and_keeps_the_connection() -> None:
    seen: list[object] = []

    def handle(peer: Peer, message: Cancel) -> None:
        if message.reason == "bad":
            raise RuntimeError("a bug")
        seen.append(message)

    def refuse(peer: Peer, message: HandoffAck) -> None:
        raise WireError("not now")

    server = PeerServer(
        lambda: Hello(Role.DECODE, "decode-0", BootId("b"), "test", None),
        {Cancel: handle, HandoffAck: refuse},
        lambda peer: None,
        TOKEN,
        WireLimits(),
    )
    address = await server.listen("tcp://127.0.0.1:0")
    mine = Hello(Role.ROUTER, "router-0", BootId("r"), "test", None)
    peer = await introduce(address, mine, TOKEN, WireLimits())
    await peer.link.send(Cancel(KEY, "bad"))
    assert await peer.link.receive() == JobFailed(KEY, "internal_error", "internal error", False)
    await peer.link.send(Cancel(KEY, "good"))
    await peer.link.send(HandoffAck(KEY))
    assert await peer.link.receive() is None
    assert seen == [Cancel(KEY, "good")]
    assert (server.failed, server.refused) == (1, 1)
    # A message for another role is refused and counted likewise.
    peer = await introduce(address, mine, TOKEN, WireLimits())
    await peer.link.send(LoadReport(0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0))
    assert await peer.link.receive() is None
    assert (server.failed, server.refused) == (1, 2)
    await server.close()
