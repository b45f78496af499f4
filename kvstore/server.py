"""The store process: its socket, its sessions, and the tasks that keep it."""

from __future__ import annotations

import asyncio

from headrace.core.role import Ready, RoleSettings
from headrace.kvstore.settings import StoreSettings


async def run_store(
    role: RoleSettings,
    store: StoreSettings,
    *,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve one host's store on `role.listen` (a unix socket) until `stop` is set."""
    raise NotImplementedError
