"""Reading, verifying and repairing a directory with no store running."""

from __future__ import annotations

import os
import random

import pytest

from headrace.core.errors import ConfigError
from headrace.kvstore import Kind
from headrace.kvstore.layout import SegmentHeader, domain_tag
from headrace.kvstore.pins import Pin, read_pins, write_pins
from headrace.kvstore.segment_names import segment_name
from headrace.kvstore.workshop import repair
from headrace.kvstore.workshop.directory import DirectoryBusy, StoreDirectory
from headrace.kvstore.workshop.survey import Seen, chains, find_tip, sums

SLOT = 4096  # of a block of 3,000 bytes


def seen(files: StoreDirectory) -> list[Seen]:
    return [Seen(h.facts, h.written_at_s, False, True) for _, h in files.objects().values()]


async def readable(rig, things, numbers) -> list[int]:
    """Blocks that a store on this directory delivers, every byte compared."""
    await rig.start()
    client = await rig.client()
    found = []
    for number in numbers:
        (place,) = await client.open_objects(Kind.KV, [things.digest(number)], None)
        dest = bytearray(3000)
        if place is not None and client.read_into(place, things.digest(number), dest):
            assert bytes(dest) == things.payload(number)
            found.append(number)
    await rig.stop()
    return found


def test_chains_and_sums_are_those_that_were_put(filled, things):
    with StoreDirectory(filled) as files:
        objects = seen(files)
    rows = {row.tip: row for row in chains(objects, ["gold"])}
    a, b = (rows[things.digest(n).hex()] for n in (4, 11))
    assert len(rows) == 2 and a.whole and b.whole and a.domain == "gold"
    assert (a.blocks, a.tokens, a.payload_bytes, a.windows) == (5, 640, 15_000, 1)
    assert (b.blocks, b.tokens, b.payload_bytes, b.windows) == (4, 512, 12_000, 0)
    kv, swa = sums(objects)
    assert (kv.kind, kv.objects, kv.payload_bytes, kv.ssd_objects) == ("kv", 7, 21_000, 7)
    assert (swa.kind, swa.objects, swa.payload_bytes) == ("swa", 1, 7000)
    assert kv.domain == domain_tag("gold").hex()[:12]
    assert find_tip(a.tip[:9].upper(), rows) == [a.tip] and find_tip("", rows) == sorted(rows)


async def test_a_served_directory_is_refused_with_its_owner(rig, things):
    await rig.start()
    from pathlib import Path

    with pytest.raises(DirectoryBusy, match=rf"served by a running store .*process {os.getpid()}"):
        StoreDirectory(Path(rig.settings.directory))
    await rig.stop()
    StoreDirectory(Path(rig.settings.directory)).close()
    await rig.start()  # and the lock was given back


def test_no_store_and_another_version_are_refused_by_name(filled, tmp_path):
    with pytest.raises(ConfigError, match="there is no store in"):
        StoreDirectory(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    path = filled / "segment-000001.seg"
    header = SegmentHeader(Kind.KV, SLOT, 3, 1, 1, 1, bytes(8)).pack()
    import xxhash

    body = bytearray(header[:-8])
    body[4] = 9
    whole = bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
    with open(path, "r+b") as file:
        file.write(whole)
    with pytest.raises(ConfigError, match=r"segment-000001.seg has format version 9, .* reads 1"):
        StoreDirectory(filled)


async def test_damage_is_found_and_removed_and_nothing_else(filled, rig, things, flip, no_progress):
    with StoreDirectory(filled) as files:
        clean = repair.verify(files, no_progress)
    assert (clean.objects, clean.payload_bytes, clean.flaws) == (8, 28_000, [])
    path = filled / "segment-000000.seg"
    flip(path, 4096 + 2 * SLOT + 77)  # block 2
    with open(path, "r+b") as file:  # block 11: its second half never reached the disk
        file.seek(4096 + 6 * SLOT + 1500)
        file.write(bytes(1500))
    with StoreDirectory(filled) as files:
        found = repair.verify(files, no_progress)
        assert found.damaged and found.counts() == {"payload": 2} and found.objects == 6
        assert [(p.segment, p.slot) for p, _, _ in found.flaws] == [(0, 2), (0, 6)]
        assert repair.scrub(files, no_progress).counts() == {"payload": 2}
        again = repair.verify(files, no_progress)
        assert (again.objects, again.flaws, again.damaged) == (6, [], False)
    assert await readable(rig, things, (0, 1, 2, 3, 4, 10, 11)) == [0, 1, 3, 4, 10]


async def test_gc_takes_what_hangs_on_nothing(filled, rig, things, no_progress):
    with StoreDirectory(filled) as files:
        assert repair.find_garbage(files, repair.Wishes(), no_progress).flaws == []
        (place, _) = next(
            at for at in files.objects().values() if at[1].facts.digest == things.digest(1)
        )
        files.erase(place)
        found = repair.find_garbage(files, repair.Wishes(), no_progress)
        # everything after block 1: 2, 3, 4, 10, 11, and the record on 4
        assert found.counts() == {"orphan": 6} and found.objects == 1
        assert repair.verify(files, no_progress).objects == 7  # it was only said
        repair.erase(files, found)
        assert repair.verify(files, no_progress).objects == 1
    assert await readable(rig, things, (0, 1, 2, 3, 4, 10, 11)) == [0]


async def test_gc_by_age_keeps_heads_of_young_tails_and_pins(
    filled, rig, things, no_progress, now_s
):
    namespace = things.namespace.hex()
    with StoreDirectory(filled) as files:
        later = repair.Wishes(written_before_s=int(now_s) + 100)
        assert repair.find_garbage(files, later, no_progress).counts() == {"unwanted": 8}
        write_pins(filled, [Pin("b", namespace, things.digest(11).hex(), now_s + 1000)])
        found = repair.find_garbage(files, later, no_progress)
        kept = {0, 1, 10, 11}
        assert found.objects == 4 and found.counts() == {"unwanted": 4}
        repair.erase(files, found)
        # another domain's and another namespace's wishes take nothing, their own all
        for wishes, n in (
            (repair.Wishes(domains={domain_tag("silver")}), 0),
            (repair.Wishes(namespaces={bytes(32)}), 0),
            (repair.Wishes(domains={domain_tag("gold")}), 4),
            (repair.Wishes(namespaces={things.namespace}), 4),
        ):
            assert len(repair.find_garbage(files, wishes, no_progress).flaws) == n
    assert set(await readable(rig, things, (0, 1, 2, 3, 4, 10, 11))) == kept
    assert repair.end_pins(filled, now_s) == ()
    assert [pin.name for pin in repair.end_pins(filled, now_s + 1001)] == ["b"]
    assert read_pins(filled) == ()


async def test_a_lost_segment_header_is_made_anew_from_its_slots(filled, rig, things, no_progress):
    before = {}
    with StoreDirectory(filled) as files:
        before = files.objects()
        kv = next(s for s in files.segments if s.header and s.header.kind is Kind.KV)
    path = filled / f"segment-{kv.number:06d}.seg"
    with open(path, "r+b") as file:
        file.write(random.Random(5).randbytes(4096))
    with StoreDirectory(filled) as files:
        found = repair.verify(files, no_progress)
        assert found.damaged_segments == (kv.number,) and found.objects == 1
        assert repair.rebuild_headers(files, no_progress) == {kv.number: 7}
        assert repair.rebuild_headers(files, no_progress) == {}
        assert files.objects() == before
        assert not repair.verify(files, no_progress).damaged
    assert len(await readable(rig, things, (0, 1, 2, 3, 4, 10, 11))) == 7


@pytest.mark.parametrize("stranger", ["segment-abcdef.seg", "segment-1.seg", "segment-٠٠٠٠٠١.seg"])
async def test_a_file_that_is_only_named_alike_is_left_alone(
    filled, rig, things, no_progress, caplog, stranger
):
    (filled / stranger).write_bytes((filled / "segment-000001.seg").read_bytes())
    with StoreDirectory(filled) as files:
        assert repair.verify(files, no_progress).objects == 8
        assert stranger not in {segment_name(s.number) for s in files.segments}
    (said,) = [r.getMessage() for r in caplog.records if stranger in r.getMessage()]
    assert "left alone" in said
    assert await readable(rig, things, (0, 1, 2, 3, 4, 10, 11)) == [0, 1, 2, 3, 4, 10, 11]
    assert (filled / stranger).exists()
    (filled / stranger).rename(filled.parent / stranger)
    for path in filled.glob("segment-*"):
        path.unlink()
    (filled.parent / stranger).rename(filled / stranger)
    with pytest.raises(ConfigError, match="there is no store in"):
        StoreDirectory(filled)
