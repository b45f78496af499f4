"""What the supervisor does about a missing role, as a pure rule under a fake clock."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import pytest

from headrace.cluster.session import read_process
from headrace.cluster.supervisor import Action, Watch, Watched, check_builds
from headrace.core.card import Member, ModelCard, Role
from headrace.core.clock import FakeClock
from headrace.core.errors import ConfigError
from headrace.core.ids import BootId
from headrace.core.states import ReplicaState

CARD = ModelCard(
    "t1", "w", b"l" * 32, "invariant-fp64", 4096, 4096, 32, 6, 6, 17920, 1000, 0, 1, 4001
)
NO_PROCESS = 2**22 + 1  # above the kernel's largest process id


def member(name: str = "decode-0", *, boot: str = "b1", pid: int = 0, build: str = "1") -> Member:
    return Member(
        Role.DECODE,
        name,
        BootId(boot),
        "tcp://127.0.0.1:1",
        pid or os.getpid(),
        build,
        ReplicaState.READY,
        CARD,
        1,
        1,
        1,
    )


def watch(clock: FakeClock) -> Watch:
    made = Watch(restart_after_s=20.0, first_s=180.0, clock=clock)
    made.expect([(Role.DECODE, "decode-0"), (Role.DECODE, "decode-1")])
    return made


def test_present_roles_need_nothing() -> None:
    clock = FakeClock()
    watched = watch(clock)
    for _ in range(1000):
        assert watched.look([member("decode-0"), member("decode-1")]) == {}
        clock.advance(1.0)
    assert watched.roles["decode-0"].lives == 1


def test_a_living_process_that_went_missing_is_killed_once_and_then_given_time() -> None:
    clock = FakeClock()
    watched = watch(clock)
    watched.look([member("decode-0"), member("decode-1")])
    actions = []
    for second in range(1, 230):
        clock.advance(1.0)
        for name, action in watched.look([member("decode-1")]).items():
            actions.append((second, name, action))
    # 20 s of patience; then a start takes up to 180 s before it is tried again
    assert actions == [(21, "decode-0", Action.KILL), (202, "decode-0", Action.KILL)]
    assert watched.roles["decode-0"].revived == 2


def test_a_dead_process_is_left_to_ray_unless_ray_gave_up() -> None:
    clock = FakeClock()
    watched = watch(clock)
    watched.look([member("decode-0", pid=NO_PROCESS), member("decode-1")])
    clock.advance(21.0)
    assert watched.look([member("decode-1")]) == {"decode-0": Action.ENSURE}


def test_a_reused_process_id_is_not_killed() -> None:
    clock = FakeClock()
    watched = watch(clock)
    watched.look([member("decode-0"), member("decode-1")])
    mine = read_process(os.getpid())
    assert mine is not None
    assert watched.roles["decode-0"].started_ticks == mine.started_ticks
    watched.roles["decode-0"].started_ticks -= 1  # as if another had this id now
    clock.advance(21.0)
    assert watched.look([member("decode-1")]) == {"decode-0": Action.ENSURE}


def test_a_role_that_never_came_gets_the_time_of_a_start() -> None:
    clock = FakeClock()
    watched = watch(clock)
    clock.advance(180.0)
    assert watched.look([member("decode-1")]) == {}
    clock.advance(1.0)
    assert watched.look([member("decode-1")]) == {"decode-0": Action.ENSURE}


def test_coming_back_in_time_is_no_case_for_action_and_counts_a_life() -> None:
    clock = FakeClock()
    watched = watch(clock)
    watched.look([member("decode-0"), member("decode-1")])
    clock.advance(19.0)
    assert watched.look([member("decode-1")]) == {}
    clock.advance(0.5)
    assert watched.look([member("decode-0", boot="b2"), member("decode-1")]) == {}
    clock.advance(19.0)
    assert watched.look([member("decode-1")]) == {}
    assert watched.roles["decode-0"].lives == 2


def test_the_count_goes_on_in_the_next_supervisor() -> None:
    clock = FakeClock()
    first, second = watch(clock), watch(clock)
    for boot in ("b1", "b2"):
        first.look([member("decode-0", boot=boot), member("decode-1")])
    clock.advance(21.0)
    first.look([member("decode-1")])
    second.remember([asdict(first.roles["decode-0"]), asdict(Watched(Role.DECODE, "gone", 0.0))])
    assert second.roles["decode-0"].state == "absent" and "gone" not in second.roles
    second.look([member("decode-0", boot="b2")])
    assert (second.roles["decode-0"].lives, second.roles["decode-0"].revived) == (2, 1)
    second.look([member("decode-0", boot="b3"), member("decode-1")])
    assert [one.lives for one in second.roles.values()] == [3, 1]


def test_time_without_redis_is_nobodys_absence() -> None:
    clock = FakeClock()
    watched = watch(clock)
    watched.look([member("decode-0"), member("decode-1")])
    for _ in range(60):
        clock.advance(1.0)
        watched.blind()
    assert watched.look([]) == {}  # every lease ran out meanwhile
    clock.advance(20.0)
    assert watched.look([member("decode-1")]) == {}
    clock.advance(1.0)
    assert watched.look([member("decode-1")]) == {"decode-0": Action.KILL}


def test_builds_may_mix_only_over_one_layout() -> None:
    other_layout = replace(CARD, layout_id=b"m" * 32)
    one, two = member(build="1+ga"), member("decode-1", build="1+gb")
    router = replace(member("router-0", build="1+gc"), card=None)
    check_builds([one, two, router])
    check_builds([one, replace(one, name="decode-1", card=other_layout)])
    with pytest.raises(ConfigError, match=r"1\+ga, 1\+gb"):
        check_builds([one, replace(two, card=other_layout), router])
