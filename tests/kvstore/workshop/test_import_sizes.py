"""Prefix files whose objects have no business in a store's slots."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from headrace.kvstore import Kind
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts, SlotHeader, checksum
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.workshop import carry, repair, shipping
from headrace.kvstore.workshop.directory import StoreDirectory


@pytest.fixture
def made(filled, things, tmp_path, no_progress):
    """A whole prefix file of one chain of blocks with payloads of these sizes."""

    def make(*sizes: int, namespace: bytes = b"", kind: Kind = Kind.KV):
        space = namespace or things.namespace
        objects, parent = [], NO_DIGEST
        for block, size in enumerate(sizes):
            digest = things.digest(500 + block)
            payload = bytes([block + 1]) * size
            facts = ObjectFacts(kind, space, digest, parent, block, bytes(16), size)
            header = SlotHeader(facts, checksum(payload), ARENA_SEGMENT, block, 0, 6)
            objects.append((header, payload))
            parent = digest
        about = shipping.PrefixFile(len(sizes), sum(sizes), 6, space, shipping.mark_of(filled))
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.hrpx"
        shipping.write_file(path, objects, about, no_progress)
        return path

    return make


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("segment-*")}


def test_odd_sizes_are_refused_before_anything_is_written(filled, made, no_progress):
    before = contents(filled)
    longest = len(before["segment-000000.seg"])
    bound = (longest - 4096) // 4096 * 4096 - 512
    with StoreDirectory(filled) as files:
        for path, words in (
            (made(3000, 400), "has 400 bytes, those before 3000"),
            (made(400), "have 3000 bytes in this namespace here, those of the file 400"),
            (made(bound + 1), f"at most {bound} bytes .* have {bound + 1}"),
            (made(bound + 1, namespace=bytes(32)), f"at most {bound} bytes .* have {bound + 1}"),
            (made(3000, kind=Kind.MM), "is of kind mm"),
        ):
            with pytest.raises(shipping.FileRefused, match=words):
                carry.import_file(files, path, no_progress, force=True)
    assert contents(filled) == before


def test_the_largest_object_that_fits_is_taken(filled, made, no_progress):
    longest = (filled / "segment-000000.seg").stat().st_size
    bound = (longest - 4096) // 4096 * 4096 - 512
    with StoreDirectory(filled) as files:
        done = carry.import_file(files, made(bound, namespace=bytes(32)), no_progress, force=True)
        assert (done.written, done.no_room) == (1, 0)
    with StoreDirectory(filled) as files:
        assert repair.verify(files, no_progress).objects == 9
    assert (filled / "segment-000000.seg").stat().st_size == longest


def test_small_blocks_of_one_namespace_leave_room_for_those_of_another(filled, made, no_progress):
    with StoreDirectory(filled) as files:
        for size, namespace in ((400, b"a" * 32), (9000, b"b" * 32)):
            path = made(size, size, namespace=namespace)
            done = carry.import_file(files, path, no_progress, force=True)
            assert (done.written, done.no_room) == (2, 0)
        assert repair.verify(files, no_progress).objects == 12


def test_a_segment_that_ends_too_soon_is_named(filled, made, no_progress):
    os.truncate(filled / "segment-000001.seg", 0)
    before = contents(filled)
    with (
        StoreDirectory(filled) as files,
        pytest.raises(shipping.FileRefused, match=r"segment-000001.seg .* scrub` first"),
    ):
        carry.import_file(files, made(3000), no_progress)
    assert contents(filled) == before


def test_segments_that_gc_emptied_take_an_import(filled, made, no_progress):
    with StoreDirectory(filled) as files:
        for place in [place for place, _ in files.objects().values()]:
            files.erase(place)
        first = next(s for s in files.segments if s.header and s.header.kind is Kind.KV)
        assert first.header is not None
        # an older segment of the same kind, with nothing in it
        second = next(s for s in files.segments if s.blank)
        newer = replace(first.header, segment=second.number, sequence=first.header.sequence + 9)
        files.write_segment_header(second, newer)
        free = carry._FreeSlots(files)
        assert first in free._free and second not in free._free
