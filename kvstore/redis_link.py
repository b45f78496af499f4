"""Calls to Redis that end in time: one deadline, no retries, and a breaker.

Everything in Redis is soft state, so a caller has one
question: was this answered? `RedisAway` says no and why; nothing else leaves `RedisLink.call`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from headrace.core.clock import Clock
from headrace.kvstore.breaker import Breaker
from headrace.kvstore.redis_servers import Client, RedisServers

log = logging.getLogger(__name__)
T = TypeVar("T")


class RedisAway(Exception):
    """No answer in time, a refusal, or a breaker that is open. Never leaves the room."""


class WrongType(RedisAway):
    """A key of ours holds something else; the caller may replace it."""


class RedisLink:
    """The Redis of `url` (`redis_servers`): one server, replicas or a cluster. `healthy` tells how
    the last call that was made ended.

    In a cluster a command may name keys of one hash slot only: `get_many` and `script_each` group
    theirs by slot, and go to all shards at once."""

    def __init__(self, url: str, deadline_s: float, clock: Clock) -> None:
        self.deadline_s = deadline_s
        self.healthy = False
        self.errors = 0
        self.refused_by_breaker = 0
        self._breaker = Breaker(clock)
        self._said = False
        self._servers = RedisServers(url, deadline_s)

    async def call(
        self, use: Callable[[Client], Awaitable[T]], deadline_s: float | None = None
    ) -> T:
        """The result of `use(client)` within the deadline; if this loop stood still when it passed,
        so much later, at most twice of it. Raises `RedisAway`."""
        if not self._breaker.admits():
            self.refused_by_breaker += 1
            raise RedisAway("the breaker is open")
        limit_s = self.deadline_s if deadline_s is None else min(deadline_s, self.deadline_s)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                alarm = loop.call_later(limit_s, _end, limit, loop.time() + limit_s, limit_s)
                try:
                    result = await use(self._servers.client)
                finally:
                    alarm.cancel()
        except ResponseError as error:
            if "WRONGTYPE" in str(error):  # a pipeline puts the command before it
                self._breaker.success()
                raise WrongType(str(error)) from None
            raise self._failed(error) from None
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            raise self._failed(error) from None
        except Exception as error:
            # A client library that stumbles over an answer must not take a store or a router down.
            log.exception("a call to Redis failed in an unforeseen way")
            raise self._failed(error) from None
        self._breaker.success()
        self.healthy = True
        self._said = False
        return result

    async def mget_packed(
        self, count: int, keys: bytes, deadline_s: float | None = None
    ) -> list[bytes | None]:
        """Values of `count` keys that are packed one after another as the protocol has them.
        Raises `RedisAway`."""
        if self._servers.cluster:
            return await self.get_many(_unpacked(keys), deadline_s)

        async def ask(client: Client) -> list[bytes | None]:
            answer = await _asked(client, b"*%d\r\n$4\r\nMGET\r\n" % (count + 1) + keys)
            if not isinstance(answer, list) or len(answer) != count:
                raise ResponseError("MGET did not answer with a value a key")
            return answer

        return await self.call(ask, deadline_s)

    async def get_many(
        self, keys: Sequence[bytes], deadline_s: float | None = None
    ) -> list[bytes | None]:
        """Values in the order of `keys`; None for a key that is not there or of another type.
        Raises `RedisAway`."""
        if not keys:
            return []

        async def ask(client: Client) -> list[bytes | None]:
            if not self._servers.cluster:
                return list(await client.mget(keys))
            async with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.get(key)
                answers = await pipe.execute(raise_on_error=False)
            return [_value(answer) for answer in answers]

        return await self.call(ask, deadline_s)

    async def script(self, lua: str, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a short script over `keys`, of one hash slot. Raises `RedisAway`."""
        return await self.call(lambda client: client.eval(lua, len(keys), *keys, *args))

    async def script_each(
        self,
        lua: str,
        keys: Sequence[bytes],
        shared: Sequence[bytes | int],
        each: Sequence[bytes] = (),
    ) -> list[Any]:
        """Run a script that does the same with every key: ARGV is `shared`, then, if there is
        `each`, one argument a key. Its answers in the order of the keys, if it answers with a list.
        Raises `RedisAway`; what was done until then stays done."""

        async def run(client: Client) -> list[Any]:
            if not self._servers.cluster:
                n_words = 3 + len(keys) + len(shared) + len(each)
                head = b"*%d\r\n$4\r\nEVAL\r\n" % n_words
                before = _packed((lua.encode(), b"%d" % len(keys)))
                rest = _packed(keys), _packed(list(map(_word, shared))), _packed(each)
                answer = await _asked(client, b"".join((head, before, *rest)))
                return answer if isinstance(answer, list) else []
            groups: dict[int, list[int]] = {}
            for index, key in enumerate(keys):
                groups.setdefault(client.keyslot(key), []).append(index)
            async with client.pipeline(transaction=False) as pipe:
                for group in groups.values():
                    own = [each[index] for index in group] if each else []
                    names = [keys[index] for index in group]
                    pipe.execute_command("EVAL", lua, len(names), *names, *shared, *own)
                answers = await pipe.execute()
            out: list[Any] = [None] * len(keys)
            for group, answer in zip(groups.values(), answers, strict=True):
                if isinstance(answer, list):
                    for index, one in zip(group, answer, strict=True):
                        out[index] = one
            return out

        return await self.call(run)

    async def _shards(self) -> list[Any]:
        """What SCAN and INFO are asked of: the primaries of a cluster, else the one client."""
        if not self._servers.cluster:
            return [None]

        async def primaries(client: Client) -> list[Any]:
            await client.initialize()
            return list(client.get_primaries())

        return await self.call(primaries)

    async def run_ids(self) -> frozenset[str]:
        """The names that the servers' processes have given themselves: another one has forgotten
        what was written since its data was saved. Raises `RedisAway`."""
        return frozenset(str(told.get("run_id", "")) for told in await self._info("server"))

    async def eviction_policies(self) -> frozenset[str]:
        """`maxmemory-policy` of the servers whose memory is bounded. Raises `RedisAway`."""
        told = await self._info("memory")
        bounded = [one for one in told if one.get("maxmemory")]
        return frozenset(str(one.get("maxmemory_policy", "")) for one in bounded)

    async def _info(self, section: str) -> list[dict[str, Any]]:
        """A section of INFO of every server that holds data."""
        found: list[dict[str, Any]] = []
        for shard in await self._shards():

            async def ask(client: Client, shard: Any = shard) -> Any:
                return await (shard or client).execute_command("INFO", section)

            told = await self.call(ask)
            found.append(told if isinstance(told, dict) else {})
        return found

    async def scan(self, match: str, count: int) -> AsyncIterator[list[bytes]]:
        """Keys that match, a part at a time, of all shards. Raises `RedisAway`."""
        shards = await self._shards()
        for shard in shards:
            cursor = 0
            while True:
                command = ("SCAN", cursor, "MATCH", match, "COUNT", count)

                async def ask(client: Client, shard: Any = shard, command: Any = command) -> Any:
                    return await (shard or client).execute_command(*command)

                found, names = await self.call(ask)
                yield list(names)
                cursor = int(found)
                if not cursor:
                    break

    def _failed(self, error: Exception) -> RedisAway:
        self.errors += 1
        self.healthy = False
        self._servers.failed(error)
        self._breaker.failure()
        if not self._said:
            self._said = True
            log.warning("Redis does not serve: %s", type(error).__name__)
        return RedisAway(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Drop all connections. Idempotent."""
        await self._servers.close()


def _end(limit: asyncio.Timeout, due_s: float, limit_s: float) -> None:
    """The time of a call is over, but for what this loop itself stood still (its collector, a busy
    machine): that is no silence of Redis."""
    now_s = asyncio.get_running_loop().time()
    limit.reschedule(now_s + min(now_s - due_s, limit_s))


async def _asked(client: Client, packed: bytes) -> Any:
    """The answer to a packed command. The library takes longer to pack a thousand keys than Redis
    to answer them."""
    connection = await client.connection_pool.get_connection()
    try:
        await connection.send_packed_command([packed])
        return await connection.read_response()
    except BaseException:
        await connection.disconnect(nowait=True)  # half an answer may be on its way
        raise
    finally:
        await client.connection_pool.release(connection)


def _packed(words: Sequence[bytes]) -> bytes:
    """Words as Redis's protocol has them."""
    if len(set(map(len, words))) != 1:
        return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
    head = b"$%d\r\n" % len(words[0])  # keys and records are as long as each other
    return head + (b"\r\n" + head).join(words) + b"\r\n"


def _word(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else b"%d" % value


def _value(answer: object) -> bytes | None:
    """A GET's answer; what was of another type counts as nothing, all else is an error."""
    if isinstance(answer, ResponseError) and "WRONGTYPE" in str(answer):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer if isinstance(answer, bytes) else None


def _unpacked(keys: bytes) -> list[bytes]:
    """Keys out of their protocol form `$length CR LF key CR LF`."""
    out: list[bytes] = []
    at = 0
    while at < len(keys):
        end = keys.index(b"\r\n", at)
        size = int(keys[at + 1 : end])
        out.append(keys[end + 2 : end + 2 + size])
        at = end + 4 + size
    return out
