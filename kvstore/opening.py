"""Finding what is stored and having it in the arena for who asked: a batch at a time, no wait where
nothing has to be waited for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from headrace.core.ids import Digest, JobKey
from headrace.kvstore.counters import UNKNOWN
from headrace.kvstore.loads import Loader
from headrace.kvstore.messages import pack_place_rows
from headrace.kvstore.objects import Entry, object_key
from headrace.kvstore.peers import Peers
from headrace.kvstore.prefetch import Prefetcher
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

_NO_ROW = (0, 0, 0, 0)


class Opening:
    """Answers are places as they go over the wire (`messages`). What has no lease is good until
    somebody needs the room. `peers` are asked for what is not here."""

    def __init__(self, state: StoreState, loader: Loader, prefetch_share: float) -> None:
        self.peers: Peers | None = None
        self.prefetch = Prefetcher(state, self, prefetch_share)
        self._state = state
        self._loader = loader

    def prefix_now(
        self, namespace: bytes, digests: Sequence[Digest], lease: JobKey | None
    ) -> bytes | None:
        """As `prefix`, if nothing of it has to be read from SSD or asked of other stores; else
        None, and nothing is leased or counted."""
        entries = self._leading(namespace, digests)
        following = digests[len(entries) : len(entries) + 1]
        if self.peers is not None and any(
            self.peers.may_have(Kind.KV, namespace, digest) for digest in following
        ):
            return None
        if not self.have(entries, lease):
            return None
        here = self.prefetch.opened(entries, lease)
        self._count_prefix(entries, here, len(entries), len(digests))
        return self._told(entries)

    async def prefix(
        self,
        namespace: bytes,
        digests: Sequence[Digest],
        lease: JobKey | None,
        *,
        early: bool = False,
    ) -> bytes:
        """Places of the longest stored prefix, leased; those on SSD or at other stores are brought
        to the arena. `early`: for a request whose turn has not come; it is counted then."""
        async with self._brought(Kind.KV, namespace, digests, run=True):
            entries = self._leading(namespace, digests)
            here = [] if early else self.prefetch.opened(entries, lease)
            count = await self.bring(entries, lease)
            told = self._told(entries[:count])
        if not early:
            self._count_prefix(entries, here, count, len(digests))
        return told

    def _leading(self, namespace: bytes, digests: Sequence[Digest]) -> list[Entry]:
        entries: list[Entry] = []
        get, key = self._state.objects.get, object_key(Kind.KV, namespace, b"")
        for digest in digests:
            entry = get(key + digest)
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _count_prefix(
        self, entries: Sequence[Entry], here: Sequence[bool], found: int, asked: int
    ) -> None:
        # A chain is of one domain; of one that is not there at all nobody can tell whose.
        group = self._state.group(entries[0]) if entries else UNKNOWN
        self._state.count.prefix(group, here, found, asked)

    async def window(
        self,
        namespace: bytes,
        digests: Sequence[Digest],
        lease: JobKey | None,
        *,
        early: bool = False,
    ) -> tuple[int, bytes]:
        """The first of `digests` that is stored and sound: (its number, one place) or (0, b"")."""
        find, count = self._state.find, self._state.count
        known = [find(Kind.SWA, namespace, digest) is not None for digest in digests]
        better = digests[: known.index(True)] if True in known else digests
        async with self._brought(Kind.SWA, namespace, better, most=1):
            for number, digest in enumerate(digests):
                entry = find(Kind.SWA, namespace, digest)
                if entry is None:
                    continue
                if not early:
                    self.prefetch.opened([entry], lease)
                if await self.bring([entry], lease):
                    count.hits += not early
                    return number, self._told([entry])
        count.misses += bool(digests) and not early
        return 0, b""

    async def objects(
        self,
        kind: Kind,
        namespace: bytes,
        digests: Sequence[Digest],
        lease: JobKey | None,
        *,
        early: bool = False,
    ) -> bytes:
        """Places of those of `digests` that are stored and sound, none for others, in order."""
        told: list[bytes] = []
        async with self._brought(kind, namespace, digests):
            for digest in digests:
                entry = self._state.find(kind, namespace, digest)
                if entry is not None and not early:
                    self.prefetch.opened([entry], lease)
                good = entry is not None and await self.bring([entry], lease) > 0
                told.append(self._told([entry if good else None]))
                self._state.count.hits += good and not early
                self._state.count.misses += not (good or early)
        return b"".join(told)

    @contextlib.asynccontextmanager
    async def _brought(
        self,
        kind: Kind,
        namespace: bytes,
        digests: Sequence[Digest],
        *,
        run: bool = False,
        most: int = 1 << 20,
    ) -> AsyncIterator[None]:
        """While this lasts, those of `digests` that only other stores had are held here."""
        missing: list[Digest] = []
        if self.peers is not None and kind is not Kind.STATE:
            before, known = object_key(kind, namespace, b""), self._state.objects
            missing = [digest for digest in digests if before + digest not in known]
        if self.peers is None or not missing:
            yield
            return
        async with self.peers.held(kind, namespace, missing, run=run, most=most):
            yield

    def have(self, entries: Sequence[Entry], lease: JobKey | None) -> bool:
        """Lease `entries` if all of them are in the arena; whether they are."""
        if any(entry.slot is None or entry.dropped for entry in entries):
            return False
        self._lease(entries, len(entries), lease, [True] * len(entries))
        return True

    async def bring(self, entries: Sequence[Entry], lease: JobKey | None) -> int:
        """How many of `entries`, of one kind, from the first on, are in the arena now, leased. What
        has no lease is there until the caller awaits anything."""
        if self.have(entries, lease):
            return len(entries)
        here = [entry.slot is not None for entry in entries]
        async with self._loader.held(entries) as count:
            self._lease(entries, count, lease, here)
        return count

    def _lease(
        self, entries: Sequence[Entry], count: int, lease: JobKey | None, here: Sequence[bool]
    ) -> None:
        """The first `count` of `entries` are in the arena now, the rest could not be had; `here`
        says which were there before."""
        again = [not entry.leases or lease not in entry.leases for entry in entries]
        if lease is not None and count:
            self._state.hold(lease, entries[:count])
        # Head last: it leaves the arena after its tail. What could not be had is used all the same.
        use = self._state.use
        for entry, anew, was_here in reversed(tuple(zip(entries, again, here, strict=True))):
            use(entry, again=anew, here=was_here)

    def _told(self, entries: Sequence[Entry | None]) -> bytes:
        """Where these lie, which are in the arena now; None: no place."""
        region, rows = None, []
        for entry in entries:
            if entry is None:
                rows.append(_NO_ROW)
                continue
            slot, facts = entry.slot, entry.facts
            assert slot is not None  # held, or in the arena at this moment
            if region is None:  # they are of one kind
                region = self._state.residents.regions[facts.kind]
            offset = region.start + slot * region.slot_bytes
            rows.append((offset, facts.payload_bytes, entry.generation, entry.checksum))
        return pack_place_rows(rows)
