"""Sends the attempts of one request: look up, choose, count, send; and the bind of a prefill.

find room -> [pictures] -> PrefillJob -> (prefill asks) -> choose decode -> DecodeJob, BindDecode
                        \\____________________ no prefill, or bound early _____^
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.card import ModelCard
from headrace.core.chain import TokenIds
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import HeadraceError, ReplicaLost, Unavailable
from headrace.core.ids import JobKey
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest
from headrace.core.states import RequestEvent
from headrace.router.attempt import Attempt
from headrace.router.blame import Suspicion
from headrace.router.policy import Choice, Route, Work
from headrace.router.replicas import Replica
from headrace.router.sight import Sight

if TYPE_CHECKING:
    from headrace.router.desk import Desk

log = logging.getLogger(__name__)


class Failed(Protocol):
    """Told when an attempt cannot go on. `replica` is to blame, if one is."""

    def __call__(
        self, error: HeadraceError, *, retryable: bool, replica: Replica | None
    ) -> object: ...


class Dispatch:
    """One a ticket. `attempt` is the newest, None before it is sent and between two; `work` what
    the index said of the newest. `avoid` holds the keys of replicas that failed the request."""

    def __init__(
        self,
        desk: Desk,
        request: GenRequest,
        card: ModelCard,
        record: RequestRecord,
        sight: Sight,
        deadline_s: float,
        step: Callable[[RequestEvent], None],
        failed: Failed,
    ) -> None:
        """`deadline_s` is of the loop; `card` is the model that the request was made for."""
        self._desk = desk
        self._base = request
        self._card = card
        self._record = record
        self._sight = sight
        self._deadline_s = deadline_s
        self._step = step
        self._failed = failed
        self._known: TokenIds  # tokens that the newest attempt resumes after
        self._task: asyncio.Task[None] | None = None
        self.epoch = 0
        self.attempt: Attempt | None = None
        self.work: Work | None = None
        self.avoid: set[str] = set()
        self.suspicion = Suspicion()

    @property
    def key(self) -> JobKey:
        """The newest; an attempt's replicas may have older ones."""
        return JobKey(self._base.request_id, self.epoch)

    @property
    def begun(self) -> bool:
        return self._task is not None

    def begin(self, known: TokenIds) -> None:
        """Another attempt, in a task of its own; `known` are the tokens that it resumes after."""
        self.attempt, self._known = None, known
        self.suspicion.begins_anew()
        self._go(self._send())

    def rebind(self, attempt: Attempt) -> None:
        """Another decode replica for the same prefill."""
        attempt.drop_decode("another decode replica")
        self.suspicion.begins_anew()
        self._record.attempts += 1
        self._record.rebinds += 1
        self._go(self._bind(attempt))

    def cancel(self) -> None:
        """Send no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        self.cancel()
        self._task = asyncio.create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except HeadraceError as error:
            self._failed(error, retryable=False, replica=None)
        except ConnectionError:
            attempt = self.attempt
            lost = attempt.decode if attempt is not None else None
            if attempt is not None and (lost is None or lost.linked):
                lost = attempt.prefill
            name = lost.name if lost is not None else "a replica"
            self._failed(ReplicaLost(f"{name} was lost"), retryable=True, replica=lost)
        except Exception:
            log.exception("dispatch of %s failed", self.key)
            self._failed(HeadraceError("internal error"), retryable=False, replica=None)

    async def _send(self) -> None:
        begun_s = SYSTEM_CLOCK.now_s()
        work, route = await self._desk.rooms.find(
            self._base, self._known, self.avoid, again=self._record.attempts > 0, taken=self._taken
        )
        self._record.stage("queue_s", SYSTEM_CLOCK.now_s() - begun_s)
        if self._desk.card() != self._card:  # its digests would name another model's bytes
            raise Unavailable("the model that this request was made for is served no more")
        self.work = work
        attempt = self._commit(route)
        handed_off = attempt.prefill is not None
        if await self._sight.ready(self.key, work, handed_off=handed_off):
            self.epoch += 1  # vision's leases are its own
        if handed_off:
            await attempt.send_prefill(self._request())
            self.epoch += 1
            silence_s = self._desk.handoff_s
            if attempt.decode is None and not await attempt.until_wanted(silence_s):
                silent = ReplicaLost(f"no word of a prefill for {silence_s:g} s")
                self._failed(silent, retryable=True, replica=attempt.prefill)
                return
        await self._bind(attempt)

    async def _bind(self, attempt: Attempt) -> None:
        """Send the attempt to its decode replica, which is chosen now unless it was before."""
        begun_s = SYSTEM_CLOCK.now_s()
        if attempt.decode is None:
            choice = await self._desk.rooms.find_decode(attempt.work, self.avoid, self._taken)
            self._record.why += f"; {choice.why}"
            self._take_decode(attempt, choice)
        self._record.epoch = self.epoch
        await attempt.send_decode(self._request(), self._known)
        if attempt.prefill is not None:
            self._record.stage("bind_s", SYSTEM_CLOCK.now_s() - begun_s)

    def _commit(self, route: Route) -> Attempt:
        self.attempt = attempt = Attempt(self._desk.ledger, route.work)
        self._record.attempts += 1
        self._record.why = route.why
        self._record.prefill = self._record.decode = self._record.bind = ""
        if route.prefill is not None:
            replica = self._desk.replica(route.prefill.key)
            attempt.take_prefill(replica)
            self.suspicion.given(replica.key)
            self._record.prefill = replica.name
            self._record.bind = "late" if route.decode is None else "early"
            self._step(RequestEvent.SENT_TO_PREFILL)
        if route.decode is not None:
            self._take_decode(attempt, route.decode)
        return attempt

    def _take_decode(self, attempt: Attempt, choice: Choice) -> None:
        replica = self._desk.replica(choice.key)
        attempt.take_decode(replica, self._base.keep_tokens)
        self.suspicion.given(replica.key)
        self._record.decode = replica.name
        self._step(RequestEvent.SENT_TO_DECODE)

    def _taken(self) -> set[str]:
        """Keys of the replicas that this request may not share; asked anew at every look."""
        return self._desk.apart_on(self._base.request_id) if self.suspicion.apart else set()

    def _request(self) -> GenRequest:
        now_s = asyncio.get_running_loop().time()
        left_s = min(self._base.deadline_s, max(0.001, self._deadline_s - now_s))
        return replace(self._base, epoch=self.epoch, deadline_s=left_s)
