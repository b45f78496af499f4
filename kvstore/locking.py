"""Keeps the arena's memory from being swapped out, where the system allows it."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from enum import StrEnum

from headrace.kvstore.arena import Arena

log = logging.getLogger(__name__)


class Locked(StrEnum):
    """Whether the arena stays in memory whatever others need."""

    YES = "locked"
    OFF = "off"  # nobody asked for it
    REFUSED = "refused"


def lock_arena(arena: Arena, wanted: bool) -> Locked:
    """Lock the whole mapping until it goes, if that is `wanted`. Where it is refused the log says
    why, and the store runs on memory that may be swapped out."""
    if not wanted:
        return Locked.OFF
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_char.from_buffer(arena.view)
    size = ctypes.c_size_t(arena.view.nbytes)
    if libc.mlock(ctypes.c_void_p(ctypes.addressof(first)), size) == 0:
        return Locked.YES
    reason = os.strerror(ctypes.get_errno())
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
    log.warning(
        "the arena's %d bytes may be swapped out: mlock was refused (%s; RLIMIT_MEMLOCK is %s)",
        size.value,
        reason,
        limit,
    )
    return Locked.REFUSED
