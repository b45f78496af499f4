"""Slots that a client holds in advance: a put into them is a copy and a message, and asks nothing.

A client that puts batch after batch of one domain's blocks asks for slots before it needs them, and
gives back what it has not used for `IDLE_S`. It writes payload and header by itself, so whoever is
told of the place may read at once; the store learns of it by a commit that nobody waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import WireError
from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.messages import Place
from headrace.kvstore.arena import Arena, Region
from headrace.kvstore.layout import Buffer, ObjectFacts, checksum, pack_slot_header
from headrace.kvstore.messages import (
    Ahead,
    Commit,
    Done,
    GiveBack,
    Granted,
    pack_pairs,
    pack_sizes,
    unpack_slots,
)
from headrace.kvstore.records import ARENA_SEGMENT
from headrace.kvstore.settings import Kind

IN_A_ROW = 32  # blocks, each batch soon after the one before: then slots are asked for
SOON_S = 0.05
IDLE_S = 0.25  # a client that puts nothing for so long gives its slots back
OLD_S = 5.0  # held for longer they are given back too: far below what the store allows
WAIT_S = 1.0  # for slots that were asked for; then the store is asked for room as usual
ASK_SLOTS = 1 << 16  # more than any store grants: it knows its bound


class Asker(Protocol):
    """A connection, as far as it is used here."""

    boot: BootId
    arena: Arena
    namespace: bytes

    @property
    def open(self) -> bool: ...
    def submit(self, make: Callable[[int], Any]) -> asyncio.Future[Any]: ...
    def post(self, message: Any) -> None: ...
    def abort(self) -> None: ...


class Stock:
    """One connection's slots for blocks of one domain. `unanswered` counts blocks that were
    committed and not yet acknowledged. Used from one event loop."""

    def __init__(self, asker: Asker) -> None:
        self.unanswered = 0
        self._asker = asker
        self._slots: deque[tuple[int, int, int]] = deque()  # number, offset, generation
        self._domain = b""
        self._row = 0  # blocks put in a row
        self._used_s = 0.0  # when the last batch was put,
        self._filled_s = 0.0  # when the stock was last empty and got slots,
        self._refused_s = 0.0  # and when the store had none to give
        self._most = 0  # as many as the store has ever granted at once
        self._known = False  # the last batch was there already: ask before copying again
        self._asked: asyncio.Future[Any] | None = None
        self._commits: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._slots)

    async def ready(self, kind: Kind, domain: bytes, count: int) -> bool:
        """Whether `put` may be called now for so many blocks. Waits for slots that were asked for,
        and asks for some when blocks of one domain come in a row."""
        now_s = asyncio.get_running_loop().time()
        if kind is not Kind.KV:
            return False
        if domain != self._domain or (self._slots and now_s - self._filled_s > OLD_S):
            self.give_back()
        soon = domain == self._domain and now_s - self._used_s < (IDLE_S if self._slots else SOON_S)
        self._row = self._row + count if soon else count
        self._used_s, self._domain = now_s, domain
        if self._row <= IN_A_ROW or self._known or not self._asker.open:
            return False
        if len(self._slots) < count:
            self._ask(now_s)
            if self._asked is None or self._most and count > self._most:
                return False
            await asyncio.wait((self._asked,), timeout=WAIT_S)
        return domain == self._domain and len(self._slots) >= count

    def answered(self, *, known: bool) -> None:
        """The store was asked for room: whether it knew any of that batch."""
        self._known = known

    def put(
        self,
        batch: Sequence[tuple[Digest, Buffer]],
        parent: Digest,
        first_block: int,
        digests: bytes,
        lease: JobKey | None,
    ) -> list[Place]:
        """Where the blocks of `batch`, bytes each, are readable now. `ready` has just said yes, and
        every payload fits a slot; `digests` are those of the batch, joined."""
        asker, domain, view = self._asker, self._domain, self._asker.arena.view
        region = asker.arena.region(Kind.KV)
        assert region is not None
        written_at_s = int(SYSTEM_CLOCK.wall_s())
        before, places, written, sizes = parent, list[Place](), list[tuple[int, int]](), list[int]()
        for number, (digest, source) in enumerate(batch, first_block):
            size = len(source)
            grant, begin, generation = self._slots.popleft()
            view[begin : begin + size] = source
            total = checksum(source)  # of the source, so that a torn copy does not verify
            facts = ObjectFacts(Kind.KV, asker.namespace, digest, before, number, domain, size)
            end = begin + region.slot_bytes
            slot = (begin - region.start) // region.slot_bytes
            header = pack_slot_header(facts, total, ARENA_SEGMENT, slot, generation, written_at_s)
            view[end - len(header) : end] = header
            places.append(Place(asker.boot, begin, size, generation, total))
            written.append((grant, total))
            sizes.append(size)
            before = digest
        packed, told = pack_pairs(written), pack_sizes(sizes)
        answer = asker.submit(
            lambda call: Commit(
                call,
                Kind.KV,
                digests,
                told,
                parent,
                first_block,
                domain,
                lease,
                packed,
            )
        )
        self.unanswered += len(places)
        self._commits.add(answer)
        answer.add_done_callback(lambda done: self._committed(done, len(places)))
        if len(self._slots) < self._most // 2:
            self._ask(self._used_s)
        return places

    async def settled(self, limit_s: float) -> None:
        """Wait until the store has acknowledged every commit, at most so long."""
        if self._commits:
            await asyncio.wait(tuple(self._commits), timeout=limit_s)

    def give_back(self) -> None:
        """Hold nothing in advance any more. Idempotent."""
        if self._slots:
            self._asker.post(GiveBack(tuple(number for number, _, _ in self._slots)))
            self._slots.clear()

    def _ask(self, now_s: float) -> None:
        if self._asked is None and now_s - self._refused_s > IDLE_S:
            domain = self._domain
            self._asked = self._asker.submit(lambda call: Ahead(call, domain, ASK_SLOTS))
            self._asked.add_done_callback(lambda done: self._granted(done, domain))

    def _granted(self, done: asyncio.Future[Any], domain: bytes) -> None:
        self._asked = None
        answer = None if done.cancelled() or done.exception() is not None else done.result()
        if answer is None:
            return
        slots = _slots_of(answer, self._asker.arena.region(Kind.KV))
        if slots is None:
            self._asker.abort()
            return
        loop = asyncio.get_running_loop()
        if not slots:
            self._refused_s = loop.time()
        if domain != self._domain:
            self._asker.post(GiveBack(tuple(number for number, _, _ in slots)))
            return
        if not self._slots:
            self._filled_s = loop.time()
        self._slots += slots
        self._most = max(self._most, len(self._slots))
        if self._timer is None and self._slots:
            self._timer = loop.call_later(IDLE_S, self._rest)

    def _committed(self, done: asyncio.Future[Any], count: int) -> None:
        self._commits.discard(done)
        self.unanswered -= count
        if done.cancelled() or done.exception() is not None:
            return
        answer = done.result()
        if not isinstance(answer, Done):
            self._asker.abort()
        elif not answer.good:
            self._known = True

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        idle_s = loop.time() - self._used_s
        self._timer = None
        if idle_s >= IDLE_S:
            self.give_back()
        elif self._slots:
            self._timer = loop.call_later(IDLE_S - idle_s, self._rest)


def _slots_of(answer: Any, region: Region | None) -> tuple[tuple[int, int, int], ...] | None:
    """The slots of an answer; None for what is none, or names what is no slot of the region."""
    if not isinstance(answer, Granted) or region is None:
        return None
    try:
        slots = unpack_slots(answer.slots)
    except WireError:
        return None
    good = all(
        region.start <= offset < region.end and not (offset - region.start) % region.slot_bytes
        for _, offset, _ in slots
    )
    return slots if good else None
