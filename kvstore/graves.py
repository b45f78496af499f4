"""What a store that does not come back has left in the index, and how that ends.

    store:numbers       sorted set: every number that lists records, by when it last said so
    kv:store:{number}   the live record; nobody's when its store is gone

A number that said nothing for `forget_stores_s` and has no live record is *dead*. Whoever notices
takes it, as a store takes a number but under an id of its own, and removes the records that carry
it, a part at a time. An owner that comes back meanwhile finds its number taken, takes another one
and lists everything under that: what is removed under a number that is held here is never a living
store's. One of several sweepers gets the number; one that dies holds it for `_HOLD_S`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from random import uniform
from typing import Any

from headrace.core.clock import Clock
from headrace.core.limits import LeaseTimes
from headrace.kvstore.records import (
    BEAT,
    FORGET,
    NUMBERS_KEY,
    LiveStore,
    cut_records,
    folder_key,
    store_key,
    store_numbers,
    unpack_records,
)
from headrace.kvstore.redis_link import RedisAway, RedisLink
from headrace.kvstore.settings import Kind, Tier

log = logging.getLogger(__name__)
_BATCH = 256  # keys of one look and one removal
_PAUSE_S = 0.02  # between two of them: Redis and this loop have other work
_AT_A_TIME = 16  # numbers of one sweep
_HOLD_S = 20.0  # a number is held for so long without another word
_LOOK_S = 60.0

# KEYS[1]: the numbers. ARGV[1]: seconds, ARGV[2]: at most so many. Numbers silent for so long.
_SILENT = """
local now = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now[1] - ARGV[1], 'LIMIT', 0, ARGV[2])
"""

# KEYS[1]: a live record, ARGV[1]: an id. Deletes the record if it is this id's; with ARGV[2] '1' if
# it is another's, who then lists everything anew with its next beat.
_LEAVE = """
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' or #value < 20 then return 0 end
local mine = string.sub(value, 13, 20) == ARGV[1]
if mine == (ARGV[2] == '1') then return 0 end
return redis.call('DEL', KEYS[1])
"""


class Graves:
    """Sweeps records of stores that are gone. `run` is its task; `sweep_all` is asked for by a
    tool. Used from one event loop; never raises for what Redis does."""

    def __init__(
        self, link: RedisLink, times: LeaseTimes, clock: Clock, forget_stores_s: float
    ) -> None:
        self._link = link
        self._clock = clock
        self._forget_s = forget_stores_s
        # A Redis that was away or went back in time knows nobody for a moment: who lives beats
        # within `member_beat_s`, so absence counts only when it was seen for longer than a lease.
        self._grace_s = 2 * times.member_s
        self._absent_s: dict[int, float] = {}  # since when a number has had no live record
        self._turn = asyncio.Lock()
        self.swept_records = 0
        self.swept_stores = 0

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        if not self._forget_s:
            await asyncio.Event().wait()
        every_s = min(_LOOK_S, self._forget_s / 4)
        while True:
            await asyncio.sleep(every_s * uniform(0.5, 1.5))  # stores need not look all at once
            await self.look()

    async def look(self) -> int:
        """Sweep what has been silent for long enough, if anything; records removed."""
        try:
            found = await self._link.script(
                _SILENT, [NUMBERS_KEY], round(self._forget_s), _AT_A_TIME
            )
            silent = [int(one) for one in found if one.isdigit()]
            dead = await self._dead(silent, keep=False)
        except RedisAway:
            self._absent_s.clear()
            return 0
        return await self._sweep(dead) if dead else 0

    async def sweep_all(self) -> tuple[int, int]:
        """Go through the whole index for numbers that have no live record, whatever they said and
        when, and sweep them: (stores, records). Takes longer than a lease. Raises `RedisAway`."""
        numbers: set[int] = set()
        for kind in Kind:
            async for names in self._link.scan(f"{kind.value}:*", _BATCH):
                numbers.update(store_numbers(await self._link.get_many(names)))
                await asyncio.sleep(_PAUSE_S)
        dead = await self._dead(sorted(numbers), keep=True)
        end_s = self._clock.now_s() + self._grace_s
        while len(dead) < len(self._absent_s) and self._clock.now_s() <= end_s:
            await asyncio.sleep(0.05)
            dead = await self._dead(sorted(self._absent_s), keep=True)
        removed = stores = 0
        for begin in range(0, len(dead), _AT_A_TIME):
            part = dead[begin : begin + _AT_A_TIME]
            before = self.swept_stores
            removed += await self._sweep(part)
            stores += self.swept_stores - before
        return stores, removed

    async def _dead(self, numbers: Sequence[int], *, keep: bool) -> list[int]:
        """Those of `numbers` that have been seen without a live record for the time of grace."""
        live = await self._link.get_many([store_key(number) for number in numbers])
        now_s = self._clock.now_s()
        absent = [n for n, value in zip(numbers, live, strict=True) if value is None]
        before = self._absent_s if keep or absent else {}
        self._absent_s = {n: before.get(n, now_s) for n in absent}
        return [n for n in absent if now_s - self._absent_s[n] >= self._grace_s]

    async def _sweep(self, numbers: Iterable[int]) -> int:
        """Take the numbers, remove what carries them, and let them go."""
        async with self._turn:
            uid, removed = secrets.token_bytes(8), 0
            held: set[int] = set()
            kept: set[int] = set()  # still named by records of a folder that somebody reads
            try:
                held = {number for number in numbers if await self._hold(number, uid)}
                for kind in Kind if held else ():
                    async for names in self._link.scan(f"{kind.value}:*", _BATCH):
                        removed += await self._remove(names, held, uid, kept)
                        await asyncio.sleep(_PAUSE_S)
                for number in held:
                    await self._forget(number, stays=number in kept)
            except RedisAway:
                log.info("sweeping the index was interrupted; it begins anew later")
            finally:
                for number in held:
                    self._absent_s.pop(number, None)
                    await self._leave(number, uid)
            if removed:
                log.info("removed %d records of %d stores that are gone", removed, len(held))
            return removed

    async def _remove(
        self, names: Sequence[bytes], held: set[int], uid: bytes, kept: set[int]
    ) -> int:
        began_s = self._clock.now_s()
        for number in tuple(held):
            if not await self._hold(number, uid):  # cannot be, unless this process stood still
                held.discard(number)
        values = await self._link.get_many(names)
        mounted = await self._mounted(values, held)
        old: list[tuple[bytes, bytes]] = []
        for name, value in zip(names, values, strict=True):
            for data in cut_records(value or b""):
                (record, *_) = unpack_records(data) or (None,)
                if record is None or record.store not in held:
                    continue
                if record.tier is Tier.SHARED and record.epoch in mounted:
                    kept.add(record.store)
                else:
                    old.append((name, data))
        if not old:
            return 0
        took = await self._link.script_each(
            FORGET, [name for name, _ in old], [], [data for _, data in old]
        )
        if self._clock.now_s() - began_s > _HOLD_S / 2:
            # This process stood still: a number may have passed to its owner in between. Whoever
            # has it now is made to list everything again.
            for number in held:
                await self._link.script(_LEAVE, [store_key(number)], uid, 1)
        count = sum(one or 0 for one in took)
        self.swept_records += count
        return count

    async def _mounted(self, values: Sequence[bytes | None], held: set[int]) -> frozenset[int]:
        """Ids of the shared folders in `values` that some living store reads."""
        ids = sorted(
            {
                record.epoch
                for value in values
                for record in unpack_records(value or b"")
                if record.tier is Tier.SHARED and record.store in held
            }
        )
        known = await self._link.get_many([folder_key(one) for one in ids])
        return frozenset(one for one, value in zip(ids, known, strict=True) if value is not None)

    async def _hold(self, number: int, uid: bytes) -> bool:
        live = LiveStore(0, 0, uid).pack()
        hold_ms = round(_HOLD_S * 1000)
        stood = await self._link.script(BEAT, [store_key(number)], uid, live, hold_ms)
        return stood is not None

    async def _forget(self, number: int, *, stays: bool) -> None:
        """A number of which nothing is left says nothing more; else it is looked at again after
        another `forget_stores_s`."""
        if stays:
            await say(self._link, number)
            return

        async def remove(client: Any) -> Any:
            return await client.zrem(NUMBERS_KEY, number)

        await self._link.call(remove)
        self.swept_stores += 1

    async def _leave(self, number: int, uid: bytes) -> None:
        try:
            await self._link.script(_LEAVE, [store_key(number)], uid, 0)
        except RedisAway:
            log.info("number %d is let go by its time", number)

    async def close(self) -> None:
        await self._link.close()


# KEYS[1]: the numbers, ARGV[1]: one that lives.
_SAY = """
redis.call('ZADD', KEYS[1], redis.call('TIME')[1], ARGV[1])
return 1
"""


async def say(link: RedisLink, number: int) -> None:
    """Note that a number is in use now. Raises `RedisAway`."""
    await link.script(_SAY, [NUMBERS_KEY], number)
