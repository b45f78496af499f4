"""All requests of a router: who is live, who waits for room, and whom a message is for."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from headrace.core.card import ModelCard, Role, VisionCard
from headrace.core.deployment import Deployment
from headrace.core.errors import HeadraceError, Overloaded, ReplicaLost, Unavailable, from_code
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.messages import (
    Cancel,
    JobFailed,
    PrefillDone,
    PrefillProgress,
    TokenBatch,
    VisionDone,
)
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest
from headrace.core.states import ReplicaState
from headrace.kvstore import IndexReader, Kind
from headrace.router.attempt import Attempt
from headrace.router.blame import charge_loss
from headrace.router.budget import Loss, RetryBudget
from headrace.router.ledger import Ledger
from headrace.router.pictures import PictureFile
from headrace.router.pieces import Trouble
from headrace.router.replicas import Replica, Replicas
from headrace.router.requests import Ticket
from headrace.router.room import Rooms, Witness
from headrace.router.settings import RouterSettings

log = logging.getLogger(__name__)


class Desk:
    """Owns the tickets, and knows whom a message is for. One event loop."""

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
        self.retried = 0
        self.draining = False
        self._crashes = settings.crashes
        self._settings = settings
        self._deployment = deployment
        self._index = index
        self.rooms = Rooms(settings, deployment, ledger, index, witness)
        self._witness = witness
        self._budget = RetryBudget(settings.retry_share)
        self._leaving: dict[str, Loss] = {}  # by key, of replicas that drain and give jobs up
        self._live: dict[RequestId, Ticket] = {}
        self._slots = 0
        self.replicas: Replicas  # set once by `attach`

    def attach(self, replicas: Replicas) -> None:
        """The replicas whose messages come here; they need the desk to be built first."""
        self.replicas = replicas
        self.rooms.replicas = replicas

    @property
    def open_requests(self) -> int:
        """Requests taken in and not yet answered, validation included."""
        return self._slots

    @property
    def live_requests(self) -> int:
        return len(self._live)

    @property
    def waiting_requests(self) -> int:
        return self.rooms.waiting

    def card(self) -> ModelCard:
        """The served model. Raises `Unavailable` when no decode replica is routable."""
        return self.rooms.card()

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
    def handoff_s(self) -> float:
        """How long a prefill may say nothing of a job."""
        return self._deployment.leases.handoff_s

    @property
    def vision_wait_s(self) -> float:
        """How long a vision replica may take for a picture, its queue included."""
        return self._deployment.leases.handoff_s

    async def pictures_present(self, digests: Sequence[Digest]) -> frozenset[Digest]:
        """Those of these pictures whose rows the index lists."""
        namespace = self.card().namespace().digest()
        return await self._index.present(namespace, Kind.MM, digests)

    def accept(
        self,
        request: GenRequest,
        card: ModelCard,
        record: RequestRecord,
        arrived_s: float,
        files: Mapping[Digest, PictureFile] | None = None,
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

    def charge_retry(self, trouble: Trouble) -> None:
        """Another attempt after `trouble` is begun; what it costs is taken from the budget.

        Raises the error to end with, if the budget does not allow it."""
        allowed = trouble.loss.take() if trouble.loss is not None else self._budget.take()
        if not allowed:
            raise self._budget.refusal(trouble.error)
        self.retried += 1

    def apart_on(self, but: RequestId) -> set[str]:
        """Keys of the replicas that have a request which is to run apart, other than `but`."""
        return {
            replica.key
            for ticket in self._live.values()
            if ticket.suspicion.apart and ticket.key.request_id != but
            if (attempt := ticket.attempt) is not None
            for replica in (attempt.prefill, attempt.decode)
            if replica is not None
        }

    def replica(self, key: str) -> Replica:
        """Raises `ConnectionResetError` when it has gone since it was chosen."""
        for replica in self.replicas.all():
            if replica.key == key:
                return replica
        raise ConnectionResetError("the chosen replica is gone")

    # What replicas say (replicas.Sink).

    def on_tokens(self, replica: Replica, batch: TokenBatch) -> None:
        for item in batch.items:
            ticket, attempt = self._attempt(item.key)
            mine = attempt is not None and attempt.decodes(replica, item.key)
            if ticket is None or not mine:
                self.late["tokens"] += 1
                continue
            try:
                self.late["tokens"] += not ticket.take(item)
            except Exception:  # the other sequences of the step have their tokens in here too
                log.exception("tokens of %s failed", item.key)
                ticket.give_up(HeadraceError("internal error"))

    def on_prefill_progress(self, replica: Replica, message: PrefillProgress) -> None:
        ticket, attempt = self._attempt(message.key)
        mine = attempt is not None and attempt.prefills(replica, message.key)
        if ticket is None or not mine or not ticket.prefill_progress(message):
            # It asks until it is answered, and nobody will ever bind this one.
            self.late["prefill_progress"] += 1
            replica.post(Cancel(message.key, "no decode replica is wanted"))

    def on_prefill_done(self, replica: Replica, message: PrefillDone) -> None:
        ticket, attempt = self._attempt(message.key)
        if ticket is None or attempt is None or not attempt.awaits(replica, message.key):
            self.late["prefill_done"] += 1
        else:
            ticket.prefill_done(message)

    def on_vision_done(self, replica: Replica, message: VisionDone) -> None:
        ticket = self._live.get(message.key.request_id)
        if ticket is None or not ticket.sight.done(replica, message):
            self.late["vision_done"] += 1

    def on_failed(self, replica: Replica, message: JobFailed) -> None:
        """A replica gave a job up. A request hears of it unless that attempt is over; what a
        draining replica gives up costs the budget once, as its loss would."""
        ticket, attempt = self._attempt(message.key)
        if replica.role is Role.VISION:
            error = _picture_error(message)
            if ticket is None or not ticket.sight.failed(
                replica, error, message.key, message.picture
            ):
                self.late["job_failed"] += 1
            return
        blamed = attempt.to_blame(replica, message.key) if attempt is not None else None
        error = from_code(message.code, message.message)
        if ticket is not None and blamed is replica:
            ticket.suspicion.given_back(replica.key)
        loss = None
        if replica.state is ReplicaState.DRAINING:  # it stops, and says so job by job
            loss = self._leaving.setdefault(replica.key, Loss(self._budget))
        heard = (
            ticket is not None
            and blamed is not None
            and ticket.trouble(error, retryable=message.retryable, replica=blamed, loss=loss)
        )
        self.late["job_failed"] += not heard

    def on_lost(self, replica: Replica) -> None:
        """A replica is gone: every request that it had is told."""
        lost = ReplicaLost(f"{replica.name} was lost")
        loss = self._leaving.pop(replica.key, None) or Loss(self._budget)
        suspicions = [ticket.suspicion for ticket in self._live.values()]
        told = replica.state is ReplicaState.DRAINING
        charge_loss(replica.key, suspicions, self._crashes, told=told)
        for ticket in tuple(self._live.values()):
            if replica.role is Role.VISION:
                ticket.sight.failed(replica, lost)
            elif ticket.attempt is not None and ticket.attempt.holds(replica):
                ticket.trouble(lost, retryable=True, replica=replica, loss=loss)
        # Those in line learn that there may be nobody left; each looks when its turn comes.
        self.rooms.kick()

    def on_load(self) -> None:
        self.rooms.news()

    def _attempt(self, key: JobKey) -> tuple[Ticket | None, Attempt | None]:
        ticket = self._live.get(key.request_id)
        return ticket, ticket.attempt if ticket is not None else None


def _picture_error(message: JobFailed) -> HeadraceError:
    """A bad picture keeps its own error; any other failure is the replica's."""
    error = from_code(message.code, message.message)
    if message.retryable and not isinstance(error, Overloaded):
        return ReplicaLost(f"a vision replica gave up: {message.code}")
    return error
