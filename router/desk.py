"""All requests of a router: who is live, who waits for room, and whom a message is for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator
from typing import Protocol

from headrace.core.card import ModelCard, Role
from headrace.core.chain import TokenIds
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.deployment import Deployment
from headrace.core.errors import LimitExceeded, Overloaded, ReplicaLost, Unavailable, from_code
from headrace.core.ids import JobKey, RequestId
from headrace.core.messages import JobFailed, PrefillDone, TokenBatch
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest
from headrace.kvstore import Hits, IndexReader
from headrace.router.ledger import Ledger
from headrace.router.policy import Route, Work, route, size_up
from headrace.router.replicas import Replica, Replicas
from headrace.router.requests import Ticket
from headrace.router.settings import RouterSettings

log = logging.getLogger(__name__)
RETRY_BURST = 10.0


class Witness(Protocol):
    """Who measures. Must not wait."""

    def on_end(self, record: RequestRecord) -> None: ...
    def on_routed(self, seconds: float) -> None: ...


class RetryBudget:
    """At most a share of all requests may be tried again, with a small allowance to begin with.

    Without it, a pool that fails under load is given its load several times over."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = RETRY_BURST if share else 0.0

    def earn(self) -> None:
        self._credit = min(RETRY_BURST, self._credit + self._share)

    def take(self) -> bool:
        """Whether another attempt is allowed now; uses one up."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


class Desk:
    """Owns tickets, the queue for room, and the ledger's use. One event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        deployment: Deployment,
        ledger: Ledger,
        index: IndexReader,
        witness: Witness,
    ) -> None:
        self.ledger = ledger
        self.retries = settings.retries
        self.resumes = settings.resumes
        self.late: Counter[str] = Counter()
        self.routed: Counter[tuple[str, ...]] = Counter()
        self.retried = 0
        self.draining = False
        self._settings = settings
        self._deployment = deployment
        self._index = index
        self._witness = witness
        self._budget = RetryBudget(settings.retry_share)
        self._live: dict[RequestId, Ticket] = {}
        self._waiting: deque[asyncio.Event] = deque()
        self._slots = 0
        self._turn = 0
        self.replicas: Replicas  # set once by `attach`

    def attach(self, replicas: Replicas) -> None:
        """The replicas whose messages come here; they need the desk to be built first."""
        self.replicas = replicas

    @property
    def open_requests(self) -> int:
        """Requests taken in and not yet answered, validation included."""
        return self._slots

    @property
    def live_requests(self) -> int:
        return len(self._live)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    def card(self) -> ModelCard:
        """The served model. Raises `Unavailable` when no decode replica is routable."""
        card = self.replicas.card
        if card is None:
            raise Unavailable("no decode replica is ready")
        return card

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the open requests, taken before a body is read.

        Raises `Overloaded` at once when there is none, `Unavailable` while the router drains."""
        if self.draining:
            raise Unavailable("this router is shutting down")
        if self._slots >= self._settings.open_requests:
            raise Overloaded(
                f"open_requests is limited to {self._settings.open_requests}, all are taken"
            )
        self._slots += 1
        try:
            yield
        finally:
            self._slots -= 1

    def accept(self, request: GenRequest, record: RequestRecord, arrived_s: float) -> Ticket:
        """A ticket for a checked and tokenised request; from here on it has one terminal event."""
        ticket = Ticket(self, request, record, arrived_s)
        self._live[request.request_id] = ticket
        self._budget.earn()
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Called by the ticket, once, after it has released everything."""
        self._live.pop(ticket.key.request_id, None)
        self._witness.on_end(ticket.record)

    def give_up(self) -> None:
        """End every live request with an error: the router stops."""
        for ticket in tuple(self._live.values()):
            ticket.give_up(Unavailable("this router is shutting down"))

    def take_retry(self) -> bool:
        allowed = self._budget.take()
        self.retried += allowed
        return allowed

    def replica(self, key: str) -> Replica:
        """Raises `ConnectionResetError` when it has gone since it was chosen."""
        for replica in self.replicas.all():
            if replica.key == key:
                return replica
        raise ConnectionResetError("the chosen replica is gone")

    # Room.

    async def find_room(
        self, request: GenRequest, generated_ids: TokenIds, avoid: set[str], *, again: bool
    ) -> tuple[Work, Route]:
        """Look the prompt up and choose replicas, waiting in line while none has room. A further
        attempt does not queue behind requests that have not begun; `generated_ids` are the tokens
        that it resumes after.

        Raises `Unavailable` without a routable decode replica, `Overloaded` when the line is full,
        `LimitExceeded` when no replica can ever hold the request."""
        begun_s = SYSTEM_CLOCK.now_s()
        card = self.card()
        hits = Hits(0, {}, ())
        if request.digests:
            hits = await self._index.hit_blocks(
                card.namespace().digest(), request.digests, self._settings.lookup_s
            )
        work = size_up(
            request.n_tokens,
            request.max_tokens,
            hits.blocks,
            hits.windows,
            request.keep_tokens,
            card.geometry,
            self._deployment.local_prefill_rows,
            n_generated=len(generated_ids),
        )
        found = self._choose(work, avoid) if again or not self._waiting else None
        self._witness.on_routed(SYSTEM_CLOCK.now_s() - begun_s)
        if found is not None:
            return work, found
        if len(self._waiting) >= self._deployment.edge.queued_requests:
            raise Overloaded(
                f"queued_requests is limited to {self._deployment.edge.queued_requests},"
                " all replicas are full"
            )
        return work, await self._wait_for_room(work, avoid, again)

    def kick(self) -> None:
        """Something may have made room: the first in line looks."""
        if self._waiting:
            self._waiting[0].set()

    async def _wait_for_room(self, work: Work, avoid: set[str], again: bool) -> Route:
        turn = asyncio.Event()
        if again:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            while True:
                await turn.wait()
                turn.clear()
                if self._waiting[0] is turn:
                    found = self._choose(work, avoid)
                    if found is not None:
                        return found
        finally:
            self._waiting.remove(turn)
            self.kick()

    def _choose(self, work: Work, avoid: set[str]) -> Route | None:
        decodes = self.replicas.routable(Role.DECODE)
        if not decodes:
            raise Unavailable("no decode replica is ready")
        most = max(replica.capacity_tokens for replica in decodes)
        if work.resident_tokens > most:
            raise LimitExceeded(
                f"a replica holds {most} tokens, prompt and max_tokens need {work.resident_tokens}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        prefills = self.replicas.routable(Role.PREFILL)
        self._turn += 1
        found = route(
            work,
            [self.replicas.candidate(r) for r in _others(decodes, avoid)],
            [self.replicas.candidate(r) for r in _others(prefills, avoid)],
            queue_ahead=self._settings.queue_ahead,
            start_rows_per_s=self._settings.prefill_rows_per_s,
            turn=self._turn,
        )
        if found is not None:
            self._count(found)
        return found

    def _count(self, found: Route) -> None:
        self.routed[("decode", found.decode.key.partition("/")[0], found.decode.reason)] += 1
        if found.prefill is not None:
            name = found.prefill.key.partition("/")[0]
            self.routed[("prefill", name, found.prefill.reason)] += 1

    # What replicas say (replicas.Sink).

    def on_tokens(self, replica: Replica, batch: TokenBatch) -> None:
        for item in batch.items:
            ticket = self._ticket(item.key)
            if ticket is None or ticket.decode is not replica or not ticket.take(item):
                self.late["tokens"] += 1

    def on_prefill_done(self, replica: Replica, message: PrefillDone) -> None:
        ticket = self._ticket(message.key)
        if ticket is None or ticket.prefill is not replica or ticket.prefill_report is not None:
            self.late["prefill_done"] += 1
        else:
            ticket.prefill_done(message)

    def on_failed(self, replica: Replica, message: JobFailed) -> None:
        ticket = self._ticket(message.key)
        if ticket is None or replica not in (ticket.decode, ticket.prefill):
            self.late["job_failed"] += 1
            return
        error = from_code(message.code, message.message)
        if not ticket.trouble(error, retryable=message.retryable, replica=replica):
            self.late["job_failed"] += 1

    def on_lost(self, replica: Replica) -> None:
        lost = ReplicaLost(f"{replica.name} was lost")
        for ticket in tuple(self._live.values()):
            if replica in (ticket.decode, ticket.prefill):
                ticket.trouble(lost, retryable=True, replica=replica)
        # Those in line learn that there may be nobody left; each looks when its turn comes.
        self.kick()

    def on_load(self) -> None:
        self.kick()

    def _ticket(self, key: JobKey) -> Ticket | None:
        ticket = self._live.get(key.request_id)
        return ticket if ticket is not None and ticket.key == key else None


def _others(replicas: list[Replica], avoid: set[str]) -> list[Replica]:
    """Without those that failed this request, unless nobody else is left. A prefill replica that
    failed is never given the same request again: decode can do without."""
    left = [replica for replica in replicas if replica.key not in avoid]
    if left or not replicas or replicas[0].role is Role.PREFILL:
        return left
    return replicas
