"""Pictures behind http(s) URLs, fetched on behalf of clients.

Off unless the configuration names hosts (`FetchSettings`): a server that fetches what strangers
name is a way into its network.

    URL -> judged as text -> host resolved once -> every address public? -> connection to one of
    these very addresses (Host and TLS name stay those of the URL) -> 200, image/*, within bounds
            ^ a redirect begins here again

Nobody resolves a second time, so a name that changes its address in between gains nothing. No proxy
of the environment is used, no cookie and no credential is sent. Refusals are `InvalidRequest` and
do not tell which of the rules about addresses was broken.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias
from urllib.parse import urljoin

import httpcore2

from headrace.core.errors import InvalidRequest, LimitExceeded, Overloaded
from headrace.router.settings import FetchSettings

log = logging.getLogger(__name__)
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

URL_CHARS = 4096
PORTS = {"http": 80, "https": 443}  # no other, whatever the URL says
ADDRESSES_TRIED = 4
PARALLEL = 4  # pictures of one request
RESOLVER_THREADS = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS: dict[bytes | str, bytes | str] = {
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "User-Agent": "headrace",
}
# No user, no IP literal, nothing behind a backslash: what does not look like this is refused. What
# matches is put together anew from its groups, so no second parser reads the text differently.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]{1,253})(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<target>[/?][!-\"$-\[\]-~]*)?(?:#[!-~]*)?",
    re.I | re.A,
)
# At least two labels, the last beginning with a letter: neither `localhost` nor any spelling of an
# IPv4 address (decimal, octal, hexadecimal, short) has this form.
_HOST = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", re.A
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # outside: mapped IPv4, NAT64, link-local ...
_CARRIES_IPV4 = tuple(map(ipaddress.IPv6Network, ("2001::/32", "2002::/16")))  # Teredo, 6to4


def is_public(address: str) -> bool:
    """Whether `address` is one of the internet: not of this host, its networks or a special use,
    and not an IPv6 address that stands for an IPv4 one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        plain = ip in _GLOBAL_UNICAST and not any(ip in net for net in _CARRIES_IPV4)
        return plain and ip.is_global
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def judge_url(url: str, settings: FetchSettings, param: str) -> httpcore2.URL:
    """The URL to ask for, by its text alone. Raises `InvalidRequest`; nothing is resolved."""
    if len(url) > URL_CHARS:
        raise LimitExceeded(
            f"an image's URL is limited to {URL_CHARS} characters, got {len(url)}", param=param
        )
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidRequest(
            "an image's URL must have the form https://host/path, without user and with a"
            " name as its host",
            param=param,
        )
    scheme, host = match["scheme"].lower(), match["host"].lower()
    if match["port"] is not None and int(match["port"]) != PORTS[scheme]:
        raise InvalidRequest(
            f"images are fetched from port {PORTS[scheme]} for {scheme} only", param=param
        )
    if _HOST.fullmatch(host) is None or not any(_covers(p, host) for p in settings.hosts):
        raise _refused(param)
    target = match["target"] or "/"
    if target.startswith("?"):
        target = "/" + target
    return httpcore2.URL(
        scheme=scheme.encode(), host=host.encode(), port=None, target=target.encode()
    )


def _covers(pattern: str, host: str) -> bool:
    if pattern == "*":
        return True
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _refused(param: str) -> InvalidRequest:
    """One sentence for a host that is not listed and for one whose address is not public: a client
    is not told what the names of this network resolve to."""
    return InvalidRequest("images are not fetched from this host", param=param)


class Fetcher:
    """Fetches what `settings` allow. One a router, used on its loop.

    `resolve` and `connect` replace name resolution and the opening of TCP connections, for tests
    alone: what `resolve` gives is judged by `is_public` all the same. `connect` is given checked
    addresses, never names."""

    def __init__(
        self,
        settings: FetchSettings,
        *,
        resolve: Resolve | None = None,
        connect: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        self._settings = settings
        self._open = 0
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, "resolve")
        self._backend = _CheckedBackend(resolve or self._resolve, connect)
        self._tls: ssl.SSLContext | None = None  # made at the first https URL

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, urls: Sequence[tuple[str, str]]) -> dict[str, bytes]:
        """Files by URL of those `urls` (place in the request, URL) that are no data URLs; each URL
        once. All or nothing, within `deadline_s` and `max_bytes` for all of them together.

        Raises `InvalidRequest` naming the place of a URL that is refused or does not give a
        picture, `Overloaded` while `open_requests` other requests are being fetched for."""
        wanted = {url: param for param, url in reversed(urls) if not is_data_url(url)}
        if not wanted:
            return {}
        targets = [(judge_url(url, self._settings, wanted[url]), url) for url in wanted]
        if self._open >= self._settings.open_requests:
            raise Overloaded(
                f"fetch.open_requests is limited to {self._settings.open_requests}, all are taken"
            )
        self._open += 1
        try:
            return await self._all(targets, wanted)
        finally:
            self._open -= 1

    async def _all(
        self, targets: Sequence[tuple[httpcore2.URL, str]], params: dict[str, str]
    ) -> dict[str, bytes]:
        budget, gate = _Budget(self._settings.max_bytes), asyncio.Semaphore(PARALLEL)

        async def one(target: httpcore2.URL, url: str) -> bytes:
            async with gate:
                return await self._follow(target, url, budget, params[url])

        tasks = [asyncio.create_task(one(*pair)) for pair in targets]
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                files = await asyncio.gather(*tasks)
        except TimeoutError:
            cut = [u for (_, u), task in zip(targets, tasks, strict=True) if not _ended(task)]
            raise InvalidRequest(
                f"images must arrive within {self._settings.deadline_s:g} s",
                param=params[cut[0]] if cut else None,
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip((url for _, url in targets), files, strict=True))

    async def _follow(self, target: httpcore2.URL, url: str, budget: _Budget, param: str) -> bytes:
        for _ in range(self._settings.redirects + 1):
            try:
                found = await self._ask(target, budget, param)
            except _NotPublic:
                raise _refused(param) from None
            except (
                httpcore2.NetworkError,
                httpcore2.ProtocolError,
                httpcore2.TimeoutException,
                OSError,
            ):
                raise InvalidRequest("the image could not be fetched", param=param) from None
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found.location)
            except ValueError:
                raise InvalidRequest("the image's URL redirects to none", param=param) from None
            secure = target.scheme == b"https"
            target = judge_url(url, self._settings, param)
            if secure and target.scheme != b"https":
                raise InvalidRequest("an image's URL redirects from https to http", param=param)
        raise LimitExceeded(
            f"redirects of an image's URL are limited to {self._settings.redirects}", param=param
        )

    async def _ask(self, target: httpcore2.URL, budget: _Budget, param: str) -> bytes | _Redirect:
        """One request on a connection of its own."""
        if target.scheme == b"https" and self._tls is None:
            self._tls = await asyncio.to_thread(httpcore2.default_ssl_context)
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=self._backend, max_keepalive_connections=0
        )
        async with pool, pool.stream("GET", target, headers=_HEADERS) as response:
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS:
                return _Redirect(headers.get(b"location", b"").decode("latin-1"))
            if response.status != 200:
                raise InvalidRequest(
                    f"the image's server answered with status {response.status}", param=param
                )
            if not headers.get(b"content-type", b"").lower().startswith(b"image/"):
                raise InvalidRequest("the image's URL gives something else", param=param)
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise InvalidRequest("the image is sent compressed", param=param)
            told = headers.get(b"content-length", b"0")
            budget.must_hold(int(told) if told.isdigit() else 0, param)
            parts: list[bytes] = []
            async for part in response.aiter_stream():
                budget.take(len(part), param)
                parts.append(part)
            return b"".join(parts)

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        """Addresses of an absolute name: this host's search domains are not the client's. In
        threads of its own, so that a dead name server stops nothing else."""

        def ask() -> list[str]:
            found = socket.getaddrinfo(f"{host}.", port, type=socket.SOCK_STREAM)
            return [str(info[4][0]) for info in found]

        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def _ended(task: asyncio.Task[bytes]) -> bool:
    """Whether a task ended by itself."""
    return task.done() and not task.cancelled()


class _NotPublic(Exception):
    """A host without addresses, or with one that is not public."""


class _Redirect:
    def __init__(self, location: str) -> None:
        self.location = location


class _Budget:
    """Bytes that one request's pictures may still take."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes

    def must_hold(self, n_bytes: int, param: str) -> None:
        if n_bytes > self._left_bytes:
            raise LimitExceeded(
                f"images fetched for one request are limited to {self._max_bytes} bytes together,"
                f" got at least {self._max_bytes - self._left_bytes + n_bytes}",
                param=param,
            )

    def take(self, n_bytes: int, param: str) -> None:
        self.must_hold(n_bytes, param)
        self._left_bytes -= n_bytes


class _CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Opens connections to checked addresses alone. One bad address among several refuses all:
    which one a connection takes would be chance."""

    def __init__(self, resolve: Resolve, connect: httpcore2.AsyncNetworkBackend | None) -> None:
        self._resolve = resolve
        self._connect = connect or httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            log.warning("%s has an address that is not public: nothing is fetched from it", host)
            raise _NotPublic
        last: Exception = httpcore2.ConnectError()
        for address in addresses[:ADDRESSES_TRIED]:
            try:
                return await self._connect.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                last = error
        raise last

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
