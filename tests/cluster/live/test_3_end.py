"""The end of things: every process killed and started again, Ray's head killed, and `down`."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.chain import BLOCK_TOKENS
from headrace.engine import LLM

pytestmark = [pytest.mark.ray, pytest.mark.fault]
Live = Any  # the cluster of conftest.py
Conversation = Any  # likewise
Ids = Callable[[str, int], list[int]]
Until = Callable[..., None]
Stream = Callable[..., Any]


def stored_block(live: Live, llm: LLM, prompt: list[int], index: int) -> tuple[bytes, int]:
    """The payload of one block of a stored prompt, read as a role reads it, and where it lies in
    the arena."""
    digests = live.digests(llm, prompt)
    places = live.wait(live.store().open_prefix(digests, None))
    assert len(places) > index
    payload = bytearray(places[index].payload_bytes)
    assert live.store().read_into(places[index], digests[index], payload)
    return bytes(payload), places[index].offset


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


def flip_in_arena(live: Live, payload: bytes, offset: int) -> None:
    """Flip one bit of a sealed object in the shared memory of the running store."""
    folder = Path(f"/proc/{live.role('store-0')['pid']}/fd")
    flipped = 0
    for fd in folder.iterdir():
        if not os.readlink(fd).startswith("/memfd:"):
            continue
        handle = os.open(fd, os.O_RDWR)
        try:
            if os.pread(handle, len(payload), offset) == payload:  # Ray has a memfd there too
                at = len(payload) // 2
                os.pwrite(handle, bytes([payload[at] ^ 0x01]), offset + at)
                flipped += os.pread(handle, len(payload), offset) != payload
        finally:
            os.close(handle)
    assert flipped == 1


@pytest.mark.parametrize("under", ["one process", pytest.param("Ray", marks=pytest.mark.slow)])
def test_everything_killed_then_up_again_serves_from_disk(
    live: Live, beside: Live, llm: LLM, ids: Ids, talk: Conversation, until: Until, under: str
) -> None:
    """By default the cluster in one process, which starts in a quarter of the time that Ray takes;
    the other one goes on untouched."""
    live, other, least = (live, beside, 10) if under == "Ray" else (beside, live, 2)
    on_disk, in_memory = ids("hurt on disk", 1000), ids("hurt in memory", 1000)
    want = llm.generate([on_disk, in_memory], max_tokens=4)
    assert live.complete(talk.first, 8).text == talk.answer.text
    for prompt, wanted in ((on_disk, want[0]), (in_memory, want[1])):
        assert live.complete(prompt, 4).text == wanted.text
    until(lambda: live.stat().pending == 0, 20.0, "not durable")
    payload, _ = stored_block(live, llm, on_disk, 5)

    before, others = live.members(), {process.pid for process in other.members()}
    assert len(before) >= least
    for process in before:
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not live.members(), 10.0, "a process lives on")
    assert {process.pid for process in other.members()} == others
    flip_on_disk(live.run.store_directory, payload)

    assert "is ready at" in live.up().stdout
    assert not {p.pid for p in before} & {p.pid for p in live.members()}
    # a store serves while it lists again what it found; what is not listed yet goes by prefill
    until(lambda: not live.stat().index_unlisted, 20.0, "not listed")
    got = live.complete(talk.second, 8)
    assert got.text == talk.second_answer.text
    talk.assert_replayed(got.record, llm.keep_tokens)
    stat = live.stat()
    assert stat.loads >= talk.stored_tokens // BLOCK_TOKENS  # from the segment files
    assert stat.damaged == 0

    for number, (prompt, wanted) in enumerate(((on_disk, want[0]), (in_memory, want[1]))):
        if prompt is in_memory:
            flip_in_arena(live, *stored_block(live, llm, in_memory, 5))
        assert live.stat().damaged == number
        got = live.complete(prompt, 4)
        assert got.text == wanted.text
        assert live.stat().damaged == number + 1
        # the five blocks before the damaged one still count, the rest was run anew
        rows = got.record["prefill_rows"] + got.record["encoder_rows"]
        assert 1000 - 5 * BLOCK_TOKENS <= rows < 1000
    live.settled()
    assert {process.pid for process in other.members()} == others


def test_streams_go_on_when_the_head_of_ray_is_killed(
    live: Live, llm: LLM, ids: Ids, stream: Stream, until: Until
) -> None:
    prompt = ids("head", 300)
    request = stream(live, prompt, 60)
    until(lambda: request.text != "", 30.0, "no text came")
    live.kill(live.process("gcs_server").pid)
    assert request.open
    request.finish()
    assert (request.text, request.done) == (llm.generate([prompt], max_tokens=60)[0].text, True)
    other = ids("headless", 400)  # and a hand-off that begins without it
    answer = live.complete(other, 4)
    assert answer.text == llm.generate([other], max_tokens=4)[0].text
    assert answer.record["prefill_rows"] == 384
    assert any("Ray's head is gone" in note for note in live.view()["notes"])
    assert "gcs_server" not in {process.name for process in live.members()}
    live.settled()


def test_down_leaves_nothing_and_touches_nobody_else(
    live: Live, beside: Live, llm: LLM, ids: Ids, stream: Stream, until: Until
) -> None:
    others = {process.pid for process in beside.members()}
    last = ids("last", 300)
    request = stream(live, last, 60)
    until(lambda: request.text != "", 30.0, "no text came")
    done = live.down()
    assert done.returncode == 0, done.stderr
    request.finish()  # what was accepted is answered first
    assert (request.text, request.done) == (llm.generate([last], max_tokens=60)[0].text, True)
    assert "none left" in done.stdout
    assert live.members() == []
    assert mentioning(str(live.run.path)) == mentioning(str(live.run.short_dir)) == []
    assert "does not run" in live.down().stdout
    assert {process.pid for process in beside.members()} == others
    prompt = ids("beside", 500)
    answer = beside.complete(prompt, 4)
    assert answer.text == llm.generate([prompt], max_tokens=4)[0].text
    assert answer.record["prefill_rows"] == 384
    beside.settled()
    assert beside.down().returncode == 0
    assert mentioning(str(beside.run.home)) == []


def mentioning(path: str) -> list[int]:
    """Processes, of whatever session, that name a path in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if path.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
