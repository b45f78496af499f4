"""Membership: leased records in Redis, and the beat that renews one.

    headrace:{cluster}:member:role:name   core.card.Member as msgpack, PX member_s
    headrace:{cluster}:members            sorted set of these keys, score = Unix seconds
    headrace:{cluster}:age                random bytes set once: gone when Redis lost its memory
    headrace:{cluster}:salt               mark of the salt that the routers use, PX member_s

An empty answer and a lost memory look alike in the records; the third key tells them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any

from headrace.core.card import Member
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.errors import WireError
from headrace.core.limits import LeaseTimes
from headrace.core.role import RoleSettings
from headrace.kvstore.redis_link import RedisAway, RedisLink, WrongType
from headrace.kvstore.redis_servers import Client

log = logging.getLogger(__name__)
CALL_S = 0.25  # not on the request path: a slow answer is better than a stale one
_FORGET_S = 3600.0  # names that have not announced themselves for so long leave the set

# Remove a record only if it is still the one this boot wrote.
_WITHDRAW = """
local record = redis.pcall('GET', KEYS[1])
if type(record) == 'string' and string.find(record, ARGV[1], 1, true) then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], KEYS[1])
  return 1
end
return 0
"""


# KEYS[1]: the mark, ARGV: this router's, PX. 1 when it stands there now.
_SAME_SALT = """
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'string' and value ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_LEAVE_SALT = """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class MemberBoard:
    """The members of one cluster. No method raises for what Redis does.

    `stale` is True when the last `members()` was answered from memory: Redis was away, or lost what
    it knew less than one lease ago. Used from one event loop."""

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        *,
        times: LeaseTimes | None = None,
        clock: Clock = SYSTEM_CLOCK,
        call_s: float = CALL_S,
    ) -> None:
        """`call_s`: the deadline of every call to Redis."""
        self._times = times or LeaseTimes()
        self._clock = clock
        self._link = RedisLink(redis_url, call_s, clock)
        # In braces: one hash slot for all, since scripts and MGET name several of these keys.
        self._prefix = f"headrace:{{{cluster}}}:"
        self._set_key = f"{self._prefix}members"
        self._age_key = f"{self._prefix}age"
        self._salt_key = f"{self._prefix}salt"
        self._known: dict[str, Member] = {}
        self._age: bytes | None = None
        self._grace_until_s = 0.0
        self._answered_s = -math.inf  # when `members()` last had an answer,
        self._missed = False  # and whether one was missing since
        self.stale = True

    @staticmethod
    def of(role: RoleSettings, *, clock: Clock = SYSTEM_CLOCK) -> MemberBoard:
        """The board of the cluster a role belongs to. Clusters that share a Redis are told apart by
        their tokens, which all roles of one cluster know (only a hash of it becomes a key)."""
        return MemberBoard(
            role.redis_url,
            hashlib.sha256(b"headrace-cluster" + role.token.encode()).hexdigest()[:16],
            times=role.deployment.leases,
            clock=clock,
        )

    @property
    def healthy(self) -> bool:
        """Whether Redis answered the last call."""
        return self._link.healthy

    def key(self, member: Member) -> str:
        return f"{self._prefix}member:{member.role.value}:{member.name}"

    async def announce(self, member: Member) -> bool:
        """Write a record that lives `member_s`; False when Redis did not take it."""
        key, record = self.key(member), member.encode()
        now_s = self._clock.wall_s()

        async def write(client: Client) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                pipe.set(key, record, px=max(1, round(self._times.member_s * 1000)))
                pipe.set(self._age_key, secrets.token_bytes(8), nx=True)
                pipe.zadd(self._set_key, {key: now_s})
                pipe.zremrangebyscore(self._set_key, "-inf", now_s - _FORGET_S)
                return await pipe.execute()

        for attempt in range(2):
            try:
                await self._link.call(write)
                return True
            except WrongType:
                if attempt or not await self._remove_foreign():
                    return False
            except RedisAway:
                return False
        return False

    async def withdraw(self, member: Member) -> bool:
        """Remove the record if it is still this boot's; True when it was."""

        async def remove(client: Client) -> Any:
            return await client.eval(
                _WITHDRAW, 2, self.key(member), self._set_key, member.boot_id.encode()
            )

        try:
            return bool(await self._link.call(remove))
        except RedisAway:
            return False

    async def members(self) -> tuple[Member, ...]:
        """The live members, by role and name; the last known ones when Redis does not answer.

        Redis that came back ends nobody: it may be empty, and records may have run out while it
        answered nobody. For one lease, in which every live member announces itself again, the known
        ones are kept."""
        try:
            age, found = await self._link.call(self._fetch)
        except RedisAway:
            self.stale = self._missed = True
            return self._sorted()
        now_s = self._clock.now_s()
        emptied = self._age is not None and age != self._age
        if emptied or (self._missed and self._may_have_lapsed(now_s)):
            self._grace_until_s = now_s + self._times.member_s
        self._age, self._answered_s, self._missed = age, now_s, False
        self.stale = now_s < self._grace_until_s
        self._known = {**self._known, **found} if self.stale else found
        return self._sorted()

    async def same_salt(self, mark: bytes) -> bool:
        """Say which salt this router uses; False while another one of this cluster lives and uses
        another. True too when Redis does not answer: then nobody finds anything anyway."""
        life_ms = max(1, round(self._times.member_s * 1000))
        try:
            key = self._salt_key.encode()
            return bool(await self._link.script(_SAME_SALT, [key], mark, life_ms))
        except RedisAway:
            return True

    async def leave_salt(self, mark: bytes) -> None:
        """A router ends: whoever of the others lives says the mark again with its next beat."""
        with contextlib.suppress(RedisAway):
            await self._link.script(_LEAVE_SALT, [self._salt_key.encode()], mark)

    async def close(self) -> None:
        await self._link.close()

    async def _fetch(self, client: Client) -> tuple[bytes | None, dict[str, Member]]:
        async with client.pipeline(transaction=False) as pipe:
            pipe.get(self._age_key)
            pipe.zrange(self._set_key, 0, -1)
            age, keys = await pipe.execute(raise_on_error=False)
        if not isinstance(keys, list):  # a set of another type: as good as none
            keys = []
        found: dict[str, Member] = {}
        for key, record in zip(keys, await client.mget(keys) if keys else (), strict=True):
            if record is None:
                continue
            try:
                found[key.decode()] = Member.decode(record)
            except (WireError, UnicodeDecodeError):
                log.warning("a member record of another version was passed over")
        return (age if isinstance(age, bytes) else None), found

    async def _remove_foreign(self) -> bool:
        async def remove(client: Client) -> Any:
            return await client.delete(self._set_key, self._age_key)

        try:
            await self._link.call(remove)
            return True
        except RedisAway:
            return False

    def _may_have_lapsed(self, now_s: float) -> bool:
        """Whether a live member's record could have run out since the last answer."""
        return now_s - self._answered_s >= self._times.member_s - self._times.member_beat_s

    def _sorted(self) -> tuple[Member, ...]:
        return tuple(self._known[key] for key in sorted(self._known))


class Beat:
    """Announces one member every `member_beat_s`, from `start()` until `stop()`.

    `make_member` is called on the loop for every beat, so that the record carries the state of that
    moment; what it raises ends nothing: the beat is skipped and logged."""

    def __init__(
        self, board: MemberBoard, make_member: Callable[[], Member], times: LeaseTimes
    ) -> None:
        self._board = board
        self._make_member = make_member
        self._times = times
        self._task: asyncio.Task[None] | None = None
        self._last: Member | None = None
        self._owns_board = False
        self.beats = 0  # announcements that Redis took

    @staticmethod
    def of(
        role: RoleSettings, make_member: Callable[[], Member], *, clock: Clock = SYSTEM_CLOCK
    ) -> Beat:
        """A beat on a board of its own, which `stop` closes."""
        beat = Beat(MemberBoard.of(role, clock=clock), make_member, role.deployment.leases)
        beat._owns_board = True
        return beat

    async def start(self) -> bool:
        """Announce, and go on doing so. Returns whether the first announcement was taken: a role
        serves without Redis too, and is found as soon as there is one."""
        taken = await self.now()
        self._task = asyncio.create_task(self._run(), name="member-beat")
        return taken

    async def now(self) -> bool:
        """Announce at once, because the member changed."""
        try:
            member = self._make_member()
        except Exception:
            log.exception("no member record could be made")
            return False
        self._last = member
        taken = await self._board.announce(member)
        self.beats += taken
        return taken

    async def stop(self) -> None:
        """End the beat and withdraw the record. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if self._last is not None:
                await self._board.withdraw(self._last)
        if self._owns_board:
            await self._board.close()

    async def __aenter__(self) -> Beat:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._times.member_beat_s)
            await self.now()
