"""What other stores have, as the index tells: full records, for those who go and get it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from headrace.core.clock import Clock
from headrace.core.ids import Digest
from headrace.kvstore.absent import AbsentKeys
from headrace.kvstore.records import (
    FORGET,
    HEAD,
    KINDS_BY_CODE,
    RECORD_BYTES,
    RECORDS,
    TIERS_BY_CODE,
    WINDOW_TOO,
    LiveStore,
    packed_key,
    packed_keys,
    record_key,
    store_key,
)
from headrace.kvstore.redis_link import RedisAway, RedisLink
from headrace.kvstore.settings import Kind, StoreSettings, Tier
from headrace.kvstore.shared import SharedFolder

log = logging.getLogger(__name__)
MOST_KEYS = 1000  # of one `find`: Redis serves nobody else meanwhile
_KNOWN = 64  # stores whose live record is asked for with the objects


@dataclass(slots=True, eq=False)
class Run:
    """Objects that follow each other in a question and lie at one address: the record of each, as
    it stands in the index. With a `folder` they are read there, with nobody to ask."""

    address: str
    folder: SharedFolder | None
    digests: list[Digest]
    packed: list[bytes]


# What a record with a certain head is worth: rank, address, folder.
_Worth: TypeAlias = tuple[int, str, SharedFolder | None]
_NOTHING: _Worth = (-1, "", None)
_STRANGE: _Worth = (-2, "", None)  # a value with such a record is believed in no part
_HEAD_BYTES = HEAD.size


class Elsewhere:
    """Looks objects up that this store does not have. Never raises for what Redis does.

    `own_uid` is this store's; its own records are none of others."""

    def __init__(
        self, link: RedisLink, settings: StoreSettings, clock: Clock, own_uid: bytes
    ) -> None:
        self._link = link
        self.folders: Mapping[int, SharedFolder] = {}  # mounted here, by what records carry
        self._own_uid = own_uid
        self._known: tuple[int, ...] = ()  # numbers of stores that were alive lately
        self.absent = AbsentKeys(clock, settings.absent_s, settings.absent_keys)
        self.forgotten = 0  # records taken out of the index

    def may_have(self, kind: Kind, namespace: bytes, digest: Digest) -> bool:
        return record_key(kind, namespace, digest) not in self.absent

    async def find(
        self,
        kind: Kind,
        namespace: bytes,
        digests: Sequence[Digest],
        *,
        run: bool,
        most: int,
        before: str = "",
    ) -> list[Run]:
        """Those of `digests` (at most `MOST_KEYS`) that a living store has, in order, the first
        `most`; with `run` up to the first hole. Of equal places that at the address `before`, or
        where the object before comes from, is taken."""
        wanted = self._not_absent(kind, namespace, digests, run)
        if not wanted:
            return []
        try:
            known = self._known  # another look-up may learn of stores meanwhile
            values, live = await self._ask(kind, namespace, wanted, known)
            alike = _alike(wanted, values)
            heads = _heads(values[:1] if alike else values)
            missing = {head[0] for head in heads.values()}.difference(known)
            await self._learn(sorted(missing), live)
        except RedisAway:
            return []
        worth = {name: self._worth(kind, head, live) for name, head in heads.items()}
        if alike:  # what is best of the first is best of all
            found = _choose(values[0] or b"", wanted[0][28:], worth, before)
            if found is None:
                return []
            (_, address, folder), at = found
            packed = [value[at : at + RECORD_BYTES] for value in values[:most] if value]
            return [Run(address, folder, list(wanted[:most]), packed)]
        runs: list[Run] = []
        for digest, value in zip(wanted, values, strict=True):
            best = _choose(value, digest[28:], worth, before) if value else None
            if value is None or best is None:
                if not value:
                    self.absent.add(record_key(kind, namespace, digest))
                if run:
                    break
                continue
            (_, address, folder), at = best
            if address != before or not runs:
                runs.append(Run(address, folder, [], []))
                before = address
            runs[-1].digests.append(digest)
            runs[-1].packed.append(value[at : at + RECORD_BYTES])
            most -= 1
            if not most:
                break
        return runs

    def _not_absent(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], run: bool
    ) -> Sequence[Digest]:
        """Those worth asking for."""
        if not len(self.absent):
            return digests
        out = []
        for digest in digests:
            if self.may_have(kind, namespace, digest):
                out.append(digest)
            elif run:
                break
        return out

    async def _ask(
        self, kind: Kind, namespace: bytes, wanted: Sequence[Digest], known: Sequence[int]
    ) -> tuple[list[bytes | None], dict[int, LiveStore]]:
        """The values of `wanted`, and the live stores among those known."""
        about = b"".join([packed_key(store_key(number)) for number in known])
        keys = packed_keys(kind, namespace, b"".join(wanted))
        answer = await self._link.mget_packed(len(known) + len(wanted), about + keys)
        return answer[len(known) :], _live(known, answer)

    async def _learn(self, missing: Sequence[int], live: dict[int, LiveStore]) -> None:
        """Add the live records of `missing`, which were not asked for with the objects."""
        if missing:
            keys = [store_key(number) for number in missing]
            live.update(_live(missing, await self._link.get_many(keys)))
        self._known = tuple(live)[-_KNOWN:]

    def _worth(
        self, kind: Kind, head: tuple[int, int, int, int], live: Mapping[int, LiveStore]
    ) -> _Worth:
        """From memory rather than from a shared folder, from there rather than through a store's
        disk."""
        number, tier, code, epoch = head
        its_tier, its_kind = TIERS_BY_CODE.get(tier), KINDS_BY_CODE.get(code & ~WINDOW_TOO)
        if its_tier is None or its_kind is None:
            return _STRANGE
        if its_kind is not kind:
            return _NOTHING
        if its_tier is Tier.SHARED:
            folder = self.folders.get(epoch)
            return _NOTHING if folder is None else (1, folder.name, folder)
        store = live.get(number)
        if store is None or store.epoch != epoch or store.uid == self._own_uid or not store.address:
            return _NOTHING
        return (2 if its_tier is Tier.HOST else 0, store.address, None)

    async def forget(
        self, kind: Kind, namespace: bytes, stale: Sequence[tuple[Digest, bytes]]
    ) -> None:
        """Compare-and-delete of the records of some digests."""
        keys = [record_key(kind, namespace, digest) for digest, _ in stale]
        try:
            took = await self._link.script_each(FORGET, keys, [], [packed for _, packed in stale])
            self.forgotten += sum(took)
        except RedisAway:
            log.info("%d stale records stay in the index for now", len(stale))

    async def close(self) -> None:
        await self._link.close()


def _choose(
    value: bytes, tail: bytes, worth: Mapping[bytes, _Worth], before: str
) -> tuple[_Worth, int] | None:
    """What the best of the records in `value` is worth, and where in it that record begins; among
    equals that at `before`."""
    best: tuple[_Worth, int] | None = None
    best_rank = (_NOTHING[0], True)
    if len(value) % RECORD_BYTES:
        return None
    for at in range(0, len(value), RECORD_BYTES):
        end = at + RECORD_BYTES
        one = worth[value[at : at + _HEAD_BYTES]]
        if one is _STRANGE:
            return None
        rank = (one[0], one[1] == before)
        if rank > best_rank and value[end - len(tail) : end] == tail:
            best_rank, best = rank, (one, at)
    return best


def _alike(digests: Sequence[Digest], values: Sequence[bytes | None]) -> bool:
    """Whether all values have as many records that begin alike, and the tails of their digests: a
    chain that lies whole in the same places. A thousand are compared at once."""
    known = [value for value in values if value]
    size = len(known[0]) if known else 0
    if len(known) < len(values) or size % RECORD_BYTES or any(len(v) != size for v in known):
        return False
    rows = np.frombuffer(b"".join(known), RECORDS).reshape(len(known), -1)
    tails = np.frombuffer(b"".join(digests), "<u4").reshape(len(known), -1)[:, -1:]
    return bool((rows["head"] == rows["head"][0]).all() and (rows["tail"] == tails).all())


def _heads(values: Iterable[bytes | None]) -> dict[bytes, tuple[int, int, int, int]]:
    """The different first eight bytes of the records in `values`, unpacked."""
    names = {
        value[at : at + _HEAD_BYTES]
        for value in values
        if value and not len(value) % RECORD_BYTES
        for at in range(0, len(value), RECORD_BYTES)
    }
    return {name: HEAD.unpack(name) for name in names}


def _live(numbers: Sequence[int], values: Sequence[bytes | None]) -> dict[int, LiveStore]:
    """The live stores among `numbers`, whose values come first in `values`."""
    found = {n: LiveStore.unpack(value) for n, value in zip(numbers, values, strict=False)}
    return {number: store for number, store in found.items() if store is not None}
