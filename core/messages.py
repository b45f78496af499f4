"""Messages between router, prefill and decode, one table for all three connections.

    router  -> prefill   PrefillJob, BindDecode, Cancel, Drain
    router  -> decode    DecodeJob, Cancel, Drain
    prefill -> router    PrefillProgress, PrefillDone, JobFailed, LoadReport
    decode  -> router    TokenBatch, JobFailed, LoadReport
    router  -> vision    VisionJob, Cancel, Drain
    vision  -> router    VisionDone, JobFailed, LoadReport
    prefill -> decode    BlocksReady, WindowReady, StateReady, PrefillDone, JobFailed
    decode  -> prefill   HandoffAck
    both ends            Hello first, on every connection

Messages that name a `JobKey` of an older epoch are ignored and counted by the receiver. The two
ends of a hand-off are two attempts with an epoch each (docs/decisions/0012): what is said of a
hand-off names the decode attempt's key, what is said of a prefill's own work names the prefill
attempt's.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.card import ModelCard, Role
from headrace.core.chain import TokenIds
from headrace.core.ids import BootId, Digest, JobKey
from headrace.core.request import FinishReason, GenRequest
from headrace.core.wire import MessageTable


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sealed object lies in a store's host arena.

    A reader checks that the header at `offset` carries this generation, length, checksum and the
    digest it asked for, before *and* after copying. `store` names one life of one store."""

    store: BootId
    offset: int  # of the payload, in bytes from the start of the arena
    payload_bytes: int
    generation: int
    checksum: int  # xxh3-64 of the payload


@dataclass(frozen=True, slots=True)
class Hello:
    """First message in both directions. Peers with another layout id are refused."""

    role: Role
    name: str
    boot_id: BootId
    build: str
    card: ModelCard | None


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Run the prompt's rows and hold what is sealed; `BindDecode` says for whom, at any time."""

    request: GenRequest
    dispatch: int  # the router's number of this dispatch, echoed in load reports


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """`await_prefill`: the prompt's blocks come by hand-off, as soon as the prefill replica is told
    of this attempt by `BindDecode`; without it decode runs all rows.

    `generated_ids`: tokens a former attempt already produced (empty for a first attempt)."""

    request: GenRequest
    generated_ids: TokenIds
    await_prefill: bool
    prefill_name: str  # "" when no prefill replica takes part
    dispatch: int


@dataclass(frozen=True, slots=True)
class Cancel:
    key: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """Blocks [first_block, first_block + len(digests)) are sealed, and leased by the prefill
    attempt until `key` was acknowledged or given up.

    Digests are those of the request's chain, or (mode `replay`) of its exact one: which tells in
    which namespace the bytes lie."""

    key: JobKey
    first_block: int
    digests: tuple[Digest, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class WindowReady:
    """The window record at `position` is sealed and leased as blocks are; decode takes a lease of
    its own, for the life of the request."""

    key: JobKey
    position: int
    digest: Digest
    place: Place


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Nothing more follows for `key`; decode may start when it has loaded all it was told of.

    Also sent to the router, under the same key. Rows and hits are those of the prefill replica, for
    the record; after another bind it is said again."""

    key: JobKey
    encoder_rows: int
    hit_tokens: int
    run_s: float
    decoder_rows: int = 0  # mode `state` only


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The sender gave `key` up. `code` is one of errors.ERRORS_BY_CODE; `retryable` says whether
    another attempt elsewhere may succeed. `picture`, from vision: the one of the job's that it is
    about; None concerns all."""

    key: JobKey
    code: str
    message: str
    retryable: bool
    picture: Digest | None = None


@dataclass(frozen=True, slots=True)
class HandoffAck:
    """Decode has its first token; prefill lets its leases end. Until then another decode replica
    can be bound in place of a lost one."""

    key: JobKey


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds and counts of the stages a decode replica saw, sent with the terminal item."""

    wait_s: float = 0.0  # admitted until rows could start (includes waiting for prefill)
    load_s: float = 0.0
    load_bytes: int = 0
    replay_s: float = 0.0  # first row until first token
    encoder_rows: int = 0  # rows before the first token, as counted by the runner
    decoder_rows: int = 0
    hit_tokens: int = 0  # H: tokens whose global KV was not computed here
    window_position: int = 0
    start_kind: str = "cold"
    decode_s: float = 0.0  # first token until the last
    committed_blocks: int = 0
    resident_tokens: int = 0  # of hit_tokens, those that stood in the engine before
    exactness: str = "exact"  # class of what was computed: exact | replayed


@dataclass(frozen=True, slots=True)
class TokenItem:
    """Tokens of one sequence in one step, and how it ended if it did.

    `first_index` counts generated tokens from 0: a router drops what it has already seen."""

    key: JobKey
    first_index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    times: StageTimes | None  # with the terminal item


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All tokens of one step for one router."""

    items: tuple[TokenItem, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A replica's own view of its load. `last_dispatch` is the highest dispatch number of the
    receiving router that it covers; the router adds only newer ones on top."""

    last_dispatch: int
    step: int  # steps run since start: moves while work is queued, or the replica is stuck
    waiting_requests: int
    running_requests: int
    backlog_rows: int  # rows that admitted and queued jobs still have to run
    resident_tokens: int
    free_blocks: int
    free_slots: int
    rows_per_s: float  # measured over the last steps, 0 before the first
    held_leases: int
    wire_refused: int = 0  # connections ended because of what came on them, since start
    parked_requests: int = 0  # of the waiting ones, those that ran and gave way


@dataclass(frozen=True, slots=True)
class VisionJob:
    """Make the `mm` object `digest` from one picture's file bytes, and lease it for `key`.

    `n_tokens` is what the router read out of the header: another number of rows is a failure."""

    key: JobKey
    digest: Digest
    data: bytes
    n_tokens: int
    dispatch: int


@dataclass(frozen=True, slots=True)
class VisionDone:
    """The object is sealed and leased. `made` tells whether pixels were opened for it."""

    key: JobKey
    digest: Digest
    made: bool
    run_s: float


@dataclass(frozen=True, slots=True)
class StateReady:
    """Hand-off mode `state`: everything a sequence of `length_tokens` positions holds beyond its
    complete blocks is sealed at `place` and leased as blocks are; `first_token_id` was sampled by
    prefill. `epoch` is that of the prefill attempt, which the digest names."""

    key: JobKey
    length_tokens: int
    digest: Digest
    place: Place
    first_token_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """A sign of life of `key`, every third of `handoff_s`. `wanted`: at most one chunk of rows is
    left, or its decode replica is gone or does not acknowledge: one is wanted now. That is also
    said at once when it comes about, and again until `BindDecode` or `Cancel` answers it."""

    key: JobKey
    rows_left: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class BindDecode:
    """Hand the product of `key` to the decode attempt of that epoch: all that is sealed at once,
    the rest as it comes. A later epoch replaces an earlier one; the same once more is a
    duplicate."""

    key: JobKey
    decode_epoch: int
    decode_address: str
    decode_name: str

    @property
    def decode_key(self) -> JobKey:
        return JobKey(self.key.request_id, self.decode_epoch)


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new jobs; finish what runs."""

    grace_s: float


MESSAGES = MessageTable(
    {
        1: Hello,
        2: PrefillJob,
        3: DecodeJob,
        4: Cancel,
        5: BlocksReady,
        6: WindowReady,
        7: PrefillDone,
        8: JobFailed,
        9: HandoffAck,
        10: TokenBatch,
        11: LoadReport,
        12: Drain,
        13: VisionJob,
        14: VisionDone,
        15: StateReady,
        16: PrefillProgress,
        17: BindDecode,
    }
)
