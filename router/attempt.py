"""What one attempt of a request has at replicas: a prefill or none, and one decode after another.

Each has a `JobKey` of its own (docs/decisions/0012), so that the end of one frees nothing that the
other holds. A charge in the ledger is opened before anything is sent and closed once.
"""

from __future__ import annotations

import asyncio

from headrace.core import faults
from headrace.core.chain import TokenIds
from headrace.core.ids import JobKey
from headrace.core.messages import BindDecode, Cancel, DecodeJob, PrefillDone, PrefillJob
from headrace.core.request import GenRequest
from headrace.router.ledger import Charge, Ledger
from headrace.router.policy import Work
from headrace.router.replicas import Replica


class Attempt:
    """Mutable, owned by its ticket.

    `wanted` is set when prefill asks for its decode replica, `heard` whenever it says anything;
    `told` is true once the bound one was told everything; `report` is prefill's own account, kept
    over a rebind."""

    def __init__(self, ledger: Ledger, work: Work) -> None:
        self._ledger = ledger
        self.work = work
        self.prefill: Replica | None = None
        self.prefill_key: JobKey | None = None
        self.decode: Replica | None = None
        self.decode_key: JobKey | None = None
        self.prefill_sent = False
        self.wanted = asyncio.Event()
        self.heard = asyncio.Event()
        self.told = False
        self._bound_again = False
        self.report: PrefillDone | None = None
        self._prefill_charge: Charge | None = None
        self._decode_charge: Charge | None = None

    def take_prefill(self, replica: Replica) -> None:
        """Count the work of a prefill replica."""
        rows = self.work.prefill_plan.encoder_rows
        self.prefill = replica
        self._prefill_charge = self._ledger.open(replica.key, rows, self.work.n_tokens)

    def take_decode(self, replica: Replica, keep_tokens: int) -> None:
        """Count the work of a decode replica: after a hand-off only its bounded rows."""
        rows = self.work.plan.encoder_rows
        if self.prefill is not None:
            rows = min(rows, keep_tokens + 127)
        self.decode, self.told = replica, False
        self._decode_charge = self._ledger.open(replica.key, rows, self.work.resident_tokens)

    async def send_prefill(self, request: GenRequest) -> None:
        """Raises `ConnectionError` when the replica is gone."""
        assert self.prefill is not None and self._prefill_charge is not None
        self.prefill_key = request.key
        for _ in range(_times()):
            await self.prefill.send(PrefillJob(request, self._prefill_charge.dispatch))
        self.prefill_sent = True

    async def send_decode(self, request: GenRequest, known: TokenIds) -> None:
        """The job, and where there is a prefill, the word for whom it works. `known`: tokens of a
        former attempt. Raises `ConnectionError` when either replica is gone."""
        assert self.decode is not None and self._decode_charge is not None
        self.decode_key = request.key
        name = self.prefill.name if self.prefill is not None else ""
        job = DecodeJob(request, known, bool(name), name, self._decode_charge.dispatch)
        for _ in range(_times()):
            await self.decode.send(job)
            if self.prefill is not None and (bind := self._bind()) is not None:
                await self.prefill.send(bind)

    async def until_wanted(self, silence_s: float) -> bool:
        """Return when prefill asks for its decode replica; False when it said nothing for so long:
        it may not know of the job."""
        while not self.wanted.is_set():
            self.heard.clear()
            try:
                async with asyncio.timeout(silence_s):
                    await self.heard.wait()
            except TimeoutError:
                return self.wanted.is_set()
        return True

    def say_bind(self) -> bool:
        """Answer a prefill that asks once more; False when there is no answer yet."""
        bind = self._bind()
        if bind is not None and self.prefill is not None:
            self.prefill.post(bind)
            self._bound_again = True
        return bind is not None

    def to_blame(self, replica: Replica, key: JobKey) -> Replica | None:
        """Whose failure `replica` tells of under `key`; None when it no longer matters. Prefill
        tells under decode's key that it lost or could not reach the one bound to it."""
        if self.decodes(replica, key) or self.awaits(replica, key):
            return self.decode
        return self.prefill if self.prefills(replica, key) else None

    def decodes(self, replica: Replica, key: JobKey) -> bool:
        return replica is self.decode and key == self.decode_key

    def prefills(self, replica: Replica, key: JobKey) -> bool:
        return replica is self.prefill and key == self.prefill_key

    def awaits(self, replica: Replica, key: JobKey) -> bool:
        """Whether prefill speaks of the bind in force, which it has not fulfilled yet."""
        return replica is self.prefill and key == self.decode_key and not self.told

    def holds(self, replica: Replica) -> bool:
        return replica is self.decode or replica is self.prefill

    def done(self, report: PrefillDone) -> None:
        """The bound decode replica was told everything."""
        self.report, self.told = report, True
        self._close_prefill()

    def drop_decode(self, reason: str) -> None:
        """Withdraw it from the replica that has it, if any."""
        if self.decode is not None and self.decode_key is not None:
            self.decode.post(Cancel(self.decode_key, reason))
        self.decode = self.decode_key = None
        self.told = False
        self._close_decode()

    def withdraw(self, reason: str, *, begun: bool, finished: bool) -> None:
        """Tell every replica that may still hold something, and close the charges. `begun`: decode
        has its first token, and with it told prefill. `finished`: it said its last word."""
        if self.decode is not None and self.decode_key is not None and not finished:
            self.decode.post(Cancel(self.decode_key, reason))
        over = begun and not self._bound_again
        if self.prefill is not None and self.prefill_key is not None and not over:
            self.prefill.post(Cancel(self.prefill_key, reason))
        self.release()

    def release(self) -> None:
        """Close the charges. Idempotent."""
        self._close_prefill()
        self._close_decode()

    def _bind(self) -> BindDecode | None:
        if self.prefill_key is None or self.decode_key is None or self.decode is None:
            return None
        member = self.decode.member
        return BindDecode(self.prefill_key, self.decode_key.epoch, member.address, member.name)

    def _close_prefill(self) -> None:
        if self._prefill_charge is not None:
            self._ledger.close(self._prefill_charge)

    def _close_decode(self) -> None:
        if self._decode_charge is not None:
            self._ledger.close(self._decode_charge)


def _times() -> int:
    """How often a dispatch is sent: once, unless a test says otherwise."""
    return {"drop": 0, "duplicate": 2}.get(faults.hit("router.dispatch") or "", 1)
