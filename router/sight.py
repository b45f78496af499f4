"""Having the rows of a request's pictures made before a replica runs them.

Vision is asked iff a row that will be run lies in a span whose object the index does not list, even
when all blocks are stored. A replica that fails or is lost is replaced once; a picture that is bad
itself ends the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.core.card import Role
from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, ReplicaLost, Unavailable
from headrace.core.ids import Digest, JobKey
from headrace.core.images import ImageSpan, spans_within
from headrace.core.messages import Cancel, VisionDone, VisionJob
from headrace.core.records import RequestRecord
from headrace.core.request import GenRequest
from headrace.router.pictures import PictureFile
from headrace.router.policy import Work
from headrace.router.replicas import Replica

if TYPE_CHECKING:
    from headrace.router.desk import Desk

log = logging.getLogger(__name__)
TRIES = 2


def spans_needed(request: GenRequest, work: Work, *, handed_off: bool) -> tuple[ImageSpan, ...]:
    """The spans with a row that prefill or decode is going to run, in order.

    After a hand-off decode starts at the window record that prefill made; without one it runs all
    rows of its plan."""
    ranges = [(work.plan.start, work.plan.end)]
    if handed_off:
        prefill = work.prefill_plan
        ranges = [(prefill.start, prefill.end), (work.handed_start, request.n_tokens)]
    return tuple(
        span for span in request.images if any(spans_within((span,), *ends) for ends in ranges)
    )


def two_rings(digest: Digest, names: Sequence[str]) -> list[str]:
    """The two of `names` that a picture belongs to, by rendezvous hashing: every router sends the
    same picture to the same two, and a replica that joins or leaves moves only its own."""
    return sorted(names, key=lambda name: hashlib.sha256(digest + name.encode()).digest())[:2]


class Sight:
    """The pictures of one ticket. `ready` is called once an attempt; messages of vision replicas
    come in through the desk on the same loop."""

    def __init__(
        self,
        desk: Desk,
        request: GenRequest,
        files: Mapping[Digest, PictureFile] | None,
        record: RequestRecord,
    ) -> None:
        self._desk = desk
        self._request = request
        self._files = files or {}
        self._record = record
        self._waits: dict[tuple[str, Digest], asyncio.Future[VisionDone]] = {}
        self._asked: dict[str, Replica] = {}
        self._key: JobKey | None = None  # under which they were asked
        self._distrust = False  # a replica missed what the index lists
        record.pictures = len(request.images)

    async def ready(self, key: JobKey, work: Work, *, handed_off: bool) -> bool:
        """Return when every object that the attempt needs is there, as far as is known; whether
        vision was asked, under `key`, which is its own then.

        Raises the picture's own error, or `Unavailable`, `Overloaded` or `ReplicaLost` when no
        vision replica could make it."""
        spans = spans_needed(self._request, work, handed_off=handed_off)
        needed = {span.digest: span for span in spans}
        if not needed:
            return False
        begun_s = SYSTEM_CLOCK.now_s()
        known: frozenset[Digest] = frozenset()
        if not self._distrust:
            known = await self._desk.pictures_present(tuple(needed))
        missing = [span for digest, span in needed.items() if digest not in known]
        self._key = key
        tasks = [asyncio.create_task(self._have(key, span)) for span in missing]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._record.stage("vision_s", SYSTEM_CLOCK.now_s() - begun_s)
        return bool(missing)

    def distrust(self) -> None:
        """Objects are missing that the index lists: from now on vision is asked for each."""
        self._distrust = True

    async def _have(self, key: JobKey, span: ImageSpan) -> None:
        avoid: set[str] = set()
        last: HeadraceError | None = None
        for _ in range(TRIES):
            replica = self._choose(span.digest, avoid)
            if replica is None:
                break
            avoid.add(replica.key)
            try:
                done = await self._ask(replica, key, span)
            except InvalidRequest:
                raise
            except HeadraceError as error:
                log.warning("%s: %s gave up a picture: %s", key, replica.name, error.message)
                last = error
            else:
                self._record.pictures_made += done.made
                return
        if last is None:
            raise Unavailable("no vision replica is ready")
        if isinstance(last, Overloaded):
            raise last
        raise ReplicaLost("no vision replica could make the rows of an image") from last

    def _choose(self, digest: Digest, avoid: set[str]) -> Replica | None:
        """Of the two replicas that the picture belongs to, the one with fewer patches before it."""
        replicas = {
            replica.name: replica
            for replica in self._desk.replicas.routable(Role.VISION)
            if replica.key not in avoid
        }
        ledger = self._desk.ledger
        return min(
            (replicas[name] for name in two_rings(digest, tuple(replicas))),
            key=lambda replica: ledger.load(replica.key).backlog_rows,
            default=None,
        )

    async def _ask(self, replica: Replica, key: JobKey, span: ImageSpan) -> VisionDone:
        place = (replica.key, span.digest)
        charge = self._desk.ledger.open(replica.key, span.n_tokens, 0)
        future: asyncio.Future[VisionDone] = asyncio.get_running_loop().create_future()
        self._waits[place] = future
        self._asked[replica.key] = replica
        data = self._files[span.digest].data
        try:
            async with asyncio.timeout(self._desk.vision_wait_s):
                job = VisionJob(key, span.digest, data, span.n_tokens, charge.dispatch)
                await replica.send(job)
                return await future
        except (ConnectionError, TimeoutError):
            raise ReplicaLost(f"{replica.name} did not answer") from None
        finally:
            self._waits.pop(place, None)
            self._desk.ledger.close(charge)

    # What vision replicas say, by way of the desk.

    def done(self, replica: Replica, message: VisionDone) -> bool:
        """False when nobody waits for it."""
        future = self._waits.get((replica.key, message.digest))
        if message.key != self._key or future is None or future.done():
            return False
        future.set_result(message)
        return True

    def failed(
        self,
        replica: Replica,
        error: HeadraceError,
        key: JobKey | None = None,
        picture: Digest | None = None,
    ) -> bool:
        """The replica gave up a picture of `key` (None: all of them), or is gone; False when nobody
        waits. A bad picture's error names its place in the request."""
        if key is not None and key != self._key:
            return False
        if picture is not None and picture in self._files and isinstance(error, InvalidRequest):
            error.param = self._files[picture].param
        mine = [
            future
            for (name, digest), future in self._waits.items()
            if name == replica.key and picture in (None, digest) and not future.done()
        ]
        for future in mine:
            future.set_exception(error)
        return bool(mine)

    def withdraw(self, reason: str) -> None:
        """The attempt is over: whoever was asked lets its leases go."""
        asked, self._asked = self._asked, {}
        for replica in asked.values():
            if self._key is not None:
                replica.post(Cancel(self._key, reason))
