"""Who leaves the arena first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.core.clock import FakeClock
from headrace.kvstore.order import LeaveOrder
from headrace.kvstore.policy import Allowance, DomainShare, allowances

ONE = (Allowance(0, 8),)


def filled(order: LeaveOrder[str], names: str, *, proven: bool = False, group: int = 0) -> None:
    for name in names:
        order.taken[group] += 1
        order.enter(name, group, proven=proven)
        order.allow(name)


def drained(order: LeaveOrder[str], group: int = 0) -> str:
    out = ""
    while (victim := order.victim(group)) is not None:
        order.leave(victim)
        out += victim
    return out


def test_what_only_one_request_used_goes_first_while_it_has_more_than_its_share():
    order: LeaveOrder[str] = LeaveOrder(8, ONE, 0.25, FakeClock())
    filled(order, "AB", proven=True)
    filled(order, "cdef")
    order.use("A", again=True)
    # c, d: four in probation, two may be; then the oldest proven one, and at the end the rest
    assert drained(order) == "cdBAef"


def test_a_second_request_takes_it_out_of_probation_and_the_same_one_does_not():
    order: LeaveOrder[str] = LeaveOrder(4, ONE, 0.25, FakeClock())
    filled(order, "abcd")
    order.use("a", again=True)
    order.use("b", again=False)
    assert order.in_probation == 3
    assert drained(order) == "cdab"


def test_what_is_held_is_no_victim_and_comes_back_last():
    order: LeaveOrder[str] = LeaveOrder(4, ONE, 1.0, FakeClock())
    filled(order, "abc")
    order.forbid("a")
    order.use("a", again=False)  # held: stays out of the queues
    assert "a" not in order and order.victim(0) == "b"
    assert order.allow("a") and not order.allow("a")
    assert drained(order) == "bca"
    assert order.taken == [0] and len(order) == 0


def test_idle_ones_are_those_not_used_since():
    clock = FakeClock()
    order: LeaveOrder[str] = LeaveOrder(4, ONE, 0.5, clock)
    filled(order, "abc")
    clock.advance(10)
    order.use("b", again=True)
    assert list(order.unused_since(clock.now_s() - 9)) == ["a"]  # the queue waits for a to leave
    gone = []
    for item in order.unused_since(clock.now_s() - 9):
        order.leave(item)
        gone.append(item)
    assert gone == ["a", "c"]


def test_what_comes_back_before_a_whole_arena_has_left_was_let_go_too_early():
    order: LeaveOrder[str] = LeaveOrder(3, ONE, 0.5, FakeClock())
    filled(order, "abc")
    left = {}
    for name in "abc":
        order.leave(name)
        left[name] = order.departures
    assert left == {"a": 1, "b": 2, "c": 3}
    assert order.left_lately(1) and order.left_lately(3) and not order.left_lately(0)
    filled(order, "d")
    order.leave("d")
    assert not order.left_lately(1) and order.left_lately(2)


SHARES = (DomainShare("a", 0.3, 0.5), DomainShare("b", 0.25, 1.0), DomainShare("c", 0.0, 0.2))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("use"), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("hold"), st.integers(0, 40), st.booleans()),
    ),
    max_size=120,
)


@hypothesis_settings(max_examples=300, deadline=None)
@given(slots=st.integers(4, 12), steps=STEPS)
def test_shares_are_kept_and_counts_add_up(slots, steps):
    groups = allowances(SHARES, slots)
    order: LeaveOrder[int] = LeaveOrder(slots, groups, 0.25, FakeClock())
    of: dict[int, int] = {}
    proven: dict[int, bool] = {}
    held: set[int] = set()
    for number, (what, at, flag) in enumerate(steps):
        item = sorted(of)[at % len(of)] if of and what != "put" else None
        if what == "put":
            used = [sum(g == group for g in of.values()) for group in range(4)]
            if sum(used) == slots or order.full_for(at):
                victim = order.victim(at)
                if victim is None:
                    # nobody may: what is not held is protected from this group
                    free = [i for i in of if i not in held]
                    assert all(
                        of[i] != at
                        and (used[at] >= groups[at].most or used[of[i]] <= groups[of[i]].guaranteed)
                        for i in free
                    )
                    continue
                loser = of.pop(victim)
                assert victim not in held
                assert loser == at or used[loser] > groups[loser].guaranteed
                assert used[at] < groups[at].most or loser == at
                order.leave(victim)
                proven.pop(victim)
            order.taken[at] += 1
            order.enter(number, at, proven=flag)
            order.allow(number)
            of[number], proven[number] = at, flag
        elif item is not None and what == "use":
            order.use(item, again=flag)
            proven[item] |= flag
        elif item is not None and flag:
            held.add(item)
            order.forbid(item)
        elif item is not None:
            held.discard(item)
            order.allow(item)
        held &= set(of)
        used = [sum(g == group for g in of.values()) for group in range(4)]
        assert order.taken == used and len(order) == sum(used)
        assert all(u <= g.most for u, g in zip(used, groups, strict=True))
        assert order.may_leave() == set(of) - held
        assert order.in_probation == sum(not p for p in proven.values())


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(("hold", "use", "again")))))
def test_many_at_once_leave_as_one_after_another(steps):
    orders = [LeaveOrder[str](8, ONE, 0.5, FakeClock()) for _ in range(2)]
    for order in orders:
        filled(order, "abcdef")
        for name, step in steps:
            if step == "hold":
                order.forbid(name)
            else:
                order.use(name, again=step == "again")
    alone, together = orders
    told = [alone.allow(name) for name in "fadbec"]
    assert together.allow_all("fadbec") is (True in told)
    assert not together.allow_all("abc")
    assert drained(alone) == drained(together)
