"""A state over a small real arena, and the disk as it would be."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from headrace.core.clock import FakeClock
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.messages import Place
from headrace.kvstore.arena import Reading, Region, create_arena
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts, checksum, pack_slot_header
from headrace.kvstore.objects import DiskPlace
from headrace.kvstore.policy import StorePolicy
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

NS = bytes(32)
SIZE = 100


def digest(number: int) -> Digest:
    return Digest(bytes([number]) * 32)


def facts(number: int, kind: Kind = Kind.KV) -> ObjectFacts:
    return ObjectFacts(kind, NS, digest(number), NO_DIGEST, number, bytes(16), SIZE)


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def lease(number: int) -> JobKey:
    return JobKey(RequestId(f"r{number}"), 0)


class World:
    """Numbers stand for objects: each has one digest and one content."""

    namespace = NS
    size_bytes = SIZE
    digest = staticmethod(digest)
    facts = staticmethod(facts)
    content = staticmethod(content)
    lease = staticmethod(lease)

    def __init__(self, slots: int = 4, policy: StorePolicy | None = None) -> None:
        regions = (
            Region(Kind.KV, 0, 4096, slots),
            Region(Kind.SWA, slots * 4096, 4096, 2),
            Region(Kind.STATE, (slots + 2) * 4096, 4096, 2),
        )
        descriptor, self.arena = create_arena(regions)
        os.close(descriptor)
        self.clock = FakeClock()
        self.state = StoreState(
            self.arena, BootId("b"), self.clock, lease_s=30.0, reserve_s=30.0, policy=policy
        )
        self.disk = 0

    def write(self, reservation) -> None:
        found = self.arena.locate(self.state.offset(reservation))
        self.arena.payload(*found, SIZE)[:] = content(reservation.facts.block)

    def write_granted(self, slot: int, number: int) -> Place:
        """Payload and header, as a client writes them; the place that it tells others."""
        region = self.state.residents.regions[Kind.KV]
        generation = self.state.residents.pools[Kind.KV].generation(slot)
        total = checksum(content(number))
        self.arena.payload(region, slot, SIZE)[:] = content(number)
        self.arena.header(region, slot)[:] = pack_slot_header(
            facts(number), total, ARENA_SEGMENT, slot, generation, 1
        )
        return Place(BootId("b"), region.offset(slot), SIZE, generation, total)

    def reads_at(self, place: Place, number: int) -> bytes | None:
        dest = bytearray(SIZE)
        found = self.arena.read(place, NS, digest(number), dest)
        return bytes(dest) if found is Reading.GOOD else None

    def put(
        self,
        number: int,
        owner: JobKey | None = None,
        connection: int = 1,
        kind: Kind = Kind.KV,
    ):
        made = self.state.reserve(connection, facts(number, kind), owner)
        if made is None:
            return None
        self.write(made)
        return self.state.seal(connection, made.number, checksum(content(number)))

    def save(self) -> None:
        for entry in self.state.take_unsaved(1 << 30):
            self.disk += 1
            self.state.saved([(entry, DiskPlace(0, self.disk, 1))])

    def reads(self, number: int) -> bytes | None:
        entry = self.state.find(Kind.KV, NS, digest(number))
        place = None if entry is None else self.state.place(entry)
        dest = bytearray(SIZE)
        if place is None or self.arena.read(place, NS, digest(number), dest) is not Reading.GOOD:
            return None
        return bytes(dest)

    @property
    def free(self) -> int:
        return self.state.residents.pools[Kind.KV].free


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def world() -> World:
    return World()
