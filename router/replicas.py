"""The replicas a router knows, and its one link to each.

Who exists comes from the membership, polled; who is alive is what the socket says. A closed socket
ends a replica's work at once. A replica whose record is gone keeps its work as long as it speaks:
Redis may have lost its memory, the replica has not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

from headrace.core.card import Member, ModelCard, Role, VisionCard
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.errors import HeadraceError, WireError
from headrace.core.limits import LeaseTimes, WireLimits
from headrace.core.messages import (
    Hello,
    JobFailed,
    LoadReport,
    PrefillDone,
    PrefillProgress,
    TokenBatch,
    VisionDone,
)
from headrace.core.peers import NO_JOB, Peer, introduce
from headrace.core.rows import GRAIN
from headrace.core.states import REPLICA_TABLE, ReplicaEvent, ReplicaState
from headrace.kvstore import MemberBoard
from headrace.router.ledger import Ledger
from headrace.router.policy import Candidate

log = logging.getLogger(__name__)
POOLS = (Role.VISION, Role.PREFILL, Role.DECODE)
SILENT_LEASES = 3  # how long, without Redis, a replica that says nothing counts as alive
RETRY_S = (0.05, 1.0)  # first and longest pause between two attempts to connect


class Sink(Protocol):
    """Who hears of what replicas say. Called on the loop's thread; must not wait."""

    def on_tokens(self, replica: Replica, batch: TokenBatch) -> None: ...
    def on_prefill_progress(self, replica: Replica, message: PrefillProgress) -> None: ...
    def on_prefill_done(self, replica: Replica, message: PrefillDone) -> None: ...
    def on_vision_done(self, replica: Replica, message: VisionDone) -> None: ...
    def on_failed(self, replica: Replica, message: JobFailed) -> None: ...
    def on_lost(self, replica: Replica) -> None: ...
    def on_load(self) -> None: ...


class Replica:
    """One life of one engine process. Compared by identity; `key` is unique over restarts."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.key = f"{member.name}/{member.boot_id}"
        self.state = ReplicaState.JOINING
        self.peer: Peer | None = None
        self.heard_at_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self.warned = False

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def role(self) -> Role:
        return self.member.role

    @property
    def linked(self) -> bool:
        return self.peer is not None and not self.peer.link.closed

    @property
    def capacity_tokens(self) -> int:
        return self.member.n_blocks * GRAIN

    def step(self, event: ReplicaEvent) -> None:
        """Apply an event by the table of states."""
        before, self.state = self.state, REPLICA_TABLE.step(self.state, event, self.name).state
        if before is not self.state:
            log.info("%s: %s -> %s", self.name, before, self.state)

    def post(self, message: Any) -> None:
        """Queue a message without waiting; dropped when the replica is gone."""
        if self.peer is not None:
            self.peer.post(message)

    async def send(self, message: Any) -> None:
        """Raises `ConnectionError` when the replica is gone or takes nothing."""
        if self.peer is None:
            raise ConnectionResetError(f"{self.name} is gone")
        await self.peer.link.send(message)


class Replicas:
    """All replicas, kept current by two kinds of tasks: one poll, and one follower a replica."""

    def __init__(
        self,
        board: MemberBoard,
        hello: Hello,
        token: str,
        wire: WireLimits,
        leases: LeaseTimes,
        ledger: Ledger,
        sink: Sink,
        *,
        max_vocabulary: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`max_vocabulary`: size of the tokenizer; a model with fewer ids is never routable."""
        self._board = board
        self._hello = hello
        self._token = token
        self._wire = wire
        self._leases = leases
        self._ledger = ledger
        self._sink = sink
        self._max_vocabulary = max_vocabulary
        self._clock = clock
        self._by_name: dict[tuple[Role, str], Replica] = {}
        self._card: ModelCard | None = None
        self._vision: VisionCard | None = None
        self._poll: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._poll = asyncio.create_task(self._poll_members())

    async def close(self) -> None:
        """Cut every link and end every task."""
        tasks = [replica.task for replica in self._by_name.values() if replica.task is not None]
        for task in [self._poll, *tasks]:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in [self._poll, *tasks] if t), return_exceptions=True)

    def all(self) -> tuple[Replica, ...]:
        return tuple(self._by_name.values())

    @property
    def card(self) -> ModelCard | None:
        """The model served: that of a routable decode replica. It stays as long as one serves it,
        so that replicas of another build cannot take the cluster over by joining."""
        cards = [r.member.card for r in self._ready(Role.DECODE)]
        if self._card not in cards:
            self._card = next((card for card in cards if card is not None), None)
        return self._card

    def routable(self, role: Role) -> list[Replica]:
        """Replicas of a pool that may get new work: ready, linked, and of the served model."""
        card = self.card
        found = [r for r in self._ready(role) if card is None or r.member.card == card]
        if role is Role.VISION:
            vision = self.vision_card
            found = [r for r in found if r.member.vision == vision]
        return found

    @property
    def vision_card(self) -> VisionCard | None:
        """How pictures are encoded: as a ready vision replica of the served model says. It stays
        when all are gone, since what they made can still be used."""
        cards = [r.member.vision for r in self._ready(Role.VISION) if r.member.card == self.card]
        if self._vision not in cards:
            self._vision = next((card for card in cards if card is not None), self._vision)
        return self._vision

    def candidate(self, replica: Replica) -> Candidate:
        return Candidate(
            replica.key,
            self._ledger.load(replica.key),
            replica.capacity_tokens,
            replica.member.n_slots,
        )

    def _ready(self, role: Role) -> list[Replica]:
        return [
            r
            for r in self._by_name.values()
            if r.role is role and r.state is ReplicaState.READY and r.linked
        ]

    async def _poll_members(self) -> None:
        while True:
            members = await self._board.members()
            self._merge([m for m in members if m.role in POOLS], stale=self._board.stale)
            await asyncio.sleep(self._leases.member_poll_s)

    def _merge(self, members: list[Member], *, stale: bool) -> None:
        for member in members:
            known = self._by_name.get((member.role, member.name))
            if known is not None and known.member.boot_id != member.boot_id:
                self._leave(known)
                known = None
            if known is None:
                self._join(member)
            else:
                known.member = member
                if member.state is ReplicaState.DRAINING:
                    known.step(ReplicaEvent.DRAIN)
        listed = {(member.role, member.name) for member in members}
        for key, replica in list(self._by_name.items()):
            silent_s = self._clock.now_s() - replica.heard_at_s
            # A frozen process keeps its sockets. Redis alone tells that soonest; while it is away
            # silence must do, and a replica may be silent because the host is busy.
            patience_s = self._leases.member_s * (SILENT_LEASES if stale else 1)
            if (stale or key not in listed) and replica.linked and silent_s > patience_s:
                log.warning("%s: no record and no word for %.1f s", replica.name, silent_s)
                self._cut(replica)
            if key not in listed and not replica.linked:
                self._leave(replica)

    def _join(self, member: Member) -> None:
        replica = Replica(member)
        self._by_name[(member.role, member.name)] = replica
        replica.task = asyncio.create_task(self._follow(replica))

    def _leave(self, replica: Replica) -> None:
        replica.step(ReplicaEvent.LEFT)
        self._cut(replica)
        self._by_name.pop((replica.role, replica.name), None)
        self._ledger.forget(replica.key)
        if replica.task is not None:
            replica.task.cancel()

    def _cut(self, replica: Replica) -> None:
        """End the link at once and tell; the follower only finds it closed."""
        peer, replica.peer = replica.peer, None
        if peer is not None:
            peer.link.abort()
            replica.step(ReplicaEvent.LOST)
            self._sink.on_lost(replica)

    async def _follow(self, replica: Replica) -> None:
        pause_s = RETRY_S[0]
        while True:
            if self._fits(replica):
                if await self._connect(replica):
                    pause_s = RETRY_S[0]
                    await self._listen(replica)
                else:
                    replica.step(ReplicaEvent.LOST)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_S[1])

    def _fits(self, replica: Replica) -> bool:
        """Whether this replica is to be connected to now."""
        card = replica.member.card
        if replica.member.state is not ReplicaState.READY or card is None:
            return False
        if card.vocab_size < self._max_vocabulary:
            if not replica.warned:
                replica.warned = True
                sizes = (self._max_vocabulary, card.vocab_size)
                log.warning("%s: the tokenizer has %d ids, its model %d", replica.name, *sizes)
            return False
        self._say_if_other(replica, card)
        return True

    def _say_if_other(self, replica: Replica, card: ModelCard) -> None:
        """An operator should learn at its start, not from a pool that stays idle, that a replica
        cannot exchange stored objects with the others."""
        served = self.card
        if served is None or card == served or replica.warned:
            return
        replica.warned = True
        for what, theirs, ours in (
            ("layout id", card.layout_id, served.layout_id),
            ("namespace", card.namespace().digest(), served.namespace().digest()),
        ):
            if theirs != ours:
                ids = (theirs.hex()[:16], ours.hex()[:16])
                log.warning("%s gets no work: its %s is %s, served is %s", replica.name, what, *ids)
                return
        log.warning("%s gets no work: its model card is not the served one", replica.name)

    async def _connect(self, replica: Replica) -> bool:
        try:
            peer = await introduce(replica.member.address, self._hello, self._token, self._wire)
        except (ConnectionError, OSError, HeadraceError) as error:
            log.info("%s: %s", replica.name, error)
            return False
        if peer.hello.boot_id != replica.member.boot_id:  # the next life on the same address
            peer.link.abort()
            return False
        replica.peer = peer
        replica.heard_at_s = self._clock.now_s()
        joining = replica.state is ReplicaState.JOINING
        replica.step(ReplicaEvent.WARM if joining else ReplicaEvent.BACK)
        self._sink.on_load()
        return True

    async def _listen(self, replica: Replica) -> None:
        assert replica.peer is not None
        try:
            with contextlib.suppress(WireError):  # the link is closed then, and the cause logged
                async for message in replica.peer.link:
                    replica.heard_at_s = self._clock.now_s()
                    try:
                        self._hear(replica, message)
                    except WireError:
                        raise
                    except Exception:  # a bug here must end neither the follower nor other requests
                        log.exception("%s: %s failed", replica.name, type(message).__name__)
        finally:
            self._cut(replica)

    def _hear(self, replica: Replica, message: Any) -> None:
        match message:
            case TokenBatch():
                self._sink.on_tokens(replica, message)
            case LoadReport():
                held_blocks = max(0, replica.member.n_blocks - message.free_blocks)
                self._ledger.report(replica.key, message, held_blocks * GRAIN)
                self._sink.on_load()
            case PrefillProgress():
                self._sink.on_prefill_progress(replica, message)
            case PrefillDone():
                self._sink.on_prefill_done(replica, message)
            case VisionDone():
                self._sink.on_vision_done(replica, message)
            case JobFailed() if message.key == NO_JOB:
                log.warning("%s refuses this router: %s", replica.name, message.message)
            case JobFailed():
                self._sink.on_failed(replica, message)
            case _:
                raise WireError(f"{replica.name} sent {type(message).__name__} to a router")
