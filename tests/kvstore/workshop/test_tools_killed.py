"""Tools that work on a directory, ended before each of their changes: by a kill, by a power cut, by
a power cut that keeps some sectors. What is there is exact or refused, and the tool run again comes
to the same end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio
from headrace_tests_kvstore_disk import Image, Recorder

from headrace.kvstore.files import FileCalls
from headrace.kvstore.layout import checksum
from headrace.kvstore.workshop import carry, repair
from headrace.kvstore.workshop.directory import StoreDirectory
from headrace.kvstore.workshop.garbage import Wishes

pytestmark = pytest.mark.fault


def quiet(done: int, total: int) -> None:
    pass


def sound_in(folder: Path) -> dict[bytes, bytes]:
    """Payload by digest of every object that verifies."""
    with StoreDirectory(folder) as files:
        found = {}
        for place, header in files.objects().values():
            payload = files.payload(place, header.facts.payload_bytes)
            if payload is not None and checksum(payload) == header.checksum:
                found[bytes(header.facts.digest)] = bytes(payload)
        return found


@pytest_asyncio.fixture
async def imported(filled, rig, home, things, tmp_path) -> tuple[Path, Callable]:
    """An empty store with the same salt, and the import of eight objects into it."""
    file = tmp_path / "both.hrpx"
    with StoreDirectory(filled) as files:
        tips = [things.digest(4), things.digest(11)]
        carry.export_chains(files, things.namespace, tips, file, quiet)
    target = Path(home) / "other"
    target.mkdir(mode=0o700)
    shutil.copy2(filled / "salt", target / "salt")
    await rig.start(directory=str(target))
    await rig.stop()
    return target, lambda files: carry.import_file(files, file, quiet)


@pytest.fixture
def cleaned(filled, things) -> tuple[Path, Callable]:
    """A store without its second block, and the clean-up of all that hung on it."""
    with StoreDirectory(filled) as files:
        for place, header in files.objects().values():
            if header.facts.digest == things.digest(1):
                files.erase(place)
        files.sync()

    def gc(files: StoreDirectory) -> None:
        repair.erase(files, repair.find_garbage(files, Wishes(), quiet))

    return filled, gc


@pytest.fixture
def scrubbed(filled, flip) -> tuple[Path, Callable]:
    """A store with two damaged blocks, and their removal."""
    for slot in (1, 4):
        flip(filled / "segment-000000.seg", 4096 + slot * 4096 + 100)
    return filled, lambda files: repair.scrub(files, quiet)


@pytest.fixture
def rebuilt(filled) -> tuple[Path, Callable]:
    """A store that has lost the headers of its segments in use, and their making."""
    for path in filled.glob("segment-*"):
        with open(path, "r+b") as file:
            if any(file.read(4096)):
                file.seek(0)
                file.write(b"x" * 4096)
    return filled, lambda files: repair.rebuild_headers(files, quiet)


@pytest.mark.parametrize("tool", ["imported", "cleaned", "scrubbed", "rebuilt"])
def test_a_tool_that_is_ended_before_any_of_its_changes(tool, request, tmp_path):
    folder, work = request.getfixturevalue(tool)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    before, recorder = sound_in(folder), Recorder()
    with StoreDirectory(folder, recorder) as files:
        work(files)
    after = sound_in(folder)
    log = [op for op in recorder.log if op.file.startswith("segment-")]
    assert len(log) > 2 and (set(after) != set(before) or tool == "scrubbed")
    everything = before | after
    segments = {name: data for name, data in first.items() if name.startswith("segment-")}
    image = Image(
        files={name: bytearray(data) for name, data in segments.items()},
        durable={name: bytearray(data) for name, data in segments.items()},
        dirty={name: set() for name in segments},
    )
    lost = 0
    for number in range(len(log) + 1):
        whole: dict[bytes, bytes] = {}
        for mode, seed in (("kill", 0), ("power", 0), ("torn", number)):
            place = tmp_path / "image"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name, data in {**first, **image.after(mode, seed)}.items():
                (place / name).write_bytes(data)
            found = sound_in(place)
            # Exact or not there; what was to stay is there, what was there before the tool, too.
            assert all(everything[digest] == payload for digest, payload in found.items())
            assert set(before) & set(after) <= set(found), (number, mode)
            if mode == "kill":
                whole = found
            lost += len(set(whole) - set(found)) > 0
            with StoreDirectory(place, FileCalls()) as files:
                if mode != "kill":
                    repair.scrub(files, quiet)  # a header may have outlived its payload
                work(files)
            assert sound_in(place) == after, (number, mode)
        if number < len(log):
            image.apply(log[number])
    assert lost > 0 or tool != "imported", (
        "no power cut has cost anything: is there a sync too many?"
    )
