"""A role's end of the store: opens, puts and reads objects; survives restarts of the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from headrace.core.chain import window_digest
from headrace.core.clock import SYSTEM_CLOCK, Clock
from headrace.core.errors import ConfigError
from headrace.core.ids import DIGEST_BYTES, BootId, Digest, JobKey
from headrace.core.limits import LeaseTimes, WireLimits
from headrace.core.link import parse_address
from headrace.core.messages import Place
from headrace.kvstore.arena import GOOD, Arena, Reading
from headrace.kvstore.connection import Connection, StoreGone, attach
from headrace.kvstore.held import HeldLeases
from headrace.kvstore.layout import NO_DIGEST, Buffer, domain_tag
from headrace.kvstore.lives import same_store
from headrace.kvstore.messages import (
    AskStat,
    Done,
    Doom,
    Opened,
    OpenObjects,
    OpenPrefix,
    OpenWindow,
    Prefetch,
    Prefetched,
    Release,
    Renew,
    Stat,
)
from headrace.kvstore.putting import ANSWER_S, joined, next_batch, put_batch
from headrace.kvstore.questions import Answer, Question, StoreRefused, StoreSilent, Topic
from headrace.kvstore.settings import Kind, StoreStat

T = TypeVar("T")
log = logging.getLogger(__name__)
_SHORT_S = 2.0  # longest wait for an answer that needs no I/O and no room
_LINE_S = 86_400.0  # longest wait in a line
_BACKOFF_S = (0.02, 0.5)  # first and longest pause between attempts to attach


class StoreClient:
    """One per process and namespace; used from one event loop, except `read_into`.

    While the store is away every call answers at once as a miss (`()`, None, False); nothing here
    raises on the request path but `ValueError` for arguments that can never be right. After a
    restart of the store the client attaches to the new one by itself; places of the old one are
    misses then, and leases are gone with it."""

    def __init__(
        self,
        address: str,
        token: str,
        namespace: bytes,
        *,
        name: str = "",
        clock: Clock = SYSTEM_CLOCK,
        times: LeaseTimes | None = None,
        limits: WireLimits | None = None,
    ) -> None:
        if parse_address(address)[0] != "unix":
            raise ConfigError("store_address must be unix:///path, the store of this host")
        if len(namespace) != DIGEST_BYTES:
            raise ConfigError(f"namespace must have {DIGEST_BYTES} bytes, got {len(namespace)}")
        self._address = address
        self._token = token
        self._namespace = namespace
        self._name = name
        self._limits = limits or WireLimits()
        self._connection: Connection | None = None
        # Kept while the store is away: bytes that are mapped and verify are right, whoever died.
        self._mapped: tuple[BootId, Arena] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the loop's
        self._attached = asyncio.Event()
        self._reporting: set[Place] = set()
        self._reserved: set[int] = set()
        self._leases = HeldLeases(clock, (times or LeaseTimes()).handoff_s)
        self.read_misses = 0  # `read_into` that answered False
        self.attaches = 0

    # connection ------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a store is attached now."""
        return self._connection is not None and self._connection.open

    @property
    def held(self) -> int:
        """Objects whose seal is not acknowledged yet, plus leases taken or renewed here and neither
        released here nor expired since."""
        waiting = 0 if self._connection is None else self._connection.ahead.unanswered
        return len(self._reserved) + waiting + len(self._leases)

    @property
    def lapsed(self) -> int:
        """How many leases taken or renewed here ended by their time."""
        return self._leases.lapsed

    async def connect(self, deadline_s: float) -> bool:
        """Begin to keep a connection; whether there is one after at most `deadline_s`. Without one
        the client goes on trying."""
        if self._keeper is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self._keeper = asyncio.create_task(self._keep(), name="store-client")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._attached.wait()
        return self.connected

    async def close(self) -> None:
        """End the connection for good, when the store has heard of everything that was put; leases
        stay until released or expired. Idempotent."""
        if self._connection is not None:
            await self._connection.ahead.settled(_SHORT_S)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        self._mapped = None

    async def _keep(self) -> None:
        pause_s = _BACKOFF_S[0]
        while True:
            try:
                connection = await attach(
                    self._address, self._token, self._name, self._namespace, self._limits
                )
            except ConnectionError:
                await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))
                pause_s = min(pause_s * 2, _BACKOFF_S[1])
                continue
            pause_s = _BACKOFF_S[0]
            if self._mapped is None or self._mapped[0] != connection.boot:
                self._leases.clear()
            self._connection = connection
            self._mapped = (connection.boot, connection.arena)
            self._reserved.clear()
            self.attaches += 1
            self._attached.set()
            try:
                await connection.serve()
            finally:
                connection.abort()
                self._connection = None
                self._attached.clear()
                self._reserved.clear()
            log.warning("the store is away")
            await asyncio.sleep(pause_s)

    # reading ---------------------------------------------------------------------------------

    async def open_prefix(
        self, digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[Place, ...]:
        """Places of the longest stored prefix of `digests`, which are block digests from the root
        on. Blocks on SSD are brought into the arena first.

        With a lease the places stay valid until it is released or not renewed for `handoff_s`;
        without, each is good until somebody needs the room (a read then answers False)."""
        _, places = await self._opened(OpenPrefix, digests, lease)
        return tuple([place for place in places if place is not None])

    async def open_windows(
        self, candidates: Sequence[tuple[int, Digest]], lease: JobKey | None
    ) -> tuple[int, Place] | None:
        """The first of `candidates` that has a stored window record: (position, place).

        A candidate is a position and the digest of the *block* that ends there; newest first. To
        read the place, ask `read_into` for `window_digest(block digest)`."""
        asked = [window_digest(digest) for _, digest in candidates]
        first, places = await self._opened(OpenWindow, asked, lease)
        if not places or places[0] is None or not 0 <= first < len(candidates):
            return None
        return candidates[first][0], places[0]

    async def open_objects(
        self, kind: Kind, digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[Place | None, ...]:
        """A place or None for each of `digests`: objects of `kind` that do not depend on each
        other, from SSD too, and leased as `open_prefix` tells."""
        _, places = await self._opened(partial(OpenObjects, kind=kind), digests, lease)
        return places if len(places) == len(digests) else (None,) * len(digests)

    async def _opened(
        self, make: Callable[..., Any], digests: Sequence[Digest], lease: JobKey | None
    ) -> tuple[int, tuple[Place | None, ...]]:
        connection = self._connection
        if connection is None or not digests:
            return 0, ()
        asked = joined(digests)
        try:
            answer = await connection.ask(
                lambda call: make(call=call, digests=asked, lease=lease), Opened, ANSWER_S
            )
            places = connection.places(answer.places)
        except StoreGone:
            return 0, ()
        self._leases.note(lease, any(places))
        return answer.first, places

    async def prefetch(self, kind: Kind, digests: Sequence[Digest], lease: JobKey) -> range:
        """For a request in line: have the store bring what the request will open, behind what
        others wait for, and lease it. The numbers of those of `digests` that are there: of window
        records the first that is stored (these are digests of the records), else the leading ones.

        May take as long as the request stands in line: cancel it when the turn has come."""
        asked = joined(digests)
        answer = await self._ask(
            lambda call: Prefetch(call, kind, asked, lease), Prefetched, _LINE_S
        )
        if answer is None:
            return range(0)
        self._leases.note(lease, answer.count > 0)
        return range(answer.first, min(answer.first + answer.count, len(digests)))

    def is_elsewhere(self, place: Place) -> bool:
        """Whether a place is another host's: to be asked for by digest, which fetches it from
        there. False while this client has never met its own store."""
        mapped = self._mapped
        return mapped is not None and not same_store(mapped[0], place.store)

    def is_past(self, place: Place) -> bool:
        """Whether a place is in another life of this host's store than the one that this client is
        attached to, or was last: what lay there may be on disk, and can be asked for by digest."""
        mapped = self._mapped
        return mapped is not None and mapped[0] != place.store and not self.is_elsewhere(place)

    def read_into(self, place: Place, digest: Digest, dest: bytearray | memoryview) -> bool:
        """Copy the payload at `place` into `dest` (at least `place.payload_bytes` bytes), verified.

        True: `dest` begins with exactly the bytes that were put under `digest` in this namespace.
        False is a miss: the place is stale, of another store's life, or damaged (which the store is
        told); `dest` then holds garbage. Callable from any thread; waits for nothing."""
        mapped = self._mapped
        if mapped is None or mapped[0] != place.store:
            self.read_misses += 1
            return False
        found = mapped[1].read(place, self._namespace, digest, dest)
        return found is GOOD or self._missed(found, place, digest)

    def view(self, place: Place, digest: Digest) -> memoryview | None:
        """The payload at `place` where it lies, verified now; None as `read_into` answers False.

        Read-only, and good for as long as the lease under which the place was opened: without one
        the slot may be another object's at any moment. Whoever holds the view keeps the store's
        memory mapped, even when the store has ended. Callable from any thread."""
        mapped = self._mapped
        if mapped is None or mapped[0] != place.store:
            self.read_misses += 1
            return None
        found = mapped[1].read(place, self._namespace, digest, None)
        if found is not GOOD:
            self._missed(found, place, digest)
            return None
        return mapped[1].bytes_at(place).toreadonly()

    def _missed(self, found: Reading, place: Place, digest: Digest) -> bool:
        self.read_misses += 1
        loop = self._loop
        if found is Reading.DAMAGED and loop is not None and not loop.is_closed():
            if threading.get_ident() == self._thread:
                self._report(place, digest)
            elif place not in self._reporting:  # a reader that insists must not flood the loop
                self._reporting.add(place)
                loop.call_soon_threadsafe(self._report, place, digest)
        return False

    def _report(self, place: Place, digest: Digest) -> None:
        self._reporting.discard(place)
        connection = self._connection
        if connection is not None and connection.boot == place.store:
            connection.post(Doom(0, place, digest))

    # writing ---------------------------------------------------------------------------------

    async def put(
        self,
        kind: Kind,
        items: Sequence[tuple[Digest, Buffer]],
        *,
        lease: JobKey | None = None,
        wait_s: float = 0.0,
        parent: Digest | None = None,
        first_block: int = 0,
        domain: str | bytes = "",
    ) -> tuple[Place | None, ...]:
        """Store objects; one answer an item, in order: where it is readable now, or None where it
        was dropped (no room, the store known to be away).

        Blocks put in a row go into slots held in advance: readable at their places at once, found
        by digest when the store hears of them. One that died has them in no later life (0019).

        An item is the object's own digest and its payload, which must not change until this
        returns. An object that is there already is answered with its place; the first writer's
        bytes stay. With a lease the objects are leased for it, and a full arena is waited for up to
        `wait_s`; without, what finds no room is dropped. What is sealed becomes durable later.

        For kind KV the items are consecutive blocks of one chain from number `first_block` on, and
        `parent` is the digest before the first; for others both describe each item. `domain` is a
        name, or the tag of 16 bytes that a header carries."""
        places: list[Place | None] = []
        until_s = asyncio.get_running_loop().time() + wait_s
        tag = domain if isinstance(domain, bytes) else domain_tag(domain)
        before, block = parent or NO_DIGEST, first_block
        while len(places) < len(items):
            connection = self._connection
            region = None if connection is None else connection.arena.region(kind)
            batch = next_batch(region, items, len(places))
            left_s = max(0.0, until_s - asyncio.get_running_loop().time())
            places += await self._put_batch(kind, batch, (before, block, tag, lease, left_s))
            if kind is Kind.KV:
                before, block = batch[-1][0], block + len(batch)
        return tuple(places)

    async def _put_batch(
        self,
        kind: Kind,
        batch: Sequence[tuple[Digest, Buffer]],
        told: tuple[Digest, int, bytes, JobKey | None, float],
    ) -> Sequence[Place | None]:
        connection = self._connection
        if connection is None:
            return (None,) * len(batch)
        places = await put_batch(connection, self._reserved, kind, batch, *told)
        self._leases.note(told[3], any(place is not None for place in places))
        return places

    # leases ----------------------------------------------------------------------------------

    async def renew(self, lease: JobKey) -> bool:
        """Prolong a lease by `handoff_s` from now; False when the store does not know it."""
        answer = await self._ask(lambda call: Renew(call, lease), Done)
        self._leases.note(lease, answer is not None and answer.good)
        return answer is not None and answer.good

    async def release(self, lease: JobKey, kind: Kind | None = None) -> None:
        """End a lease, or only its part on objects of one kind. Idempotent, never fails.

        Without `kind` the owner is over: what is still put or opened in its name, by whichever
        process, is served but leased no more."""
        if kind is None:
            self._leases.end(lease)
        await self._ask(lambda call: Release(call, lease, kind), Done)

    async def doom(self, place: Place, digest: Digest) -> None:
        """Report bytes that did not verify; the store looks itself and drops what is damaged."""
        connection = self._connection
        if connection is not None and connection.boot == place.store:
            await self._ask(lambda call: Doom(call, place, digest), Done)

    async def stat(self) -> StoreStat | None:
        """The store's own account; None while it is away."""
        answer = await self._ask(AskStat, Stat)
        return None if answer is None else answer.stat

    async def _ask(
        self, make: Callable[[int], Any], expect: type[T], limit_s: float = _SHORT_S
    ) -> T | None:
        """The answer to `make(call)`; None while the store is away."""
        connection = self._connection
        if connection is None:
            return None
        try:
            return await connection.ask(make, expect, limit_s)
        except StoreGone:
            return None

    async def ask(self, topic: Topic, limit_s: float = 60.0, **values: Any) -> dict[str, Any]:
        """A question of a tool, answered by the running store. Raises `StoreSilent` while it is
        away, and `StoreRefused` with its own words when it says no."""
        connection = self._connection
        if connection is None:
            raise StoreSilent("the store does not answer")
        text = json.dumps(values)
        try:
            answer = await connection.ask(lambda call: Question(call, topic, text), Answer, limit_s)
        except StoreGone:
            raise StoreSilent("the store went away, or took too long") from None
        if not answer.good:
            raise StoreRefused(answer.text)
        found: dict[str, Any] = json.loads(answer.text)
        return found
