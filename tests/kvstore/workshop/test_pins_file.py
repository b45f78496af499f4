"""A list of pins that is none: the store starts without, the tools say so."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.core.clock import FakeClock
from headrace.core.errors import ConfigError
from headrace.kvstore import Kind
from headrace.kvstore.pins import PINS_FILE, Pin, read_pins, write_pins
from headrace.kvstore.questions import StoreRefused, Topic
from headrace.kvstore.workshop import repair
from headrace.kvstore.workshop.directory import StoreDirectory

GOOD = {"name": "a", "namespace": "0" * 64, "tip": "1" * 64, "expires_at_s": 9e9}
BROKEN = {
    "deep": "[" * 100_000,
    "empty": "",
    "list": "[]",
    "null": "null",
    "bytes": "\udcff",
    "long": " " * (1 << 20) + "{}",
    "version": '{"version": 2, "pins": []}',
    "pins": '{"version": 1, "pins": 7}',
    "twice": json.dumps({"version": 1, "pins": [GOOD, GOOD]}),
    **{
        f"{name}={value!r}": json.dumps({"version": 1, "pins": [GOOD | {name: value}]})
        for name, value in [
            ("expires_at_s", float("nan")),
            ("expires_at_s", float("inf")),
            ("expires_at_s", 1e300),
            ("expires_at_s", "9e9"),
            ("expires_at_s", True),
            ("expires_at_s", None),
            ("name", 7),
            ("namespace", None),
            ("tip", ["1"]),
            ("other", 1),
        ]
    },
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_list_of_pins_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / PINS_FILE
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match="pins.json"):
        read_pins(tmp_path)


@pytest.mark.parametrize("what", ["deep", "expires_at_s=nan", "folder", "version"])
async def test_a_store_starts_without_pins_and_keeps_the_file(
    filled, rig, things, no_progress, now_s, caplog, what
):
    path = filled / PINS_FILE
    path.mkdir() if what == "folder" else path.write_text(BROKEN[what])
    with StoreDirectory(filled) as files, pytest.raises(ConfigError, match="pins.json"):
        repair.find_garbage(files, repair.Wishes(1 << 40), no_progress)  # could be pinned
    for suffix in ("damaged", "damaged-2"):
        await rig.start()
        client = await rig.client()
        assert len(await client.open_prefix([things.digest(0)], None)) == 1
        await rig.stop()
        aside = filled / f"{PINS_FILE}.{suffix}"
        assert aside.is_dir() if what == "folder" else aside.read_text() == BROKEN[what]
        assert f"it is {aside} now" in caplog.text and read_pins(filled) == ()
        path.mkdir() if what == "folder" else path.write_text(BROKEN[what])
    path.rmdir() if what == "folder" else path.unlink()
    write_pins(filled, [Pin("b", things.namespace.hex(), things.digest(11).hex(), now_s + 1000)])
    await rig.start()
    await rig.stop()
    assert [pin.name for pin in read_pins(filled)] == ["b"]


async def test_a_list_that_cannot_be_written_ends_no_store(rig, things, when_idle):
    """A folder stands where the new list would be written."""
    clock = FakeClock()
    rig.options = {"clock": clock}
    await rig.start()
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(0, 1, 2))
    await when_idle(client)

    async def pin(name: str, tip: int, ttl_s: float = 60.0) -> None:
        pinned = {"namespace": things.namespace.hex(), "tip": things.digest(tip).hex()}
        await client.ask(Topic.PIN, name=name, ttl_s=ttl_s, **pinned)

    await pin("a", 0)
    await pin("b", 0, ttl_s=3600.0)
    folder = Path(rig.settings.directory)
    text = (folder / PINS_FILE).read_text()
    (folder / f".{PINS_FILE}.{os.getpid()}").mkdir()

    async def pins() -> tuple[int, list[Any]]:
        found = await client.ask(Topic.PINS)
        return found["held_bytes"], sorted(found["pins"], key=lambda one: str(one["name"]))

    before = await pins()
    assert before[0] == 3000 and [one["name"] for one in before[1]] == ["a", "b"]
    for change in (
        lambda: pin("c", 1),
        lambda: pin("a", 2),
        lambda: client.ask(Topic.UNPIN, name="a"),
    ):
        with pytest.raises(StoreRefused, match=r"pins.json cannot be written \(Is a directory\)"):
            await change()
        assert await pins() == before
    assert (folder / PINS_FILE).read_text() == text
    clock.advance(100)

    async with asyncio.timeout(15):
        while [one["name"] for one in (await pins())[1]] != ["b"]:
            await asyncio.sleep(0.02)
    assert (folder / PINS_FILE).read_text() == text  # with the one that ended
    assert rig.task is not None and not rig.task.done()
    assert None not in await client.put(Kind.KV, things.blocks(5))
    (folder / f".{PINS_FILE}.{os.getpid()}").rmdir()
    await rig.restart()
    assert [one["name"] for one in (await pins())[1]] == ["b"]
    assert [one.name for one in read_pins(folder)] == ["b"]
