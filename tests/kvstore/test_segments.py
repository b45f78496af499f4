"""Segment files: what a process finds that opens them after another one ended anywhere."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.core import faults
from headrace.core.errors import ConfigError
from headrace.core.ids import Digest
from headrace.kvstore.files import FileCalls, aligned_buffer, lock_directory
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts, SegmentHeader, SlotHeader, checksum
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind
from headrace.kvstore.slot_io import SlotMove

SIZE = 3000
SEGMENT = 256 << 10  # 63 block slots, 31 window slots


def header(number: int, kind: Kind = Kind.KV, size: int = SIZE) -> SlotHeader:
    facts = ObjectFacts(
        kind, bytes(32), Digest(number.to_bytes(32, "big")), NO_DIGEST, number, bytes(16), size
    )
    return SlotHeader(facts, checksum(content(number, size)), 0, 0, 0, 1)


def content(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


@pytest.fixture
def opened(settings_for):
    """`opened(**settings)`: files of this test's directory; closed at the end."""
    made: list[SegmentFiles] = []

    def open_files(calls: FileCalls | None = None, **changes) -> SegmentFiles:
        for files in made:
            files.close()
        settings = settings_for(**changes)
        Path(settings.directory).mkdir(exist_ok=True)
        files = SegmentFiles(settings, calls)
        made.append(files)
        files.open()
        return files

    yield open_files
    for files in made:
        files.close()


def write(files: SegmentFiles, *numbers: int, kind: Kind = Kind.KV) -> list[DiskPlace]:
    places = []
    for number in numbers:
        place = files.next_place(kind)
        if place is None:
            files.recycle(next(iter(files.candidates(kind))), kind)
            place = files.next_place(kind)
        files.write(place, content(number), header(number, kind))
        places.append(place)
    return places


def found(files: SegmentFiles) -> dict[int, DiskPlace]:
    return {h.facts.block: place for h, place in files.scan()}


def path(settings_for, number: int) -> Path:
    return Path(settings_for().directory) / f"segment-{number:06d}.seg"


def test_what_was_written_is_found_and_writing_goes_on_behind_it(opened):
    places = write(opened(), 1, 2, 3)
    files = opened()
    assert found(files) == dict(zip((1, 2, 3), places, strict=True))
    (next_place,) = write(files, 4)
    assert next_place == DiskPlace(places[0].segment, 3, places[0].generation)
    dest = bytearray(SIZE)
    assert files.read(places[1], memoryview(dest)).facts.block == 2
    assert bytes(dest) == content(2)


def test_kinds_have_segments_of_their_own(opened):
    files = opened()
    kv, swa = write(files, 1)[0], write(files, 2, kind=Kind.SWA)[0]
    assert kv.segment != swa.segment
    files = opened()
    assert found(files) == {1: kv, 2: swa}
    assert files.next_place(Kind.SWA) == DiskPlace(swa.segment, 1, swa.generation)
    assert files.next_place(Kind.KV) == DiskPlace(kv.segment, 1, kv.generation)


def test_the_space_is_taken_at_start(opened, settings_for):
    opened()
    sizes = [p.stat() for p in sorted(Path(settings_for().directory).glob("segment-*.seg"))]
    assert [s.st_size for s in sizes] == [SEGMENT] * 8
    assert all(s.st_blocks * 512 >= SEGMENT for s in sizes)


def test_a_disk_that_is_too_small_is_an_error_at_start(opened, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="ssd_bytes: 2097152 bytes could not be taken .No space"):
        opened()


def test_more_than_is_free_is_refused_before_anything_is_taken(opened, settings_for, monkeypatch):
    write(opened(ssd_bytes=2 * SEGMENT), 1)
    folder = path(settings_for, 0).parent
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=3 * SEGMENT))
    before = sorted(folder.iterdir())
    most = 5 * SEGMENT  # two are there already
    with pytest.raises(ConfigError, match=f"ssd_bytes must be at most {most}, .*got {6 * SEGMENT}"):
        opened(ssd_bytes=6 * SEGMENT)
    with pytest.raises(ConfigError, match=f"ssd_bytes must be at most .*got {1 << 60}"):
        opened(ssd_bytes=1 << 60)
    assert sorted(folder.iterdir()) == before
    files = opened(ssd_bytes=most)
    assert len(files.segments) == 5 and set(found(files)) == {1}


def test_a_start_that_fails_later_leaves_the_files_as_they_were(opened, settings_for, monkeypatch):
    write(opened(ssd_bytes=2 * SEGMENT), 1)
    folder = path(settings_for, 0).parent
    before = {file.name: file.stat().st_size for file in folder.iterdir()}
    calls = []
    take = os.posix_fallocate

    def full_at_the_fourth(descriptor, offset, length):
        calls.append(length)
        if len(calls) == 4:
            take(descriptor, offset, length // 2)  # some systems leave what they could take
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_fourth)
    with pytest.raises(ConfigError, match="bytes could not be taken .No space"):
        opened(ssd_bytes=8 * SEGMENT)
    assert len(calls) == 4
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == before
    assert set(found(opened(ssd_bytes=2 * SEGMENT))) == {1}


def test_sizes_that_hold_nothing_are_refused(opened):
    with pytest.raises(ConfigError, match="segment_bytes must be at least 12288 .*, got 8192"):
        opened(segment_bytes=8192)
    with pytest.raises(ConfigError, match="ssd_bytes must be at least 524288, .*got 262144"):
        opened(ssd_bytes=SEGMENT)


def test_recycling_takes_the_oldest_and_its_old_slots_never_come_back(opened):
    """Also when the process ends between the new generation and the first new slot."""
    files = opened(ssd_bytes=2 * SEGMENT)
    places = write(files, *range(63))
    more = write(files, *range(100, 163))
    assert {p.segment for p in places} == {0} and {p.segment for p in more} == {1}
    assert files.next_place(Kind.KV) is None
    oldest = next(iter(files.candidates(Kind.KV)))
    assert oldest.number == 0
    files.recycle(oldest, Kind.KV)
    files = opened(ssd_bytes=2 * SEGMENT)
    assert found(files) == dict(zip(range(100, 163), more, strict=True))
    (fresh,) = write(files, 200)
    assert fresh == DiskPlace(0, 0, places[0].generation + 1)
    dest = memoryview(bytearray(SIZE))
    assert files.read(places[0], dest) is None  # the old generation
    assert files.read(fresh, dest) is not None
    assert found(opened(ssd_bytes=2 * SEGMENT))[200] == fresh


def test_a_segment_changes_its_kind_with_its_life(opened):
    files = opened(ssd_bytes=2 * SEGMENT)
    write(files, *range(126))
    (place,) = write(files, 500, kind=Kind.SWA)
    assert (place.segment, place.slot) == (0, 0)
    files = opened(ssd_bytes=2 * SEGMENT)
    assert set(found(files)) == {*range(63, 126), 500}


def test_an_erased_slot_is_gone_and_an_old_erasure_hits_nothing(opened):
    files = opened(ssd_bytes=2 * SEGMENT)
    places = write(files, 1, 2)
    files.erase(places[0])
    assert found(opened(ssd_bytes=2 * SEGMENT)) == {2: places[1]}
    files = opened(ssd_bytes=2 * SEGMENT)
    files.erase(DiskPlace(places[1].segment, places[1].slot, places[1].generation - 1))
    assert found(files) == {2: places[1]}


@pytest.mark.parametrize("offset", [0, 5, 20, 39, 4000, 4090])
def test_a_damaged_segment_header_frees_the_segment_for_good(opened, settings_for, offset):
    files = opened(ssd_bytes=2 * SEGMENT)
    old = write(files, *range(5))
    data = bytearray(path(settings_for, 0).read_bytes()[:4096])
    data[offset] ^= 4
    with open(path(settings_for, 0), "r+b") as file:
        file.write(data)
    files = opened(ssd_bytes=2 * SEGMENT)
    assert files.damaged_headers == 1 and found(files) == {}
    (place,) = write(files, 77)
    assert place.segment == 0 and place.generation > old[0].generation
    assert found(opened(ssd_bytes=2 * SEGMENT)) == {77: place}  # none of the old slots


def test_a_newer_format_is_refused_by_name(opened, settings_for):
    write(opened(), 1)
    data = bytearray(path(settings_for, 0).read_bytes()[:4096])
    data[4:6] = (9).to_bytes(2, "little")
    data[-8:] = checksum(bytes(data[:-8])).to_bytes(8, "little")
    with open(path(settings_for, 0), "r+b") as file:
        file.write(data)
    with pytest.raises(ConfigError, match="segment 0 has format version 9, this build reads 1"):
        opened()


def test_files_of_another_store_are_refused(opened, settings_for):
    write(opened(), 1)
    head = SegmentHeader.unpack(path(settings_for, 0).read_bytes()[:4096])
    with open(path(settings_for, 1), "r+b") as file:  # a copy under another number
        file.write(head.pack())
    with pytest.raises(ConfigError, match="segment 1 belongs to another store"):
        opened()


def test_files_beyond_ssd_bytes_are_removed_and_new_ones_made(opened, settings_for):
    write(opened(), 1)
    files = opened(ssd_bytes=2 * SEGMENT)
    assert set(found(files)) == {1}
    assert len(list(path(settings_for, 0).parent.glob("segment-*"))) == 2
    files = opened(ssd_bytes=5 * SEGMENT)
    assert len(files.segments) == 5 and set(found(files)) == {1}


def test_other_sizes_are_taken_over_with_the_next_life(opened, settings_for):
    write(opened(ssd_bytes=2 * SEGMENT), *range(63))
    files = opened(segment_bytes=SEGMENT // 2, ssd_bytes=SEGMENT, block_bytes=6000)
    assert len(found(files)) == 63  # readable, though of another slot size
    assert files.next_place(Kind.KV) is None  # but nothing is added to it
    for _ in range(2):
        files.recycle(next(iter(files.candidates(Kind.KV))), Kind.KV)
    assert path(settings_for, 0).stat().st_size == SEGMENT // 2
    assert [s.header.slots for s in files.segments] == [15, 15]


class Failing(FileCalls):
    """Short writes and reads, and an error at the n-th write or sync."""

    def __init__(self) -> None:
        self.short = False
        self.writes_left = 10**9
        self.most = 0  # bytes of the longest write
        self.sync_error = 0

    def pwritev(self, descriptor, buffers, offset):
        self.writes_left -= 1
        if self.writes_left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.most = max(self.most, sum(map(len, buffers)))
        return super().pwritev(descriptor, [buffers[0][:4096]] if self.short else buffers, offset)

    def preadv(self, descriptor, buffers, offset):
        if self.short:
            buffers = [buffers[0][:4096]]
        return super().preadv(descriptor, buffers, offset)

    def sync(self, descriptor):
        if self.sync_error:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync(descriptor)


def test_short_writes_and_reads_go_on_until_done(opened):
    calls = Failing()
    calls.short = True
    files = opened(calls)
    places = write(files, 1, 2)
    dest = bytearray(SIZE)
    assert files.read(places[1], memoryview(dest)) is not None and bytes(dest) == content(2)


@pytest.mark.parametrize("written", [0, 1])
def test_a_write_that_fails_leaves_nothing_to_find(opened, written):
    calls = Failing()
    files = opened(calls, block_bytes=7000)
    first = write(files, 1)
    calls.short, calls.writes_left = True, written  # nothing, or only the first of two pages
    with pytest.raises(OSError, match="Input/output"):
        write(files, 2)
    calls.writes_left = 10**9
    assert found(opened(calls, block_bytes=7000)) == {1: first[0]}


def test_a_generation_that_was_not_synced_is_not_used(opened):
    calls = Failing()
    files = opened(calls)
    calls.sync_error = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        files.recycle(files.segments[0], Kind.KV)
    assert files.segments[0].header.kind is None and files.next_place(Kind.KV) is None


def test_a_flip_on_the_way_to_disk_is_in_the_payload_only(opened):
    faults.arm("store.segment_write=flip@1")
    files = opened()
    (place,) = write(files, 1)
    assert faults.fired("store.segment_write") == 1
    dest = bytearray(SIZE)
    assert files.read(place, memoryview(dest)) is not None
    assert checksum(dest) != checksum(content(1)) and dest[1:] == content(1)[1:]


def test_one_process_owns_a_directory(tmp_path):
    first = lock_directory(str(tmp_path))
    (tmp_path.parent / "other name").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path.parent / "other name"):
        with pytest.raises(ConfigError, match=f"store process may own it, process {os.getpid()} "):
            lock_directory(str(path))
    os.close(first)
    os.close(lock_directory(str(tmp_path)))


class NoDirect(FileCalls):
    """A file system without O_DIRECT, as tmpfs was before Linux 6.5."""

    refused = 0

    def open(self, path, *, direct=False, **options):
        if direct:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, **options)


def test_files_that_cannot_be_direct_hold_the_same_bytes(opened, settings_for, caplog):
    """One warning, and either build reads what the other wrote."""
    direct = opened()
    assert direct.direct
    places = write(direct, *range(20))
    before = path(settings_for, 0).read_bytes()[: 21 * 4096]  # its header and 20 slots
    plain = opened(calls := NoDirect())
    assert not plain.direct and calls.refused == 1
    assert sum("O_DIRECT" in record.message for record in caplog.records) == 1
    assert found(plain) == dict(enumerate(places))
    places += write(plain, *range(20, 40))
    dest = bytearray(SIZE)
    for number, place in enumerate(places):
        assert plain.read(place, memoryview(dest)) is not None and dest == content(number)
    after = path(settings_for, 0).read_bytes()
    assert after[: 21 * 4096] == before  # nothing that was there is touched
    assert found(opened()) == dict(enumerate(places))


def test_slots_that_follow_each_other_go_in_one_call_and_hold_what_single_ones_do(opened):
    calls = Failing()
    files = opened(calls, block_bytes=7000)
    files.recycle(files.segments[0], Kind.KV)
    memory = [aligned_buffer(8192) for _ in range(7)]
    moves, headers = [], []
    for number, slot in enumerate(memory):
        slot[:] = content(number, 7000) + b"\xaa" * 1192  # padding, and a header of elsewhere
        place = files.next_place(Kind.KV)
        if number == 3:
            place = files.next_place(Kind.KV)  # a hole: two runs of neighbours
        moves.append(SlotMove(place, slot))
        headers.append(header(number, size=7000)._replace(**place._asdict()).pack())
    calls.writes_left = 2
    assert files.write_moves(moves, headers) == [None] * 7
    assert calls.writes_left == 0 and calls.most == 4 * 8192
    dest = bytearray(7000)
    for number, move in enumerate(moves):
        assert files.read(move.place, memoryview(dest)) is not None
        assert dest == content(number, 7000)
    target = [SlotMove(move.place, aligned_buffer(8192)) for move in moves]
    for number, (move, data) in enumerate(zip(target, files.read_moves(target), strict=True)):
        assert move.memory[:7000] == content(number, 7000) and move.memory[-512:] == data
        told = SlotHeader.unpack(data)
        assert (told.segment, told.slot, told.generation) == move.place


def test_one_bad_sector_costs_one_slot_of_a_run(opened):
    class BadSector(FileCalls):
        def preadv(self, descriptor, buffers, offset):
            if bad in range(offset, offset + sum(map(len, buffers))):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(descriptor, buffers, offset)

    bad = -1
    files = opened(BadSector())
    places = write(files, *range(5))
    bad = files.segments[0].slot_begin(places[2].slot) + 100
    found = files.read_moves([SlotMove(place, aligned_buffer(4096)) for place in places])
    assert [d and SlotHeader.unpack(d).facts.block for d in found] == [0, 1, None, 3, 4]
