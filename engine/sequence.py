"""One admitted sequence: its state table and what the scheduler keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.chain import BLOCK_TOKENS, TokenIds, next_digest
from headrace.core.ids import Digest, JobKey
from headrace.core.images import span_extras
from headrace.core.request import FinishReason, GenRequest
from headrace.core.rows import RowPlan
from headrace.core.states import StateTable
from headrace.engine.lease import Lease


class SequenceState(StrEnum):
    FILLING = "filling"  # admitted: its blocks may be written from outside
    KNOWN = "known"  # rows of known tokens run: prompt, replay, resume
    DECODING = "decoding"  # one row a step
    HELD = "held"  # out of the steps; its state was copied out, slot and blocks stay
    PARKED = "parked"  # its slot was given back; blocks stay reserved
    FINISHED = "finished"  # nothing more to run; the lease is open
    FAILED = "failed"  # cannot go on; the lease is open
    RELEASED = "released"  # the lease is closed


class SequenceEvent(StrEnum):
    START = "start"
    ROWS = "rows"  # a part of the known rows ran
    TOKEN = "token"  # a token was sampled and more will be
    HOLD = "hold"
    PARK = "park"
    UNPARK = "unpark"  # it has a slot, and its state is there
    FINISH = "finish"  # the last row ran
    FAIL = "fail"
    RELEASE = "release"


_S, _E = SequenceState, SequenceEvent
SEQUENCE_TABLE: StateTable[SequenceState, SequenceEvent] = StateTable(
    "sequence",
    {
        (_S.FILLING, _E.START): _S.KNOWN,
        (_S.KNOWN, _E.ROWS): _S.KNOWN,
        (_S.KNOWN, _E.TOKEN): _S.DECODING,
        (_S.DECODING, _E.TOKEN): _S.DECODING,
        (_S.DECODING, _E.HOLD): _S.HELD,
        (_S.HELD, _E.PARK): _S.PARKED,
        **{(s, _E.UNPARK): _S.DECODING for s in (_S.KNOWN, _S.HELD, _S.PARKED)},
        (_S.KNOWN, _E.FINISH): _S.FINISHED,
        (_S.DECODING, _E.FINISH): _S.FINISHED,
        **{(s, _E.FAIL): _S.FAILED for s in (_S.FILLING, _S.KNOWN, _S.DECODING)},
        **{(s, _E.RELEASE): _S.RELEASED for s in _S if s is not _S.RELEASED},
    },
    ignored=frozenset(
        # Results of a step that was in flight when the sequence ended.
        {(s, e) for s in (_S.FINISHED, _S.FAILED) for e in (_E.ROWS, _E.TOKEN, _E.FINISH, _E.FAIL)}
        # The owner decided before it heard of the end.
        | {(_S.FAILED, _E.START), (_S.FAILED, _E.HOLD), (_S.FINISHED, _E.HOLD)}
        | {(_S.RELEASED, e) for e in _E}
    ),
)


class DigestChain:
    """Digests of the complete blocks of a sequence: the request's, then the chain goes on over
    generated tokens. Reads `ids`, which may grow but never change."""

    def __init__(self, request: GenRequest, ids: TokenIds) -> None:
        self._ids = ids
        self._root = request.chain_root
        self._extras = span_extras(request.images)
        self._digests = list(request.digests)

    def __getitem__(self, index: int) -> Digest:
        """Digest of block `index`. Raises `IndexError` if it is not complete in `ids`."""
        if (index + 1) * BLOCK_TOKENS > len(self._ids):
            raise IndexError(f"block {index} is not complete in {len(self._ids)} tokens")
        while len(self._digests) <= index:
            begin = len(self._digests) * BLOCK_TOKENS
            parent = self._digests[-1] if self._digests else self._root
            block = self._ids[begin : begin + BLOCK_TOKENS].tobytes()
            extras = self._extras.get(len(self._digests), b"")
            self._digests.append(next_digest(parent, block, extras))
        return self._digests[index]


@dataclass(slots=True)
class Sequence:
    """Mutable; owned by the scheduler. `ids` are all known tokens, the newest included.

    `next_row` is the first position that has not run; `next_block` the first block that may still
    become complete here."""

    request: GenRequest
    ids: TokenIds
    digests: DigestChain
    hit_blocks: int
    lease: Lease
    state: SequenceState = SequenceState.FILLING
    plan: RowPlan | None = None
    records: tuple[int, ...] = ()  # where known rows are cut for a window record, ascending
    next_row: int = 0
    next_block: int = 0
    encoder_rows: int = 0
    decoder_rows: int = 0
    key: JobKey = field(init=False)  # made once: a step asks for it several times a sequence

    def __post_init__(self) -> None:
        self.key = self.request.key

    @property
    def generated(self) -> int:
        """Generated tokens, those of former attempts included."""
        return len(self.ids) - self.request.n_tokens

    def on(self, event: SequenceEvent) -> bool:
        """Take a step of the table; False when the event came late and is ignored."""
        return SEQUENCE_TABLE.move(self, event, self.key)

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id`, already appended to `ids`; None: it goes on."""
        if token_id in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.generated >= self.request.max_tokens:
            return FinishReason.LENGTH
        return None

    @property
    def rows_left(self) -> int:
        """Rows of known tokens that still have to run; before `start` an estimate for a plan
        that begins at a window record."""
        if self.state is SequenceState.KNOWN and self.plan is not None:
            return self.plan.end - self.next_row
        if self.state is SequenceState.FILLING:
            return len(self.ids) - min(
                self.hit_blocks * BLOCK_TOKENS, self.request.first_decoder_row
            )
        return 0
