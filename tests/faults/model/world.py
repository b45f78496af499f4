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

from headrace_tests_faults_model_prefilling import Prefilling

from headrace.core.attempts import Attempts, Verdict
from headrace.core.clock import FakeClock
from headrace.core.ids import BootId, Digest, JobKey, RequestId
from headrace.core.messages import BindDecode, BlocksReady, Place, PrefillDone
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
from headrace.prefill.jobs import JOB_TABLE

LEASE_S = 30.0
R, P, D = "router", "prefill", "decode"
_D, _Q = DecodeEvent, RequestEvent


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
    """`prefill` and `decode` are the keys of its attempts; `told` that the latter was told all."""

    request: str
    state: Any = RequestState.ACCEPTED
    epoch: int = -1
    tries: int = 0
    ends: int = 0
    told: bool = False
    prefill: JobKey | None = None
    decode: JobKey | None = None

    def next_key(self) -> JobKey:
        self.epoch += 1
        return JobKey(RequestId(self.request), self.epoch)


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


class World(Prefilling):
    """`enabled()` names what may happen next; `do(name)` does it and checks the invariants."""

    def __init__(
        self, requests: str, laws: Laws | None = None, *, retries: int = 1, begun: bool = False
    ) -> None:
        """`begun`: the first jobs have reached prefill and decode, in order, and are bound."""
        self.laws = laws or Laws()
        self.retries = retries
        self.clock = FakeClock()
        self.store = self.laws.leases(self.clock, LEASE_S)
        self.objects = {r: Stored() for r in requests}
        self.links: dict[tuple[str, str], deque[tuple[str, Any]]] = {
            pair: deque() for pair in ((R, P), (R, D), (P, D), (D, P), (P, R), (D, R))
        }
        self.used: dict[str, int] = {}  # faults so far
        self.tickets = {r: Ticket(r) for r in requests}
        self.new_prefill()
        self.new_decode()
        for ticket in self.tickets.values():
            self.dispatch(ticket)
        steps = (
            ((R, P), self.prefill_hears), ((P, R), self.router_hears),
            ((R, D), self.decode_hears), ((R, P), self.prefill_hears),
        )  # fmt: skip
        for pair, hear in steps:
            while begun and self.links[pair]:
                hear(pair[0], *self.links[pair].popleft())

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
        ticket.prefill, ticket.decode, ticket.told = ticket.next_key(), None, False
        self.links[R, P].append(("job", ticket.prefill))

    def bind(self, ticket: Ticket) -> None:
        """Decode is chosen; both ends are told."""
        self.move(ticket, _Q.SENT_TO_DECODE)
        ticket.decode, ticket.told = ticket.next_key(), False
        self.links[R, D].append(("job", ticket.decode))
        self.say_bind(ticket)

    def say_bind(self, ticket: Ticket) -> None:
        assert ticket.prefill is not None and ticket.decode is not None
        bind = BindDecode(ticket.prefill, ticket.decode.epoch, "tcp://d:1", "decode")
        self.links[R, P].append(("bind", bind))

    def move(self, ticket: Ticket, event: RequestEvent) -> bool:
        step = self.laws.request.step(ticket.state, event, ticket.request)
        ended = ticket.state not in TERMINAL_REQUEST_STATES
        ticket.state = step.state
        ticket.ends += ended and ticket.state in TERMINAL_REQUEST_STATES
        return not step.ignored

    def withdraw(self, ticket: Ticket) -> None:
        for part, key in ((P, ticket.prefill), (D, ticket.decode)):
            if key is not None:
                self.links[R, part].append(("cancel", key))

    def trouble(self, ticket: Ticket, *, decode: bool = False) -> None:
        """The attempt was given up or its replica is gone; `decode`: that end of it alone."""
        if ticket.state in TERMINAL_REQUEST_STATES:
            return
        if ticket.tries >= self.retries:
            self.withdraw(ticket)
            self.move(ticket, _Q.ERROR)
            return
        ticket.tries += 1
        if decode and ticket.prefill is not None and ticket.decode is not None:
            self.links[R, D].append(("cancel", ticket.decode))
            self.move(ticket, _Q.REBIND)
            self.bind(ticket)
            return
        self.withdraw(ticket)
        self.move(ticket, _Q.RETRY)
        self.dispatch(ticket)

    def lost(self, ticket: Ticket, part: str) -> None:
        """The router sees that a replica is gone."""
        if part == P:
            gone = ticket.prefill is not None and not ticket.told
            ticket.prefill = None
            if gone:
                self.trouble(ticket)
        elif ticket.decode is not None:
            self.trouble(ticket, decode=True)

    def router_hears(self, source: str, kind: str, key: JobKey) -> None:
        ticket = self.tickets[key.request_id]
        over = ticket.state in TERMINAL_REQUEST_STATES
        if kind == "wanted":
            if over or key != ticket.prefill:
                self.links[R, P].append(("cancel", key))
            elif ticket.decode is None:
                self.move(ticket, _Q.DECODE_WANTED)
                self.bind(ticket)
            else:
                self.say_bind(ticket)
        elif over or key not in (ticket.prefill, ticket.decode):
            return  # late
        elif kind == "failed":
            if source == D or not ticket.told:
                self.trouble(ticket, decode=key == ticket.decode)
        elif kind == "done":
            ticket.told = True
            self.move(ticket, _Q.PREFILL_DONE)
        else:
            self.move(ticket, _Q.TOKENS)
            self.move(ticket, _Q.FINISH)

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
        # As long as prefill has the job nobody's end frees what is read here. And a lease of its
        # own, as for the window record.
        bound = any(j.binding.decode_key == job.key for j in self.prefill.jobs.values())
        assert not bound or self.objects[job.key.request_id].leases, "what is read is nobody's"
        self.store.hold(job.key, self.objects[job.key.request_id])  # type: ignore[arg-type]
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
        self.store.release(job.key, Kind.KV)

    def answer(self, job: DecodeJob) -> None:
        for event in (_D.TOKEN, _D.FINISH):
            job.state = self.laws.decode.step(job.state, event, job.key).state
        self.links[D, P].append(("ack", job.key))
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


def digest(request: str) -> Digest:
    return Digest(request.encode().ljust(32, b"."))


def announcement(kind: str, key: JobKey) -> Any:
    if kind == "done":
        return PrefillDone(key, 128, 0, 0.0)
    place = Place(BootId("s"), 0, 1, 1, 1)
    return BlocksReady(key, 0, (digest(key.request_id),), (place,))
