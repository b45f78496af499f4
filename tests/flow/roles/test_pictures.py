"""Chats with pictures over HTTP, through a router, vision, prefill and decode replicas."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis.asyncio
from PIL import Image

from headrace.core import faults
from headrace.core.card import Role
from headrace.core.chain import TokenIds, root_digest
from headrace.core.ids import Digest
from headrace.core.images import ImageLimits, ImageSpan
from headrace.core.rows import floor_grain
from headrace.engine import Picture
from headrace.kvstore import Kind, SaltBook
from headrace.router.keys import ApiKey
from headrace.router.pictures import open_files, place_pictures, take_urls
from headrace.router.protocol import Protocols
from headrace.router.role import RouterProcess
from headrace.router.settings import RouterSettings
from headrace.router.sight import two_rings
from headrace.router.tokens import TextStream, Vocabulary
from headrace.vision import VisionReplica, VisionSettings

MODEL = "toy"
STORE = {"picture_bytes": 64 << 10}
PROCESSES = {"vision-5": ("vision", "vision.encode=exit@1")}
KEY = "key-of-the-picture-tests"
N_OUT = 6
pytestmark = pytest.mark.asyncio(loop_scope="module")


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

    def counts(self, name: str) -> int:
        works = [vision.work for vision in self.visions]
        return sum(getattr(work.counts, name) for work in works if work is not None)

    def rows(self) -> int:
        return int(self.cluster.prefill.driver.stats.encoder_rows_total)

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
        (done,) = await asyncio.to_thread(
            lambda: self.yardstick._llm.generate([ids], max_tokens=N_OUT, pictures=[shown])
        )
        return TextStream(self.vocabulary).push(done.token_ids)  # the rest is no whole character

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body)

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Usage of a request that must give the expected text; everything is at rest after it."""
        answer = await self.post(body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert said["choices"][0]["message"]["content"] == await self.expected(body)
        await self.at_rest()
        usage: dict[str, Any] = said["usage"]
        assert usage["prompt_tokens"] == len(self.prompt(body)[0])
        return usage

    async def at_rest(self, within_s: float = 1.0) -> None:
        async with asyncio.timeout(within_s):
            while any(v.work.jobs or v.work.held_leases or v.store.held for v in self.visions):
                await asyncio.sleep(0.01)
        await self.cluster.at_rest(within_s)
        assert self.router.ledger.open_charges == 0

    async def listed(self, body: dict[str, Any]) -> None:
        """All that a request left is in the index."""
        await self.cluster.written()
        _, spans, _ = self.prompt(body)
        async with asyncio.timeout(5):
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
    cluster: Any, roles: Any, yardstick: Any, valkey: Any, tmp_path_factory: Any
) -> AsyncIterator[Service]:
    visions = [VisionReplica(roles(f"vision-{i}"), VisionSettings()) for i in (0, 1)]
    await asyncio.gather(*(vision.start() for vision in visions))
    salts = tmp_path_factory.mktemp("salt")
    settings = RouterSettings(
        salt_directory=str(salts),
        keys=(ApiKey(KEY, "tenant-a"),),
        port=0,
        drain_s=0.2,
        tokenizer="tokenizer-1024",
        images=True,
    )
    role = roles("router-pictures", local_prefill_rows=0)
    router, stop, up = RouterProcess(role, settings), asyncio.Event(), asyncio.Event()
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
        await routable(made, 2)
        yield made
    stop.set()
    await serving
    await router.close()
    for vision in visions:
        await vision.close()


async def routable(service: Service, visions: int) -> None:
    wanted = {Role.VISION: visions, Role.PREFILL: 1, Role.DECODE: 2}
    async with asyncio.timeout(10):
        while any(len(service.router.replicas.routable(r)) < n for r, n in wanted.items()):
            await asyncio.sleep(0.01)


async def test_handed_over_then_found_then_another_picture(service: Service) -> None:
    before, words = text(300, "before"), text(420, "after")
    body = chat(before, png(1), words)
    ids, (span,), _ = service.prompt(body)
    n_tokens = len(ids)
    assert span.start > 128 and floor_grain(n_tokens) > span.end + 44 + 128
    rows = service.rows()
    first = await service.ask(body)
    assert service.rows() == rows + floor_grain(n_tokens)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert (service.counts("jobs"), service.counts("encoded")) == (1, 1)
    record = service.record()
    assert (record["pictures"], record["pictures_made"]) == (1, 1)
    assert record["stages"]["vision_s"] > 0
    await service.listed(body)

    # The same picture again: everything is found, and nobody looks at it.
    rows = service.rows()
    again = await service.ask(body)
    assert again["prompt_tokens_details"]["cached_tokens"] == floor_grain(n_tokens)
    assert (service.rows(), service.counts("jobs")) == (rows, 1)

    # The same text with another picture: what is common ends where the span begins.
    other = chat(before, png(2), words)
    assert list(service.prompt(other)[0]) == list(ids)
    usage = await service.ask(other)
    assert usage["prompt_tokens_details"]["cached_tokens"] == floor_grain(span.start)
    assert (service.counts("jobs"), service.counts("encoded")) == (2, 2)


async def test_vision_is_called_only_for_rows_that_run(service: Service) -> None:
    """The index does not list the pictures any more, and all blocks are stored."""
    early = chat(png(3), text(600, "long text"))
    late = chat(text(600, "long text before"), png(4), "so?")
    for body in (early, late):
        await service.ask(body)
        await service.listed(body)
    await service.forget_pictures()
    jobs, rows = service.counts("jobs"), service.rows()
    await service.ask(early)
    assert service.counts("jobs") == jobs
    found = service.counts("found")
    usage = await service.ask(late)
    assert (service.counts("jobs"), service.counts("found")) == (jobs + 1, found + 1)
    assert usage["prompt_tokens_details"]["cached_tokens"] == floor_grain(usage["prompt_tokens"])
    assert service.rows() == rows
    assert service.record()["pictures_made"] == 0


async def test_two_pictures_one_of_them_twice(service: Service) -> None:
    encoded = service.counts("encoded")
    await service.ask(chat("first", png(5), "then", png(6), text(300, "more"), png(5), "alike?"))
    assert service.counts("encoded") == encoded + 2


async def test_equal_pixels_in_another_mode_are_another_picture(service: Service) -> None:
    stored = (await service.cluster.prefill.store.stat()).pictures
    await service.ask(chat("look", png(7), text(40, "a")))
    await service.ask(chat("look", png(7, mode="RGBA"), text(40, "a")))
    assert (await service.cluster.prefill.store.stat()).pictures == stored + 2


async def test_a_damaged_object_is_made_again(service: Service) -> None:
    body = chat("see", png(8), text(300, "one"))
    await service.ask(body)
    await service.listed(body)
    (span,) = service.prompt(body)[1]
    store = service.cluster.prefill.store
    (place,) = await store.open_objects(Kind.MM, [span.digest], None)
    boot, arena = store._mapped
    region, slot = arena.locate(place.offset)
    arena.payload(region, slot, place.payload_bytes)[777] ^= 0x10
    assert not store.read_into(place, span.digest, bytearray(place.payload_bytes))
    jobs = service.counts("jobs")
    await service.ask(chat("see", png(8), text(300, "another text")))
    assert service.record()["attempts"] <= 2
    assert service.counts("jobs") >= jobs
    (place,) = await store.open_objects(Kind.MM, [span.digest], None)
    assert store.read_into(place, span.digest, bytearray(place.payload_bytes))


@pytest.mark.fault
async def test_missing_at_load_is_asked_for_in_the_next_attempt(service: Service) -> None:
    """The index lists what the store lost: decode says so, and vision makes it again."""
    body = chat("gone", png(9), text(60, "short"))
    (span,) = service.prompt(body)[1]
    real = service.router._index.present

    async def listed(*_: Any) -> frozenset[Digest]:
        return frozenset({span.digest})

    service.router._index.present = listed  # type: ignore[method-assign]
    try:
        encoded = service.counts("encoded")
        await service.ask(body)
    finally:
        service.router._index.present = real  # type: ignore[method-assign]
    record = service.record()
    assert (record["attempts"], record["pictures_made"]) == (2, 1)
    assert service.counts("encoded") == encoded + 1


@pytest.mark.fault
@pytest.mark.parametrize("action", ["nan", "flip", "raise"])
async def test_one_bad_encode_is_done_elsewhere(service: Service, action: str) -> None:
    """NaN, a wrong length and an exception: never decoded, once more on the other replica."""
    failed = service.counts("failed")
    faults.arm(f"vision.encode={action}@1")
    await service.ask(chat("try", png(20 + len(action)), text(50, action)))
    assert faults.fired("vision.encode") == 1
    assert service.counts("failed") == failed + 1


@pytest.mark.fault
async def test_no_replica_can_encode(service: Service) -> None:
    faults.arm("vision.encode=nan")
    answer = await service.post(chat("try", png(30), "a"))
    assert faults.fired("vision.encode") == 2
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    await service.at_rest()
    faults.disarm()
    await service.ask(chat("try", png(30), "a"))


@pytest.mark.fault
async def test_a_vision_replica_killed_in_the_middle(service: Service, processes: Any) -> None:
    process = processes["vision-5"]
    await routable(service, 3)
    names = ["vision-0", "vision-1", "vision-5"]
    bodies = (chat("die", png(seed), text(250, "killed")) for seed in range(40, 80))
    body = next(
        b for b in bodies if two_rings(service.prompt(b)[1][0].digest, names)[0] == "vision-5"
    )
    answer = asyncio.create_task(service.ask(body))
    assert await process.ended() == 137 and not Path(f"/proc/{process.pid}").exists()
    await answer
    assert service.record()["attempts"] == 1


@pytest.mark.fault
async def test_a_client_that_leaves_while_its_picture_is_encoded(service: Service) -> None:
    gate = threading.Event()
    real = [vision.encoder.encode_prepared for vision in service.visions]
    for vision, encode in zip(service.visions, real, strict=True):

        def waiting(pictures: Any, encode: Any = encode) -> Any:
            gate.wait(20)
            return encode(pictures)

        vision.encoder.encode_prepared = waiting  # type: ignore[method-assign]
    try:
        leaving = asyncio.create_task(service.post(chat("bye", png(90), text(200, "left"))))
        async with asyncio.timeout(5):
            while not any(v.work and v.work.queued_patches for v in service.visions):
                await asyncio.sleep(0.005)
        leaving.cancel()
        await service.at_rest(1.0)
    finally:
        gate.set()
        for vision, encode in zip(service.visions, real, strict=True):
            vision.encoder.encode_prepared = encode  # type: ignore[method-assign]
    await service.ask(chat("back", png(91), "again"))


async def test_nothing_is_ever_fetched(service: Service) -> None:
    hits = 0

    def on_connect(reader: Any, writer: Any) -> None:
        nonlocal hits
        hits += 1
        writer.close()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    hosts = ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "0x7f000001", "0177.0.0.1"]
    hosts += ["[::ffff:127.0.0.1]", "user@127.0.0.1", "169.254.169.254", "10.0.0.1"]
    urls = [f"{scheme}://{host}:{port}/a.png" for host in hosts for scheme in ("http", "https")]
    urls += [f"ftp://127.0.0.1:{port}/a", f"gopher://127.0.0.1:{port}/", "file:///etc/hostname"]
    urls += ["//127.0.0.1/a.png", "data:text/html;base64,AAAA", "data:image/png,raw", "data:", ""]
    for address in urls:
        body = chat("look", b"")
        body["messages"][0]["content"][1]["image_url"]["url"] = address
        answer = await service.post(body)
        assert answer.status_code == 400, address
        assert answer.json()["error"]["param"] == "messages[0].content[1]"
    await asyncio.sleep(0.05)
    server.close()
    assert hits == 0


async def test_bad_files_and_too_many_end_at_the_edge(service: Service) -> None:
    jobs = service.counts("jobs")
    huge = bytearray(png(1))
    huge[16:24] = (9000).to_bytes(4, "big") * 2
    for data in (bytes(huge), b"<svg xmlns='a'/>", b"II*\0" + bytes(40), png(1)[:20], b""):
        answer = await service.post(chat("look", data))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages[0].content[1]"
    answer = await service.post(chat(*[png(1)] * 1000))
    assert answer.status_code == 400 and "32" in answer.json()["error"]["message"]
    for role in ("system", "assistant"):
        body = chat(png(1), "look")
        body["messages"] = [{**body["messages"][0], "role": role}, {"role": "user", "content": "a"}]
        assert (await service.post(body)).status_code == 400
    ids = {"model": MODEL, "prompt": [5, service.cluster.card.image_token_id, 6]}
    assert (await service.http.post("/v1/completions", json=ids)).status_code == 400
    # Pixels that are damaged behind a sound header are found out by vision, and it is the client's
    # fault all the same.
    damaged = bytearray(png(1))
    at = damaged.index(b"IDAT") + 4
    damaged[at : at + 8] = bytes(8)
    assert service.counts("jobs") == jobs
    answer = await service.post(chat("look", bytes(damaged)))
    assert answer.status_code == 400 and "damaged" in answer.json()["error"]["message"]
    assert service.counts("jobs") == jobs + 1
    await service.at_rest()


async def test_a_marker_in_a_text_is_text(service: Service) -> None:
    """A content that spells the placeholder neither becomes one nor takes a picture's place."""
    await service.ask(chat("<｜image｜> and", png(95), "<｜image｜>"))
    await service.ask(chat("only <｜image｜>"))
