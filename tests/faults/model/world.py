"""The hand-off as a small world that takes one step at a time: router, prefill, decode, store.

Built of the real parts wherever they hold no input or output: the three state tables, `Attempts`,
`EarlyFrames`, `Handoff`, the store's `LeaseBook`, and the engine's pools, leases and fill guard.
What the world adds is the order of things: links that keep their order, one frame or one inner step
at a time, crashes, aborts and time. Whatever raises here, or breaks `check`, is a fault of the
protocol.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headrace.core.attempts import Attempts, Verdict
from headrace.core.clock import FakeClock
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.messages import BlocksReady, Place, PrefillDone
from headrace.core.states import (
    REQUEST_TABLE,
    TERMINAL_REQUEST_STATES,
    RequestEvent,
    RequestState,
    StateTable,
)
from headrace.decode.handoff import DECODE_TABLE, DecodeEvent, DecodeState, EarlyFrames, Handoff
from headrace.decode.handoff import TERMINAL as DECODE_ENDS
from headrace.engine.blocks import BlockPool
from headrace.engine.fills import FillGuard
from headrace.engine.lease import Lease, Resources, SlotPool
from headrace.kvstore.leases import LeaseBook
from headrace.kvstore.settings import Kind
from headrace.prefill.jobs import JOB_TABLE, JobEvent, JobState
from headrace.prefill.jobs import TERMINAL as PREFILL_ENDS

LEASE_S = 30.0
R, P, D = "router", "prefill", "decode"
_D, _J, _Q = DecodeEvent, JobEvent, RequestEvent


@dataclass(frozen=True)
class Laws:
    """What a control may break."""

    request: StateTable[Any, Any] = REQUEST_TABLE
    prefill: StateTable[Any, Any] = JOB_TABLE
    decode: StateTable[Any, Any] = DECODE_TABLE
    guard: type[FillGuard] = FillGuard
    leases: type[LeaseBook] = LeaseBook


@dataclass(eq=False)
class Ticket:
    request: str
    state: Any = RequestState.ACCEPTED
    epoch: int = 0
    ends: int = 0
    prefilled: bool = False

    @property
    def key(self) -> JobKey:
        return JobKey(RequestId(self.request), self.epoch)


@dataclass(eq=False)
class PrefillJob:
    key: JobKey
    state: Any = JobState.FINDING


@dataclass(eq=False)
class DecodeJob:
    key: JobKey
    handoff: Handoff
    state: Any = DecodeState.QUEUED_OPEN
    lease: Lease | None = None
    writing: int | None = None  # the block that a loading thread is inside of
    waiting: bool = False  # a block was told of before there was room


@dataclass(eq=False)
class Stored:
    """A block in the arena, as the book of leases sees it."""

    kind: Kind = Kind.KV
    leases: set[JobKey] = field(default_factory=set)


@dataclass
class Ends:
    """What one life of a prefill or decode replica remembers."""

    attempts: Attempts
    jobs: dict[JobKey, Any] = field(default_factory=dict)
    late: int = 0


class World:
    """`enabled()` names what may happen next; `do(name)` does it and checks the invariants."""

    def __init__(
        self, requests: str, laws: Laws | None = None, *, retries: int = 1, begun: bool = False
    ) -> None:
        """`begun`: the first jobs have reached prefill and decode, in order."""
        self.laws = laws or Laws()
        self.retries = retries
        self.clock = FakeClock()
        self.store = self.laws.leases(self.clock, LEASE_S)
        self.objects = {r: Stored() for r in requests}
        self.links: dict[tuple[str, str], deque[tuple[str, JobKey]]] = {
            pair: deque() for pair in ((R, P), (R, D), (P, D), (D, P), (P, R), (D, R))
        }
        self.used: dict[str, int] = {}  # faults so far
        self.tickets = {r: Ticket(r) for r in requests}
        self.new_prefill()
        self.new_decode()
        for ticket in self.tickets.values():
            self.dispatch(ticket)
        for pair, hear in (((R, D), self.decode_hears), ((R, P), self.prefill_hears)):
            while begun and self.links[pair]:
                hear(R, *self.links[pair].popleft())

    # ---- lives -----------------------------------------------------------------------------

    def new_prefill(self) -> None:
        self.prefill = Ends(Attempts())

    def new_decode(self) -> None:
        """Two blocks a request, three in all: the second request waits for the first one's."""
        self.decode = Ends(Attempts())
        self.early = EarlyFrames(LEASE_S)
        self.engine = Resources(BlockPool(3), SlotPool(2), self.laws.guard())
        self.orphans: list[tuple[int, int]] = []  # (ticket, block) of writers whose job is gone

    # ---- router ----------------------------------------------------------------------------

    def dispatch(self, ticket: Ticket) -> None:
        self.move(ticket, _Q.SENT_TO_PREFILL)
        self.links[R, D].append(("job", ticket.key))
        self.links[R, P].append(("job", ticket.key))

    def move(self, ticket: Ticket, event: RequestEvent) -> bool:
        step = self.laws.request.step(ticket.state, event, ticket.request)
        ended = ticket.state not in TERMINAL_REQUEST_STATES
        ticket.state = step.state
        ticket.ends += ended and ticket.state in TERMINAL_REQUEST_STATES
        return not step.ignored

    def withdraw(self, ticket: Ticket) -> None:
        for part in (P, D):
            self.links[R, part].append(("cancel", ticket.key))

    def trouble(self, ticket: Ticket) -> None:
        """The attempt was given up or its replica is gone."""
        if ticket.state in TERMINAL_REQUEST_STATES:
            return
        self.withdraw(ticket)
        if ticket.epoch >= self.retries:
            self.move(ticket, _Q.ERROR)
            return
        self.move(ticket, _Q.RETRY)
        ticket.epoch, ticket.prefilled = ticket.epoch + 1, False
        self.dispatch(ticket)

    def router_hears(self, source: str, kind: str, key: JobKey) -> None:
        ticket = self.tickets[key.request_id]
        if ticket.key != key or ticket.state in TERMINAL_REQUEST_STATES:
            return  # late
        if kind == "failed":
            if not (source == P and ticket.prefilled):
                self.trouble(ticket)
        elif kind == "done":
            ticket.prefilled = True
            self.move(ticket, _Q.PREFILL_DONE)
        else:
            self.move(ticket, _Q.TOKENS)
            self.move(ticket, _Q.FINISH)

    # ---- prefill ---------------------------------------------------------------------------

    def prefill_hears(self, source: str, kind: str, key: JobKey) -> None:
        job = self.prefill.jobs.get(key)
        if kind == "job":
            if self.prefill.attempts.begin(key) is not Verdict.NEW:
                self.prefill.late += 1
                return
            for other in self.same(self.prefill.jobs, key):
                self.end_prefill(other, _J.CANCEL)
            job = self.prefill.jobs[key] = PrefillJob(key)
            for event in (_J.FOUND, _J.ADMITTED, _J.STARTED):
                job.state = self.laws.prefill.step(job.state, event, key).state
        elif kind == "cancel":
            self.prefill.attempts.close(key)
            if job is None:
                self.prefill.late += 1
            else:
                self.end_prefill(job, _J.CANCEL)
        elif job is not None:  # the ack
            self.laws.prefill.step(job.state, _J.ACK, key)

    def seal(self, job: PrefillJob) -> None:
        job.state = self.laws.prefill.step(job.state, _J.PRODUCT, job.key).state
        self.store.hold(job.key, self.objects[job.key.request_id])  # type: ignore[arg-type]
        self.links[P, D].append(("blocks", job.key))
        job.state = self.laws.prefill.step(job.state, _J.ROWS_DONE, job.key).state

    def all_told(self, job: PrefillJob) -> None:
        self.links[P, D].append(("done", job.key))
        job.state = self.laws.prefill.step(job.state, _J.ALL_TOLD, job.key).state
        self.links[P, R].append(("done", job.key))
        self.close_prefill(job)

    def end_prefill(self, job: PrefillJob, event: JobEvent) -> None:
        step = self.laws.prefill.step(job.state, event, job.key)
        if step.ignored:
            return
        job.state = step.state
        if event in (_J.ERROR, _J.DECODE_GONE):
            self.links[P, R].append(("failed", job.key))
        self.close_prefill(job)

    def close_prefill(self, job: PrefillJob) -> None:
        self.prefill.attempts.close(job.key)
        if job.state is not JobState.DONE:
            self.store.release(job.key, None)
        assert job.state in PREFILL_ENDS
        del self.prefill.jobs[job.key]

    # ---- decode ----------------------------------------------------------------------------

    def decode_hears(self, source: str, kind: str, key: JobKey) -> None:
        job = self.decode.jobs.get(key)
        if kind == "job":
            self.accept(key)
        elif kind == "cancel":
            self.decode.attempts.close(key)
            self.early.take(key)
            if job is None:
                self.decode.late += 1
            else:
                self.end_decode(job, _D.CANCEL)
        elif job is not None:
            self.announced(job, kind)
        elif self.decode.attempts.look(key) is not Verdict.NEW:
            self.decode.late += 1
        else:
            self.early.hold(announcement(kind, key), self.clock.now_s())

    def accept(self, key: JobKey) -> None:
        if self.decode.attempts.begin(key) is not Verdict.NEW:
            self.decode.late += 1
            return
        for other in self.same(self.decode.jobs, key):
            self.end_decode(other, _D.CANCEL)
        job = self.decode.jobs[key] = DecodeJob(key, Handoff((digest(key.request_id),)))
        for message in self.early.take(key):
            self.announced(job, "blocks" if isinstance(message, BlocksReady) else "done")
        self.admit()

    def admit(self) -> None:
        """In the order of arrival, as long as there is room."""
        for job in list(self.decode.jobs.values()):
            if job.lease is not None:
                continue
            inside = {j.writing for j in self.decode.jobs.values()}
            inside |= {block for _, block in self.orphans}
            job.lease = Lease.reserve(self.engine, [digest(job.key.request_id)], 2)
            if job.lease is None:
                return
            assert not inside & set(job.lease.blocks), "a block was free while it was written"
            job.state = self.laws.decode.step(job.state, _D.ADMITTED, job.key).state
            if job.lease.n_shared:
                job.handoff.loaded(0)
            elif job.waiting:
                self.load(job)

    def announced(self, job: DecodeJob, kind: str) -> None:
        event = _D.BLOCKS if kind == "blocks" else _D.PREFILL_DONE
        step = self.laws.decode.step(job.state, event, job.key)
        self.decode.late += step.ignored
        job.state = step.state
        if kind != "blocks" or step.ignored:
            return
        if job.handoff.blocks(announcement(kind, job.key)):
            if job.lease is None:
                job.waiting = True
            elif not job.lease.n_shared:
                self.load(job)

    def load(self, job: DecodeJob) -> None:
        assert job.lease is not None
        block = job.lease.blocks[0]
        if self.engine.guard.enter(job.lease.ticket, block):
            job.writing = block

    def loaded(self, job: DecodeJob) -> None:
        assert job.lease is not None and job.writing is not None
        if self.engine.guard.leave(job.lease.ticket, job.writing, complete=True):
            job.handoff.loaded(0)
        job.writing = None
        self.admit()

    def start(self, job: DecodeJob) -> None:
        job.state = self.laws.decode.step(job.state, _D.STARTED, job.key).state
        self.links[D, P].append(("ack", job.key))
        self.store.release(job.key, Kind.KV)

    def answer(self, job: DecodeJob) -> None:
        for event in (_D.TOKEN, _D.FINISH):
            job.state = self.laws.decode.step(job.state, event, job.key).state
        self.links[D, R].append(("tokens", job.key))
        self.close_decode(job)

    def end_decode(self, job: DecodeJob, event: DecodeEvent) -> None:
        step = self.laws.decode.step(job.state, event, job.key)
        if step.ignored:
            self.decode.late += 1
            return
        job.state = step.state
        if event is not _D.CANCEL:
            self.links[D, R].append(("failed", job.key))
        self.close_decode(job)

    def close_decode(self, job: DecodeJob) -> None:
        assert job.state in DECODE_ENDS
        self.decode.attempts.close(job.key)
        if job.lease is not None:
            if job.writing is not None:
                self.orphans.append((job.lease.ticket, job.writing))
            job.lease.close()
        self.store.release(job.key, None)
        del self.decode.jobs[job.key]
        self.admit()

    @staticmethod
    def same(jobs: dict[JobKey, Any], key: JobKey) -> list[Any]:
        """Other attempts of the same request."""
        return [j for k, j in jobs.items() if k.request_id == key.request_id and k != key]


def digest(request: str) -> Digest:
    return Digest(request.encode().ljust(32, b"."))


def announcement(kind: str, key: JobKey) -> Any:
    if kind == "done":
        return PrefillDone(key, 128, 0, 0.0)
    place = Place(BootId("s"), 0, 1, 1, 1)
    return BlocksReady(key, 0, (digest(key.request_id),), (place,))
