"""The store's own records in Redis: written when objects change, rewritten when Redis forgot.

Everything is derived from the state at the moment of writing: a key is marked dirty, and what its
record should be is looked up when its turn comes. So a lost, late or doubled write costs nothing
but another one, and serving never waits for Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from headrace.core.clock import Clock
from headrace.core.limits import LeaseTimes
from headrace.core.states import Visibility, VisibilityEvent
from headrace.kvstore.graves import say
from headrace.kvstore.objects import Entry
from headrace.kvstore.records import (
    ARENA_SEGMENT,
    BEAT,
    CLAIM,
    FORGET,
    KIND_CODES,
    RECORD,
    TIER_CODES,
    WINDOW_TOO,
    LiveStore,
    claim_name,
    cut_records,
    digest_tail,
    record_name,
    store_key,
    unpack_records,
)
from headrace.kvstore.redis_link import RedisAway, RedisLink
from headrace.kvstore.settings import Kind, StoreSettings, Tier
from headrace.kvstore.shared import uid_epoch
from headrace.kvstore.state import StoreState

log = logging.getLogger(__name__)
_BATCH = 256
_SLICE = 64  # records made in one go: about 0.1 ms
_GATHER_S = 0.005  # a call costs as much as thirty records
_LATER_S = 0.05  # what the index tells of already, but for the tier, is gathered for so long
_FLOW_S = 0.25  # while much waits for its sync, which changes its record again
_FLOW_OBJECTS = 256  # that is much
_FLOW_KEYS = 4096  # written in one turn then
_NUMBER_TRIES = 64
_SAY_BEATS = 8  # every so many a store notes that its number is in use

# KEYS: objects; ARGV[1]: this store's number as two bytes; ARGV[i + 1]: its records for KEYS[i].
# Replaces this store's records and keeps all others'. A key of another type is replaced.
_REPLACE = """
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' or #value % 40 ~= 0 then value = '' end
  local kept = ARGV[i + 1]
  for at = 1, #value, 40 do
    if string.sub(value, at, at + 1) ~= ARGV[1] then
      kept = kept .. string.sub(value, at, at + 39)
    end
  end
  if kept == '' then redis.call('DEL', key) else redis.call('SET', key, kept) end
end
return #KEYS
"""


class Publisher:
    """Writes one store's records. `run` is its task; `publish` and `claim` are called by others.

    Without `redis_url` everything here answers at once that there is nobody."""

    def __init__(
        self,
        state: StoreState,
        settings: StoreSettings,
        times: LeaseTimes,
        clock: Clock,
        redis_url: str,
        uid: bytes,
        epoch: int,
    ) -> None:
        self._state = state
        self._settings = settings
        self._times = times
        self._uid = uid
        self._epoch = epoch
        self._link = RedisLink(redis_url, settings.index_deadline_s, clock) if redis_url else None
        self._number: int | None = None
        self._beat = 0
        self._written: set[bytes] = set()  # what Redis may hold of our live record
        self._wake = asyncio.Event()
        self._sweep_due = False
        self._run_ids: frozenset[str] = frozenset()
        self.peer_address = ""  # where other stores may ask this one; told with the next beat
        self._turn = asyncio.Lock()
        self._relist: list[bytes] = []  # keys of objects that the index is to get anew
        state.dirty.clear()  # the first beat lists everything that was found on disk
        self._under_way = 0  # keys whose records are being written
        self._current_s = clock.now_s()  # when the index held everything, as far as we know
        state.on_dirty = self._wake.set
        state.on_dirty_tier = self._wake_later
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def condition(self) -> str:
        if self._link is None:
            return "off"
        return "ok" if self._link.healthy and self._number is not None else "away"

    @property
    def unlisted(self) -> int:
        """Objects whose record is still to be written, or being written."""
        return len(self._state.dirty) + len(self._relist) + self._under_way

    @property
    def lag_s(self) -> float:
        """Time since the index last held everything; 0 when it does, or when there is none."""
        if self._link is None or not self.unlisted:
            return 0.0
        return self._state.clock.now_s() - self._current_s

    def _wake_later(self) -> None:
        if self._alarm is None and self._link is not None:
            self._alarm = asyncio.get_running_loop().call_later(_LATER_S, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake.set()

    def republish(self) -> bool:
        """Write every record anew, and remove those of earlier lives, while serving goes on. False
        without Redis."""
        if self._link is None:
            return False
        self._forgotten()
        self._wake.set()
        return True

    @property
    def errors(self) -> int:
        return self._link.errors if self._link else 0

    @property
    def sweeping(self) -> bool:
        """Whether records of this store's earlier lives may still be in the index."""
        return self._sweep_due

    async def run(self) -> None:
        """Beat, and write what is dirty, until cancelled."""
        if self._link is None:
            # Nobody will ever ask.
            self._state.on_dirty = self._state.on_dirty_tier = self._state.dirty.clear
            self._state.dirty.clear()
            await asyncio.Event().wait()  # until cancelled
            return
        loop = asyncio.get_running_loop()
        next_beat_s = loop.time()
        while True:
            if not self.unlisted:
                self._current_s = self._state.clock.now_s()
            if loop.time() >= next_beat_s:
                next_beat_s = loop.time() + self._times.member_beat_s
                await self._renew()
            if self._number is not None and self._state.dirty:
                if len(self._state.dirty) <= _FLOW_KEYS:
                    self._wake.clear()
                await self.publish_changed(tuple(islice(self._state.dirty, _FLOW_KEYS)))
            elif self._number is not None and self._relist:
                await self._relist_some()
            elif self._number is not None and self._sweep_due:
                self._sweep_due = not await self._sweep()
            await self._rest(next_beat_s - loop.time())

    async def _rest(self, left_s: float) -> None:
        """Until there is something to write soon, or the next beat is due. While Redis is away only
        the beat wakes it: seals that go on happening must not turn into a busy loop."""
        assert self._link is not None
        if not self._link.healthy or self._number is None:
            await asyncio.sleep(max(0.0, left_s))
            return
        if not self._state.dirty and not self._relist:
            self._wake.clear()
        if len(self._state.dirty) < _BATCH and not self._relist:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._wake.wait()
        gather_s = _GATHER_S if len(self._state.dirty) < _BATCH and not self._relist else 0.0
        if len(self._state.pending) > _FLOW_OBJECTS and not self._relist:
            gather_s = _FLOW_S  # most are listed once then, by the writer, not twice
        await asyncio.sleep(min(max(0.0, left_s), gather_s))

    async def publish(self, keys: Sequence[bytes]) -> bool:
        """Bring the records of these objects up to date. False leaves the rest dirty for later."""
        for begin in range(0, len(keys), _BATCH):
            if not await self._publish_batch(keys[begin : begin + _BATCH]):
                return False
        return True

    async def publish_changed(self, keys: Sequence[bytes]) -> None:
        """As `publish`, but for those that somebody else has brought up to date meanwhile."""
        for begin in range(0, len(keys), _BATCH):
            await self._publish_batch(keys[begin : begin + _BATCH], changed=True)

    async def _publish_batch(self, keys: Sequence[bytes], *, changed: bool = False) -> bool:
        if self._link is None or self._number is None:
            return False
        async with self._turn:  # two writes of one key must arrive in the order of their making
            if changed:  # looked at only now: nothing is on its way
                keys = [key for key in keys if key in self._state.dirty]
            return not keys or await self._write_records(keys, self._number)

    async def _write_records(self, keys: Sequence[bytes], number: int) -> bool:
        assert self._link is not None
        names = list(map(record_name, keys))
        objects = self._state.objects
        records: list[bytes] = []
        self._under_way += len(keys)
        try:
            for begin in range(0, len(keys), _SLICE):
                part = keys[begin : begin + _SLICE]
                records += [self._records(objects.get(key), number) for key in part]
                for key in part:
                    self._state.dirty.pop(key, None)  # changes from here on mark it anew
                await asyncio.sleep(0)  # who waits for an answer goes first
            await self._link.script_each(_REPLACE, names, [number.to_bytes(2, "little")], records)
        except RedisAway:
            self._state.dirty.update(dict.fromkeys(keys))
            return False
        finally:
            self._under_way -= len(keys)
        for key, record in zip(keys, records, strict=True):
            entry = objects.get(key)
            if record and entry is not None and entry.visibility is not Visibility.DURABLE:
                entry.step(VisibilityEvent.LIST)
        return True

    async def claim(self, entries: Iterable[Entry]) -> frozenset[Entry]:
        """Those of `entries` that this store may persist: it asked first, or nobody answered."""
        asked = tuple(entries)
        if self._link is None or not asked:
            return frozenset(asked)
        life_ms = max(1, round(self._settings.claim_s * 1000))
        mine: list[Entry] = []
        for begin in range(0, len(asked), _BATCH):
            batch = asked[begin : begin + _BATCH]
            keys = [claim_name(entry.key) for entry in batch]
            try:
                answer = await self._link.script_each(CLAIM, keys, [self._uid, life_ms])
            except RedisAway:
                return frozenset((*mine, *asked[begin:]))  # claims only save work, so go on
            mine += [entry for entry, won in zip(batch, answer, strict=True) if won]
        return frozenset(mine)

    async def close(self) -> None:
        """Say that this store lives no more, so that its records count no longer."""
        if self._link is None:
            return
        if self._number is not None:
            key = store_key(self._number)
            with contextlib.suppress(RedisAway):  # then the lease ends by itself
                await self._link.call(lambda client: client.delete(key))
        await self._link.close()

    async def _renew(self) -> None:
        """Renew the live record; when Redis does not hold what was written last, it forgot or
        went back in time, and everything is written again."""
        assert self._link is not None
        self._beat += 1
        live = LiveStore(self._epoch, self._beat, self._uid, self.peer_address).pack()
        life_ms = max(1, round(self._times.member_s * 1000))
        first = self._number if self._number is not None else int.from_bytes(self._uid[:2], "big")
        for step in range(_NUMBER_TRIES):
            number = (first + step) & 0xFFFF
            key = store_key(number)
            try:
                stood = await self._link.script(BEAT, [key], self._uid, live, life_ms)
            except RedisAway:
                if len(self._written) < _BATCH:
                    self._written.add(live)  # it may have arrived all the same
                return
            if stood is not None:
                break
        else:
            log.warning("no free store number in the index; objects are not listed")
            return
        if number != self._number or self._beat % _SAY_BEATS == 1:
            with contextlib.suppress(RedisAway):
                await say(self._link, number)
        another = await self._is_another()  # asked every time: the next beat compares with this one
        if number != self._number or stood not in self._written or another:
            self._number = number
            self._forgotten()
        self._written = {live}

    async def _is_another(self) -> bool:
        """Whether another process answers than at the last beat: data that it has loaded may be
        older than this beat and yet hold our last one."""
        assert self._link is not None
        try:
            now = await self._link.run_ids()
        except RedisAway:
            return False  # asked again at the next beat
        before, self._run_ids = self._run_ids, now
        return bool(before) and before != now

    def _forgotten(self) -> None:
        log.info("the index gets all %d objects", len(self._state.objects))
        self._relist = list(self._state.objects)  # a part at a time: serving must not stand still
        self._sweep_due = True

    async def _relist_some(self) -> None:
        """Write a part of what the index forgot; what changes meanwhile goes first."""
        keys = self._relist[-_BATCH:]
        for key in keys:
            entry = self._state.objects.get(key)
            if entry is not None:
                entry.step(VisibilityEvent.UNLIST)
        del self._relist[-_BATCH:]
        await self.publish(keys)  # marks them dirty if nobody answers

    def _records(self, entry: Entry | None, number: int) -> bytes:
        """What the index shall hold of an object: only what is true at this moment."""
        if entry is None or entry.copy:  # another store's object is listed by that store
            return b""
        facts = entry.facts
        kind = KIND_CODES[facts.kind]
        if facts.kind is Kind.KV and self._state.has_window(entry):
            kind |= WINDOW_TOO
        told = (
            facts.payload_bytes,
            entry.checksum,
            entry.written_at_s & 0xFFFF_FFFF,
            digest_tail(facts.digest),
        )
        # As `IndexRecord.pack`, which costs five times as much.
        out = b""
        if entry.slot is not None:
            at = (ARENA_SEGMENT, entry.slot, entry.generation)
            out += RECORD.pack(number, TIER_CODES[Tier.HOST], kind, self._epoch, *at, *told)
        if entry.disk is not None and entry.visibility is Visibility.DURABLE:
            at = (entry.disk.segment, entry.disk.slot, entry.disk.generation)
            out += RECORD.pack(number, TIER_CODES[Tier.SSD], kind, self._epoch, *at, *told)
            if self._settings.shared:
                epoch = uid_epoch(self._uid)
                out += RECORD.pack(number, TIER_CODES[Tier.SHARED], kind, epoch, *at, *told)
        return out

    async def _sweep(self) -> bool:
        """Remove records of this store that name what it no longer has: of earlier lives, or come
        back with older data. Each goes only if it still stands there unchanged."""
        assert self._link is not None and self._number is not None
        removed = 0
        free = {kind: pool.free_uses() for kind, pool in self._state.residents.pools.items()}
        try:
            for kind in Kind:
                async for names in self._link.scan(f"{kind.value}:*", _BATCH):
                    values = await self._link.get_many(names)
                    old = [
                        (name, record)
                        for name, value in zip(names, values, strict=True)
                        for record in cut_records(value or b"")
                        if self._is_old(record, free)
                    ]
                    if old:
                        took = await self._link.script_each(
                            FORGET, [name for name, _ in old], [], [record for _, record in old]
                        )
                        removed += sum(took)
                    await asyncio.sleep(0)
        except RedisAway:
            return False
        if removed:
            log.info("removed %d records of what is no longer here from the index", removed)
        return True

    def _is_old(self, data: bytes, free: Mapping[Kind, Mapping[int, int]]) -> bool:
        for record in unpack_records(data):
            if record.store != self._number:
                continue
            shared = record.tier is Tier.SHARED and self._settings.shared
            if record.epoch != (uid_epoch(self._uid) if shared else self._epoch):
                return True
            if record.tier is Tier.HOST:
                pool = self._state.residents.pools.get(record.kind)
                return (
                    pool is None
                    or record.slot >= pool.total
                    or record.generation != pool.generation(record.slot)
                    or record.generation == free[record.kind].get(record.slot)
                )
            there = self._state.disks.by_segment.get(record.segment)
            one = next(iter(there)) if there else None
            return one is None or one.disk is None or one.disk.generation != record.generation
        return False
