"""The receiving end of a hand-off, without input or output: states, which block came, what to plan.

    queued_open --PrefillDone--> queued_told          waiting for room in the engine
        | admitted                   | admitted
    awaiting ----PrefillDone----> loading --started--> replaying --token--> streaming --> finished
                                                               parked <--> streaming
The two `queued` states differ in whether all of the hand-off was announced; a job without a prefill
replica begins in `queued_told`. Objects are loaded on arrival from `awaiting` on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from headrace.core.chain import BLOCK_TOKENS, TokenIds, block_digests
from headrace.core.ids import Digest, JobKey
from headrace.core.images import span_extras
from headrace.core.messages import (
    BlocksReady,
    JobFailed,
    Place,
    PrefillDone,
    StateReady,
    WindowReady,
)
from headrace.core.request import GenRequest
from headrace.core.rows import GRAIN, Geometry, RowPlan, floor_grain, plan_decode, plan_resume
from headrace.core.states import StateTable


class DecodeState(StrEnum):
    QUEUED_OPEN = "queued_open"
    QUEUED_TOLD = "queued_told"
    AWAITING = "awaiting"
    LOADING = "loading"
    REPLAYING = "replaying"
    STREAMING = "streaming"
    PARKED = "parked"  # its slot, or all it had in the engine, went to others; in line for it again
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DecodeEvent(StrEnum):
    ADMITTED = "admitted"
    BLOCKS = "blocks"  # BlocksReady
    WINDOW = "window"  # WindowReady
    STATE = "state"  # StateReady
    PREFILL_DONE = "prefill_done"
    PREFILL_FAILED = "prefill_failed"  # JobFailed from the prefill replica
    PREFILL_GONE = "prefill_gone"  # its connection ended
    STALLED = "stalled"  # no progress for handoff_s
    STARTED = "started"  # all that came is loaded, rows run
    TOKEN = "token"
    PARK = "park"  # it gave way
    UNPARK = "unpark"  # it has what it needs again
    FINISH = "finish"
    ERROR = "error"
    CANCEL = "cancel"  # by the router, by its connection's end, or by a newer epoch
    AGAIN = "again"  # the same DecodeJob once more


_S, _E = DecodeState, DecodeEvent
TERMINAL = frozenset({_S.FINISHED, _S.FAILED, _S.CANCELLED})
_OPEN = (_S.QUEUED_OPEN, _S.AWAITING)  # the hand-off is not complete
_TOLD = (_S.QUEUED_TOLD, _S.LOADING, _S.REPLAYING, _S.STREAMING, _S.PARKED)
_HANDOFF_ENDS = (_E.PREFILL_FAILED, _E.PREFILL_GONE, _E.STALLED)

DECODE_TABLE: StateTable[DecodeState, DecodeEvent] = StateTable(
    "decode job",
    {
        (_S.QUEUED_OPEN, _E.ADMITTED): _S.AWAITING,
        (_S.QUEUED_OPEN, _E.PREFILL_DONE): _S.QUEUED_TOLD,
        (_S.QUEUED_TOLD, _E.ADMITTED): _S.LOADING,
        (_S.AWAITING, _E.PREFILL_DONE): _S.LOADING,
        **{(s, e): s for s in _OPEN for e in (_E.BLOCKS, _E.WINDOW, _E.STATE)},
        **{(s, e): _S.FAILED for s in _OPEN for e in _HANDOFF_ENDS},
        (_S.LOADING, _E.STARTED): _S.REPLAYING,
        (_S.REPLAYING, _E.TOKEN): _S.STREAMING,
        (_S.STREAMING, _E.TOKEN): _S.STREAMING,
        (_S.STREAMING, _E.PARK): _S.PARKED,
        (_S.PARKED, _E.UNPARK): _S.STREAMING,
        (_S.STREAMING, _E.FINISH): _S.FINISHED,
        **{(s, _E.ERROR): _S.FAILED for s in (*_OPEN, *_TOLD)},
        **{(s, _E.CANCEL): _S.CANCELLED for s in (*_OPEN, *_TOLD)},
    },
    ignored=frozenset(
        {(s, _E.AGAIN) for s in DecodeState}
        # After PrefillDone nothing of the hand-off is news: a duplicate, a frame that was
        # overtaken, or the end of a prefill replica that did its part.
        | {
            (s, e)
            for s in (*_TOLD, *TERMINAL)
            for e in (_E.BLOCKS, _E.WINDOW, _E.STATE, _E.PREFILL_DONE, *_HANDOFF_ENDS)
        }
        # What the engine finished before it saw the release, a second cause of the end, and what
        # the job's own task had in hand when the job ended under it.
        | {(s, e) for s in TERMINAL for e in (_E.TOKEN, _E.FINISH, _E.ERROR, _E.CANCEL)}
        | {(s, e) for s in TERMINAL for e in (_E.ADMITTED, _E.STARTED, _E.PARK, _E.UNPARK)}
    ),
)


@dataclass
class Counts:
    """What this replica saw since it started. Mutable, owned by the role's loop."""

    jobs: int = 0
    late: int = 0  # frames of older epochs, duplicates, and cancels of what is over
    foreign: int = 0  # announcements that do not fit the request they name
    early_dropped: int = 0  # announcements before their job, beyond the bound or too old
    damaged: int = 0  # objects that did not verify
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    fetched_blocks: int = 0  # told to be at another host, and brought by this host's store
    unreached_blocks: int = 0  # the same, and not brought: their rows are computed
    committed_blocks: int = 0
    commits_dropped: int = 0  # write-behind was full, or the store took it not
    parkings: int = 0  # jobs that gave way, each time
    parkings_refused: int = 0  # who went on since the store had no room for what was to be kept
    parkings_lost: int = 0  # parked jobs that went on by rows: what was kept is gone or damaged


@dataclass(eq=False)
class Handoff:
    """What one job was told and has loaded. Mutable, owned by its job.

    `digests` are those of all complete blocks of the known tokens. A block is *here* when its bytes
    stand in the engine: resident before, or loaded and verified."""

    digests: tuple[Digest, ...]
    exact_digests: tuple[Digest, ...] = ()  # mode `replay`: the same blocks in the exact namespace
    exact: set[int] = field(default_factory=set)  # blocks whose told place holds exact bytes
    exact_stored: set[int] = field(default_factory=set)  # blocks ever told of in that class
    told: dict[int, Place] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    spare: dict[int, tuple[Place, bool]] = field(default_factory=dict)  # told while a copy was made

    def blocks(self, message: BlocksReady) -> list[tuple[int, Place]] | None:
        """The announced blocks that are news, or None when the message does not fit the request:
        other digests, a range outside it, or places that do not match in number.

        A block announced again at another place is news only after the first copy was damaged;
        while that copy is being made the newer place is kept for `lost`."""
        first, count = message.first_block, len(message.digests)
        if len(message.places) != count or first < 0:
            return None
        exact = bool(count) and self.exact_digests[first : first + count] == message.digests
        if not exact and self.digests[first : first + count] != message.digests:
            return None
        news = [
            (index, place)
            for index, place in enumerate(message.places, start=first)
            if self._news(index, place)
        ]
        if exact:
            self.exact_stored.update(range(first, first + count))
        numbers = {index for index, _ in news}
        for index, place in enumerate(message.places, start=first):
            if index not in self.here and self.told[index] != place:
                self.spare[index] = (place, exact)
        self.exact = self.exact | numbers if exact else self.exact - numbers
        return news

    def digest(self, index: int) -> Digest:
        """The key under which the told place of a block was put."""
        return self.exact_digests[index] if index in self.exact else self.digests[index]

    def _news(self, index: int, place: Place) -> bool:
        if index in self.here or self.told.get(index) == place:
            return False
        if index in self.told and index not in self.damaged:
            return False
        self.told[index] = place
        self.damaged.discard(index)
        return True

    def loaded(self, index: int) -> None:
        self.here.add(index)

    def lost(self, index: int) -> Place | None:
        """The copy of this block did not verify. The other place it was told to be at, to be
        loaded now, or None: then a further announcement of it is news."""
        if index not in self.spare:
            self.damaged.add(index)
            return None
        place, exact = self.spare.pop(index)
        self.told[index] = place
        self.exact = self.exact | {index} if exact else self.exact - {index}
        return place

    @property
    def verified_blocks(self) -> int:
        """Leading blocks that are here: H = 128 times this."""
        count = 0
        while count in self.here:
            count += 1
        return count


def known_digests(request: GenRequest, generated_ids: TokenIds) -> tuple[Digest, ...]:
    """Digests of the complete blocks of prompt and generated tokens together."""
    if not generated_ids:
        return request.digests
    parent = request.digests[-1] if request.digests else None
    known = request.token_ids + generated_ids
    begin = len(request.digests)
    extras = span_extras(request.images)
    return request.digests + block_digests(request.chain_root, known, begin, parent, extras)


def make_plan(
    request: GenRequest,
    n_generated: int,
    hit_tokens: int,
    windows: tuple[int, ...],
    geometry: Geometry,
    depth_tokens: int | None = None,
) -> RowPlan:
    """The rows of a first attempt, or those of a resume when tokens were generated before.
    `depth_tokens` as in `plan_decode`."""
    if n_generated:
        known = request.n_tokens + n_generated
        first = request.first_decoder_row
        return plan_resume(known, hit_tokens, first, windows, geometry, depth_tokens=depth_tokens)
    n_tokens, keep_tokens = request.n_tokens, request.keep_tokens
    return plan_decode(
        n_tokens, hit_tokens, keep_tokens, windows, geometry, depth_tokens=depth_tokens
    )


def window_candidates(
    plan: RowPlan, digests: tuple[Digest, ...], geometry: Geometry, *, above: int = 0
) -> list[tuple[int, Digest]]:
    """(position, digest of the block before it) of the window records that would improve on
    `plan`, newest first: from R = min(H, first decoder row) down to where an exact replay begins
    at or above them, and past `above`."""
    latest = min(plan.write_floor, plan.decoder_start)
    oldest = max(GRAIN, latest - geometry.replay_rows, above + 1)
    return [
        (position, digests[position // GRAIN - 1])
        for position in range(floor_grain(latest), 0, -GRAIN)
        if position >= oldest
    ]


def windows_to_hold(keep_tokens: int) -> int:
    """Window records made while decoding of which the newest must be held: those that may lie at
    or above floor(length - keep) whenever the answer ends."""
    return -(-keep_tokens // BLOCK_TOKENS) + 1


Announcement: TypeAlias = BlocksReady | WindowReady | StateReady | PrefillDone | JobFailed


class EarlyFrames:
    """Announcements whose DecodeJob has not come yet: they take another socket and may overtake it.

    Bounded in frames and in blocks named; each key expires `handoff_s` after its first frame."""

    def __init__(self, handoff_s: float, max_frames: int = 4096, max_blocks: int = 1 << 17) -> None:
        self._handoff_s = handoff_s
        self._max_frames = max_frames
        self._max_blocks = max_blocks
        self._held: OrderedDict[JobKey, tuple[float, list[Announcement]]] = OrderedDict()
        self._frames = 0
        self._blocks = 0

    def __len__(self) -> int:
        return self._frames

    def hold(self, message: Announcement, now_s: float) -> bool:
        """Keep it; False when there is no room. Decode then computes what it was not told of, or
        gives the job up after `handoff_s` without progress."""
        blocks = _n_blocks(message)
        if self._frames >= self._max_frames or self._blocks + blocks > self._max_blocks:
            return False
        self._held.setdefault(message.key, (now_s, []))[1].append(message)
        self._frames += 1
        self._blocks += blocks
        return True

    def take(self, key: JobKey) -> list[Announcement]:
        """What came for `key`, in order; it is forgotten here."""
        _, messages = self._held.pop(key, (0.0, []))
        self._frames -= len(messages)
        self._blocks -= sum(map(_n_blocks, messages))
        return messages

    def expire(self, now_s: float) -> int:
        """Forget keys whose job did not come in time; returns how many frames went."""
        before = self._frames
        for key, (since_s, _) in tuple(self._held.items()):
            if now_s - since_s <= self._handoff_s:
                break  # kept in the order of their first frame
            self.take(key)
        return before - self._frames


def _n_blocks(message: Announcement) -> int:
    return len(message.digests) if isinstance(message, BlocksReady) else 0
