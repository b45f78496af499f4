"""A list of pins that is none: the store starts without, the tools say so."""

from __future__ import annotations

import json

import pytest

from headrace.core.errors import ConfigError
from headrace.kvstore.pins import PINS_FILE, Pin, read_pins, write_pins
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
