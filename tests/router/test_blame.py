"""Blame, as rounds of a game: requests lie on replicas, some replicas are lost, the rest answer."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.router.blame import Suspicion, charge_loss


def placed(rng: random.Random, open_: list[Suspicion], n_replicas: int, round_: int) -> list[str]:
    """Put each of `open_` on a replica at random, none that is apart beside another; returns the
    replicas. Who finds no place waits for another round."""
    names = [f"{round_}-{i}" for i in range(n_replicas)]
    free = set(names)
    for one in open_:
        one.begins_anew()
        choice = sorted(free) if one.apart else names
        if choice:
            one.given(name := rng.choice(choice))
            if one.apart:
                free.discard(name)
    return names


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_one_that_kills_is_found_and_nobody_else(
    n_innocent: int, n_replicas: int, crashes: int, rng: random.Random
) -> None:
    bad = Suspicion()
    innocent = [Suspicion() for _ in range(n_innocent)]
    for round_ in range(100):
        if bad.guilty:
            break
        open_ = [bad, *(one for one in innocent if one.losses or rng.random() < 0.7)]
        rng.shuffle(open_)
        names = placed(rng, open_, n_replicas, round_)
        for name in set(bad.had_by):
            charge_loss(name, open_, crashes)
        for one in innocent:
            if one.had_by & set(names):
                one.acquit(None)
    assert bad.guilty and crashes <= bad.losses <= crashes + 1
    assert not any(one.guilty for one in innocent)


@given(st.integers(2, 20), st.integers(1, 6), st.randoms(use_true_random=False))
def test_who_is_lost_with_others_again_and_again_is_not_guilty(
    n: int, n_losses: int, rng: random.Random
) -> None:
    """As long as at least two lie together whenever a replica is lost."""
    suspicions = [Suspicion() for _ in range(n)]
    for round_ in range(n_losses):
        together = [one for one in suspicions if not one.apart]
        for one in together:
            one.begins_anew()
            one.given(str(round_))
        if len(together) > 1:
            charge_loss(str(round_), suspicions, 2)
    assert not any(one.guilty for one in suspicions)
    assert {one.losses for one in suspicions} == {min(n_losses, 2)}
    assert {one.apart for one in suspicions} == {n_losses >= 2}


def test_an_attempt_is_charged_once_and_the_loss_of_somebody_guilty_to_nobody_else() -> None:
    pair, other = Suspicion(), Suspicion()
    pair.given("prefill")
    pair.given("decode")
    for name in ("prefill", "decode"):
        charge_loss(name, [pair], 2)
    assert pair.losses == 1 and not pair.had_by
    pair.begins_anew()
    for one in (pair, other):
        one.given("next")
    charge_loss("next", [pair, other], 2)
    assert (pair.losses, pair.apart, pair.guilty) == (2, True, False)
    assert (other.losses, other.apart) == (1, False)
    for one in (pair, other):
        one.begins_anew()
        one.given("third")
    charge_loss("third", [pair, other], 2)
    assert (pair.losses, pair.guilty) == (3, True)
    assert (other.losses, other.apart, other.guilty) == (1, False, False)
