"""Which Redis a url means, and the client for it. No call of these clients retries by itself.

    redis://host:port/0   rediss://...   unix:///path    one server
    redis://a:6379,b:6379/0                              a server and its replicas: whoever writes
    redis-sentinel://a:26379,b:26379/name                the master of that name, as sentinels tell
    redis-cluster://a:6379,b:6379                        a cluster; these are where to begin

`user:password@` may stand before the hosts of each.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias
from urllib.parse import unquote

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

from headrace.core.errors import ConfigError

Client: TypeAlias = Any  # redis-py's commands are typed for both of its clients at once
_CLUSTER, _SENTINEL = "redis-cluster://", "redis-sentinel://"


class RedisServers:
    """The client of a url; `client` may be another one after `failed`. Raises `ConfigError` for a
    url that means nothing."""

    def __init__(self, url: str, connect_s: float) -> None:
        self.cluster = url.startswith(_CLUSTER)
        self._sentinel: Sentinel | None = None
        self._now = 0
        # protocol 2: with 3 the client asks for maintenance notices at every connect.
        # socket_timeout None: the deadline is the caller's. With a timeout the client wraps each
        # send in asyncio.wait_for, which on Python 3.11 swallows a cancellation that arrives as the
        # send completes: a task that was to end then went on for ever.
        options: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": connect_s,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
        }
        try:
            self._clients = self._open(url, options)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"redis_url cannot be used: {error}") from None

    def _open(self, url: str, options: dict[str, Any]) -> list[Client]:
        if self.cluster:
            login, hosts, rest = _parts(url.removeprefix(_CLUSTER))
            if rest:
                raise ValueError("a cluster has no databases and no name")
            nodes = [ClusterNode(host, port) for host, port in _hosts(hosts)]
            return [RedisCluster(startup_nodes=nodes, **options, **login)]
        if url.startswith(_SENTINEL):
            login, hosts, name = _parts(url.removeprefix(_SENTINEL))
            if not name or "/" in name:
                raise ValueError("redis-sentinel://host:port,.../name names the master")
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py leaves it out
                _hosts(hosts), sentinel_kwargs=dict(options), **options, **login
            )
            return [self._sentinel.master_for(name)]
        scheme, mark, rest = url.partition("://")
        if scheme in ("redis", "rediss") and "," in rest:
            before, at, after = rest.rpartition("@")
            hosts, slash, database = after.partition("/")
            return [
                Redis.from_url(f"{scheme}://{before}{at}{host}{slash}{database}", **options)
                for host in hosts.split(",")
            ]
        return [Redis.from_url(url, **options)]

    @property
    def client(self) -> Client:
        return self._clients[self._now]

    def failed(self, error: Exception) -> None:
        """A call of the present client failed so: the next call may be another's."""
        if isinstance(error, ReadOnlyError | RedisConnectionError | OSError | TimeoutError):
            self._now = (self._now + 1) % len(self._clients)

    async def close(self) -> None:
        """Drop all connections. Idempotent."""
        for client in self._clients:
            await client.aclose()
        for sentinel in self._sentinel.sentinels if self._sentinel else ():
            with contextlib.suppress(RedisConnectionError):
                await sentinel.aclose()


def _parts(text: str) -> tuple[dict[str, Any], str, str]:
    """(login, hosts, what follows the slash)."""
    before, at, after = text.rpartition("@")
    hosts, _, rest = after.partition("/")
    user, _, password = before.partition(":")
    login = {"username": unquote(user), "password": unquote(password)} if at else {}
    return {name: value for name, value in login.items() if value}, hosts, rest


def _hosts(text: str) -> list[tuple[str, int]]:
    out = []
    for item in text.split(","):
        host, _, port = item.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"expected host:port, got {item!r}")
        out.append((host.strip("[]"), int(port)))
    return out
