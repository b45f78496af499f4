"""The end of things: every process killed and started again, Ray's head killed, and `down`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.chain import BLOCK_TOKENS
from headrace.engine import LLM

pytestmark = [pytest.mark.ray, pytest.mark.fault]
Live = Any  # the cluster of conftest.py
Ids = Callable[[str, int], list[int]]
Until = Callable[..., None]
Stream = Callable[..., Any]


class Conversation:
    """Two turns of which the second is 4,000 tokens, by name."""

    def __init__(self, llm: LLM, ids: Ids, name: str) -> None:
        self.first = ids(name, 3850)
        self.answer = llm.generate([self.first], max_tokens=8)[0]
        more = ids(f"{name}: second turn", 150 - len(self.answer.token_ids))
        self.second = [*self.first, *self.answer.token_ids, *more]
        self.text = llm.generate([self.second], max_tokens=4)[0].text
        assert len(self.second) == 4000


def stored_block(live: Live, llm: LLM, prompt: list[int], index: int) -> bytes:
    """The payload of one block of a stored prompt, read as a role reads it."""
    digests = live.digests(llm, prompt)
    places = live.wait(live.store().open_prefix(digests, None))
    assert len(places) > index
    payload = bytearray(places[index].payload_bytes)
    assert live.store().read_into(places[index], digests[index], payload)
    return bytes(payload)


def flip_on_disk(directory: Path, payload: bytes) -> None:
    """Flip one bit in the one place below `directory` that holds `payload`."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.stat().st_size > len(payload):
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
                at = view.find(payload)
                while at >= 0:
                    found.append((path, at))
                    at = view.find(payload, at + 1)
    assert len(found) == 1, found
    path, at = found[0]
    with open(path, "r+b") as file:
        file.seek(at + len(payload) // 2)
        old = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
        file.seek(at)
        assert file.read(len(payload)) != payload


def test_everything_killed_then_up_again_serves_from_disk(
    live: Live, beside: Live, llm: LLM, ids: Ids, until: Until
) -> None:
    good, hurt = Conversation(llm, ids, "kept"), Conversation(llm, ids, "hurt")
    for talk in (good, hurt):
        assert live.complete(talk.first, 8).text == talk.answer.text
    until(lambda: live.stat().pending == 0, 20.0, "not durable")
    payload = stored_block(live, llm, hurt.first, 5)

    before, others = live.members(), {process.pid for process in beside.members()}
    assert len(before) > 10
    for process in before:
        os.kill(process.pid, 9)
    until(lambda: not live.members(), 10.0, "a process lives on")
    assert {process.pid for process in beside.members()} == others
    flip_on_disk(live.run.store_directory, payload)

    done = live.up()
    assert "is ready at" in done.stdout
    assert not {p.pid for p in before} & {p.pid for p in live.members()}
    got = live.complete(good.second, 4)
    assert got.text == good.text
    assert got.record["prefill_rows"] == 0
    assert got.record["encoder_rows"] <= max(4000 - 3840, llm.keep_tokens + 127)
    assert got.record["decoder_rows"] == llm.keep_tokens
    stat = live.stat()
    assert stat.loads >= 3840 // BLOCK_TOKENS  # they came from the segment files
    assert stat.damaged == 0

    got = live.complete(hurt.second, 4)
    assert got.text == hurt.text
    assert live.stat().damaged == 1
    # the five blocks before the damaged one still counted, the rest was run anew
    assert got.record["prefill_rows"] + got.record["encoder_rows"] >= 4000 - 5 * BLOCK_TOKENS - 44
    live.settled()


def test_a_bit_flipped_in_the_arena(live: Live, llm: LLM, ids: Ids) -> None:
    talk = Conversation(llm, ids, "kept, in memory")
    tenant = "two"
    live.complete(talk.first, 8, tenant=tenant)
    live.settled()
