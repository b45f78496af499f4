"""What other stores have, as the index tells: full records, for those who go and get it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.ids import Digest
from headrace.kvstore.absent import AbsentKeys
from headrace.kvstore.records import (
    FORGET,
    IndexRecord,
    LiveStore,
    digest_tail,
    record_key,
    store_key,
    store_numbers,
    unpack_records,
)
from headrace.kvstore.redis_link import RedisAway, RedisLink
from headrace.kvstore.settings import Kind, StoreSettings, Tier
from headrace.kvstore.shared import SharedFolder

log = logging.getLogger(__name__)
_KEYS_A_CALL = 1000


@dataclass(frozen=True, slots=True)
class Where:
    """One object at another store: who serves it, and the record that says so."""

    digest: Digest
    kind: Kind
    namespace: bytes
    record: IndexRecord
    address: str
    folder: SharedFolder | None = None  # read there, with nobody to ask

    @property
    def payload_bytes(self) -> int:
        return self.record.payload_bytes


class Elsewhere:
    """Looks objects up that this store does not have. Never raises for what Redis does.

    `own_uid` is this store's; its own records are none of others."""

    def __init__(
        self, link: RedisLink, settings: StoreSettings, clock: Clock, own_uid: bytes
    ) -> None:
        self._link = link
        self.folders: Mapping[int, SharedFolder] = {}  # mounted here, by what records carry
        self._own_uid = own_uid
        self.absent = AbsentKeys(clock, settings.absent_s, settings.absent_keys)
        self.forgotten = 0  # records taken out of the index

    def may_have(self, kind: Kind, namespace: bytes, digest: Digest) -> bool:
        return record_key(kind, namespace, digest) not in self.absent

    async def find(
        self, kind: Kind, namespace: bytes, digests: Sequence[Digest], *, run: bool
    ) -> list[Where]:
        """Those of `digests` that a living store has, in order; with `run` up to the first hole."""
        wanted: list[tuple[Digest, bytes]] = []
        for digest in digests:
            key = record_key(kind, namespace, digest)
            if key not in self.absent:
                wanted.append((digest, key))
            elif run:
                break
        if not wanted:
            return []
        keys = [key for _, key in wanted]

        values: list[bytes | None] = []
        try:
            for begin in range(0, len(keys), _KEYS_A_CALL):
                values += await self._link.get_many(keys[begin : begin + _KEYS_A_CALL])
                if run and None in values:
                    break
            live = await self._live_stores(values)
        except RedisAway:
            return []
        out: list[Where] = []
        for (digest, key), value in zip(wanted, values, strict=False):
            choice = self._choose(
                kind, namespace, digest, value, live, out[-1].address if out else ""
            )
            if choice is not None:
                out.append(choice)
                continue
            if not value:
                self.absent.add(key)
            if run:
                break
        return out

    def _choose(
        self,
        kind: Kind,
        namespace: bytes,
        digest: Digest,
        value: bytes | None,
        live: dict[int, LiveStore],
        before: str,
    ) -> Where | None:
        """From memory rather than from a shared folder, from there rather than through a store's
        disk; and from where the object before came."""
        if not value:
            return None
        tail = digest_tail(digest)
        found: list[tuple[int, bool, Where]] = []
        for record in unpack_records(value):
            store = live.get(record.store)
            if record.kind is not kind or record.digest_tail != tail:
                continue
            if record.tier is Tier.SHARED:
                folder = self.folders.get(record.epoch)
                if folder is not None:
                    where = Where(digest, kind, namespace, record, folder.name, folder)
                    found.append((1, folder.name == before, where))
            elif (
                store is not None
                and store.epoch == record.epoch
                and store.uid != self._own_uid
                and store.address
            ):
                where = Where(digest, kind, namespace, record, store.address)
                in_memory = record.tier is Tier.HOST
                found.append((2 if in_memory else 0, store.address == before, where))
        return max(found, key=lambda one: one[:2])[2] if found else None

    async def forget(self, where: Where) -> None:
        """Compare-and-delete of one record."""
        key = record_key(where.kind, where.namespace, where.digest)
        try:
            took = await self._link.script_each(FORGET, [key], [], [where.record.pack()])
            self.forgotten += sum(took)
        except RedisAway:
            log.info("a stale record stays in the index for now")

    async def _live_stores(self, values: Sequence[bytes | None]) -> dict[int, LiveStore]:
        """The live records of the stores that `values` name."""
        numbers = store_numbers(values)
        live = await self._link.get_many([store_key(number) for number in numbers])
        pairs = zip(numbers, map(LiveStore.unpack, live), strict=True)
        return {number: store for number, store in pairs if store is not None}

    async def close(self) -> None:
        await self._link.close()
