"""Named fault points: places where a test may make the product fail on purpose.

A point is a no-op unless `arm` was called in this process, which the roles do only when the
test-only variable HEADRACE_FAULTS is set *and* they are bound to loopback. Every firing is
counted, so that a scenario can verify that its fault took effect.

    HEADRACE_FAULTS="prefill.seal=exit@3,decode.load=flip%0.01/7"

`@3`: once, at the third hit; `%0.01/7`: at a share of all hits, drawn from seed 7; else at each.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field

from headrace.core.errors import ConfigError, HeadraceError

POINTS = frozenset(
    {
        "engine.step",
        "prefill.chunk",
        "prefill.seal",
        "prefill.announce",
        "decode.accept",
        "decode.load",
        "decode.first_token",
        "decode.token",
        "vision.encode",
        "store.seal",
        "store.segment_write",
        "store.before_sync",
        "store.before_index",
        "store.after_index",
        "router.dispatch",
        "link.send",
    }
)
ACTIONS = frozenset(
    {"raise", "assert", "memory", "exit", "sleep", "drop", "duplicate", "flip", "nan"}
)


class InjectedFault(HeadraceError):
    """Raised by an armed point whose action is `raise`."""

    code = "injected_fault"
    may_go_elsewhere = True


@dataclass(slots=True)
class _Armed:
    action: str
    first_hit: int  # fires from this hit on, counted from 1
    last_hit: int
    share: float = 1.0
    draw: random.Random = field(default_factory=random.Random)
    hits: int = 0
    fired: int = 0


_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Arm the points of `spec`: `point=action[@hit|%share/seed]`, comma separated. Raises
    `ConfigError` for unknown names and for what is no number or share."""
    for item in filter(None, (part.strip() for part in spec.split(","))):
        point, _, action = item.partition("=")
        action, _, drawn = action.partition("%")
        action, _, hit = action.partition("@")
        if point not in POINTS:
            raise ConfigError(f"unknown fault point {point!r}; known: {', '.join(sorted(POINTS))}")
        if action not in ACTIONS:
            raise ConfigError(f"unknown fault action {action!r}; known: {sorted(ACTIONS)}")
        if hit and not hit.isdigit():
            raise ConfigError(f"fault hit must be a number, got {hit!r}")
        first = int(hit) if hit else 1
        share, seed = _share(drawn) if drawn else (1.0, "")
        last = first if hit else 2**62
        _armed[point] = _Armed(action, first, last, share, random.Random(seed))


def _share(text: str) -> tuple[float, str]:
    share, _, seed = text.partition("/")
    try:
        if 0.0 < float(share) <= 1.0 and seed.isdigit():
            return float(share), seed
    except ValueError:
        pass
    raise ConfigError(f"a share of hits is above 0, at most 1, and has a seed, got {text!r}")


def arm_from_environment(*, loopback_only: bool) -> None:
    """Arm HEADRACE_FAULTS if set. Raises `ConfigError` when it is set on an open process."""
    spec = os.environ.get("HEADRACE_FAULTS", "")
    if not spec:
        return
    if not loopback_only:
        raise ConfigError("HEADRACE_FAULTS is set, but this process does not listen on loopback")
    arm(spec)


def disarm() -> None:
    """Forget every armed point and its counts."""
    _armed.clear()


def fired(point: str) -> int:
    """How often `point` took effect in this process."""
    armed = _armed.get(point)
    return armed.fired if armed else 0


def hit(point: str) -> str | None:
    """Pass a fault point. Returns None when nothing is to happen, else the action's name for the
    caller to carry out (`drop`, `duplicate`, `flip`, `nan`); the others happen here. `raise`,
    `assert` and `memory` raise `InjectedFault`, `AssertionError` and `MemoryError`; `exit` ends the
    process at once, as SIGKILL would: no handlers, no flushing."""
    if not _armed:
        return None
    armed = _armed.get(point)
    if armed is None:
        return None
    armed.hits += 1
    if not armed.first_hit <= armed.hits <= armed.last_hit:
        return None
    if armed.share < 1.0 and armed.draw.random() >= armed.share:
        return None
    armed.fired += 1
    if armed.action == "raise":
        raise InjectedFault(f"fault point {point} fired")
    if armed.action == "assert":
        raise AssertionError(f"fault point {point} fired")
    if armed.action == "memory":
        raise MemoryError
    if armed.action == "exit":
        os._exit(137)
    if armed.action == "sleep":
        time.sleep(5.0)
        return None
    return armed.action
