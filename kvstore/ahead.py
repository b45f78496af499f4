"""Slots that a client holds in advance: a put into them is a copy and a message, and asks nothing.

A client that puts batch after batch of one domain's blocks asks for slots before it needs them, and
gives back what it has not used for `IDLE_S`. It writes payload and header by itself, so whoever is
told of the place may read at once; the store learns of it by a commit that nobody waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
OLD_S = 5.0  # asked for longer ago they are given back too,
OLD_SHARE = 6  # or than this part of the time for which the store keeps them for a client
WAIT_S = 1.0  # for slots that were asked for; then the store is asked for room as usual


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
    committed and not yet acknowledged. Used from one event loop."""

    def __init__(self, asker: Asker) -> None:
        self.unanswered = 0
        self._asker = asker
        self._old_s = min(OLD_S, asker.reserve_s / OLD_SHARE)
        # Number, offset, generation, and when it was asked for: the store counts from soon after.
        self._slots: deque[tuple[int, int, int, float]] = deque()
        self._domain = b""
        self._row = 0  # blocks put in a row
        self._last_s = 0.0  # when the last batch came,
        self._used_s = 0.0  # when one last went into the stock, or the stock got its first slots,
        self._refused_s = 0.0  # and when the store had none to give
        self._want = 0  # as many as are asked for: two batches at first, then twice as many
        self._known = False  # the last batch was there already: ask before copying again
        self._asked: asyncio.Future[Any] | None = None
        self._commits: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._slots)

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
        self._row = self._row + count if soon else count
        self._want = self._want if soon else 0
        self._last_s, self._domain = now_s, domain
        good = self._row > IN_A_ROW and not self._known and self._asker.open
        if good and not self._holds(count):
            self._ask(count)
            if self._asked is not None:
                await asyncio.wait((self._asked,), timeout=WAIT_S)
            good = domain == self._domain and self._asker.open and self._holds(count)
        if not good and domain == self._domain:
            self.give_back()
        return good

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
        batch: Sequence[tuple[Digest, Buffer]],
        parent: Digest,
        first_block: int,
        digests: bytes,
        lease: JobKey | None,
    ) -> list[Place]:
        """Where the blocks of `batch`, bytes each, are readable now. `ready` has just said yes, and
        every payload fits a slot; `digests` are those of the batch, joined."""
        taken = [self._slots.popleft() for _ in batch]
        try:
            places = self._fill(taken, batch, parent, first_block)
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
                digests,
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
        if len(self._slots) < self._want // 2:
            self._ask(len(batch))
        return places

    def _fill(
        self,
        taken: Sequence[tuple[int, int, int, float]],
        batch: Sequence[tuple[Digest, Buffer]],
        parent: Digest,
        first_block: int,
    ) -> list[Place]:
        """Payload and header of each block in its slot: where they are readable."""
        asker, domain, view = self._asker, self._domain, self._asker.arena.view
        region = asker.arena.region(Kind.KV)
        assert region is not None
        written_at_s = int(SYSTEM_CLOCK.wall_s())
        before, places = parent, list[Place]()
        for number, ((_, begin, generation, _), (digest, source)) in enumerate(
            zip(taken, batch, strict=True), first_block
        ):
            size = len(source)
            view[begin : begin + size] = source
            total = checksum(source)  # of the source, so that a torn copy does not verify
            facts = ObjectFacts(Kind.KV, asker.namespace, digest, before, number, domain, size)
            end = begin + region.slot_bytes
            slot = (begin - region.start) // region.slot_bytes
            header = pack_slot_header(facts, total, ARENA_SEGMENT, slot, generation, written_at_s)
            view[end - len(header) : end] = header
            places.append(Place(asker.boot, begin, size, generation, total))
            before = digest
        return places

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

    def _ask(self, count: int) -> None:
        """For slots, as many as were put in a row at most; fewer than a batch are of no use."""
        now_s = SYSTEM_CLOCK.now_s()
        if self._asked is not None or now_s - self._refused_s <= IDLE_S:
            return
        domain, held = self._domain, len(self._slots)
        self._want = max(2 * count, min(2 * self._want, self._row))
        more, least = self._want - held, max(1, count - held)
        self._asked = self._asker.submit(lambda call: Ahead(call, domain, more, least))
        self._asked.add_done_callback(lambda done: self._granted(done, domain, more, now_s))

    def _granted(self, done: asyncio.Future[Any], domain: bytes, more: int, asked_s: float) -> None:
        self._asked = None
        answer = None if done.cancelled() or done.exception() is not None else done.result()
        if answer is None:
            return
        slots = _slots_of(answer, self._asker.arena.region(Kind.KV))
        if slots is None:
            self._asker.abort()
            return
        # Counted from the question: this process may have been stopped before it read the answer.
        now_s, new = SYSTEM_CLOCK.now_s(), [(*slot, asked_s) for slot in slots]
        if not new:
            self._refused_s = now_s
            return
        if len(new) < more:
            self._want = len(self._slots) + len(new)
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
