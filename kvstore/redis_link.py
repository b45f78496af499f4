"""Calls to Redis that end in time: one deadline, no retries, and a breaker.

The only module that builds a redis client. Everything in Redis is soft state, so a caller has one
question: was this answered? `RedisAway` says no and why; nothing else leaves `RedisLink.call`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.kvstore.breaker import Breaker

log = logging.getLogger(__name__)
T = TypeVar("T")
Client: TypeAlias = Any  # redis-py's commands are typed for both of its clients at once


class RedisAway(Exception):
    """No answer in time, a refusal, or a breaker that is open. Never leaves the room."""


class WrongType(RedisAway):
    """A key of ours holds something else; the caller may replace it."""


class RedisLink:
    """One server at `url`. `healthy` tells how the last call that was made ended."""

    def __init__(self, url: str, deadline_s: float, clock: Clock) -> None:
        self.deadline_s = deadline_s
        self.healthy = False
        self.errors = 0
        self.refused_by_breaker = 0
        self._breaker = Breaker(clock)
        self._said = False
        try:
            # protocol 2: with 3 the client asks for maintenance notices at every connect
            self._client: Client = Redis.from_url(
                url,
                protocol=2,
                # None: the deadline is `call`'s. With a timeout the client wraps each send in
                # asyncio.wait_for, which on Python 3.11 swallows a cancellation that arrives as
                # the send completes: a task that was to end then went on for ever.
                socket_timeout=None,
                socket_connect_timeout=deadline_s,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except ValueError as error:
            raise ConfigError(f"redis_url cannot be used: {error}") from None

    async def call(
        self, use: Callable[[Client], Awaitable[T]], deadline_s: float | None = None
    ) -> T:
        """The result of `use(client)` within the deadline. Raises `RedisAway`."""
        if not self._breaker.admits():
            self.refused_by_breaker += 1
            raise RedisAway("the breaker is open")
        limit_s = self.deadline_s if deadline_s is None else min(deadline_s, self.deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                result = await use(self._client)
        except ResponseError as error:
            if "WRONGTYPE" in str(error):  # a pipeline puts the command before it
                self._breaker.success()
                raise WrongType(str(error)) from None
            raise self._failed(error) from None
        except (RedisError, OSError, TimeoutError) as error:
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

        async def ask(client: Client) -> list[bytes | None]:
            # The library takes longer to pack a thousand keys than Redis to answer them.
            connection = await client.connection_pool.get_connection()
            try:
                await connection.send_packed_command(
                    [b"*%d\r\n$4\r\nMGET\r\n" % (count + 1) + keys]
                )
                answer = await connection.read_response()
            except BaseException:
                await connection.disconnect(nowait=True)  # half an answer may be on its way
                raise
            finally:
                await client.connection_pool.release(connection)
            if not isinstance(answer, list) or len(answer) != count:
                raise ResponseError("MGET did not answer with a value a key")
            return answer

        return await self.call(ask, deadline_s)

    async def script(self, lua: str, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Run a short script over `keys`. Raises `RedisAway`."""
        return await self.call(lambda client: client.eval(lua, len(keys), *keys, *args))

    def _failed(self, error: Exception) -> RedisAway:
        self.errors += 1
        self.healthy = False
        self._breaker.failure()
        if not self._said:
            self._said = True
            log.warning("Redis does not serve: %s", type(error).__name__)
        return RedisAway(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Drop all connections. Idempotent."""
        await self._client.aclose()
