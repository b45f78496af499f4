"""The store's operations, joined from its parts; what a session calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from headrace.core import faults
from headrace.core.errors import ConfigError
from headrace.core.ids import JobKey
from headrace.core.messages import Place
from headrace.kvstore.account import take_stat
from headrace.kvstore.answers import Answers
from headrace.kvstore.graves import Graves
from headrace.kvstore.importing import ImportDesk
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.loads import Loader
from headrace.kvstore.locking import Locked
from headrace.kvstore.messages import Reserve
from headrace.kvstore.metrics import Snapshot, StoreMetrics
from headrace.kvstore.objects import Entry, Reservation
from headrace.kvstore.opening import Opening
from headrace.kvstore.peers_serve import PeerServer
from headrace.kvstore.pins import PinBook
from headrace.kvstore.publisher import Publisher
from headrace.kvstore.redis_link import RedisAway
from headrace.kvstore.scrubbing import scrub_segment
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreSettings, StoreStat
from headrace.kvstore.state import StoreState
from headrace.kvstore.writer import Writer

log = logging.getLogger(__name__)
# What a writer gets of each object: room for it, or where it is already.
Promises: TypeAlias = list[tuple[Reservation | None, Place | None]]
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
        pins: PinBook,
        settings: StoreSettings,
    ) -> None:
        self.state = state
        self.pins = pins
        self.door: PeerServer | None = None  # where other stores ask
        self.graves: Graves | None = None  # who clears up behind stores that are gone
        self.connections = 0
        self.arena_lock = Locked.OFF
        self._files = files
        self._publisher = publisher
        self._writer = writer
        self.loader = Loader(state, files, threads, settings)
        self.opening = Opening(state, self.loader, settings.prefetch_share)
        self._room = asyncio.Event()
        self._queues = {kind: asyncio.Lock() for kind in state.residents.regions}
        state.residents.on_room = self._room.set
        shares = settings.domain_shares
        self.answers = Answers(
            state,
            pins,
            tuple(share.domain for share in shares),
            publisher.republish,
            StoreMetrics(self.snapshot, shares).text,
            partial(scrub_segment, state, files, threads),
            self._sweep,
            ImportDesk(state, files, settings),
        )

    # writing ---------------------------------------------------------------------------------

    def reserve_now(
        self, connection: int, asked: Reserve, facts: Sequence[ObjectFacts]
    ) -> Promises | None:
        """As `reserve`, if that has to wait for nothing; else None, and nothing is reserved."""
        queue = self._queues.get(asked.kind)
        entries = [self.state.find(f.kind, f.namespace, f.digest) for f in facts]
        if (
            queue is None
            or queue.locked()  # somebody who waits goes first
            or any(entry is not None and entry.slot is None for entry in entries)
        ):
            return None
        fits = self.state.residents.fits
        out: Promises = []
        for fact, entry in zip(facts, entries, strict=True):
            made = None
            known = entry is not None and self.opening.have([entry], asked.lease)
            if not known:
                if fits(fact.kind, fact.payload_bytes):
                    made = self.state.reserve(connection, fact, asked.lease)
                    if made is None and asked.lease is not None:  # it waits for room
                        self.state.reserving.abandon(
                            connection, [m.number for m, _ in out if m is not None]
                        )
                        return None
                    self.state.count.dropped += made is None
                else:
                    self.state.count.refused += 1
            out.append((made, self.state.place(entry) if entry and known else None))
        return out

    async def reserve(
        self, connection: int, asked: Reserve, facts: Sequence[ObjectFacts]
    ) -> Promises:
        """A reservation or the place of what is already there for every object of `asked`, which
        `facts` describes; neither for want of room.

        With a lease this waits for room in the order of asking; without, it drops."""
        deadline_s = asyncio.get_running_loop().time() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        out: Promises = []
        try:
            for fact in facts:
                entry = self.state.find(fact.kind, fact.namespace, fact.digest)
                made = place = None
                if entry is not None and await self.opening.bring([entry], asked.lease):
                    place = self.state.place(entry)
                else:
                    made = await self._room_for(connection, fact, asked.lease, deadline_s)
                out.append((made, place))
        except BaseException:
            self.state.reserving.abandon(connection, [m.number for m, _ in out if m is not None])
            raise
        return out

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

    def grant(
        self, connection: int, domain: bytes, count: int, least: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Slots for blocks of a domain in advance: number of the first grant, slot and generation
        of each."""
        waits = self._queues[Kind.KV].locked()  # somebody waits for room
        made = None if waits else self.state.granted.make(connection, domain, count, least)
        if made is None:
            return 0, []
        generation = self.state.residents.pools[Kind.KV].generation
        return made.first, [(slot, generation(slot)) for slot in made.slots]

    def seal_all(
        self, connection: int, written: Sequence[tuple[int, int]]
    ) -> tuple[tuple[Place | None, ...], dict[int, Entry]]:
        """Make written reservations readable: places in their order, None where it failed, and
        those by number whose bytes `bring_sealed` has to fetch first."""
        places: list[Place | None] = []
        gone: dict[int, Entry] = {}
        for number, checksum in written:
            entry = self._seal_one(connection, number, checksum)
            place = None if entry is None else self.state.place(entry)
            if entry is not None and place is None and not entry.dropped:
                # Another writer was first and its copy has left the arena meanwhile.
                gone[len(places)] = entry
            places.append(place)
        return tuple(places), gone

    async def bring_sealed(
        self, places: Sequence[Place | None], gone: dict[int, Entry]
    ) -> tuple[Place | None, ...]:
        """`places` with those of `gone` brought back from SSD."""
        out = list(places)
        for index, entry in gone.items():
            await self.opening.bring([entry], None)
            out[index] = self.state.place(entry)
        return tuple(out)

    def _seal_one(self, connection: int, number: int, checksum: int) -> Entry | None:
        try:
            action = faults.hit("store.seal")
        except faults.InjectedFault:
            self.state.reserving.abandon(connection, (number,))
            return None
        entry = self.state.seal(connection, number, checksum)
        if action == "flip" and entry is not None and entry.slot is not None:
            region = self.state.residents.regions[entry.kind]
            self.state.residents.arena.payload(region, entry.slot, 1)[0] ^= 1
        return entry

    # account ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What a scrape shows of this moment."""
        lag_s = self._publisher.lag_s
        swept = self.graves.swept_records if self.graves else 0
        pins = self.pins
        return Snapshot(self.stat(), self.state.count, lag_s, len(pins), pins.held_bytes, swept)

    async def _sweep(self) -> tuple[int, int]:
        if self.graves is None:
            raise ConfigError("this store has no index to sweep: the cluster has no Redis")
        try:
            return await self.graves.sweep_all()
        except RedisAway:
            raise ConfigError("Redis does not answer; the sweep may be begun anew") from None

    def stat(self) -> StoreStat:
        return take_stat(self, self._files, self._publisher, self._writer)
