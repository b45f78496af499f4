"""Rings and bounded replay: what a sliding window needs of its ring, of keep and of a replay.

A row at p sees the window keys of positions max(floor, p-W+1) to p. A ring holds the newest keys of
one layer, that of p in slot p mod ring. A verify step stores the keys of B rows before the first of
them attends, and all but one may be rejected, so a ring has at least W + B rows. A truncated
prefill runs `keep` decoder rows, of which the drafter reads W. A bounded replay runs `depth` rows
before the latest start: the windows of its first rows end at its floor, not W-1 rows back.

Both bounds are checked where a replica starts; each refusal names both numbers.
"""

from __future__ import annotations

from headrace.core.errors import ConfigError


def default_ring_rows(window_tokens: int, backtrack_rows: int) -> int:
    """The smallest ring: W + B."""
    return window_tokens + backtrack_rows


def check_ring(window_tokens: int, ring_rows: int, backtrack_rows: int) -> int:
    """`ring_rows` if a ring of that many rows holds a window and one verify step.

    Raises `ConfigError` for a backtrack below 1 and for a ring below W + B.
    """
    if backtrack_rows < 1:
        raise ConfigError(f"backtrack_rows must be at least 1, got {backtrack_rows}")
    least = default_ring_rows(window_tokens, backtrack_rows)
    if ring_rows < least:
        raise ConfigError(
            f"ring_rows must be at least window + backtrack = {window_tokens} + {backtrack_rows} "
            f"= {least}, got {ring_rows}"
        )
    return ring_rows


def check_keep(window_tokens: int, keep_tokens: int) -> int:
    """`keep_tokens` if that many decoder rows fill a window. Raises `ConfigError`."""
    if keep_tokens < window_tokens:
        raise ConfigError(
            f"keep_tokens must be at least the window ({window_tokens}), got {keep_tokens}"
        )
    return keep_tokens


def bounded_start(latest: int, depth_tokens: int) -> int:
    """First row of a bounded replay before a latest start: `depth_tokens` rows earlier, rounded
    down to even, since a group of ratio 2 must not straddle it."""
    start = max(0, latest - depth_tokens)
    return start - start % 2
