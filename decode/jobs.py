"""What one decode job knows, from its DecodeJob to its terminal event."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace

from headrace.core.chain import TokenIds, as_token_ids
from headrace.core.ids import Digest, JobKey
from headrace.core.messages import DecodeJob, HandoffAck, Place, StageTimes, TokenItem
from headrace.core.peers import Peer
from headrace.core.request import FinishReason, GenRequest, HandoffMode
from headrace.core.rows import GRAIN, Geometry, RowPlan, StartKind, floor_grain
from headrace.decode.handoff import (
    DECODE_TABLE,
    DecodeEvent,
    DecodeState,
    Handoff,
    known_digests,
    make_plan,
    window_candidates,
    windows_to_hold,
)
from headrace.engine import Admission, Fill, TokenSampled

_WAITING = (DecodeState.QUEUED_OPEN, DecodeState.QUEUED_TOLD)
_BEFORE_ROWS = (*_WAITING, DecodeState.AWAITING, DecodeState.LOADING)


@dataclass
class Stages:
    """Seconds and counts of one job, for `StageTimes`. Mutable."""

    arrived_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    load_s: float = 0.0
    load_bytes: int = 0
    encoder_rows: int = 0
    decoder_rows: int = 0
    committed_blocks: int = 0
    resident_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Parked:
    """What a parked job goes on with, leased for it: its private state after `length_tokens` rows,
    and `blocks`, its complete blocks, once it gave them up too (None: it has them in the engine).

    `clings`: its blocks found no room in the store."""

    digest: Digest
    place: Place
    length_tokens: int
    blocks: tuple[Place, ...] | None = None
    clings: bool = False


@dataclass(eq=False)
class Job:
    """One job. Mutable; `state` moves by `DECODE_TABLE` only.

    `router` asked for it and gets its tokens; `source` is the connection over which blocks were
    last announced (None before the first frame). `told` is set when no announcement is to come,
    `settled` while no load is in flight. `digests` grows with the blocks completed here."""

    message: DecodeJob
    router: Peer
    stages: Stages
    state: DecodeState = DecodeState.QUEUED_OPEN
    source: Peer | None = None
    task: asyncio.Task[None] | None = None
    handoff: Handoff = field(init=False)
    digests: list[Digest] = field(init=False)
    progress_s: float = field(init=False)
    fills: dict[int, Fill] = field(default_factory=dict)
    loads: set[asyncio.Task[None]] = field(default_factory=set)
    waiting_loads: list[tuple[int, Place]] = field(default_factory=list)  # told before admission
    ahead: list[asyncio.Task[None]] | None = None  # prefetches, once it stands in line
    windows: dict[int, bytes] = field(default_factory=dict)  # delivered, verified
    state_bytes: bytes | None = None  # mode `state`: delivered, verified
    told: asyncio.Event = field(default_factory=asyncio.Event)
    plan: RowPlan | None = None
    held_windows: deque[tuple[int, bytes]] = field(init=False)  # made while decoding
    length_tokens: int = 0  # known and generated tokens, from the first one generated here on
    deadline: asyncio.TimerHandle | None = None
    answer: TokenIds = field(init=False)  # generated tokens, those of former attempts included
    since_tokens: int = 0  # tokens since it has its slot
    leaving: asyncio.Task[None] | None = None  # while it gives way
    parked: Parked | None = None
    ran: RowPlan | None = None  # the latest plan of this job
    replayed: bool = False  # something under its text is not exact

    def __post_init__(self) -> None:
        known = known_digests(self.request, self.message.generated_ids)
        known_ids = self.request.token_ids + self.message.generated_ids
        self.handoff = Handoff(known, self.request.exact_digests(known_ids))
        self.digests = list(known)
        self.answer = as_token_ids(self.message.generated_ids)
        self.progress_s = self.stages.arrived_s
        self.held_windows = deque(maxlen=windows_to_hold(self.request.keep_tokens))
        if not self.message.await_prefill:
            self.state = DecodeState.QUEUED_TOLD
            self.told.set()

    @property
    def request(self) -> GenRequest:
        return self.message.request

    @property
    def key(self) -> JobKey:
        return self.message.request.key

    @property
    def known_tokens(self) -> int:
        """Prompt and what former attempts generated."""
        return self.request.n_tokens + len(self.message.generated_ids)

    @property
    def waits_for_room(self) -> bool:
        return self.state in _WAITING

    @property
    def waits(self) -> bool:
        """Whether no row of it can run now: it stands in line, or what it needs is on its way."""
        return self.state in _BEFORE_ROWS or self.is_parked

    @property
    def is_parked(self) -> bool:
        return self.state is DecodeState.PARKED

    @property
    def may_give_way(self) -> bool:
        """Whether it has anything in the engine that it may be asked for."""
        if self.leaving is not None and not self.leaving.done():
            return False
        if self.state is DecodeState.PARKED and self.parked is not None:
            return self.parked.blocks is None and not self.parked.clings
        return self.state is DecodeState.STREAMING

    def admitted(self, admission: Admission) -> int:
        """Note the places to fill, and what needs no filling; how many blocks that is."""
        self.fills = {fill.index: fill for fill in admission.fills}
        resident = set(range(len(self.handoff.digests))).difference(self.fills)
        self.handoff.here |= resident
        self.since_tokens = 0
        return len(resident)

    def plan_from(
        self, hit_tokens: int, geometry: Geometry, depth_tokens: int | None, *found: int
    ) -> tuple[RowPlan, list[tuple[int, Digest]]]:
        """The rows to run from a hit and the windows that were delivered or `found`, and as
        candidates of `StoreClient.open_windows` the stored records that would be better."""
        n_generated, windows = len(self.message.generated_ids), (*self.windows, *found)
        plan = make_plan(self.request, n_generated, hit_tokens, windows, geometry, depth_tokens)
        if depth_tokens is not None:
            return plan, []
        above = plan.window_position if plan.kind is StartKind.WINDOW else 0
        return plan, window_candidates(plan, self.handoff.digests, geometry, above=above)

    def rewind(self, length_tokens: int) -> None:
        """It is to be admitted again, with all its tokens, of which `length_tokens` have rows."""
        self.message = replace(self.message, generated_ids=self.answer[:], await_prefill=False)
        known = known_digests(self.request, self.message.generated_ids)
        self.handoff = Handoff(known[: length_tokens // GRAIN])
        self.fills, self.windows = {}, {}

    def planned(self, plan: RowPlan) -> None:
        """These rows are going to run; the first plan is the one that is told."""
        self.plan, self.ran = self.plan or plan, plan
        hit = range(plan.write_floor // GRAIN)
        exact = plan.kind is not StartKind.BOUNDED and self.handoff.exact.issuperset(hit)
        self.replayed |= self.request.mode is HandoffMode.REPLAY and not exact

    @property
    def rows_to_come(self) -> int:
        """Estimate of the rows that the engine does not know of: what the hit leaves, and for a
        hand-off that is not complete what it leaves at best."""
        if self.state not in _WAITING:
            return 0
        if self.message.await_prefill:
            return min(self.known_tokens, self.request.keep_tokens + GRAIN)
        return self.known_tokens - self.handoff.verified_blocks * GRAIN

    def step(self, event: DecodeEvent) -> bool:
        """Move by one event; False when it was late or a duplicate. Raises `IllegalTransition`."""
        return DECODE_TABLE.move(self, event, self.key)

    def advance(self, event: DecodeEvent) -> None:
        """A step that the job's own task decided on. Raises `Over` when the job has ended."""
        DECODE_TABLE.advance(self, event, self.key)

    def token(self, event: TokenSampled, now_s: float) -> TokenItem:
        """The item that tells a sampled token; with the last one the stages and the finished
        state. The first one ends the hand-off. A stop id ends the sequence and is no part of the
        text."""
        first = self.state is DecodeState.REPLAYING
        self.step(DecodeEvent.TOKEN)
        self.length_tokens = self.request.n_tokens + event.index + 1
        self.answer.append(event.token_id)
        if first:
            self.stages.first_token_s = now_s
            self.stages.encoder_rows = event.encoder_rows
            self.stages.decoder_rows = event.decoder_rows
            self.acknowledge()
        times = None
        if event.finish is not None:
            times = self.times(now_s)
            self.step(DecodeEvent.FINISH)
        ids = () if event.finish is FinishReason.STOP else (event.token_id,)
        return TokenItem(self.key, event.index, ids, event.finish, times)

    def acknowledge(self) -> None:
        """Tell the prefill replica, if there is one, that it is needed no more."""
        if self.source is not None:
            self.source.post(HandoffAck(self.key))

    @property
    def exactness(self) -> str:
        """Class of what is computed here: exact as long as all rows and blocks under it are."""
        return "replayed" if self.replayed else "exact"

    @property
    def may_adopt(self) -> bool:
        """Whether a delivered state can be gone on from: it is there and all its blocks are."""
        whole = self.handoff.verified_blocks == self.request.n_tokens // GRAIN
        return self.state_bytes is not None and whole and not self.message.generated_ids

    def windows_to_commit(self, length_tokens: int) -> list[tuple[int, bytes]]:
        """Records made while decoding that the next turn may start from: at or above
        floor(length - keep), where its p lies, and whose block is known."""
        first = max(GRAIN, floor_grain(max(0, length_tokens - self.request.keep_tokens)))
        return [
            (position, payload)
            for position, payload in self.held_windows
            if position >= first and position // GRAIN <= len(self.digests)
        ]

    def times(self, now_s: float) -> StageTimes:
        """The stages so far, as sent with the terminal item."""
        stages, plan = self.stages, self.plan
        started = stages.started_s or now_s
        first = stages.first_token_s or now_s
        return StageTimes(
            wait_s=started - stages.arrived_s,
            load_s=stages.load_s,
            load_bytes=stages.load_bytes,
            replay_s=first - started,
            encoder_rows=stages.encoder_rows,
            decoder_rows=stages.decoder_rows,
            hit_tokens=plan.write_floor if plan else 0,
            window_position=plan.window_position if plan else 0,
            start_kind=str(plan.kind) if plan else str(StartKind.COLD),
            decode_s=now_s - first,
            committed_blocks=stages.committed_blocks,
            resident_tokens=min(stages.resident_tokens, plan.write_floor) if plan else 0,
            exactness=self.exactness,
        )
