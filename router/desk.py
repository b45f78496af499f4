"""All requests of a router: who is live, who waits for room, and whom a message is for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from headrace.core.card import ModelCard, Role, VisionCard
from headrace.core.chain import TokenIds
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.deployment import Deployment
from headrace.core.errors import (
    HeadraceError,
    LimitExceeded,
    Overloaded,
    ReplicaLost,
    Unavailable,
    from_code,
)
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.messages import JobFailed, PrefillDone, TokenBatch, VisionDone
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest
from headrace.core.rows import GRAIN
from headrace.kvstore import Hits, IndexReader, Kind
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
        self.crashes = settings.crashes
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
        self._news = asyncio.Event()  # set and replaced when a replica joins or reports
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

    def vision_card(self) -> VisionCard:
        """How pictures are encoded here. Raises `Unavailable` before a vision replica was seen."""
        card = self.replicas.vision_card
        if card is None:
            raise Unavailable("no vision replica is ready")
        return card

    @property
    def vision_wait_s(self) -> float:
        """How long a vision replica may take for a picture, its queue included."""
        return self._deployment.leases.handoff_s

    async def pictures_present(self, digests: Sequence[Digest]) -> frozenset[Digest]:
        """Those of these pictures whose rows the index lists."""
        namespace = self.card().namespace().digest()
        return await self._index.present(namespace, Kind.MM, digests, self._settings.lookup_s)

    def accept(
        self,
        request: GenRequest,
        card: ModelCard,
        record: RequestRecord,
        arrived_s: float,
        files: Mapping[Digest, bytes] | None = None,
    ) -> Ticket:
        """A ticket for a checked and tokenised request; from here on it has one terminal event.
        `card` is the model that it was made for, `files` are its pictures by the digests of its
        spans."""
        ticket = Ticket(self, request, card, record, arrived_s, files)
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
        attempt does not queue behind requests that have not begun, and waits `resume_wait_s` for a
        decode replica to come back; `generated_ids` are the tokens that it resumes after.

        Raises `Unavailable` without a routable decode replica, `Overloaded` when the line is full,
        `LimitExceeded` when no replica can ever hold the request."""
        if not again:
            return await self._find_room(request, generated_ids, avoid, again=False)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._settings.resume_wait_s
        while True:
            try:
                return await self._find_room(request, generated_ids, avoid, again=True)
            except Unavailable:
                if loop.time() >= until_s:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        await self._news.wait()

    async def _find_room(
        self, request: GenRequest, generated_ids: TokenIds, avoid: set[str], *, again: bool
    ) -> tuple[Work, Route]:
        begun_s = SYSTEM_CLOCK.now_s()
        card = self.card()
        hits = await self._look_up(request, card)
        work = size_up(
            request.n_tokens,
            request.max_tokens,
            hits.blocks,
            hits.windows,
            request.keep_tokens,
            card.geometry,
            self._deployment.local_prefill_rows,
            n_generated=len(generated_ids),
            depth_tokens=self._deployment.depth_for(card.window_tokens),
        )
        work = replace(work, hit_tiers={t.value: n * GRAIN for t, n in hits.by_tier.items()})
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

    async def _look_up(self, request: GenRequest, card: ModelCard) -> Hits:
        """What is stored of the prompt: the exact blocks, and in mode `replay` those behind them
        that a replay wrote."""
        lookup_s, exact = self._settings.lookup_s, card.namespace().digest()
        if request.exact_root is None:
            return await self._index.hit_blocks(exact, request.digests, lookup_s)
        digests = request.exact_digests(request.token_ids)
        first = await self._index.hit_blocks(exact, digests, lookup_s)
        own = card.namespace(self._deployment.exactness).digest()
        rest = request.digests[first.blocks :]
        behind = await self._index.hit_blocks(own, rest, lookup_s)
        tiers = Counter(first.by_tier) + Counter(behind.by_tier)
        return Hits(first.blocks + behind.blocks, tiers)

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
            if ticket is None or ticket.decode is not replica:
                self.late["tokens"] += 1
                continue
            try:
                self.late["tokens"] += not ticket.take(item)
            except Exception:  # the other sequences of the step have their tokens in here too
                log.exception("tokens of %s failed", item.key)
                ticket.give_up(HeadraceError("internal error"))

    def on_prefill_done(self, replica: Replica, message: PrefillDone) -> None:
        ticket = self._ticket(message.key)
        if ticket is None or ticket.prefill is not replica or ticket.prefill_report is not None:
            self.late["prefill_done"] += 1
        else:
            ticket.prefill_done(message)

    def on_vision_done(self, replica: Replica, message: VisionDone) -> None:
        ticket = self._ticket(message.key)
        if ticket is None or not ticket.sight.done(replica, message):
            self.late["vision_done"] += 1

    def on_failed(self, replica: Replica, message: JobFailed) -> None:
        ticket = self._ticket(message.key)
        if replica.role is Role.VISION:
            error = _picture_error(message)
            if ticket is None or not ticket.sight.failed(replica, error):
                self.late["job_failed"] += 1
            return
        if ticket is None or replica not in (ticket.decode, ticket.prefill):
            self.late["job_failed"] += 1
            return
        error = from_code(message.code, message.message)
        if not ticket.trouble(error, retryable=message.retryable, replica=replica):
            self.late["job_failed"] += 1

    def on_lost(self, replica: Replica) -> None:
        lost = ReplicaLost(f"{replica.name} was lost")
        for ticket in tuple(self._live.values()):
            ticket.note_lost(replica)
            if replica.role is Role.VISION:
                ticket.sight.failed(replica, lost)
            elif replica in (ticket.decode, ticket.prefill):
                ticket.trouble(lost, retryable=True, replica=replica)
        # Those in line learn that there may be nobody left; each looks when its turn comes.
        self.kick()

    def on_load(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self.kick()

    def _ticket(self, key: JobKey) -> Ticket | None:
        ticket = self._live.get(key.request_id)
        return ticket if ticket is not None and ticket.key == key else None


def _picture_error(message: JobFailed) -> HeadraceError:
    """A bad picture keeps its own error; any other failure is the replica's."""
    error = from_code(message.code, message.message)
    if message.retryable and not isinstance(error, Overloaded):
        return ReplicaLost(f"a vision replica gave up: {message.code}")
    return error


def _others(replicas: list[Replica], avoid: set[str]) -> list[Replica]:
    """Without those that failed this request, unless nobody else is left. A prefill replica that
    failed is never given the same request again: decode can do without."""
    left = [replica for replica in replicas if replica.key not in avoid]
    if left or not replicas or replicas[0].role is Role.PREFILL:
        return left
    return replicas
