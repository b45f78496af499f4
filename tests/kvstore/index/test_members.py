"""Membership: leases, boots, and a Redis that is stopped or forgets."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import pytest_asyncio
import redis

from headrace.core.card import Member, Role
from headrace.core.ids import new_boot_id
from headrace.core.limits import LeaseTimes
from headrace.core.states import ReplicaState
from headrace.kvstore import Beat, MemberBoard, embedded_valkey
from headrace.kvstore.members import CALL_S

pytestmark = pytest.mark.redis
# A record must live on until it is looked at, on a busy machine too.
TIMES = LeaseTimes(member_s=1.5, member_beat_s=0.1)


def member(name: str = "decode-0", role: Role = Role.DECODE) -> Member:
    return Member(
        role=role,
        name=name,
        boot_id=new_boot_id(),
        address="tcp://127.0.0.1:1",
        pid=1,
        build="test",
        state=ReplicaState.READY,
        card=None,
        max_rows_per_step=1,
        n_blocks=2,
        n_slots=3,
    )


@pytest_asyncio.fixture
async def board_for():
    made: list[MemberBoard] = []

    def make(url: str, cluster: str = "c", call_s: float = 5.0) -> MemberBoard:
        """Where nothing stops Redis, an answer that is late on a busy machine is an answer."""
        made.append(MemberBoard(url, cluster, times=TIMES, call_s=call_s))
        return made[-1]

    yield make
    for board in made:
        await board.close()


async def test_announced_members_are_seen_by_all_and_withdrawn_ones_are_not(valkey, board_for):
    board, other, elsewhere = (
        board_for(valkey.url),
        board_for(valkey.url),
        board_for(valkey.url, "d"),
    )
    decode, prefill = member(), member("prefill-0", Role.PREFILL)
    assert await board.announce(decode) and await board.announce(prefill)
    assert await other.members() == (decode, prefill) and not other.stale
    assert await elsewhere.members() == ()
    assert await board.withdraw(decode) and not await board.withdraw(decode)
    assert await other.members() == (prefill,)


async def test_a_restarted_process_is_another_boot_and_the_old_one_withdraws_nothing(
    valkey, board_for
):
    board = board_for(valkey.url)
    old = member()
    new = replace(old, boot_id=new_boot_id())
    await board.announce(old)
    await board.announce(new)
    assert await board.members() == (new,)
    assert not await board.withdraw(old)
    assert await board.members() == (new,)


async def test_a_member_that_does_not_beat_is_gone_with_its_lease(valkey, board_for, wait_until):
    board = board_for(valkey.url)
    await board.announce(member())
    assert len(await board.members()) == 1

    async def gone() -> bool:
        return await board.members() == () and not board.stale

    await wait_until(gone)


async def test_a_beat_carries_the_state_of_its_moment(valkey, board_for, wait_until):
    board, other = board_for(valkey.url), board_for(valkey.url)
    now = member()
    beat = Beat(board, lambda: now, TIMES)
    assert await beat.start()
    await asyncio.sleep(TIMES.member_s + 0.3)
    assert await other.members() == (now,)
    now = replace(now, state=ReplicaState.DRAINING)
    assert await beat.now()
    (seen,) = await other.members()
    assert seen.state is ReplicaState.DRAINING
    await beat.stop()
    await beat.stop()
    assert await other.members() == () and not other.stale


async def test_a_beat_survives_what_making_a_record_raises(valkey, board_for, wait_until):
    board = board_for(valkey.url)
    calls = 0

    def make() -> Member:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise RuntimeError("not yet")
        return member()

    async with Beat(board, make, TIMES) as beat:
        assert beat.beats == 0

        async def there() -> bool:
            return len(await board.members()) == 1

        await wait_until(there)


async def test_records_that_ran_out_while_redis_was_stopped_end_nobody(own_valkey, board_for):
    board = board_for(own_valkey.url, call_s=CALL_S)
    other = board_for(own_valkey.url, call_s=CALL_S)
    one = member()
    await board.announce(one)
    assert await other.members() == (one,)
    os.kill(own_valkey.process.pid, signal.SIGSTOP)
    assert await other.members() == (one,) and other.stale
    await asyncio.sleep(TIMES.member_s)
    os.kill(own_valkey.process.pid, signal.SIGCONT)
    link = redis.Redis.from_url(own_valkey.url)
    assert link.keys("*member:*") == []
    for _ in range(100):  # until Redis is no longer avoided for what it missed
        seen = await other.members()
        assert seen == (one,) and other.stale
        if other.healthy:
            break
        await asyncio.sleep(0.01)
    assert other.healthy
    await asyncio.sleep(TIMES.member_s + 0.05)  # and nobody announced it again
    assert await other.members() == () and not other.stale


async def test_a_stopped_redis_leaves_the_last_known(own_valkey, board_for, wait_until):
    board = board_for(own_valkey.url, call_s=CALL_S)
    other = board_for(own_valkey.url, call_s=CALL_S)
    one = member()
    async with Beat(board, lambda: one, TIMES):
        assert await other.members() == (one,)
        os.kill(own_valkey.process.pid, signal.SIGSTOP)
        for _ in range(6):
            assert await other.members() == (one,) and other.stale
        assert not await board.announce(one)
        os.kill(own_valkey.process.pid, signal.SIGCONT)

        async def fresh() -> bool:
            return await other.members() == (one,) and not other.stale

        await wait_until(fresh)


async def test_a_redis_that_comes_back_empty_ends_nobody(home, own_valkey, board_for, wait_until):
    board = board_for(own_valkey.url)
    one, two = member("decode-0"), member("decode-1")
    await board.announce(one)
    await board.announce(two)
    assert await board.members() == (one, two)
    own_valkey.process.kill()
    own_valkey.process.wait(10)
    assert await board.members() == (one, two) and board.stale
    server = embedded_valkey(home)
    try:

        async def answered() -> bool:
            return await board.members() == (one, two) and board.healthy

        await wait_until(answered)
        assert board.stale  # for one lease, in which the living announce themselves
        assert await board.announce(one)

        async def settled() -> bool:
            await board.announce(one)
            return await board.members() == (one,) and not board.stale

        await wait_until(settled)
    finally:
        server.stop()


async def test_keys_that_are_none_of_ours_are_replaced_or_passed_over(valkey, board_for):
    plain = redis.Redis.from_url(valkey.url)
    plain.set("headrace:{c}:members", "x")
    board = board_for(valkey.url)
    one = member()
    assert await board.members() == () and not board.stale
    assert await board.announce(one)
    assert await board.members() == (one,)
    plain.zadd("headrace:{c}:members", {"headrace:{c}:member:decode:x": 1, b"\xff": 2})
    plain.set("headrace:{c}:member:decode:x", b"garbage")
    plain.set(b"\xff", one.encode())
    assert await board.members() == (one,)
    plain.delete(board.key(one))
    plain.rpush(board.key(one), "x")  # a record of another type
    assert await board.announce(one) and await board.members() == (one,)
    plain.close()


async def test_nobody_there_is_false_and_empty_and_never_an_error(home, board_for):
    board = board_for(f"unix://{home}/none.sock")
    assert not await board.announce(member()) and not await board.withdraw(member())
    assert await board.members() == () and board.stale
    beat = Beat(board, member, TIMES)
    assert not await beat.start()
    await beat.stop()


async def test_boards_of_two_clusters_are_told_apart_by_token(valkey, role_for):
    role = role_for()
    role = replace(role, redis_url=valkey.url)
    other = replace(role, token="another token")
    boards = [MemberBoard.of(r) for r in (role, role, other)]
    one = member()
    await boards[0].announce(one)
    assert [await board.members() for board in boards] == [(one,), (one,), ()]
    for board in boards:
        await board.close()


async def test_a_store_announces_itself_and_withdraws(listed_rig, wait_until):
    board = MemberBoard.of(listed_rig.role)
    await listed_rig.start()
    (seen,) = await board.members()
    assert (seen.role, seen.name, seen.pid) == (Role.STORE, "store-0", os.getpid())
    assert seen.address == listed_rig.role.listen and seen.card is None
    await listed_rig.restart()
    (again,) = await board.members()
    assert again.boot_id != seen.boot_id
    await listed_rig.stop()
    assert await board.members() == ()
    await board.close()
