"""The store's operations, joined from its parts; what a session calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.core import faults
from headrace.core.errors import WireError
from headrace.core.ids import Digest, JobKey
from headrace.core.messages import Place
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.loads import Loader
from headrace.kvstore.messages import Grant, Reserve, Wish, Written
from headrace.kvstore.objects import Entry, Reservation, Saving
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreStat
from headrace.kvstore.state import StoreState
from headrace.kvstore.writer import Writer

log = logging.getLogger(__name__)
MAX_WAIT_S = 60.0  # longest wait for room that a client may ask for


class Store:
    """One host's store. Used from one event loop; I/O is in threads."""

    def __init__(
        self,
        state: StoreState,
        files: SegmentFiles,
        publisher: Publisher,
        writer: Writer,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.state = state
        self.connections = 0
        self._files = files
        self._publisher = publisher
        self._writer = writer
        self._loader = Loader(state, files, threads)
        self._room = asyncio.Event()
        self._queues = {kind: asyncio.Lock() for kind in state.residents.regions}
        state.residents.on_room = self._room.set

    # reading ---------------------------------------------------------------------------------

    async def open_prefix(
        self, namespace: bytes, digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[Place, ...]:
        """Places of the longest stored prefix, leased; those on SSD are brought to the arena."""
        entries: list[Entry] = []
        for digest in digests:
            entry = self.state.find(Kind.KV, namespace, digest)
            if entry is None:
                break
            entries.append(entry)
        places = await self._bring(entries, lease)
        self.state.count.hits += len(places)
        self.state.count.misses += len(digests) - len(places)
        return places

    async def open_window(
        self, namespace: bytes, digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[int, tuple[Place, ...]]:
        """The first of `digests` that is stored and sound: (its number, one place) or (0, ())."""
        for number, digest in enumerate(digests):
            entry = self.state.find(Kind.SWA, namespace, digest)
            if entry is None:
                continue
            places = await self._bring([entry], lease)
            if places:
                self.state.count.hits += 1
                return number, places
        self.state.count.misses += bool(digests)
        return 0, ()

    async def open_objects(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[Place | None, ...]:
        """Places of those of `digests` that are stored and sound, in their order, leased."""
        places: list[Place | None] = []
        for digest in digests:
            entry = self.state.find(kind, namespace, digest)
            brought = () if entry is None else await self._bring([entry], lease)
            places.append(brought[0] if brought else None)
            self.state.count.hits += len(brought)
            self.state.count.misses += not brought
        return tuple(places)

    async def _bring(self, entries: Sequence[Entry], lease: JobKey | None) -> tuple[Place, ...]:
        """Places of the longest prefix of `entries` that can be had in the arena, leased."""
        places: list[Place] = []
        async with self._loader.held(entries) as count:
            again = [lease is None or lease not in entry.leases for entry in entries]
            for entry in entries[:count]:
                if lease is not None:
                    self.state.hold(lease, entry)
                place = self.state.place(entry)
                assert place is not None  # held
                places.append(place)
        # Head last: it leaves the arena after its tail. What could not be had is used all the same.
        for entry, again_ in reversed(tuple(zip(entries, again, strict=True))):
            self.state.use(entry, again=again_)
        return tuple(places)

    # writing ---------------------------------------------------------------------------------

    async def reserve(
        self, connection: int, namespace: bytes, asked: Reserve
    ) -> tuple[tuple[Grant | None, ...], tuple[Place | None, ...]]:
        """A grant or the place of what is already there for every wish; neither for want of room.

        With a lease this waits for room in the order of asking; without, it drops."""
        deadline_s = asyncio.get_running_loop().time() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        grants: list[Grant | None] = []
        places: list[Place | None] = []
        made: list[int] = []
        try:
            for wish in asked.wishes:
                facts = _facts(namespace, asked, wish)
                entry = self.state.find(asked.kind, namespace, wish.digest)
                known = await self._bring([entry], asked.lease) if entry is not None else ()
                grant: Grant | None = None
                if not known:
                    reservation = await self._room_for(connection, facts, asked.lease, deadline_s)
                    if reservation is not None:
                        made.append(reservation.number)
                        grant = Grant(reservation.number, self.state.offset(reservation))
                grants.append(grant)
                places.append(known[0] if known else None)
        except BaseException:
            self.state.reserving.abandon(connection, made)
            raise
        return tuple(grants), tuple(places)

    async def _room_for(
        self, connection: int, facts: ObjectFacts, lease: JobKey | None, deadline_s: float
    ) -> Reservation | None:
        if not self.state.residents.fits(facts.kind, facts.payload_bytes):
            self.state.count.refused += 1
            return None
        queue = self._queues[facts.kind]
        reservation = None
        if not queue.locked():  # somebody who waits goes first
            reservation = self.state.reserve(connection, facts, lease)
        if reservation is None and lease is not None:
            try:
                async with asyncio.timeout_at(deadline_s), queue:
                    while (made := self.state.reserve(connection, facts, lease)) is None:
                        self._room.clear()
                        await self._room.wait()
                    reservation = made
            except TimeoutError:
                pass
        if reservation is None:
            self.state.count.dropped += 1
        return reservation

    async def seal(
        self, connection: int, namespace: bytes, written: Sequence[Written]
    ) -> tuple[Place | None, ...]:
        """Make written reservations readable; places in their order, None where it failed."""
        entries = [self._seal_one(connection, item) for item in written]
        places: list[Place | None] = []
        for entry in entries:
            place = None if entry is None else self.state.place(entry)
            if entry is not None and place is None and not entry.dropped:
                # Another writer was first and its copy has left the arena meanwhile.
                place = next(iter(await self._bring([entry], None)), None)
            places.append(place)
        return tuple(places)

    def _seal_one(self, connection: int, item: Written) -> Entry | None:
        if not 0 <= item.checksum < 1 << 64:
            raise WireError("a checksum has 64 bits")
        try:
            action = faults.hit("store.seal")
        except faults.InjectedFault:
            self.state.reserving.abandon(connection, (item.reservation,))
            return None
        entry = self.state.seal(connection, item.reservation, item.checksum)
        if action == "flip" and entry is not None and entry.slot is not None:
            region = self.state.residents.regions[entry.kind]
            self.state.residents.arena.payload(region, entry.slot, 1)[0] ^= 1
        return entry

    # account ---------------------------------------------------------------------------------

    def stat(self) -> StoreStat:
        state, count = self.state, self.state.count
        objects = state.objects.values()
        pools = state.residents.pools.values()
        durable = [e for e in objects if e.disk is not None]
        return StoreStat(
            boot=state.boot,
            blocks=sum(e.kind is Kind.KV for e in objects),
            windows=sum(e.kind is Kind.SWA for e in objects),
            pictures=sum(e.kind is Kind.MM for e in objects),
            arena_slots=sum(pool.total for pool in pools),
            arena_free=sum(pool.free for pool in pools),
            arena_reserved=sum(pool.reserved for pool in pools),
            arena_resident=sum(pool.resident for pool in pools),
            arena_bytes=sum(e.facts.payload_bytes for e in objects if e.slot is not None),
            ssd_objects=len(durable),
            ssd_bytes=sum(e.facts.payload_bytes for e in durable),
            ssd_segments=len(self._files.segments),
            ssd_segments_free=sum(s.header.kind is None for s in self._files.segments),
            pending=sum(e.saving in (Saving.WAITING, Saving.WRITING) for e in objects),
            leases=len(state.leases),
            leased_objects=sum(bool(e.leases) for e in objects),
            reservations=len(state.reserving),
            connections=self.connections,
            hits=count.hits,
            misses=count.misses,
            damaged=count.damaged,
            dropped=count.dropped,
            unsaved=count.unsaved,
            refused=count.refused + state.leases.late,
            loads=count.loads,
            writes=count.writes,
            evicted=count.evicted,
            recycled=self._writer.recycled,
            write_errors=self._writer.errors,
            index=self._publisher.condition,
            index_unlisted=len(state.dirty),
            index_errors=self._publisher.errors,
        )


def _facts(namespace: bytes, asked: Reserve, wish: Wish) -> ObjectFacts:
    """What goes into the header. Raises `WireError` for lengths that are none."""
    if len(wish.digest) != 32 or len(wish.parent) != 32 or len(asked.domain) != 16:
        raise WireError("a digest has 32 bytes, a domain tag 16")
    if not 0 <= wish.block < 1 << 32:
        raise WireError(f"a block number has 32 bits, got {wish.block}")
    return ObjectFacts(
        kind=asked.kind,
        namespace=namespace,
        digest=wish.digest,
        parent=wish.parent,
        block=wish.block,
        domain=asked.domain,
        payload_bytes=wish.payload_bytes,
    )
