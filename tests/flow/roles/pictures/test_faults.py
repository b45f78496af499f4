"""What fails on a picture's way: the right text, or one explicit error, and nothing is held."""

from __future__ import annotations

import asyncio
import math
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core import faults
from headrace.core.ids import Digest
from headrace.kvstore import Kind
from headrace.model.vision_rows import pack_rows
from headrace.router.sight import two_rings

MODEL = "toy"
STORE = {"picture_bytes": 64 << 10}
PROCESSES = {"vision-5": ("vision", "vision.encode=exit@1")}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.fault
async def test_missing_at_load_is_asked_for_in_the_next_attempt(service: Any) -> None:
    """The index lists what the store lost: decode says so, and vision makes it again."""
    body = service.chat("gone", service.png(9), service.text(60, "short"))
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
@pytest.mark.parametrize("g", [1, 3, 5])
@pytest.mark.parametrize("late", [False, True], ids=["picture before F", "picture across F"])
async def test_a_lost_answer_about_a_picture_goes_on(service: Any, g: int, late: bool) -> None:
    """Decode gives up after `g` tokens: the next one runs rows of the picture again where the
    resume needs them, and the client reads the text of one engine."""
    words = service.text(300, f"resumed {g} {late}")
    picture = service.png(60 + g)
    parts = (words, picture, service.text(24, "tail")) if late else (picture, words)
    body = service.chat(*parts)
    (span,) = service.prompt(body)[1]
    floor = len(service.prompt(body)[0]) - service.cluster.keep_tokens
    assert (span.start < floor < span.end) if late else span.end < floor
    faults.arm(f"decode.token=raise@{g}")
    await service.ask(body)
    assert faults.fired("decode.token") == 1
    record = service.record()
    assert (record["attempts"], record["resumes"]) == (2, 1)
    assert record["completion_tokens"] == 6


@pytest.mark.fault
@pytest.mark.parametrize("action", ["nan", "flip", "raise"])
async def test_one_bad_encode_is_done_elsewhere(service: Any, action: str) -> None:
    """NaN, a wrong length and an exception: never decoded, once more on the other replica."""
    failed = service.counts("failed")
    faults.arm(f"vision.encode={action}@1")
    await service.ask(service.chat("try", service.png(20 + len(action)), service.text(50, action)))
    assert faults.fired("vision.encode") == 1
    assert service.counts("failed") == failed + 1


@pytest.mark.fault
async def test_no_replica_can_encode(service: Any) -> None:
    faults.arm("vision.encode=nan")
    answer = await service.post(service.chat("try", service.png(30), "a"))
    assert faults.fired("vision.encode") == 2
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    await service.at_rest()
    faults.disarm()
    await service.ask(service.chat("try", service.png(30), "a"))


def wrong_rows(kind: str, n_rows: int, width: int) -> bytes:
    """A payload that is whole as an object of the store and is not the picture's rows."""
    rows = torch.zeros(n_rows - (kind == "short"), width, dtype=torch.float64)
    if kind == "float32":
        return pack_rows(rows.float())
    payload = bytearray(pack_rows(rows))
    if kind == "nan":
        payload[-8:] = struct.pack("<d", math.nan)
    return bytes(payload)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["short", "float32", "nan"])
async def test_wrong_rows_under_the_right_key_are_never_run(service: Any, kind: str) -> None:
    """As a vision replica would leave them that does not check what it makes."""
    body = service.chat("lie", service.png(100 + len(kind)), service.text(250, kind))
    (span,) = service.prompt(body)[1]
    width = service.cluster.prefill.engine.model.config.hidden_size
    store, payload = service.cluster.prefill.store, wrong_rows(kind, span.n_tokens, width)
    (place,) = await store.put(Kind.MM, [(span.digest, payload)])
    assert place is not None
    rows = service.rows()
    answer = await service.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "pictures_missing")
    assert (service.rows(), service.record()["attempts"]) == (rows, 3)
    await service.at_rest()
    await service.ask(service.chat("another", service.png(110 + len(kind)), "?"))


@pytest.mark.fault
async def test_a_vision_replica_killed_in_the_middle(service: Any, processes: Any) -> None:
    process = processes["vision-5"]
    await service.routable(3)
    names = ["vision-0", "vision-1", "vision-5"]
    bodies = (
        service.chat("die", service.png(seed), service.text(250, "killed"))
        for seed in range(40, 80)
    )
    body = next(
        b for b in bodies if two_rings(service.prompt(b)[1][0].digest, names)[0] == "vision-5"
    )
    answer = asyncio.create_task(service.ask(body))
    assert await process.ended() == 137 and not Path(f"/proc/{process.pid}").exists()
    await answer
    assert service.record()["attempts"] == 1


@pytest.mark.fault
async def test_a_client_that_leaves_while_its_picture_is_encoded(service: Any) -> None:
    gate = threading.Event()
    real = [vision.encoder.encode_prepared for vision in service.visions]
    for vision, encode in zip(service.visions, real, strict=True):

        def waiting(pictures: Any, encode: Any = encode) -> Any:
            gate.wait(20)
            return encode(pictures)

        vision.encoder.encode_prepared = waiting  # type: ignore[method-assign]
    try:
        leaving = asyncio.create_task(
            service.post(service.chat("bye", service.png(90), service.text(200, "left")))
        )
        async with asyncio.timeout(60):
            while not any(v.work and v.work.queued_patches for v in service.visions):
                await asyncio.sleep(0.005)
        leaving.cancel()
        await service.at_rest(1.0)
    finally:
        gate.set()
        for vision, encode in zip(service.visions, real, strict=True):
            vision.encoder.encode_prepared = encode  # type: ignore[method-assign]
    await service.ask(service.chat("back", service.png(91), "again"))
