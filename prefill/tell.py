"""Tells a bound decode replica what a job has sealed: all of it at once, the rest as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from headrace.core import faults
from headrace.core.errors import HeadraceError, ReplicaLost, Unavailable
from headrace.core.ids import JobKey
from headrace.core.messages import BindDecode, BlocksReady, JobFailed, PrefillDone, PrefillProgress
from headrace.core.peers import Peer
from headrace.prefill.binding import Announcement, BindEvent, BindState
from headrace.prefill.jobs import TERMINAL, Job
from headrace.prefill.links import DecodeLinks

log = logging.getLogger(__name__)


class Teller:
    """Used from the role's loop. `on_error(job, error)`: telling failed for a reason that is not
    the decode replica's."""

    def __init__(self, links: DecodeLinks, on_error: Callable[[Job, HeadraceError], None]) -> None:
        self._links = links
        self._on_error = on_error

    def near(self, job: Job) -> None:
        """Ask the router for a decode replica, once, unless the job has one."""
        if job.state not in TERMINAL and job.binding.step(BindEvent.NEAR, job.key):
            job.router.post(PrefillProgress(job.key, job.rows_left, wanted=True))

    def bind(self, job: Job, message: BindDecode) -> bool:
        """Begin to tell the replica that `message` names; False when it is late or a duplicate."""
        if not job.binding.name(message):
            return False
        telling = self._tell(job, message)
        job.binding.telling = asyncio.create_task(telling, name=f"tell {message.decode_key}")
        return True

    def lost(self, job: Job, error: HeadraceError) -> None:
        """The bound replica is gone, or was never reached. The rows run on, what is sealed stays
        leased, and the router, which is told why, names another or cancels."""
        key = job.binding.decode_key
        if job.state in TERMINAL or key is None or not job.binding.step(BindEvent.GONE, job.key):
            return
        job.binding.stop()
        job.binding.peer = None
        retryable = isinstance(error, ReplicaLost | Unavailable)
        job.router.post(JobFailed(key, error.code, error.message, retryable))

    def keep(self, job: Job, *, moving: bool) -> None:
        """A sign of life, every third of `handoff_s`: to a decode replica that waits for more, else
        to the router, whose answer, or whose decode's acknowledgement, may be missing. `moving`:
        the engine makes steps, or has none to make."""
        binding = job.binding
        wanted = binding.state is BindState.ASKED or binding.told
        if wanted or (moving and binding.state is BindState.FREE):
            job.router.post(PrefillProgress(job.key, job.rows_left, wanted))
        elif moving and binding.peer is not None and binding.message:
            binding.peer.post(BlocksReady(binding.message.decode_key, 0, (), ()))

    async def _tell(self, job: Job, message: BindDecode) -> None:
        try:
            peer = await self._links.get(message.decode_address)
            job.binding.step(BindEvent.LINKED, job.key)
            job.binding.peer = peer
        except HeadraceError as error:
            self.lost(job, error)
            return
        try:
            await self._tell_all(job, peer, message.decode_key)
        except ConnectionError as error:
            self.lost(job, ReplicaLost(f"the decode replica was lost: {error}"))
        except HeadraceError as error:
            self._on_error(job, error)
        except Exception:
            log.exception("telling of %s failed", job.key)
            self._on_error(job, HeadraceError("prefill failed"))

    async def _tell_all(self, job: Job, peer: Peer, key: JobKey) -> None:
        index = 0
        while True:
            item: Announcement = replace(await job.product.item(index), key=key)
            index += 1
            if isinstance(item, PrefillDone):
                await peer.link.send(item)
                job.binding.told = True
                job.router.post(item)
                return
            action = faults.hit("prefill.announce")
            for _ in range({"drop": 0, "duplicate": 2}.get(action or "", 1)):
                await peer.link.send(item)
