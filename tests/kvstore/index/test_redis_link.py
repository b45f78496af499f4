"""Calls to Redis end in time and never get another call's answer."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.core.clock import SYSTEM_CLOCK, FakeClock
from headrace.core.errors import ConfigError
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.redis_link import RedisAway, RedisLink, WrongType


class Peer:
    """Speaks enough of the protocol to be slow, wrong or gone. Answers GET with the key's name."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.answer = b""  # instead of the right one
        self.hang_up = False
        self.asked: list[bytes] = []
        self.server: asyncio.Server | None = None

    async def start(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        return f"redis://{host}:{port}/0"

    async def serve(self, reader, writer) -> None:
        try:
            while line := await reader.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    parts.append((await reader.readexactly(size + 2))[:-2])
                if parts[0] != b"GET":
                    writer.write(b"+OK\r\n")
                    continue
                self.asked.append(parts[1])
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                right = b"$%d\r\n%s\r\n" % (len(parts[1]), parts[1])
                writer.write(self.answer or right)
                if self.hang_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@pytest.mark.fault
async def test_a_loop_that_stood_still_does_not_take_redis_for_silent(shared_valkey):
    link = RedisLink(shared_valkey.url, 0.5, SYSTEM_CLOCK)

    async def stall(client) -> bytes | None:
        began_s = time.monotonic()
        time.sleep(1.0)
        assert time.monotonic() - began_s > link.deadline_s
        return await client.get(b"nothing")

    assert await link.call(stall) is None
    assert link.errors == 0
    await link.close()


@pytest.fixture
async def peer():
    made = Peer()
    yield made
    if made.server is not None:
        made.server.close()


async def get(link: RedisLink, key: str) -> bytes:
    return await link.call(lambda client: client.get(key))


async def test_a_late_answer_is_not_the_next_calls(peer):
    link = RedisLink(await peer.start(), 1.0, SYSTEM_CLOCK)
    assert await get(link, "a") == b"a" and link.healthy
    peer.delay_s = 1.5
    with pytest.raises(RedisAway, match="TimeoutError"):
        await get(link, "b")
    assert not link.healthy and link.errors == 1
    peer.delay_s = 0.0
    for number in range(20):
        assert await get(link, f"c{number}") == b"c%d" % number
        await asyncio.sleep(0.05)  # the late answer to b falls in here
    await link.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"$100\r\nhalf",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"?nonsense\r\n",
        b"\r\n\r\n",
    ],
    ids=["reset", "loading", "readonly", "noauth", "full", "nonsense", "empty"],
)
async def test_whatever_comes_back_is_away_and_the_next_call_is_right(peer, answer):
    link = RedisLink(await peer.start(), 5.0, SYSTEM_CLOCK)
    peer.answer, peer.hang_up = answer, not answer.startswith(b"-")
    with pytest.raises(RedisAway):
        await get(link, "a")
    peer.answer, peer.hang_up = b"", False
    assert await get(link, "b") == b"b" and link.healthy and link.errors == 1
    await link.close()


async def test_a_wrong_type_is_told_apart_and_costs_no_breaker(peer):
    link = RedisLink(await peer.start(), 5.0, SYSTEM_CLOCK)
    peer.answer = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    for _ in range(5):
        with pytest.raises(WrongType):
            await get(link, "a")
    peer.answer = b""
    assert await get(link, "b") == b"b"
    await link.close()


async def test_after_three_failures_nothing_is_asked_for_a_while(peer):
    clock = FakeClock()
    link = RedisLink(await peer.start(), 1.0, clock)
    assert await get(link, "a") == b"a"
    peer.delay_s = 1.5
    for _ in range(3):
        with pytest.raises(RedisAway, match="TimeoutError"):
            await get(link, "a")
    asked = len(peer.asked)
    for _ in range(10):
        with pytest.raises(RedisAway, match="breaker"):
            await get(link, "b")
    assert (len(peer.asked), link.errors, link.refused_by_breaker) == (asked, 3, 10)
    clock.advance(1.01)
    with pytest.raises(RedisAway, match="TimeoutError"):  # the one trial
        await get(link, "a")
    with pytest.raises(RedisAway, match="breaker"):
        await get(link, "a")
    clock.advance(1.01)
    peer.delay_s = 0.0
    assert await get(link, "b") == b"b"
    assert await get(link, "c") == b"c"
    await link.close()


async def test_a_cancelled_call_ends_its_task(peer):
    link = RedisLink(await peer.start(), 5.0, SYSTEM_CLOCK)
    peer.delay_s = 3.0
    for pause_s in (0.0, 0.001, 0.02):
        task = asyncio.create_task(get(link, "a"))
        await asyncio.sleep(pause_s)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30.0)
        assert done and task.cancelled()
    peer.delay_s = 0.0
    assert await get(link, "b") == b"b"
    await link.close()


async def test_nobody_at_the_address_is_away():
    link = RedisLink("unix:///tmp/no-such-socket", 0.05, SYSTEM_CLOCK)
    with pytest.raises(RedisAway):
        await get(link, "a")
    await link.close()
    with pytest.raises(ConfigError, match="redis_url cannot be used"):
        RedisLink("http://x", 0.05, SYSTEM_CLOCK)


def test_a_breaker_lets_one_try_through_a_rest():
    clock = FakeClock()
    breaker = Breaker(clock, failures=2, rest_s=1.0)
    breaker.failure()
    assert breaker.admits()
    breaker.failure()
    assert not breaker.admits()
    clock.advance(1.0)
    assert [breaker.admits(), breaker.admits()] == [True, False]
    clock.advance(1.0)
    assert breaker.admits()
    breaker.success()
    assert breaker.admits() and breaker.admits()
