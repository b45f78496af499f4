"""One request from acceptance to its one terminal event, over as many attempts as it takes.

    accept -> [queue for room] -> dispatch -> [prefill -> bind] -> tokens ... -> end
                                   ^               ^  decode lost before its first token: rebind
                                   |  replica lost or gave up
                                   +--- withdraw, next epoch, other replica

A request that prefill runs gets its decode replica when prefill asks for it. If that one is lost
before its first token, another is bound to the same prefill under the next epoch, and no row runs
twice. An attempt that follows on tokens *resumes*: it is given them, draws the same as the lost one
would have drawn, and its first token is the one after them. So nothing that a client got is void.

A ticket owns all a request holds in the router: its charges in the ledger, its jobs at replicas.
`end` releases both, once, whatever the way: finish, error, client gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace.core.card import ModelCard
from headrace.core.chain import as_token_ids
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    PicturesMissing,
    ReplicaLost,
)
from headrace.core.ids import Digest, JobKey
from headrace.core.messages import PrefillDone, PrefillProgress, StageTimes, TokenItem
from headrace.core.records import RequestRecord
from headrace.core.request import FinishReason, GenRequest
from headrace.core.states import (
    REQUEST_TABLE,
    TERMINAL_REQUEST_STATES,
    UNSENT_REQUEST_STATES,
    RequestEvent,
    RequestState,
)
from headrace.router.accounts import note_decode, note_prefill
from headrace.router.attempt import Attempt
from headrace.router.blame import Suspicion
from headrace.router.budget import Loss
from headrace.router.dispatch import Dispatch
from headrace.router.pictures import PictureFile
from headrace.router.pieces import Arrival, Piece, Trouble
from headrace.router.replicas import Replica
from headrace.router.sight import Sight

if TYPE_CHECKING:
    from headrace.router.desk import Desk

log = logging.getLogger(__name__)
PREFILL_REPORT_S = 0.25  # how long an answer's end waits for its prefill's counts


class Ticket:
    """One accepted request. Driven by one task through `next` and `end`; replicas' messages come in
    through the desk on the same loop."""

    def __init__(
        self,
        desk: Desk,
        request: GenRequest,
        card: ModelCard,
        record: RequestRecord,
        arrived_s: float,
        files: Mapping[Digest, PictureFile] | None = None,
    ) -> None:
        """`request.deadline_s` is what is left at this moment; `arrived_s` is the request's own
        beginning by the system clock; `files` are its pictures."""
        self.sight = Sight(desk, request, files, record)
        self._desk = desk
        self._base = request
        self.record = record
        self.state = RequestState.ACCEPTED
        self.times: StageTimes | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived_s = arrived_s
        self._deadline_s = self._loop.time() + request.deadline_s
        self._received = as_token_ids(())  # the answer's tokens so far, over all attempts
        self._resumed_at = 0  # how many of them this attempt was given
        self._barren = 0  # attempts in a row that gave no token
        self._cached: int | None = None  # `cached_tokens` as of the first resume
        self._given = False  # whether a piece with tokens was given in this attempt
        self._decode_done = False
        self._inbox: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._dispatch = Dispatch(
            desk, request, card, record, self.sight, self._deadline_s, self._step, self.trouble
        )

    @property
    def key(self) -> JobKey:
        """The newest; an attempt's replicas may have older ones."""
        return self._dispatch.key

    @property
    def epoch(self) -> int:
        return self._dispatch.epoch

    @property
    def attempt(self) -> Attempt | None:
        return self._dispatch.attempt

    @property
    def suspicion(self) -> Suspicion:
        """Whether this request may be what its replicas die of."""
        return self._dispatch.suspicion

    @property
    def _begun(self) -> bool:
        """Whether this attempt gave tokens: its decode has all it needs."""
        return len(self._received) > self._resumed_at

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no replica had to compute for this request: what its prefill found
        stored, or decode where none took part, or the index's word when decode has not spoken."""
        if self._cached is not None:
            return self._cached  # later attempts find what earlier ones computed
        attempt = self.attempt
        if attempt is not None and attempt.prefill is not None:
            return attempt.report.hit_tokens if attempt.report else 0
        if self.times is not None:
            return min(self.times.hit_tokens, self._base.n_tokens)
        work = self._dispatch.work
        return work.hit_tokens if work else 0

    async def next(self, wait_s: float) -> Piece:
        """The next piece; an empty one when nothing came within `wait_s`. Starts and repeats
        attempts by itself. Cancelling it loses nothing.

        Raises `DeadlineExceeded` at the request's deadline, and the attempt's error when it cannot
        be repeated."""
        if not self._dispatch.begun:
            self._dispatch.begin(self._received[:0])
        give_up_s = min(self._loop.time() + wait_s, self._deadline_s)
        while True:
            if not await self._wait_until(give_up_s, lambda: bool(self._inbox)):
                if give_up_s < self._deadline_s:  # the loop's time may stand a moment before either
                    return Piece()
                raise DeadlineExceeded(
                    f"a request is limited to {self._base.deadline_s:g} s, got no end by then"
                )
            arrival = self._inbox.popleft()
            if isinstance(arrival, Piece):
                break
            if self._again(arrival):
                return Piece(restart=True)
        arrival = self._join_waiting(arrival)
        attempt = self.attempt
        if arrival.finish is not None and attempt is not None and attempt.prefill is not None:
            # Its counts come over another socket and may be a moment later than the last token.
            until_s = self._loop.time() + PREFILL_REPORT_S
            await self._wait_until(until_s, lambda: attempt.report is not None)
        self._given = self._given or bool(arrival.token_ids)
        return arrival

    def _join_waiting(self, piece: Piece) -> Piece:
        """Everything that waits, as one piece: a client that reads slowly gets fewer and larger
        events, and a task with much to say still lets the loop run between its pieces."""
        if piece.finish is not None or not self._inbox:
            return piece
        token_ids = list(piece.token_ids)
        finish: FinishReason | None = None
        while finish is None and self._inbox and isinstance(self._inbox[0], Piece):
            token_ids += self._inbox[0].token_ids
            finish = self._inbox[0].finish
            self._inbox.popleft()
        return Piece(tuple(token_ids), finish)

    def byte_sent(self) -> None:
        """Text reached the client: from now on another attempt can only resume."""
        self._step(RequestEvent.TOKENS)

    def end(self, event: RequestEvent, finish: str) -> None:
        """The terminal event. Releases everything; idempotent, only the first call counts.

        `finish` goes into the record: the finish reason, an error's code, or `cancelled`."""
        if self.state in TERMINAL_REQUEST_STATES:
            return
        self._step(event)
        self._dispatch.cancel()
        self._withdraw("ended" if event is RequestEvent.FINISH else finish)
        self._fill_record(finish)
        self._desk.close(self)

    # What replicas say, by way of the desk. The key is known to be the current one.

    def take(self, item: TokenItem) -> bool:
        """Tokens from the decode replica; False when there was nothing new in them."""
        if self._decode_done:
            return False
        seen = len(self._received) - item.first_index
        if seen < 0:
            lost = ReplicaLost(f"{-seen} tokens before token {item.first_index} did not arrive")
            decode = self.attempt.decode if self.attempt is not None else None
            self.trouble(lost, retryable=True, replica=decode)
            return True
        token_ids = item.token_ids[seen:]
        if not token_ids and item.finish is None:
            return False
        self._received.extend(token_ids)
        if token_ids:
            self._barren = 0
            decode = self.attempt.decode if self.attempt is not None else None
            if self.suspicion.acquit(decode.key if decode is not None else None):
                self._desk.rooms.kick()  # others may run there now
        if item.finish is not None:
            self._decode_done = True
            self.times = item.times
            if self.attempt is not None:
                self.attempt.release()
            self._desk.rooms.kick()
            if token_ids and token_ids[-1] in self._base.stop_token_ids:
                token_ids = token_ids[:-1]  # it ended the sequence and is no text
        self._put(Piece(token_ids, item.finish))
        return True

    def prefill_progress(self, message: PrefillProgress) -> bool:
        """A word of prefill, which may ask for a decode replica; False when it is needed no
        more."""
        if self.attempt is None or self._begun or self._decode_done:
            return False
        self.attempt.heard.set()
        if message.wanted:
            self._step(RequestEvent.DECODE_WANTED)
            if not self.attempt.say_bind():
                self.attempt.wanted.set()
        return True

    def prefill_done(self, message: PrefillDone) -> None:
        """The bound decode replica was told everything."""
        assert self.attempt is not None
        self.attempt.done(message)
        if self.attempt.prefill is not None:
            self.suspicion.given_back(self.attempt.prefill.key)
        self._step(RequestEvent.PREFILL_DONE)
        self._desk.rooms.kick()
        self._arrived.set()

    def trouble(
        self,
        error: HeadraceError,
        *,
        retryable: bool,
        replica: Replica | None,
        loss: Loss | None = None,
    ) -> bool:
        """A replica gave the attempt up or is gone; False when that no longer matters. `loss` is
        shared by all who had a replica that is gone."""
        if self._decode_done:
            return False
        attempt = self.attempt
        prefills = replica is not None and attempt is not None and replica is attempt.prefill
        if prefills and attempt is not None and (self._begun or attempt.told):
            return False  # decode has all it needs
        self._put(Trouble(error, retryable, replica.key if replica is not None else "", loss))
        return True

    def give_up(self, error: HeadraceError) -> None:
        """End this request with `error`, whatever its replicas do."""
        self._put(Trouble(error, retryable=False))

    # Attempts.

    def _again(self, trouble: Trouble) -> bool:
        """Begin another attempt, or raise the error of the failed one. Returns whether tokens of
        the failed one were given away and are void."""
        if self._decode_done:  # its end came in right behind the trouble
            return False
        resume = bool(self._received) and self._desk.resumes > 0
        if self.suspicion.guilty:
            raise ReplicaLost(
                f"{self.suspicion.losses} replicas were lost in a row while they had this request",
                code="request_quarantined",
            )
        if not trouble.retryable or not self._may_repeat(resume):
            raise trouble.error
        if not (resume and self._begun):
            self._desk.charge_retry(trouble)
        log.warning("%s: another attempt after: %s", self.key, trouble.error.message)
        if isinstance(trouble.error, PicturesMissing):
            self.sight.distrust()
        elif trouble.replica:
            self._dispatch.avoid.add(trouble.replica)
        self._barren += 1
        self._dispatch.epoch += 1
        if (attempt := self._to_rebind(trouble)) is not None:
            self._rebind(attempt, trouble)
            return False
        self._withdraw("another attempt")
        voided = False
        if resume:
            self._cached = self.cached_tokens
            self.record.resumes += 1
            self._step(RequestEvent.RESUME)
        else:
            self._step(RequestEvent.RETRY)
            self._received = as_token_ids(())
            voided, self._given = self._given, False
        self.times = None
        self._resumed_at = len(self._received)
        # Tokens that came behind the trouble count as received, so they stay.
        waiting = [arrival for arrival in self._inbox if isinstance(arrival, Piece) and resume]
        self._inbox = deque(waiting)
        self._dispatch.begin(self._received[:])
        return voided

    def _to_rebind(self, trouble: Trouble) -> Attempt | None:
        """The attempt, if its decode was lost before it gave a token and its prefill was not."""
        attempt = self.attempt
        if attempt is None or attempt.decode is None or attempt.prefill is None:
            return None
        kept = attempt.prefill_sent and attempt.prefill.linked
        kept = kept and trouble.replica == attempt.decode.key
        kept = kept and not self._begun and not isinstance(trouble.error, PicturesMissing)
        return attempt if kept else None

    def _rebind(self, attempt: Attempt, trouble: Trouble) -> None:
        """Another decode replica for the same prefill, under this epoch."""
        self._step(RequestEvent.REBIND)
        # More of the same loss means nothing any more; what concerns prefill does.
        self._inbox = deque(
            arrival
            for arrival in self._inbox
            if not isinstance(arrival, Trouble) or arrival.replica != trouble.replica
        )
        self._dispatch.rebind(attempt)

    def _may_repeat(self, resume: bool) -> bool:
        """Whether this request's own bounds allow a further attempt. One that follows on progress
        costs no budget: each stream has a bounded rest to run."""
        if resume:
            allowed = self._barren < self._desk.retries or not self._barren
            return allowed and self.record.resumes < self._desk.resumes
        return self.state in UNSENT_REQUEST_STATES and self.record.attempts <= self._desk.retries

    def _withdraw(self, reason: str) -> None:
        """Tell every replica that may still hold something for this attempt, and release it."""
        finished = self.state is RequestState.FINISHED and self._decode_done
        if self.attempt is not None:
            begun = self._begun or finished
            self.attempt.withdraw(reason, begun=begun, finished=finished)
            self._desk.rooms.kick()
        self.sight.withdraw(reason)

    async def _wait_until(self, until_s: float, condition: Callable[[], bool]) -> bool:
        """Whether `condition` came true by `until_s` (of the loop); looked at on every arrival."""
        while not condition():
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._arrived.wait()
            except TimeoutError:
                return condition()
        return True

    def _put(self, arrival: Arrival) -> None:
        self._inbox.append(arrival)
        self._arrived.set()

    def _step(self, event: RequestEvent) -> None:
        REQUEST_TABLE.move(self, event, self.key)

    def _fill_record(self, finish: str) -> None:
        record = self.record
        record.finish = finish
        record.cached_tokens = self.cached_tokens
        record.stage("total_s", SYSTEM_CLOCK.now_s() - self._arrived_s)
        note_prefill(record, self.attempt.report if self.attempt is not None else None)
        if self.times is not None:
            work = self._dispatch.work
            tiers = work.hit_tiers if work is not None else {}
            note_decode(record, self._base, self.times, tiers)
