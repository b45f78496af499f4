"""Which replicas a request goes to: pure functions over a snapshot of loads.

One currency, predicted milliseconds. Prefill: the smallest backlog plus own work. Decode: replicas
of a pool step together in the end, so the largest use is what counts; among equally used ones the
fewest requests. Ties rotate, because a fixed order sends every burst to the same replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.request import HandoffBind
from headrace.core.rows import (
    GRAIN,
    Geometry,
    RowPlan,
    floor_grain,
    plan_decode,
    plan_prefill,
    plan_resume,
    record_position,
    wants_prefill,
)
from headrace.router.ledger import Load

TIE_MS, TIE_SHARE = 2.0, 0.02
USE_BUCKET = 0.05
MAX_USE = 0.95
LOAD_MS_PER_BLOCK = 0.1  # a block's way out of the arena, verified; start value


class Reason(StrEnum):
    """Why a replica was chosen, as a label of the metric."""

    ONLY = "only-choice"
    LEAST = "least"
    TIE = "tie"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A routable replica as the policy sees it. `key` names it in ledger and route."""

    key: str
    load: Load
    capacity_tokens: int
    n_slots: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a request needs, apart from who does it. `plan` is decode's, should it run all rows."""

    n_tokens: int
    expected_tokens: int  # of the answer
    hit_tokens: int
    plan: RowPlan
    prefill_plan: RowPlan
    handed_start: int  # where decode begins after a whole hand-off
    wants_prefill: bool
    hit_tiers: Mapping[str, int] = field(default_factory=dict)  # tokens of the hit, by tier

    @property
    def resident_tokens(self) -> int:
        """Tokens whose blocks a decode replica reserves, in whole blocks."""
        return floor_grain(self.n_tokens + self.expected_tokens + GRAIN - 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica by its key. `score` is what it won by, lower is better; `why` is for people."""

    key: str
    score: float
    reason: Reason
    why: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. `prefill` is None when decode runs all rows itself, `decode` when it is
    chosen later, for what prefill has made by then."""

    decode: Choice | None
    prefill: Choice | None
    work: Work
    why: str


def size_up(
    n_tokens: int,
    max_tokens: int,
    hit_blocks: int,
    windows: Sequence[int],
    keep_tokens: int,
    geometry: Geometry,
    local_prefill_rows: int,
    *,
    n_generated: int = 0,
    depth_tokens: int | None = None,
) -> Work:
    """The rows a request needs, from what the index knows of its prompt. A hit longer than the
    prompt's whole blocks counts up to them. `n_generated`: tokens that it resumes after;
    `depth_tokens` as in `plan_decode`."""
    hit = min(hit_blocks * GRAIN, floor_grain(n_tokens))
    made = (record_position(n_tokens, keep_tokens),)
    whole = floor_grain(n_tokens)
    handed = plan_decode(n_tokens, whole, keep_tokens, made, geometry, depth_tokens=depth_tokens)
    if n_generated:
        first = max(0, n_tokens - keep_tokens)
        known = n_tokens + n_generated
        plan = plan_resume(known, hit, first, windows, geometry, depth_tokens=depth_tokens)
    else:
        plan = plan_decode(n_tokens, hit, keep_tokens, windows, geometry, depth_tokens=depth_tokens)
    return Work(
        n_tokens,
        max_tokens,
        hit,
        plan,
        plan_prefill(n_tokens, hit, keep_tokens, windows, geometry, depth_tokens=depth_tokens),
        handed.start,
        wants_prefill(plan, n_tokens, keep_tokens, local_prefill_rows),
    )


def choose_decode(
    candidates: Sequence[Candidate], need_tokens: int, queue_ahead: int, turn: int
) -> Choice | None:
    """The decode replica with the smallest projected use; None when none has room now.

    Room: blocks for the whole sequence within 95 % of the capacity, and at most `queue_ahead` jobs
    beyond its state slots."""
    scored: list[tuple[tuple[int, int], float, Candidate]] = []
    for candidate in candidates:
        projected = candidate.load.tokens + need_tokens
        if candidate.load.requests and projected > MAX_USE * candidate.capacity_tokens:
            continue
        if need_tokens > candidate.capacity_tokens:
            continue
        if candidate.load.requests >= candidate.n_slots + queue_ahead:
            continue
        use = projected / candidate.capacity_tokens
        rank = (int(use / USE_BUCKET), candidate.load.requests + 1)
        scored.append((rank, use, candidate))
    if not scored:
        return None
    best = min(rank for rank, _, _ in scored)
    tied = [(use, candidate) for rank, use, candidate in scored if rank == best]
    use, chosen = tied[turn % len(tied)]
    why = f"{chosen.key}: use {use:.0%}, {chosen.load.requests} requests"
    return Choice(chosen.key, use, _reason(len(candidates), len(tied)), why)


def choose_prefill(
    candidates: Sequence[Candidate],
    work: Work,
    start_rows_per_s: float,
    turn: int,
    queue_ahead: int | None = None,
) -> Choice | None:
    """The prefill replica that is predicted to be done first; None without candidates, or when each
    has `queue_ahead` jobs beyond its state slots.

    Scores within 2 ms or 2 % of the best are a tie: fewer resident tokens, then rotation."""
    scored: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        full = queue_ahead is not None and (
            candidate.load.requests >= candidate.n_slots + queue_ahead
        )
        if full:
            continue
        rate = candidate.load.rows_per_s or start_rows_per_s
        backlog_ms = candidate.load.backlog_rows / rate * 1e3
        scored.append((backlog_ms + prefill_ms(work, rate), candidate))
    if not scored:
        return None
    best = min(score for score, _ in scored)
    close = [pair for pair in scored if pair[0] - best <= max(TIE_MS, TIE_SHARE * best)]
    fewest = min(candidate.load.tokens for _, candidate in close)
    tied = [pair for pair in close if pair[1].load.tokens == fewest]
    score, chosen = tied[turn % len(tied)]
    why = (
        f"{chosen.key}: {score:.0f} ms, {chosen.load.backlog_rows:.0f} rows before"
        f" {work.prefill_plan.encoder_rows}"
    )
    return Choice(chosen.key, score, _reason(len(candidates), len(tied)), why)


def prefill_ms(work: Work, rows_per_s: float) -> float:
    """Predicted time of a prefill replica for this request alone: its rows, and the blocks below
    the start that it reads from the store. (A term in L^2 enters when rates are fitted.)"""
    blocks = work.prefill_plan.start // GRAIN
    return work.prefill_plan.encoder_rows / rows_per_s * 1e3 + blocks * LOAD_MS_PER_BLOCK


def route(
    work: Work,
    decodes: Sequence[Candidate],
    prefills: Sequence[Candidate],
    *,
    bind: HandoffBind,
    queue_ahead: int,
    start_rows_per_s: float,
    turn: int,
) -> Route | None:
    """The whole choice; None when no replica of the pool that comes first has room: prefill where
    decode is bound late, decode otherwise. Without a prefill replica a request that would want one
    runs on decode alone."""
    rows = f"{work.plan.encoder_rows} rows, hit {work.hit_tokens} of {work.n_tokens}"
    if bind is HandoffBind.LATE and work.wants_prefill and prefills:
        prefill = choose_prefill(prefills, work, start_rows_per_s, turn, queue_ahead)
        return Route(None, prefill, work, f"{rows}; {prefill.why}") if prefill else None
    decode = choose_decode(decodes, work.resident_tokens, queue_ahead, turn)
    if decode is None:
        return None
    prefill = None
    if work.wants_prefill:
        prefill = choose_prefill(prefills, work, start_rows_per_s, turn)
    where = prefill.why if prefill is not None else "local"
    if work.wants_prefill and prefill is None:
        where = "local, no prefill replica"
    return Route(decode, prefill, work, f"{rows}; {where}; {decode.why}")


def _reason(candidates: int, tied: int) -> Reason:
    if candidates == 1:
        return Reason.ONLY
    return Reason.TIE if tied > 1 else Reason.LEAST
