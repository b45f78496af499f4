"""What decides who stays in a store: settings with their bounds, and the rules as pure functions.

Nothing here holds state or does I/O; `order` and `eviction` apply it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError

# Of a segment that is reused at most this share may be kept. What must stay (pins, guarantees) is
# bounded by the same share of the disk, so some segment can always give something.
MUST_STAY_MOST = 0.75
MAX_DOMAIN_SHARES = 64  # each costs a look at every choice of a victim


@dataclass(frozen=True, slots=True)
class DomainShare:
    """One cache domain's part of every tier. `guaranteed`: others' objects never push it below
    this. `most`: it never takes more, even if nobody else needs the room. Domains without an entry
    have no guarantee and share one bound: what the guarantees of others leave is never theirs for
    long, but they may borrow it while it is unused."""

    domain: str
    guaranteed: float = 0.0
    most: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.domain, str) or not self.domain:
            raise ConfigError("domain_shares: domain must name a cache domain, got ''")
        for name, value in (("guaranteed", self.guaranteed), ("most", self.most)):
            check_number(f"domain_shares: {name} of {self.domain}", value, 0.0, 1.0)
        if self.most < self.guaranteed or self.most <= 0.0:
            raise ConfigError(
                f"domain_shares: most of {self.domain} must be above 0 and at least its guaranteed"
                f" {self.guaranteed}, got {self.most}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """Parameters of eviction and admission. Raises `ConfigError` naming key, bound and value.

    `probation_share` of a kind's arena slots is for objects that only one request has used; while
    they hold more they go before all others. `second_chance_share` of a reused segment is for
    objects that were used since they were written. A window record or picture that nobody used for
    `window_ttl_s` or `picture_ttl_s` leaves the arena. A window record goes to disk at once when it
    takes at most `window_cost_share` of the bytes of the blocks before it, else when it is used a
    second time. `pin_share` of the disk is the most that pins hold."""

    probation_share: float = 0.25
    second_chance_share: float = 0.5
    window_ttl_s: float = 1800.0
    picture_ttl_s: float = 1800.0
    window_cost_share: float = 0.25
    pin_share: float = 0.25
    domain_shares: tuple[DomainShare, ...] = ()
    ahead_slots: int = 1024  # of the arena, granted to one client in advance; 0: none

    def __post_init__(self) -> None:
        check_number("probation_share", self.probation_share, 0.01, 0.5)
        check_number("second_chance_share", self.second_chance_share, 0.0, MUST_STAY_MOST)
        check_number("window_ttl_s", self.window_ttl_s, 1.0, 604_800.0)
        check_number("picture_ttl_s", self.picture_ttl_s, 1.0, 604_800.0)
        check_number("window_cost_share", self.window_cost_share, 0.0, 1000.0)
        check_number("pin_share", self.pin_share, 0.0, MUST_STAY_MOST)
        names = [share.domain for share in self.domain_shares]
        if len(names) > MAX_DOMAIN_SHARES:
            raise ConfigError(
                f"domain_shares must have at most {MAX_DOMAIN_SHARES} entries, got {len(names)}"
            )
        if len(set(names)) != len(names):
            raise ConfigError("domain_shares: a domain stands twice")
        must_stay = self.pin_share + sum(share.guaranteed for share in self.domain_shares)
        if must_stay > MUST_STAY_MOST + 1e-9:
            raise ConfigError(
                f"pin_share and all guaranteed shares together must be at most {MUST_STAY_MOST},"
                f" got {must_stay:g}"
            )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raises `ConfigError` unless `value` is a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must lie between {low} and {high}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one group of domains may hold of `total` slots: never pushed below `guaranteed`, never
    above `most`."""

    guaranteed: int
    most: int


COMMON = 0  # the group of all domains without a share of their own


def allowances(shares: Sequence[DomainShare], total: int) -> tuple[Allowance, ...]:
    """By group number: `COMMON` first, then the shares in order. Guarantees are rounded down, so
    that together they never exceed what was promised; `most` is at least one slot."""
    named = tuple(
        Allowance(int(total * share.guaranteed), max(1, int(total * share.most)))
        for share in shares
    )
    return (Allowance(0, total), *named)


def may_lose(groups: Sequence[Allowance], used: Sequence[int], asking: int) -> tuple[int, ...]:
    """The groups that may lose an object so that `asking` may have its room, in order of choice
    being free among them. Empty: nobody may.

    A group at its `most` replaces its own. Below its guarantee it takes back what others borrowed,
    its own going only if they have nothing. Otherwise whoever is above their guarantee, and the
    asking group itself, since that takes nothing from it."""
    if used[asking] >= groups[asking].most:
        return (asking,)
    borrowed = tuple(
        number
        for number, group in enumerate(groups)
        if number != asking and used[number] > group.guaranteed
    )
    if used[asking] < groups[asking].guaranteed:
        return borrowed or (asking,)
    return (*borrowed, asking)


def window_pays(window_bytes: int, blocks: int, block_bytes: int, cost_share: float) -> bool:
    """Whether a window record after `blocks` blocks is small enough beside them to be persisted on
    its first use (kvstore.md decision 4: 25 %). One whose writer did not say where it stands (0)
    is."""
    return not blocks or window_bytes <= cost_share * blocks * block_bytes
