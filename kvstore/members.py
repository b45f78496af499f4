"""Membership: leased records in Redis, and the beat that renews one."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from headrace.core.card import Member
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.limits import LeaseTimes
from headrace.core.role import RoleSettings


class MemberBoard:
    """The members of one cluster. No method raises for what Redis does."""

    stale: bool

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        *,
        times: LeaseTimes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        raise NotImplementedError

    @staticmethod
    def of(role: RoleSettings, *, clock: Clock = SYSTEM_CLOCK) -> MemberBoard:
        """The board of the cluster a role belongs to, named after its token."""
        raise NotImplementedError

    async def announce(self, member: Member) -> bool:
        """Write a record that lives `member_s`; False when Redis did not take it."""
        raise NotImplementedError

    async def withdraw(self, member: Member) -> bool:
        """Remove a record if it is still this boot's."""
        raise NotImplementedError

    async def members(self) -> tuple[Member, ...]:
        """The live members; the last known ones, with `stale` True, when Redis does not answer."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Beat:
    """Announces one member every `member_beat_s`: `async with Beat(board, make, times): ...`, or
    `await start()` and `await stop()` (which withdraws)."""

    def __init__(
        self, board: MemberBoard, make_member: Callable[[], Member], times: LeaseTimes
    ) -> None:
        raise NotImplementedError

    async def start(self) -> bool:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def now(self) -> bool:
        """Announce at once, because the member changed."""
        raise NotImplementedError

    async def __aenter__(self) -> Beat:
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError
