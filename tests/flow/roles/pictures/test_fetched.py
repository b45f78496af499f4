"""Pictures behind URLs through all roles: the same picture, the same key, the same text."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import httpcore2
import pytest

from headrace.core.rows import floor_grain
from headrace.router.fetch import Fetcher
from headrace.router.settings import FetchSettings

MODEL = "toy"
STORE = {"picture_bytes": 64 << 10}
FETCH = FetchSettings(hosts=("img.example",))
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Loopback(httpcore2.AsyncNetworkBackend):
    """Where the one public address of `img.example` leads."""

    port = 0

    async def connect_tcp(self, host: str, port: int, *rest: Any) -> Any:
        assert (host, port) == ("93.184.215.14", 80)
        return await httpcore2.AnyIOBackend().connect_tcp("127.0.0.1", self.port)


def make_fetcher(settings: FetchSettings) -> Fetcher:
    async def resolve(host: str, port: int) -> Sequence[str]:
        assert host == "img.example"
        return ("93.184.215.14",)

    return Fetcher(settings, resolve=resolve, connect=Loopback())


async def test_a_fetched_picture_is_the_picture(service: Any) -> None:
    picture, asked = service.png(1), []

    async def serve(reader: Any, writer: Any) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n" + picture)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    Loopback.port = server.sockets[0].getsockname()[1]
    sent = service.chat("look", picture, service.text(300, "fetched"))
    named = copy.deepcopy(sent)
    named["messages"][0]["content"][1]["image_url"]["url"] = "http://img.example/cat.png"

    answer = await service.post(named)
    assert answer.status_code == 200, answer.text
    heard, wanted = answer.json()["choices"][0]["message"]["content"], await service.expected(sent)
    assert heard.rstrip("\ufffd") == wanted.rstrip("\ufffd") != ""
    assert asked == [b"/cat.png"] and service.record()["stages"]["fetch_s"] > 0
    await service.at_rest()
    await service.listed(sent)

    # As a data URL it is found; by its URL it is fetched again, and found too.
    jobs = service.counts("jobs")
    usage = await service.ask(sent)
    assert usage["prompt_tokens_details"]["cached_tokens"] == floor_grain(usage["prompt_tokens"])
    assert "fetch_s" not in service.record()["stages"]
    again = (await service.post(named)).json()["usage"]
    assert again["prompt_tokens_details"] == usage["prompt_tokens_details"]
    assert (service.counts("jobs"), len(asked)) == (jobs, 2)

    # Another file behind the same URL is another picture.
    picture = service.png(2)
    other = (await service.post(named)).json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert service.counts("jobs") == jobs + 1
    server.close()
    await service.at_rest()


async def test_an_unlisted_host_is_refused_and_nothing_is_held(service: Any) -> None:
    body = service.chat("look", b"", "?")
    for url in ("http://elsewhere.example/a.png", "http://127.0.0.1/a.png", "ftp://img.example/a"):
        body["messages"][0]["content"][1]["image_url"]["url"] = url
        answer = await service.post(body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400,
            "messages[0].content[1]",
        )
    await service.at_rest()
