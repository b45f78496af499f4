"""The rules of shares and windows, value by value."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.kvstore.policy import (
    Allowance,
    DomainShare,
    StorePolicy,
    allowances,
    may_lose,
    window_pays,
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: StorePolicy(probation_share=0),
            "probation_share must lie between 0.01 and 0.5, got 0",
        ),
        (
            lambda: StorePolicy(second_chance_share=0.8),
            "second_chance_share must lie between 0.0 and 0.75, got 0.8",
        ),
        (lambda: StorePolicy(window_ttl_s="x"), "window_ttl_s must be a number, got 'x'"),
        (
            lambda: StorePolicy(picture_ttl_s=0.5),
            "picture_ttl_s must lie between 1.0 and 604800.0, got 0.5",
        ),
        (
            lambda: StorePolicy(window_cost_share=-1),
            "window_cost_share must lie between 0.0 and 1000.0, got -1",
        ),
        (
            lambda: StorePolicy(pin_share=0.5, domain_shares=(DomainShare("a", 0.3),)),
            "pin_share and all guaranteed shares together must be at most 0.75, got 0.8",
        ),
        (
            lambda: StorePolicy(domain_shares=(DomainShare("a"), DomainShare("a"))),
            "domain_shares: a domain stands twice",
        ),
        (
            lambda: StorePolicy(domain_shares=tuple(DomainShare(f"d{i}") for i in range(65))),
            "domain_shares must have at most 64 entries, got 65",
        ),
        (lambda: DomainShare(""), "domain_shares: domain must name a cache domain, got ''"),
        (
            lambda: DomainShare("a", 0.5, 0.4),
            "domain_shares: most of a must be above 0 and at least its guaranteed 0.5, got 0.4",
        ),
        (
            lambda: DomainShare("a", 1.5),
            "domain_shares: guaranteed of a must lie between 0.0 and 1.0, got 1.5",
        ),
    ],
)
def test_every_bound_is_said_with_the_value(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.message == words


def test_shares_become_slots_rounded_down_and_never_none_at_all():
    shares = (DomainShare("a", 0.29, 0.5), DomainShare("b", 0.0, 0.001))
    assert allowances(shares, 100) == (Allowance(0, 100), Allowance(28, 50), Allowance(0, 1))


@pytest.mark.parametrize(
    ("used", "asking", "groups"),
    [
        ((9, 1, 0), 0, (0,)),  # a is within its guarantee, b has nothing: the common ones' own
        ((6, 3, 1), 0, (1, 2, 0)),
        ((6, 2, 2), 1, (0, 2, 1)),
        ((8, 1, 1), 1, (0, 2)),  # below its guarantee: takes back, and spares its own
        ((0, 1, 0), 1, (1,)),
        ((3, 5, 2), 1, (1,)),  # at its most
        ((3, 5, 2), 2, (0, 1, 2)),
    ],
)
def test_who_may_lose_for_whom(used, asking, groups):
    allowed = (Allowance(0, 10), Allowance(2, 5), Allowance(0, 10))
    assert may_lose(allowed, used, asking) == groups


def test_a_window_record_pays_from_48_blocks_of_flash_on():
    flash = (1_341_120, 113_920)
    assert not window_pays(flash[0], 47, flash[1], 0.25) and window_pays(
        flash[0], 48, flash[1], 0.25
    )
    assert window_pays(flash[0], 0, flash[1], 0.25)  # a writer that does not say where it stands
    assert not window_pays(flash[0], 10**6, flash[1], 0.0)
