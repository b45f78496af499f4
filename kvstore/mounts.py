"""Shared folders that this host has mounted: looked at again and again, and told to the index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.kvstore.io_threads import guarded
from headrace.kvstore.records import folder_key
from headrace.kvstore.redis_link import RedisAway, RedisLink
from headrace.kvstore.shared import SharedFolder, uid_epoch

log = logging.getLogger(__name__)
_FIRST_S = 2.0  # a mount that hangs does not keep a store from starting
_LIVES = 3  # looks that may fail before the index is believed to have no reader


class Mounts:
    """Folders by what their records carry (`by_epoch`). Each is looked at every `every_s` by a task
    of its own, so that one that hangs holds up no other. While a folder can be read, a key in the
    index says so: routers count what lies there, and nobody sweeps its records."""

    def __init__(self, link: RedisLink, folders: Sequence[SharedFolder], every_s: float) -> None:
        self._link = link
        self._folders = folders
        self._every_s = every_s
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.by_epoch: dict[int, SharedFolder] = {}

    async def start(self) -> None:
        """Begin; returns when every folder was looked at once, or hangs."""
        self._tasks = tuple(
            asyncio.create_task(self._watch(folder), name="store-mounts")
            for folder in self._folders
        )
        looks = [asyncio.create_task(self._look(folder)) for folder in self._folders]
        if looks:
            _, hung = await asyncio.wait(looks, timeout=_FIRST_S)
            for look in hung:
                look.cancel()

    async def _watch(self, folder: SharedFolder) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._look(folder)

    async def _look(self, folder: SharedFolder) -> None:
        try:
            uid = await asyncio.to_thread(guarded(folder.look))
        except (OSError, HeadraceError):
            log.warning("%s cannot be read", folder.name)
            return
        epoch = uid_epoch(uid) if uid else None
        for other in [e for e, one in self.by_epoch.items() if one is folder and e != epoch]:
            del self.by_epoch[other]  # another store's by now
        if epoch is None:
            return  # it holds nothing yet
        self.by_epoch[epoch] = folder
        life_ms = max(1, round(_LIVES * self._every_s * 1000))

        async def tell(client: Any) -> Any:
            return await client.set(folder_key(epoch), b"1", px=life_ms)

        with contextlib.suppress(RedisAway):
            await self._link.call(tell)

    async def close(self) -> None:
        """Look no more; what the index was told ends by its time. Idempotent."""
        tasks, self._tasks = self._tasks, ()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
