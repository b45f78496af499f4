"""Which rows must run: the arithmetic of prefill, hand-off, exact replay and resume.

All numbers are token positions. g = 128; N prompt length; H end of the longest stored prefix of
whole blocks; keep = decoder rows kept in prefill; W window. From docs/architecture.md:

    latest start   R = max(0, min(H, N - keep))
    window set     C = {0} + grains with a stored window record;  c = max{x in C : x <= R}
    exact replay   e = max(0, R - n_enc (W-1)), rounded down to even
    start          max(c, e); both are exact, c wins ties

Encoder rows are [start, N), with the first decoder layer's KV source on the same rows; decoder rows
are [F, N) with F = max(0, N - keep). Global KV is written from the write floor H on, never below.

A model without a decoder half (V4) runs every row through all layers: nothing is truncated, and
what runs again at the end of a prompt is its last row alone, for its logits. So its keep is 1, and
R = floor_g(min(H, N-1)), the grain whose window record has all layers' windows and what overlapping
compressors carry; a resume is a prompt of M tokens. Everything here is a pure function of its
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.chain import BLOCK_TOKENS
from headrace.core.errors import ConfigError
from headrace.core.windows import bounded_start, check_keep

GRAIN = BLOCK_TOKENS


def floor_grain(position: int) -> int:
    """The last multiple of 128 at or below `position`."""
    return position - position % GRAIN


class StartKind(StrEnum):
    """Why a run may begin where it begins."""

    COLD = "cold"  # position 0
    WINDOW = "window"  # a stored window record
    REPLAY = "replay"  # exact replay: rows enough to rebuild every window
    BOUNDED = "bounded"  # fewer rows than that: approximate, and never exact again
    STATE = "state"  # no row: another engine's state was taken over


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of a model that decide which rows run. `n_decoder_layers` 0: no decoder half,
    and the encoder layers are all layers."""

    window_tokens: int
    n_encoder_layers: int
    n_decoder_layers: int

    def __post_init__(self) -> None:
        bounds = (("window_tokens", 1), ("n_encoder_layers", 1), ("n_decoder_layers", 0))
        for name, least in bounds:
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def replay_rows(self) -> int:
        """Rows of an exact replay: n_enc (W-1)."""
        return self.n_encoder_layers * (self.window_tokens - 1)

    @property
    def exact_keep_tokens(self) -> int:
        """The keep from which a truncated prefill equals an untruncated one for the last row."""
        if not self.has_decoder_half:
            return 1
        return self.window_tokens + (self.n_decoder_layers - 1) * (self.window_tokens - 1)

    @property
    def has_decoder_half(self) -> bool:
        return self.n_decoder_layers > 0

    def keep_for(self, configured_tokens: int) -> int:
        """The keep in force: the configured one, or for 0 the default, W + 12 (without a decoder
        half 1)."""
        return configured_tokens or (self.window_tokens + 12 if self.has_decoder_half else 1)

    def check_keep(self, keep_tokens: int) -> int:
        """`keep_tokens` if legal; raises `ConfigError`. The drafter reads W rows, so keep < W is
        refused; without a decoder half there is nothing to keep and only 1 is legal."""
        if self.has_decoder_half:
            return check_keep(self.window_tokens, keep_tokens)
        if keep_tokens != 1:
            raise ConfigError(
                "keep_tokens must be 1 for a model without a decoder half (0 in a configuration),"
                f" got {keep_tokens}"
            )
        return keep_tokens

    def latest_start(self, n_tokens: int, hit_tokens: int, keep_tokens: int) -> int:
        """R: no run of N tokens with a hit H may begin later."""
        latest = max(0, min(hit_tokens, n_tokens - keep_tokens))
        return latest if self.has_decoder_half else floor_grain(latest)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows of one run over known tokens. Half-open ranges; a row's position is its token's.
    Without a decoder half rows from `decoder_start` on are those that may have logits.

    `decoder_floor` is the first position whose decoder window rows exist; `encoder_floor` the first
    position whose encoder window rows may be read (0 when started from a window record or cold)."""

    start: int
    end: int  # one past the last encoder row
    decoder_start: int  # == end when no decoder row runs
    write_floor: int
    encoder_floor: int
    decoder_floor: int
    kind: StartKind
    window_position: int  # c, where the window record is loaded; 0 unless kind is WINDOW

    @property
    def encoder_rows(self) -> int:
        return self.end - self.start

    @property
    def decoder_rows(self) -> int:
        return self.end - self.decoder_start


def _start(
    latest: int, windows: Iterable[int], geometry: Geometry, depth_tokens: int | None = None
) -> tuple[int, StartKind, int, int]:
    """(start, kind, window position, encoder floor) for a latest start R. With a depth: that many
    rows before R whatever is stored, rounded down to even."""
    if depth_tokens is not None:
        start = bounded_start(latest, depth_tokens)
        whole = latest - start >= geometry.replay_rows
        kind = StartKind.REPLAY if whole else StartKind.BOUNDED
        return (start, kind, 0, start) if start else (0, StartKind.COLD, 0, 0)
    for x in windows:
        if x % GRAIN or x < 0:
            raise ValueError(f"a window record lies at a multiple of {GRAIN}, got {x}")
    c = max((x for x in windows if x <= latest), default=0)
    e = max(0, latest - geometry.replay_rows)
    e -= e % 2  # a ratio-2 group must not straddle the start
    if c >= e:
        return (c, StartKind.WINDOW, c, 0) if c else (0, StartKind.COLD, 0, 0)
    return e, StartKind.REPLAY, 0, e


def _check(n_tokens: int, hit_tokens: int, keep_tokens: int, geometry: Geometry) -> None:
    geometry.check_keep(keep_tokens)
    if n_tokens < 1:
        raise ValueError(f"a run needs at least one token, got {n_tokens}")
    if hit_tokens % GRAIN or not 0 <= hit_tokens <= n_tokens:
        raise ValueError(
            f"a hit is a multiple of {GRAIN} within the prompt ({n_tokens}), got {hit_tokens}"
        )


def plan_decode(
    n_tokens: int,
    hit_tokens: int,
    keep_tokens: int,
    windows: Iterable[int],
    geometry: Geometry,
    *,
    depth_tokens: int | None = None,
) -> RowPlan:
    """Rows that a decode replica (or the `all` engine) runs for a prompt of N tokens.

    `windows`: positions of usable window records; 0 need not be named. A cold run is the same with
    hit 0. `depth_tokens` (mode `replay`): start = max(0, R - depth), without windows.
    Raises `ValueError` on a hit that is not a multiple of 128 or exceeds N."""
    _check(n_tokens, hit_tokens, keep_tokens, geometry)
    first = max(0, n_tokens - keep_tokens)
    latest = geometry.latest_start(n_tokens, hit_tokens, keep_tokens)
    start, kind, window, floor = _start(latest, tuple(windows), geometry, depth_tokens)
    return RowPlan(start, n_tokens, first, hit_tokens, floor, first, kind, window)


def record_position(n_tokens: int, keep_tokens: int) -> int:
    """p: where prefill makes the window record that the hand-off needs."""
    return floor_grain(max(0, n_tokens - keep_tokens))


def plan_prefill(
    n_tokens: int,
    hit_tokens: int,
    keep_tokens: int,
    windows: Iterable[int],
    geometry: Geometry,
    *,
    depth_tokens: int | None = None,
) -> RowPlan:
    """Encoder rows that a prefill replica runs: complete blocks from the hit H0 to floor(N), and
    the window record at p. No decoder rows. When all blocks are stored only the rows up to p run;
    when the record is stored too the plan is empty (start == end). With `depth_tokens` (mode
    `replay`) no record is made and the run starts that many rows before R."""
    _check(n_tokens, hit_tokens, keep_tokens, geometry)
    p = record_position(n_tokens, keep_tokens)
    known = tuple(windows)
    all_stored = hit_tokens == floor_grain(n_tokens)
    end = p if all_stored else floor_grain(n_tokens)
    if all_stored and depth_tokens is not None:
        known = (p,)  # nobody will ask for a record
    if all_stored and (p == 0 or p in known):
        return RowPlan(p, p, p, hit_tokens, 0, p, StartKind.WINDOW if p else StartKind.COLD, p)
    start, kind, window, floor = _start(min(hit_tokens, p), known, geometry, depth_tokens)
    return RowPlan(start, end, end, hit_tokens, floor, end, kind, window)


def plan_resume(
    known_tokens: int,
    hit_tokens: int,
    first_decoder_row: int,
    windows: Iterable[int],
    geometry: Geometry,
    *,
    depth_tokens: int | None = None,
) -> RowPlan:
    """Rows that rebuild a sequence of M known tokens (the newest included) after a decode death.

    `first_decoder_row` is the F of the first run, which travels with the request."""
    if hit_tokens % GRAIN or not 0 <= hit_tokens <= known_tokens:
        raise ValueError(f"a hit is a multiple of {GRAIN} within {known_tokens}, got {hit_tokens}")
    if not geometry.has_decoder_half:
        return plan_decode(
            known_tokens, hit_tokens, 1, windows, geometry, depth_tokens=depth_tokens
        )
    w = geometry.window_tokens
    reach = w + (geometry.n_decoder_layers - 1) * (w - 1)
    decoder_start = max(first_decoder_row, known_tokens - reach)
    latest = max(0, min(hit_tokens, decoder_start))
    start, kind, window, floor = _start(latest, tuple(windows), geometry, depth_tokens)
    return RowPlan(
        start, known_tokens, decoder_start, hit_tokens, floor, decoder_start, kind, window
    )


def plan_adopted(n_tokens: int, keep_tokens: int, geometry: Geometry) -> RowPlan:
    """No row: the state at N of another engine with the same keep is taken over (mode `state`)."""
    _check(n_tokens, 0, keep_tokens, geometry)
    first = max(0, n_tokens - keep_tokens)
    hit = floor_grain(n_tokens)
    return RowPlan(n_tokens, n_tokens, n_tokens, hit, 0, first, StartKind.STATE, 0)


def plan_parked(length_tokens: int, ran: RowPlan) -> RowPlan:
    """No row: a sequence goes on where it was parked, after `length_tokens` rows, with the window
    rows that its run `ran` made and none below their floors."""
    hit, end = floor_grain(length_tokens), length_tokens
    floors = ran.encoder_floor, ran.decoder_floor
    return RowPlan(end, end, end, hit, *floors, StartKind.STATE, 0)


def wants_prefill(plan: RowPlan, n_tokens: int, keep_tokens: int, local_prefill_rows: int) -> bool:
    """Whether a prompt goes to a prefill replica first: many rows to run, and blocks to gain."""
    return plan.encoder_rows > local_prefill_rows and n_tokens >= keep_tokens + GRAIN


def record_positions(
    start: int, length_tokens: int, keep_tokens: int, spacing_tokens: int
) -> tuple[int, ...]:
    """Grains in (start, length] at which a run of known length makes window records: from
    floor(length - keep) on, where the next turn's p lies, and every `spacing_tokens`."""
    first = record_position(length_tokens, keep_tokens)
    grains = range(floor_grain(start) + GRAIN, length_tokens + 1, GRAIN)
    return tuple(x for x in grains if x >= max(first, GRAIN) or x % spacing_tokens == 0)


def complete_blocks(verified_tokens_with_kv: int) -> int:
    """Blocks that may be committed: (b+1)*128 <= verified tokens whose KV exists."""
    return verified_tokens_with_kv // GRAIN
