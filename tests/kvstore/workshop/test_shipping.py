"""Prefix files: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from headrace.kvstore import Kind
from headrace.kvstore.layout import checksum
from headrace.kvstore.workshop import carry, shipping
from headrace.kvstore.workshop.directory import StoreDirectory


@pytest.fixture
def shipped(filled, things, tmp_path, no_progress):
    """Both chains in one file."""
    path = tmp_path / "both.hrpx"
    with StoreDirectory(filled) as files:
        tips = [things.digest(4), things.digest(11)]
        carry.export_chains(files, things.namespace, tips, path, no_progress)
    return path


@pytest.fixture
async def other(rig, filled, home, settings_for):
    """An empty store's directory with the same salt."""
    target = Path(home) / "other"
    target.mkdir(mode=0o700)
    shutil.copy2(filled / "salt", target / "salt")
    await rig.start(directory=str(target))
    await rig.stop()
    return target


def by_digest(files: StoreDirectory) -> dict[bytes, tuple[bytes, bytes, int]]:
    return {
        bytes(h.facts.digest): (
            bytes(files.payload(place, h.facts.payload_bytes)),
            h.facts.domain,
            h.facts.block,
        )
        for place, h in files.objects().values()
    }


async def test_a_file_carries_chains_to_another_store_byte_for_byte(
    filled, shipped, other, rig, things, no_progress
):
    about = shipping.verify_file(shipped, no_progress)
    assert (about.objects, about.payload_bytes) == (8, 28_000)  # shared blocks stand once
    assert shipped.stat().st_size == 4096 + 8 * 512 + 28_000 + 24
    with StoreDirectory(filled) as files:
        before = by_digest(files)
    with StoreDirectory(other) as files:
        done = carry.import_file(files, shipped, no_progress)
        assert (done.written, done.known, done.no_room) == (8, 0, 0)
        assert by_digest(files) == before
        again = carry.import_file(files, shipped, no_progress)
        assert (again.written, again.known, again.no_room) == (0, 8, 0)
    await rig.start(directory=str(other))
    client = await rig.client()
    chain = [things.digest(n) for n in (0, 1, 2, 3, 4)]
    places = await client.open_prefix(chain, None)
    for number, place in zip((0, 1, 2, 3, 4), places, strict=True):
        dest = bytearray(3000)
        assert client.read_into(place, things.digest(number), dest)
        assert bytes(dest) == things.payload(number)
    # and it goes on writing behind what came in
    await client.put(Kind.KV, things.blocks(50, 51))
    await rig.restart()
    assert len(await client.open_prefix([things.digest(n) for n in (50, 51)], None)) == 2
    assert len(await client.open_prefix(chain, None)) == 5


def test_one_chain_alone_and_none_that_is_not_whole(filled, things, tmp_path, no_progress):
    with StoreDirectory(filled) as files:
        path = tmp_path / "b.hrpx"
        about = carry.export_chains(files, things.namespace, [things.digest(11)], path, no_progress)
        assert about.objects == 4
        numbers = [h.facts.block for h, _ in shipping.read_objects(path)]
        assert numbers == [0, 1, 2, 3]
        (place, _) = next(
            at for at in files.objects().values() if at[1].facts.digest == things.digest(1)
        )
        files.erase(place)
        with pytest.raises(shipping.FileRefused, match="is not stored as a whole"):
            carry.export_chains(
                files, things.namespace, [things.digest(11)], tmp_path / "c.hrpx", no_progress
            )
    assert [p.name for p in tmp_path.iterdir()] == ["b.hrpx"]  # no part of a file is left


def test_damage_in_the_store_stops_an_export(filled, things, tmp_path, flip, no_progress):
    flip(filled / "segment-000000.seg", 4096 + 77)
    with (
        StoreDirectory(filled) as files,
        pytest.raises(shipping.FileRefused, match=r"segment 0, slot 0 does not verify"),
    ):
        carry.export_chains(
            files, things.namespace, [things.digest(4)], tmp_path / "a.hrpx", no_progress
        )
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_and_every_cut_is_refused_before_anything_is_written(
    shipped, other, no_progress, tmp_path
):
    data = shipped.read_bytes()
    draw = random.Random(11)
    padding = range(4 + 2 + 2 + 4 + 24 + 64, 4088)  # covered by the header's checksum too
    places = [*range(0, 100, 7), padding[5], len(data) - 3, len(data) - 20]
    places += [draw.randrange(len(data)) for _ in range(60)]
    damaged = tmp_path / "damaged.hrpx"
    with StoreDirectory(other) as files:
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 1 << draw.randrange(8)
            damaged.write_bytes(changed)
            with pytest.raises(shipping.FileRefused):
                carry.import_file(files, damaged, no_progress)
        for end in (0, 3, 4095, 4096, 4600, 9000, len(data) - 1):
            damaged.write_bytes(data[:end])
            with pytest.raises(shipping.FileRefused):
                carry.import_file(files, damaged, no_progress)
        damaged.write_bytes(data + b"x")
        with pytest.raises(shipping.FileRefused, match=r"must have \d+ bytes, has"):
            carry.import_file(files, damaged, no_progress)
        assert files.objects() == {}


def test_another_salt_namespace_or_version_is_refused_by_name(
    shipped, other, things, no_progress, tmp_path
):
    with StoreDirectory(other) as files:
        (other / "salt").write_bytes(bytes(32))
        with pytest.raises(shipping.FileRefused, match="exported under another salt"):
            carry.import_file(files, shipped, no_progress, force=True)
        assert files.objects() == {}
    about = shipping.read_header(shipped)
    with pytest.raises(shipping.FileRefused, match="--new-namespace"):
        carry.check_fits(about, about.mark, {bytes(32)}, force=False)
    carry.check_fits(about, about.mark, {bytes(32)}, force=True)
    carry.check_fits(about, about.mark, {things.namespace}, force=False)
    old = bytearray(shipped.read_bytes())
    old[4:6] = (0).to_bytes(2, "little")
    path = tmp_path / "old.hrpx"
    path.write_bytes(old)
    with pytest.raises(shipping.FileRefused, match=r"old.hrpx has format version 0, .* reads 1"):
        shipping.read_header(path)
    path.write_bytes(b"PK\3\4" + bytes(5000))
    with pytest.raises(shipping.FileRefused, match="no prefix file"):
        shipping.read_header(path)


def test_a_tail_before_its_head_is_refused(shipped, tmp_path, no_progress):
    objects = list(shipping.read_objects(shipped))
    about = shipping.read_header(shipped)
    path = tmp_path / "turned.hrpx"
    shipping.write_file(path, objects[::-1], about, no_progress)
    with pytest.raises(shipping.FileRefused, match="before the block that it hangs on"):
        shipping.verify_file(path, no_progress)


async def test_an_import_fills_free_slots_heads_first_and_pushes_nothing_out(
    shipped, other, rig, things, when_idle, no_progress
):
    # three segments of four slots: two hold other blocks and are full, one is free
    small = {"segment_bytes": 20 << 10, "ssd_bytes": 3 * (20 << 10), "arena_bytes": 200_000}
    shutil.rmtree(other)
    other.mkdir(mode=0o700)
    shutil.copy2(f"{rig.home}/store/salt", other / "salt")
    await rig.start(directory=str(other), **small)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(100, 108)))
    assert (await when_idle(client)).ssd_objects == 8
    await rig.stop()
    with StoreDirectory(other) as files:
        done = carry.import_file(files, shipped, no_progress)
        assert (done.written, done.no_room) == (4, 4)
        blocks = {h.facts.digest for _, h in files.objects().values()}
        assert blocks == {things.digest(n) for n in (*range(100, 108), 0, 1, 2, 3)}
        for place, header in files.objects().values():
            assert checksum(files.payload(place, 3000)) == header.checksum


def test_an_export_replaces_no_segment_no_device_and_no_file_unasked(
    filled, things, tmp_path, no_progress
):
    def export(files: StoreDirectory, path, **options) -> None:
        tips = [things.digest(4)]
        carry.export_chains(files, things.namespace, tips, path, no_progress, **options)

    before = {path.name: path.read_bytes() for path in filled.iterdir()}
    (filled / "below").mkdir()
    link = tmp_path / "link"
    link.symlink_to(filled)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pointer = tmp_path / "pointer.hrpx"
    pointer.symlink_to(filled / "segment-000000.seg")
    older = tmp_path / "older.hrpx"
    older.write_bytes(b"mine")
    with StoreDirectory(filled) as files:
        inside = ["segment-000000.seg", "salt", "new.hrpx", "below/new.hrpx"]
        for path in [folder / name for folder in (filled, link) for name in inside]:
            for force in (False, True):
                with pytest.raises(shipping.FileRefused, match="lies in the store"):
                    export(files, path, force=force)
        for path in (fifo, tmp_path, pointer, Path("/dev/null")):
            for force in (False, True):
                with pytest.raises(shipping.FileRefused, match="no regular file"):
                    export(files, path, force=force)
        with pytest.raises(shipping.FileRefused, match="--force replaces it"):
            export(files, older)
        assert older.read_bytes() == b"mine" and fifo.is_fifo() and pointer.is_symlink()
        export(files, older, force=True)
    assert shipping.verify_file(older, no_progress).objects == 6
    assert older.stat().st_mode & 0o777 == 0o600
    (filled / "below").rmdir()
    after = {path.name: path.read_bytes() for path in filled.iterdir()}
    assert {n: d for n, d in after.items() if n != "lock"} == {
        n: d for n, d in before.items() if n != "lock"
    }


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_salt_that_no_store_takes_is_refused(
    filled, shipped, other, things, tmp_path, no_progress, length
):
    for folder in (filled, other):
        (folder / "salt").write_bytes(bytes(length))
    with (
        StoreDirectory(other) as files,
        pytest.raises(shipping.FileRefused, match=f"must hold 32 bytes, has {length}"),
    ):
        carry.import_file(files, shipped, no_progress)
    with (
        StoreDirectory(filled) as files,
        pytest.raises(shipping.FileRefused, match=f"must hold 32 bytes, has {length}"),
    ):
        tips = [things.digest(4)]
        carry.export_chains(files, things.namespace, tips, tmp_path / "x.hrpx", no_progress)
