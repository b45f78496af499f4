"""Pictures behind URLs: what is asked of whom, and that nobody else hears a single byte.

The site is a real server on loopback. Names resolve by a table and checked addresses lead to it, as
the fetcher's two hooks allow; every rule about URLs, addresses and answers is the product's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpcore2
import pytest

from headrace.core.errors import ConfigError, HeadraceError, InvalidRequest, Overloaded
from headrace.router.fetch import Fetcher, is_public
from headrace.router.settings import FetchSettings

PUBLIC, OTHER, SIX = "93.184.215.14", "198.41.0.4", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"
PICTURE = b"\x89PNG and so on" * 100
HOSTS = ("img.example", "*.cdn.example")


def answer(body: bytes = PICTURE, status: str = "200 OK", **headers: str) -> bytes:
    fields = {"content-type": "image/png", "content-length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def moved(location: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, location=location, content_type="")


@dataclass
class Site(httpcore2.AsyncNetworkBackend):
    """A loopback server, the table of names, and the way from a checked address to the server."""

    answers: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, Sequence[str]] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)  # what the server heard
    resolved: list[str] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)
    refusing: set[str] = field(default_factory=set)
    slow: asyncio.Event | None = None
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            reply = self.answers[head.split()[1]]
            writer.write(reply)
            await writer.drain()
            if self.slow is not None:
                await self.slow.wait()
        writer.close()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        found = self.names[host]
        return [found.pop(0)] if isinstance(found, list) else found

    async def connect_tcp(self, host: str, port: int, *rest: Any) -> Any:
        self.connected.append((host, port))
        assert is_public(host)
        if host in self.refusing:
            raise httpcore2.ConnectError
        return await httpcore2.AnyIOBackend().connect_tcp("127.0.0.1", self.port)

    def fetcher(self, **settings: Any) -> Fetcher:
        values = {"hosts": HOSTS, "deadline_s": 5.0} | settings
        return Fetcher(FetchSettings(**values), resolve=self.resolve, connect=self)

    async def fetch(self, *urls: str, **settings: Any) -> list[bytes | None]:
        places = [(f"messages[0].content[{i}]", url) for i, url in enumerate(urls)]
        with contextlib.closing(self.fetcher(**settings)) as fetcher:
            files = await fetcher.fetch(places)
        return [files.get(url) for url in urls]

    async def refused(self, *urls: str, **settings: Any) -> HeadraceError:
        with pytest.raises(HeadraceError) as caught:
            await self.fetch(*urls, **settings)
        for told in (*self.names, *self.answers, *(host for host, _ in self.connected)):
            assert told not in caught.value.message
        return caught.value


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site(names={"img.example": (PUBLIC,), "a.cdn.example": (PUBLIC,)})
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


async def test_a_picture_is_asked_for_once_with_its_own_host(site: Site) -> None:
    site.answers["/a/b.png?x=1&y=%20"] = answer()
    url = "http://IMG.example:80/a/b.png?x=1&y=%20#part"
    assert await site.fetch(url, "data:,x", url) == [PICTURE, None, PICTURE]
    (head,) = site.heads
    lines = head.lower().split("\r\n")
    assert lines[0] == "get /a/b.png?x=1&y=%20 http/1.1"
    assert "host: img.example" in lines and "accept-encoding: identity" in lines
    assert not any(line.startswith(("cookie", "authorization", "referer")) for line in lines)
    assert (site.resolved, site.connected) == (["img.example"], [(PUBLIC, 80)])


async def test_tls_is_spoken_with_the_name_of_the_url(site: Site) -> None:
    """The first bytes of an https connection name the host; nothing is said in the clear."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    error = await site.refused("https://a.cdn.example/secret-path")
    server.close()
    assert error.message == "the image could not be fetched"
    (hello,) = heard
    assert hello[:2] == b"\x16\x03" and b"a.cdn.example" in hello and b"secret" not in hello
    assert site.connected == [(PUBLIC, 443)]


NEVER = [
    *("127.0.0.1", "127.1", "0.0.0.0", "10.0.0.1", "169.254.169.254", "192.168.0.1", "8.8.8.8"),
    *("2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "127.0.0.1.", "1.2.3"),
    *("[::1]", "[::ffff:127.0.0.1]", "[fe80::1]", "[::]", "localhost", "localhost.", "router"),
    *("user@img.example", "img.example@127.0.0.1", "user:pw@img.example", "img.example:8080"),
    *("img.example:443", "img.example:", "img.example:080", "img.example:99999", "img_x.example"),
    *("img.example.", ".img.example", "img..example", "ｉｍｇ.example", "img.example\\@127.0.0.1"),
    *("img.example\t", "img.example ", "img.example%2f", "evil-img.example", "ximg.example", ""),
    *("cdn.example", "xcdn.example", "a.cdn.example.evil.test"),
]


@pytest.mark.parametrize("host", NEVER)
async def test_what_is_refused_by_its_text_resolves_nothing(site: Site, host: str) -> None:
    error = await site.refused(f"http://{host}/a.png")
    assert (error.status, error.param) == (400, "messages[0].content[0]")
    assert (site.resolved, site.connected, site.heads) == ([], [], [])


PRIVATE = [
    *("127.0.0.1", "127.255.0.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
    *("169.254.169.254", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "::ffff:127.0.0.1", "::ffff:93.184.215.14", "fe80::1", "fe80::1%lo", "fd00::1"),
    *(
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "ff02::1",
        "2001:db8::1",
        "::127.0.0.1",
    ),
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_name_with_an_address_that_is_not_public_is_refused(
    site: Site, address: str
) -> None:
    for addresses in ((address,), (PUBLIC, address), (address, SIX)):
        site.names["img.example"] = addresses
        error = await site.refused("http://img.example/a.png")
        assert (error.status, error.message) == (400, "images are not fetched from this host")
    assert (site.connected, site.heads) == ([], [])


def test_public_addresses_are_public() -> None:
    for address in (PUBLIC, OTHER, SIX, "2a00:1450:4001:82a::200e"):
        assert is_public(address)
    assert not is_public("img.example") and not is_public("")


async def test_a_name_that_changes_its_address_gains_nothing(site: Site) -> None:
    """Resolved once a connection, and the connection goes to what was judged."""
    site.names["img.example"] = [PUBLIC, "127.0.0.1", "127.0.0.1"]
    site.answers["/a.png"] = answer()
    assert await site.fetch("http://img.example/a.png") == [PICTURE]
    assert (site.resolved, site.connected) == (["img.example"], [(PUBLIC, 80)])


async def test_a_dead_address_is_passed_over(site: Site) -> None:
    site.names["img.example"], site.refusing = (SIX, PUBLIC), {SIX}
    site.answers["/a.png"] = answer()
    assert await site.fetch("http://img.example/a.png") == [PICTURE]
    assert site.connected == [(SIX, 80), (PUBLIC, 80)]
    site.names["img.example"] = (SIX,)
    error = await site.refused("http://img.example/a.png")
    assert error.message == "the image could not be fetched"


@pytest.mark.parametrize("status", ["301 x", "302 x", "303 x", "307 x", "308 x"])
async def test_redirects_are_followed_on_listed_hosts(site: Site, status: str) -> None:
    site.names["a.cdn.example"] = (OTHER,)
    site.answers |= {
        "/a": moved("http://a.cdn.example/b", status),
        "/b": moved("c?d", status),
        "/c?d": answer(),
    }
    assert await site.fetch("http://img.example/a") == [PICTURE]
    assert [host for host, _ in site.connected] == [PUBLIC, OTHER, OTHER]


@pytest.mark.parametrize(
    "location",
    [
        *("http://127.0.0.1/x", "//127.0.0.1/x", "http://[::1]/", "http://2130706433/"),
        *("http://elsewhere.test/x", "http://img.example:81/x", "http://u@img.example/x"),
        *(
            "file:///etc/hostname",
            "ftp://img.example/x",
            "gopher://img.example/",
            "data:image/png,",
        ),
        *("http://rebound.cdn.example/x", "\\\\127.0.0.1\\x", "http://[x", "/é"),
    ],
)
async def test_each_redirect_is_judged_anew(site: Site, location: str) -> None:
    site.names["rebound.cdn.example"] = ("10.0.0.7",)
    site.answers["/a"] = moved(location)
    error = await site.refused("http://img.example/a")
    assert (error.status, error.param) == (400, "messages[0].content[0]")
    assert len(site.heads) == 1 and site.connected == [(PUBLIC, 80)]


async def test_redirects_are_counted(site: Site) -> None:
    site.answers |= {"/a": moved("/a"), "/none": moved("")}
    for place in ("/a", "/none"):
        site.heads.clear()
        error = await site.refused(f"http://img.example{place}", redirects=2)
        assert "limited to 2" in error.message and len(site.heads) == 3


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (answer(status="404 Not Found"), "status 404"),
        (answer(status="206 Partial Content"), "status 206"),
        (answer(content_type="text/html"), "something else"),
        (answer(content_type=""), "something else"),
        (answer(content_encoding="gzip"), "compressed"),
        (b"nonsense\r\n\r\n", "could not be fetched"),
        (b"", "could not be fetched"),
        (answer()[:-5], "could not be fetched"),  # shorter than it said
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000 + b"\r\n\r\n", "could not be fetched"),
        (answer(content_length="99999999"), "limited to 8388608 bytes together"),
    ],
)
async def test_answers_that_are_no_picture(site: Site, reply: bytes, said: str) -> None:
    site.answers["/a.png"] = reply
    error = await site.refused("http://img.example/a.png")
    assert isinstance(error, InvalidRequest) and said in error.message


async def test_bytes_are_counted_while_they_come(site: Site) -> None:
    """No length is told, and more comes than is allowed, from one or from several together."""
    site.answers["/a.png"] = answer(bytes(50_000), content_length="")
    site.answers["/b.png"] = answer(bytes(50_000))
    (file,) = await site.fetch("http://img.example/a.png", max_bytes=50_000)
    assert file == bytes(50_000)
    for urls in (["/a.png"], ["/a.png", "/b.png"]):
        bound = 50_000 * len(urls) - 1
        error = await site.refused(*(f"http://img.example{u}" for u in urls), max_bytes=bound)
        assert (error.code, f"{bound} bytes" in error.message) == ("limit_exceeded", True)
    error = await site.refused("http://img.example/a.png", max_bytes=10)
    assert "limited to 10 bytes" in error.message


async def test_a_slow_site_ends_at_the_deadline_and_the_place_is_free_again(site: Site) -> None:
    site.slow = asyncio.Event()
    site.answers["/a.png"] = answer(content_length="99999")
    site.answers["/b.png"] = answer()
    with contextlib.closing(site.fetcher(deadline_s=0.3, open_requests=1)) as fetcher:
        first = asyncio.create_task(fetcher.fetch([("one", "http://img.example/a.png")]))
        while not site.heads:
            await asyncio.sleep(0.005)
        with pytest.raises(Overloaded, match="open_requests is limited to 1"):
            await fetcher.fetch([("two", "http://img.example/b.png")])
        with pytest.raises(InvalidRequest, match=r"within 0\.3 s") as caught:
            await first
        assert caught.value.param == "one"
        site.slow.set()
        fetcher._settings = replace(fetcher._settings, deadline_s=30.0)  # this one is to come
        files = await fetcher.fetch([("two", "http://img.example/b.png")])
        assert files == {"http://img.example/b.png": PICTURE}


async def test_a_failed_picture_breaks_the_others_off(site: Site) -> None:
    site.slow = asyncio.Event()
    site.answers["/slow.png"] = answer(content_length="99999")
    site.answers["/no.png"] = answer(status="404 Not Found")
    error = await site.refused("http://img.example/slow.png", "http://img.example/no.png")
    assert error.param == "messages[0].content[1]"
    site.slow.set()


async def test_proxies_of_the_environment_are_not_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{site.port}")
    site.answers["/a.png"] = answer()
    assert await site.fetch("http://img.example/a.png") == [PICTURE]
    assert site.heads[0].startswith("GET /a.png ")


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"hosts": (host,)}
            for host in ("127.0.0.1", "IMG.example", "http://a.b", "a", "*.*", "")
        ),
        *({"max_bytes": 0}, {"deadline_s": 0.0}, {"redirects": 11}, {"open_requests": 0}),
    ],
)
def test_settings_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FetchSettings(**values)


# ---- over HTTP -------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[Callable[..., Any]]:
    """`async with listener() as (port, hits)`: counts every connection to this host."""

    @contextlib.asynccontextmanager
    async def listening() -> AsyncIterator[tuple[int, list[int]]]:
        hits: list[int] = []

        def on_connect(reader: Any, writer: asyncio.StreamWriter) -> None:
            hits.append(1)
            writer.close()

        server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1], hits
        await asyncio.sleep(0.05)
        server.close()

    yield listening


@pytest.mark.redis
async def test_nothing_of_this_network_is_reached_with_every_host_allowed(
    rigs: Any, listener: Any
) -> None:
    """The product's own resolver and connector, `hosts: ["*"]`."""
    fetch = FetchSettings(hosts=("*",), deadline_s=2.0)
    async with listener() as (port, hits), rigs(images=True, fetch=fetch) as rig:
        urls = [f"{scheme}://{host}/a.png" for host in NEVER for scheme in ("http", "https")]
        urls = [url for url in urls if "example" not in url]
        urls += [f"http://{host}:{port}/" for host in ("127.0.0.1", "localhost", "[::1]")]
        urls += [f"{scheme}://127.0.0.1:{port}/" for scheme in ("ftp", "gopher", "ws", "unix")]
        urls += ["file:///etc/hostname", "http:/127.0.0.1", "http:", "//127.0.0.1/a", "https"]
        for url in urls:
            image = {"type": "image_url", "image_url": {"url": url}}
            body = {"model": "scripted", "messages": [{"role": "user", "content": [image]}]}
            got = await rig.client.post("/v1/chat/completions", json=body)
            assert (got.status_code, got.json()["error"]["param"]) == (
                400,
                "messages[0].content[0]",
            ), url
        await rig.until(rig.nothing_held)
        await rig.pulse()
    assert hits == []


@pytest.mark.redis
async def test_too_many_are_refused_before_one_is_fetched(rigs: Any, site: Site) -> None:
    async with rigs(images=True, fetch=FetchSettings(hosts=HOSTS)) as rig:
        rig.router._fetcher._backend._resolve = site.resolve
        url = {"url": "http://img.example/a.png"}
        content = [{"type": "image_url", "image_url": url}] * 33
        body = {"model": "scripted", "messages": [{"role": "user", "content": content}]}
        got = await rig.client.post("/v1/chat/completions", json=body)
        assert got.status_code == 400 and "32" in got.json()["error"]["message"]
        assert site.resolved == []
