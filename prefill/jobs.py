"""A prefill job as an automaton, and what it knows. No input or output here.

    finding -> waiting -> filling -> running -> sealing -> held -> done
     |   ^ \\___________________________________^          (nothing to run)
     v   |
    pending

`finding` reads the store; `pending` waits for blocks that another job computes, then looks again;
`waiting` stands in line for the engine, `filling` copies stored blocks in, `running` has rows in
the engine, `sealing` has none left but objects to seal. `held` has only leases: everything is
sealed, and the bound decode replica (`binding`) was told or will be. Whatever is not written in the
table raises.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.ids import Digest, JobKey
from headrace.core.messages import Place, PrefillJob
from headrace.core.peers import Peer
from headrace.core.request import GenRequest
from headrace.core.rows import GRAIN, Geometry, floor_grain, record_position
from headrace.core.states import StateTable
from headrace.engine import Event
from headrace.prefill.binding import Binding, Product


class JobState(StrEnum):
    FINDING = "finding"
    PENDING = "pending"
    WAITING = "waiting"
    FILLING = "filling"
    RUNNING = "running"
    SEALING = "sealing"
    HELD = "held"
    DONE = "done"  # decode has its first token
    FAILED = "failed"  # decode and router were told
    CANCELLED = "cancelled"


class JobEvent(StrEnum):
    UNDERWAY = "underway"  # the next block is being computed by another job
    LOOK_AGAIN = "look_again"  # it is there, its job ended, or the wait was long enough
    FOUND = "found"  # the stored prefix is known and rows must run
    ALL_STORED = "all_stored"  # no row must run
    ADMITTED = "admitted"  # the engine reserved blocks and a slot
    STARTED = "started"  # fills are done, rows run
    PRODUCT = "product"  # the engine completed a block or a window record
    ROWS_DONE = "rows_done"
    CUT_SHORT = "cut_short"  # the store took no more: decode runs the rest
    ALL_SEALED = "all_sealed"  # what was sealed is all there will be
    ERROR = "error"
    CANCEL = "cancel"  # by the router, by its connection's end, or by a newer epoch
    AGAIN = "again"  # the same PrefillJob once more
    ACK = "ack"  # of the bound decode replica


_S, _E = JobState, JobEvent
TERMINAL = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})
_LIVE = tuple(state for state in _S if state not in TERMINAL)
NOT_ADMITTED = (_S.FINDING, _S.PENDING, _S.WAITING)

_AFTER_ROWS = (_S.SEALING, _S.HELD, *TERMINAL)

JOB_TABLE: StateTable[JobState, JobEvent] = StateTable(
    "prefill job",
    {
        (_S.FINDING, _E.UNDERWAY): _S.PENDING,
        (_S.PENDING, _E.LOOK_AGAIN): _S.FINDING,
        (_S.FINDING, _E.FOUND): _S.WAITING,
        (_S.FINDING, _E.ALL_STORED): _S.SEALING,
        (_S.WAITING, _E.ADMITTED): _S.FILLING,
        (_S.FILLING, _E.STARTED): _S.RUNNING,
        (_S.FILLING, _E.ALL_STORED): _S.SEALING,  # another job sealed the rest meanwhile
        (_S.RUNNING, _E.PRODUCT): _S.RUNNING,
        (_S.RUNNING, _E.ROWS_DONE): _S.SEALING,
        (_S.RUNNING, _E.CUT_SHORT): _S.SEALING,
        (_S.SEALING, _E.ALL_SEALED): _S.HELD,
        (_S.HELD, _E.ACK): _S.DONE,
        **{(s, _E.ERROR): _S.FAILED for s in _LIVE},
        **{(s, _E.CANCEL): _S.CANCELLED for s in _LIVE},
    },
    ignored=frozenset(
        {(s, _E.AGAIN) for s in JobState}
        | {(s, _E.CANCEL) for s in TERMINAL}
        | {(s, _E.ERROR) for s in TERMINAL}  # a second failure while the first is being told
        # What the engine finished before it saw the release, and rows after a cut.
        | {(s, e) for s in _AFTER_ROWS for e in (_E.PRODUCT, _E.ROWS_DONE)}
        | {(s, _E.CUT_SHORT) for s in _AFTER_ROWS}
        # What the job's own task had in hand when the job ended under it.
        | {
            (s, e)
            for s in TERMINAL
            for e in (_E.UNDERWAY, _E.LOOK_AGAIN, _E.FOUND, _E.ALL_STORED, _E.ADMITTED)
        }
        | {(s, e) for s in TERMINAL for e in (_E.STARTED, _E.ALL_SEALED)}
        # An answer to something we did not say; nothing depends on it.
        | {(s, _E.ACK) for s in JobState if s is not _S.HELD}
    ),
)


@dataclass
class Counts:
    """What this replica saw since it started. Mutable, owned by the role's loop."""

    jobs: int = 0
    late: int = 0  # frames of older epochs, duplicates, and cancels of what is over
    damaged: int = 0  # stored objects that did not verify
    hit_blocks: int = 0
    sealed_blocks: int = 0
    cut_short: int = 0
    awaited: int = 0  # times a job waited for blocks that another one computed
    wait_ended: int = 0  # of these, waits that lasted to their bound
    encoder_rows: int = 0


@dataclass(eq=False)
class Job:
    """One job and what it knows so far. Mutable; `state` moves by `JOB_TABLE` only.

    `router` asked for it; `binding` says who receives its `product`. `rows_end` is one past the
    last row that runs, `reached` where the completed blocks end, both 0 until the plan is made."""

    message: PrefillJob
    router: Peer
    arrived_at_s: float
    state: JobState = JobState.FINDING
    binding: Binding = field(default_factory=Binding)
    product: Product = field(default_factory=Product)
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    places: tuple[Place, ...] = ()  # of the stored prefix
    exact_digests: tuple[Digest, ...] = ()  # mode `replay`: keys of the exact ones among these
    hit_blocks: int = 0  # of these, the usable ones: less than `places` after damage
    rows_end: int = 0
    reached: int = 0
    encoder_rows: int = 0
    decoder_rows: int = 0  # mode `state`
    first_token_id: int | None = None  # mode `state`

    @property
    def request(self) -> GenRequest:
        return self.message.request

    @property
    def key(self) -> JobKey:
        return self.message.request.key

    def parent_of(self, index: int) -> Digest | None:
        """What block `index` of the own class hangs on. None behind blocks that were read in the
        exact class: the block before it is not stored in this one."""
        if not index:
            return self.request.chain_root
        behind_exact = index == self.hit_blocks <= len(self.exact_digests)
        return None if behind_exact else self.request.digests[index - 1]

    @property
    def rows_to_come(self) -> int:
        """Estimate of the rows that the engine does not know of yet."""
        if self.state not in NOT_ADMITTED:
            return 0
        return floor_grain(self.request.n_tokens) - self.hit_blocks * GRAIN

    @property
    def rows_left(self) -> int:
        """Rows still to run, by whole blocks; an estimate before the plan is made."""
        return self.rows_to_come or self.rows_end - self.reached

    def step(self, event: JobEvent) -> bool:
        """Move by one event; False when it was late or a duplicate. Raises `IllegalTransition`."""
        return JOB_TABLE.move(self, event, self.key)

    def advance(self, event: JobEvent) -> None:
        """A step that the job's own task decided on. Raises `Over` when the job has ended."""
        JOB_TABLE.advance(self, event, self.key)


def window_candidates(
    request: GenRequest, hit_tokens: int, geometry: Geometry
) -> list[tuple[int, Digest]]:
    """(position, digest of the block before it) of the window records worth asking for, newest
    first: from R = min(H0, p) down to where an exact replay would begin at or above them."""
    latest = min(hit_tokens, record_position(request.n_tokens, request.keep_tokens))
    oldest = max(GRAIN, latest - geometry.replay_rows)
    return [
        (position, request.digests[position // GRAIN - 1])
        for position in range(floor_grain(latest), 0, -GRAIN)
        if position >= oldest
    ]
