"""Chats with pictures over HTTP, through a router, vision, prefill and decode replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.economics import of_records
from headrace.core.records import RequestRecord
from headrace.core.rows import floor_grain
from headrace.kvstore import Kind
from headrace.kvstore.arena import Reading

MODEL = "toy"
STORE = {"picture_bytes": 64 << 10}
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_handed_over_then_found_then_another_picture(service: Any) -> None:
    before, words = service.text(300, "before"), service.text(420, "after")
    body = service.chat(before, service.png(1), words)
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
    other = service.chat(before, service.png(2), words)
    assert list(service.prompt(other)[0]) == list(ids)
    usage = await service.ask(other)
    assert usage["prompt_tokens_details"]["cached_tokens"] == floor_grain(span.start)
    assert (service.counts("jobs"), service.counts("encoded")) == (2, 2)


async def test_vision_is_called_only_for_rows_that_run(service: Any) -> None:
    """The index does not list the pictures any more, and all blocks are stored."""
    early = service.chat(service.png(3), service.text(600, "long text"))
    late = service.chat(service.text(600, "long text before"), service.png(4), "so?")
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


async def test_two_pictures_one_of_them_twice(service: Any) -> None:
    encoded = service.counts("encoded")
    one, two = service.png(5), service.png(6)
    await service.ask(service.chat("first", one, "then", two, service.text(300, "more"), one, "?"))
    assert service.counts("encoded") == encoded + 2


async def test_equal_pixels_in_another_mode_are_another_picture(service: Any) -> None:
    stored = (await service.cluster.prefill.store.stat()).pictures
    await service.ask(service.chat("look", service.png(7), service.text(40, "a")))
    await service.ask(service.chat("look", service.png(7, mode="RGBA"), service.text(40, "a")))
    assert (await service.cluster.prefill.store.stat()).pictures == stored + 2


@pytest.mark.fault
async def test_a_damaged_object_costs_an_attempt(service: Any) -> None:
    """Whoever runs the rows finds the flipped bit; vision is asked and finds the copy on disk."""
    picture = service.png(8)
    body = service.chat("see", picture, service.text(300, "one"))
    await service.ask(body)
    await service.listed(body)
    (span,) = service.prompt(body)[1]
    store, namespace = service.cluster.prefill.store, service.cluster.card.namespace().digest()
    (place,) = await store.open_objects(Kind.MM, [span.digest], None)
    _, arena = store._mapped
    region, slot = arena.locate(place.offset)
    arena.payload(region, slot, place.payload_bytes)[777] ^= 0x10
    assert arena.read(place, namespace, span.digest, None) is Reading.DAMAGED
    jobs, found = service.counts("jobs"), service.counts("found")
    await service.ask(service.chat("see", picture, service.text(300, "another text")))
    record = service.record()
    assert (record["attempts"], record["pictures_made"]) == (2, 0)
    assert (service.counts("jobs"), service.counts("found")) == (jobs + 1, found + 1)
    (place,) = await store.open_objects(Kind.MM, [span.digest], None)
    assert arena.read(place, namespace, span.digest, None) is Reading.GOOD


async def test_nothing_is_ever_fetched(service: Any) -> None:
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
        body = service.chat("look", b"")
        body["messages"][0]["content"][1]["image_url"]["url"] = address
        answer = await service.post(body)
        assert answer.status_code == 400, address
        assert answer.json()["error"]["param"] == "messages[0].content[1]"
    await asyncio.sleep(0.05)
    server.close()
    assert hits == 0


async def test_bad_files_and_too_many_end_at_the_edge(service: Any) -> None:
    jobs = service.counts("jobs")
    huge = bytearray(service.png(1))
    huge[16:24] = (9000).to_bytes(4, "big") * 2
    for data in (bytes(huge), b"<svg xmlns='a'/>", b"II*\0" + bytes(40), service.png(1)[:20], b""):
        answer = await service.post(service.chat("look", data))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages[0].content[1]"
    answer = await service.post(service.chat(*[service.png(1)] * 1000))
    assert answer.status_code == 400 and "32" in answer.json()["error"]["message"]
    for role in ("system", "assistant"):
        body = service.chat(service.png(1), "look")
        body["messages"] = [{**body["messages"][0], "role": role}, {"role": "user", "content": "a"}]
        assert (await service.post(body)).status_code == 400
    ids = {"model": MODEL, "prompt": [5, service.cluster.card.image_token_id, 6]}
    assert (await service.http.post("/v1/completions", json=ids)).status_code == 400
    # Pixels that are damaged behind a sound header are found out by vision, and it is the client's
    # fault all the same.
    damaged = bytearray(service.png(1))
    at = damaged.index(b"IDAT") + 4
    damaged[at : at + 8] = bytes(8)
    assert service.counts("jobs") == jobs
    answer = await service.post(service.chat("look", service.png(1), bytes(damaged)))
    error = answer.json()["error"]
    assert answer.status_code == 400 and "damaged" in error["message"]
    assert error["param"] == "messages[0].content[2]"
    # Both were asked for at once; the sound one lies with another replica, which may hear of it
    # after the answer.
    async with asyncio.timeout(60):
        while service.counts("jobs") < jobs + 2:
            await asyncio.sleep(0.005)
    assert service.counts("jobs") == jobs + 2
    await service.at_rest()


async def test_a_marker_in_a_text_is_text(service: Any) -> None:
    """A content that spells the placeholder neither becomes one nor takes a picture's place."""
    await service.ask(service.chat("<｜image｜> and", service.png(95), "<｜image｜>"))
    await service.ask(service.chat("only <｜image｜>"))


async def test_saved_rows_are_those_that_no_replica_ran(service: Any) -> None:
    """Two chats twice each. The short one finds a block and replays most of it, since no window
    record lies below its end; the long one finds one. The engines themselves count the rows."""
    records = []
    for body in (service.chat(service.text(180, "few")), service.chat(service.text(900, "many"))):
        n_tokens = len(service.prompt(body)[0])
        for turn in (1, 2):
            before = service.encoder_rows()
            usage = await service.ask(body)
            record = RequestRecord(**service.record())
            answer_rows = record.completion_tokens - 1  # the newest token has no row
            ran = service.encoder_rows() - before - answer_rows
            assert record.finish == "length" and record.saved_rows == n_tokens - ran
            assert usage["prompt_tokens_details"]["cached_tokens"] == (
                floor_grain(n_tokens) if turn == 2 else 0
            )
            records.append(record)
            await service.listed(body)
    _, short, _, long = records
    latest_start = short.prompt_tokens - service.cluster.keep_tokens
    assert sum(short.hit_tokens.values()) == 128 > latest_start
    assert short.saved_rows == (latest_start - 2 * (32 - 1)) // 2 * 2 < 128 // 2
    assert long.saved_rows > 128
    account = of_records(records)
    assert account.row_s is not None and account.again_rows == 0
    merit = [  # what the replica still had is the head of the prompt, and not the store's
        max(0, one.saved_rows - one.hit_tokens.get("resident", 0))
        for one in (short, long)
        if one.hit_tokens.keys() != {"resident"}
    ]
    assert (account.hits, account.saved_rows) == (len(merit), sum(merit))
