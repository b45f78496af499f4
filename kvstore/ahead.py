"""Slots that a client holds in advance: a put into them is a copy and a message, and asks nothing.

A client that puts batch after batch of one domain's blocks asks for slots before it needs them, and
gives back what it has not used for `IDLE_S`. It writes payload and header by itself, so whoever is
told of the place may read at once; the store learns of it by a commit that nobody waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count as numbers_from
from typing import Any, Protocol

from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import WireError
from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.messages import Place
from headrace.kvstore.arena import Arena, Region
from headrace.kvstore.layout import HEADER_BYTES, Buffer, checksum, header_packer
from headrace.kvstore.messages import (
    Ahead,
    Commit,
    Done,
    GiveBack,
    Granted,
    cut_digests,
    pack_pairs,
    pack_sizes,
    unpack_slots,
)
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind

IN_A_ROW = 32  # blocks, each batch soon after the one before: then slots are asked for
SOON_S = 0.05
IDLE_S = 0.25  # a client that puts nothing for so long gives its slots back
OLD_S = 5.0  # asked for longer ago they are given back too,
OLD_SHARE = 6  # or than this part of the time for which the store keeps them for a client
WAIT_S = 1.0  # for slots that were asked for; then the store is asked for room as usual
TURN_BLOCKS = 64  # others get their turn, and commits go out, after so many blocks at most,
TURN_S = 0.001  # or so long: a turn of the loop for 16 blocks costs as much as one of them
_NO_BOUND = 1 << 30


class Asker(Protocol):
    """A connection, as far as it is used here."""

    boot: BootId
    arena: Arena
    namespace: bytes
    reserve_s: float  # a slot that is not committed by then is the store's again

    @property
    def open(self) -> bool: ...
    def submit(self, make: Callable[[int], Any]) -> asyncio.Future[Any]: ...
    def post(self, message: Any) -> None: ...
    def abort(self) -> None: ...


class Stock:
    """One connection's slots for blocks of one domain. `unanswered` counts blocks that were
    committed and not yet acknowledged. Used from one event loop, until `end`."""

    def __init__(self, asker: Asker) -> None:
        self.unanswered = 0
        self._asker: Asker = asker
        self._open = True
        self._old_s = min(OLD_S, asker.reserve_s / OLD_SHARE)
        # Grant, slot, generation, and when it was asked for: the store counts from soon after.
        self._slots: deque[tuple[int, int, int, float]] = deque()
        self._domain = b""
        self._row = 0  # blocks put in a row,
        self._began_s = 0.0  # since when,
        self._last_s = 0.0  # and when the last batch came,
        self._used_s = 0.0  # when one last went into the stock, or the stock got its first slots,
        self._refused_s = 0.0  # and when the store had none to give
        self._bound = _NO_BOUND  # what the store would not go beyond lately
        self._known = False  # the last batch was there already: ask before copying again
        self._untold = 0  # blocks put since others had their turn,
        self._turned_s = 0.0  # and when that was
        self._asked: asyncio.Future[Any] | None = None
        self._commits: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def end(self) -> None:
        """The connection has ended: hold nothing, and let go of it, which has this stock. A circle
        would keep the arena of a store that went away mapped until the collector comes by.
        Idempotent."""
        if self._open:
            self._open = False
            self._slots.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            del self._asker

    async def ready(self, kind: Kind, domain: bytes, count: int) -> bool:
        """Whether `put` may be called now for so many blocks. Waits for slots that were asked for,
        and asks for some when blocks of one domain come in a row.

        False for blocks of this domain: nothing is held in advance any more, so that it is not
        missing where the store is now asked for room."""
        if kind is not Kind.KV:
            return False
        now_s = SYSTEM_CLOCK.now_s()
        if domain != self._domain:
            self.give_back()
        soon = domain == self._domain and now_s - self._last_s < (IDLE_S if self._slots else SOON_S)
        if not soon:
            self._row, self._began_s, self._bound = 0, now_s, _NO_BOUND
        self._row += count
        self._last_s, self._domain = now_s, domain
        good = self._row > IN_A_ROW and not self._known and self._is_open
        if good and not self._holds(count):
            self._ask(count)
            if self._asked is not None:
                await asyncio.wait((self._asked,), timeout=WAIT_S)
            good = domain == self._domain and self._is_open and self._holds(count)
        if not good and domain == self._domain:
            self.give_back()
        return good

    @property
    def _is_open(self) -> bool:
        return self._open and self._asker.open

    def _holds(self, count: int) -> bool:
        """Whether there are so many slots that are good for long enough."""
        # By a clock that goes on while this process is stopped: the store's does, too.
        if self._slots and SYSTEM_CLOCK.now_s() - self._slots[0][3] > self._old_s:
            self.give_back()
        return len(self._slots) >= count

    def answered(self, *, known: bool) -> None:
        """The store was asked for room: whether it knew any of that batch."""
        self._known = known

    def put(
        self,
        packed: bytes,
        sources: Sequence[Buffer],
        parent: Digest,
        first_block: int,
        lease: JobKey | None,
    ) -> list[Place]:
        """Where blocks of these payloads, bytes each, are readable now. `ready` has just said yes,
        and every payload fits a slot; `packed` are their digests joined."""
        taken = [self._slots.popleft() for _ in sources]
        try:
            places = self._fill(taken, cut_digests(packed), sources, parent, first_block)
        except BaseException:
            self._return(taken)
            raise
        domain = self._domain
        told = pack_sizes([place.payload_bytes for place in places])
        written = pack_pairs(
            [(slot[0], place.checksum) for slot, place in zip(taken, places, strict=True)]
        )
        answer = self._asker.submit(
            lambda call: Commit(
                call,
                Kind.KV,
                packed,
                told,
                parent,
                first_block,
                domain,
                lease,
                written,
            )
        )
        self.unanswered += len(places)
        self._commits.add(answer)
        answer.add_done_callback(lambda done: self._committed(done, len(places)))
        self._used_s = self._last_s
        if len(self._slots) < self._goal(len(places)) // 2:
            self._ask(len(places))
        return places

    def _fill(
        self,
        taken: Sequence[tuple[int, int, int, float]],
        digests: Sequence[Digest],
        sources: Sequence[Buffer],
        parent: Digest,
        first_block: int,
    ) -> list[Place]:
        """Payload and header of each block in its slot: where they are readable."""
        boot, view = self._asker.boot, self._asker.arena.view
        region = self._asker.arena.region(Kind.KV)
        assert region is not None
        start, slot_bytes = region.start, region.slot_bytes
        now_s = int(SYSTEM_CLOCK.wall_s())
        pack = header_packer(Kind.KV, self._asker.namespace, self._domain, now_s)
        places = list[Place]()
        # Before each block stands the one put with it; the parent before the first.
        rows = zip(numbers_from(first_block), taken, digests, (parent, *digests), sources)
        for block, (_, slot, generation, _), digest, before, source in rows:
            begin, size = start + slot * slot_bytes, len(source)
            end = begin + slot_bytes
            view[begin : begin + size] = source
            total = checksum(source)  # of the source, so that a torn copy does not verify
            at = (ARENA_SEGMENT, slot, generation, size, total)
            view[end - HEADER_BYTES : end] = pack(digest, before, block, *at)
            places.append(Place(boot, begin, size, generation, total))
        return places

    async def turn(self, count: int) -> None:
        """`count` blocks were put: let answers come in and others do something, now and then."""
        self._untold += count
        now_s = SYSTEM_CLOCK.now_s()
        if self._untold >= TURN_BLOCKS or now_s - self._turned_s > TURN_S:
            self._untold, self._turned_s = 0, now_s
            await asyncio.sleep(0)

    async def settled(self, limit_s: float) -> None:
        """Wait until the store has acknowledged every commit, at most so long."""
        if self._commits:
            await asyncio.wait(tuple(self._commits), timeout=limit_s)

    def give_back(self) -> None:
        """Hold nothing in advance any more. Idempotent."""
        if self._slots:
            self._return(self._slots)
            self._slots.clear()

    def _return(self, slots: Iterable[tuple[int, int, int, float]]) -> None:
        self._asker.post(GiveBack(tuple(slot[0] for slot in slots)))

    def _goal(self, count: int) -> int:
        """How many slots to hold at best: two batches, or as many blocks as came after the first
        `IN_A_ROW`, but no more than go in `IDLE_S` at the pace of this row."""
        pace = self._row * IDLE_S / max(IDLE_S, self._last_s - self._began_s)
        return max(2 * count, min(self._row - IN_A_ROW, int(pace), self._bound))

    def _ask(self, count: int) -> None:
        """For as many slots as are missing; fewer than a batch are of no use."""
        now_s = SYSTEM_CLOCK.now_s()
        if self._asked is not None or now_s - self._refused_s <= IDLE_S:
            return
        domain, held = self._domain, len(self._slots)
        more, least = self._goal(count) - held, max(1, count - held)
        self._asked = self._asker.submit(lambda call: Ahead(call, domain, more, least))
        self._asked.add_done_callback(lambda done: self._granted(done, domain, more, now_s))

    def _granted(self, done: asyncio.Future[Any], domain: bytes, more: int, asked_s: float) -> None:
        self._asked = None
        answer = None if done.cancelled() or done.exception() is not None else done.result()
        if answer is None or not self._open:
            return
        slots = _slots_of(answer, self._asker.arena.region(Kind.KV))
        if slots is None:
            self._asker.abort()
            return
        # Counted from the question: this process may have been stopped before it read the answer.
        now_s = SYSTEM_CLOCK.now_s()
        new = [
            (grant, slot, generation, asked_s)
            for grant, (slot, generation) in enumerate(slots, answer.first)
        ]
        if not new:
            self._refused_s = now_s
            return
        if len(new) < more:
            self._bound = len(self._slots) + len(new)
        else:
            self._bound = min(2 * self._bound, _NO_BOUND)
        if domain != self._domain or now_s - asked_s > self._old_s:
            self._return(new)
            return
        if not self._slots:
            self._used_s = now_s
        self._slots += new
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._rest)

    def _committed(self, done: asyncio.Future[Any], count: int) -> None:
        self._commits.discard(done)
        self.unanswered -= count
        if done.cancelled() or done.exception() is not None:
            return
        answer = done.result()
        if not isinstance(answer, Done):
            if self._open:
                self._asker.abort()
        elif not answer.good:
            self._known = True

    def _rest(self) -> None:
        idle_s = SYSTEM_CLOCK.now_s() - self._used_s
        self._timer = None
        if idle_s >= IDLE_S:
            self.give_back()
        elif self._slots:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(IDLE_S - idle_s, self._rest)


def _slots_of(answer: Any, region: Region | None) -> tuple[tuple[int, int], ...] | None:
    """The slots of an answer; None for what is none, or names what is no slot of the region."""
    if not isinstance(answer, Granted) or region is None:
        return None
    try:
        slots = unpack_slots(answer.slots)
    except WireError:
        return None
    return slots if all(slot < region.slots for slot, _ in slots) else None
