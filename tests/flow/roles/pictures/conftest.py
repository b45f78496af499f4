"""A router with two vision replicas on a small cluster, and what one engine would say."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis.asyncio
from PIL import Image

from headrace.core.card import Role
from headrace.core.chain import TokenIds, root_digest
from headrace.core.ids import Digest
from headrace.core.images import ImageLimits, ImageSpan
from headrace.engine import Picture
from headrace.kvstore import SaltBook
from headrace.router.keys import ApiKey
from headrace.router.pictures import open_files, place_pictures, take_urls
from headrace.router.protocol import Protocols
from headrace.router.role import RouterProcess
from headrace.router.settings import FetchSettings, RouterSettings
from headrace.router.tokens import TextStream, Vocabulary
from headrace.vision import VisionReplica, VisionSettings

KEY = "key-of-the-picture-tests"
MODEL = "toy"
N_OUT = 6


def png(seed: int, width: int = 64, height: int = 48, mode: str = "RGB") -> bytes:
    """A small picture that no other seed gives."""
    draw = random.Random(seed)
    picture = Image.new("RGB", (width, height), tuple(draw.randrange(256) for _ in range(3)))
    for _ in range(12):
        box = [draw.randrange(width), draw.randrange(height)]
        patch = tuple(draw.randrange(256) for _ in range(3))
        picture.paste(patch, (*box, min(width, box[0] + 20), min(height, box[1] + 16)))
    out = io.BytesIO()
    picture.convert(mode).save(out, "PNG")
    return out.getvalue()


def text(n_chars: int, seed: str) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice("abcdefghij klmnop") for _ in range(n_chars)).strip()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(*parts: str | bytes) -> dict[str, Any]:
    """A request whose user says these texts and shows these files."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": N_OUT, "temperature": 0}


@dataclass(eq=False)
class Service:
    """A router on the module's cluster, two vision replicas, and what one engine would say."""

    http: httpx.AsyncClient
    router: RouterProcess
    visions: list[VisionReplica]
    cluster: Any
    yardstick: Any
    redis_url: str
    root: Digest

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary("tokenizer-1024")
        self._protocols = Protocols(self.vocabulary)

    png = staticmethod(png)
    text = staticmethod(text)
    chat = staticmethod(chat)

    async def routable(self, visions: int) -> None:
        """Wait until the router knows so many vision replicas, and all others."""
        wanted = {Role.VISION: visions, Role.PREFILL: 1, Role.DECODE: 2}
        async with asyncio.timeout(60):
            while any(len(self.router.replicas.routable(r)) < n for r, n in wanted.items()):
                await asyncio.sleep(0.01)

    def counts(self, name: str) -> int:
        works = [vision.work for vision in self.visions]
        return sum(getattr(work.counts, name) for work in works if work is not None)

    def rows(self) -> int:
        return int(self.cluster.prefill.driver.stats.encoder_rows_total)

    def encoder_rows(self) -> int:
        """Of all engines, decode's included."""
        drivers = [role.driver for role in (self.cluster.prefill, *self.cluster.decodes)]
        return sum(int(driver.stats.encoder_rows_total) for driver in drivers)

    def prompt(self, body: dict[str, Any]) -> tuple[TokenIds, tuple[ImageSpan, ...], list[bytes]]:
        messages = json.loads(json.dumps(body["messages"]))
        files = open_files(take_urls(messages), ImageLimits())
        made = self._protocols.chat_prompt({"messages": messages, "stream": False})
        card, vision = self.cluster.card, self.visions[0].shell.vision
        assert vision is not None
        placed = place_pictures(made.token_ids, card.image_token_id, files, vision, self.root)
        return placed.token_ids, placed.spans, [file.data for file in files]

    async def expected(self, body: dict[str, Any]) -> str:
        """The text of one engine that got the rows of the same tower by hand."""
        ids, spans, files = self.prompt(body)
        encoder = self.visions[0].encoder
        shown = [
            Picture(span, encoder.encode(data).payload)
            for span, data in zip(spans, files, strict=True)
        ]
        said = await asyncio.to_thread(self.yardstick.shown, ids, N_OUT, shown)
        return TextStream(self.vocabulary).push(said)  # the rest is no whole character

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body)

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Usage of a request that must give the expected text; everything is at rest after it."""
        answer = await self.post(body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        # Bytes at the end that are no character are dropped by one and shown by the other.
        heard, wanted = said["choices"][0]["message"]["content"], await self.expected(body)
        assert heard.rstrip("\ufffd") == wanted.rstrip("\ufffd") != ""
        await self.at_rest()
        usage: dict[str, Any] = said["usage"]
        assert usage["prompt_tokens"] == len(self.prompt(body)[0])
        return usage

    async def at_rest(self, within_s: float | None = None) -> None:
        async with asyncio.timeout(within_s or 2.5):
            while any(v.work.jobs or v.work.held_leases or v.store.held for v in self.visions):
                await asyncio.sleep(0.01)
        await self.cluster.at_rest(within_s)
        assert self.router.ledger.open_charges == 0

    async def listed(self, body: dict[str, Any]) -> None:
        """All that a request left is in the index."""
        await self.cluster.written()
        _, spans, _ = self.prompt(body)
        async with asyncio.timeout(60):
            while (stat := await self.cluster.prefill.store.stat()).index_unlisted or stat.pending:
                await asyncio.sleep(0.02)
            while not await self.present(spans):
                await asyncio.sleep(0.02)

    async def present(self, spans: Sequence[ImageSpan]) -> bool:
        wanted = {span.digest for span in spans}
        return await self.router.desk.pictures_present(tuple(wanted)) == wanted

    async def forget_pictures(self) -> None:
        """Take the pictures, and nothing else, out of the index."""
        client = redis.asyncio.from_url(self.redis_url)
        keys = [key async for key in client.scan_iter("mm:*")]
        assert keys and await client.delete(*keys) == len(keys)
        await client.aclose()

    def record(self) -> dict[str, Any]:
        path = Path(self.router._role.run_dir, "records.jsonl")
        last: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        return last


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    request: pytest.FixtureRequest,
    cluster: Any,
    roles: Any,
    yardstick: Any,
    valkey: Any,
    tmp_path_factory: Any,
) -> AsyncIterator[Service]:
    """The module may name FETCH, settings of the router's fetcher, and `make_fetcher`."""
    fetch = getattr(request.module, "FETCH", FetchSettings())
    make_fetcher = getattr(request.module, "make_fetcher", lambda _: None)
    visions = [VisionReplica(roles(f"vision-{i}"), VisionSettings()) for i in (0, 1)]
    await asyncio.gather(*(vision.start() for vision in visions))
    salts = tmp_path_factory.mktemp("salt")
    settings = RouterSettings(
        salt_directory=str(salts),
        keys=(ApiKey(KEY, "tenant-a"),),
        port=0,
        drain_s=0.2,
        lookup_s=10.0,  # one that is late counts as a miss, and vision would be called again
        tokenizer="tokenizer-1024",
        images=True,
        fetch=fetch,
    )
    role = roles("router-pictures", local_prefill_rows=0)
    router = RouterProcess(role, settings, fetcher=make_fetcher(fetch))
    stop, up = asyncio.Event(), asyncio.Event()
    members: list[Any] = []
    serving = asyncio.create_task(router.serve(lambda m: (members.append(m), up.set())[1], stop))
    await up.wait()
    headers = {"authorization": f"Bearer {KEY}"}
    address = members[0].address.replace("tcp://", "http://")
    salt = SaltBook.ensure(str(salts)).salt("tenant-a")
    root = root_digest(cluster.card.namespace().digest(), salt)
    async with httpx.AsyncClient(
        base_url=address, headers=headers, timeout=60, verify=False
    ) as http:
        made = Service(http, router, visions, cluster, yardstick, valkey.url, root)
        await made.routable(2)
        yield made
    stop.set()
    await serving
    await router.close()
    for vision in visions:
        await vision.close()
