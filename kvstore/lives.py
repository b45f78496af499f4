"""Ids of a store's lives: eight hex digits drawn anew at every start, then eight of the store.

The first half is the boot epoch of index records. By the second half a reader tells a place of its
own store's earlier life, which may be on disk still, from one of another host.
"""

from __future__ import annotations

import secrets

from headrace.core.ids import BootId

_HALF = 8  # hex digits


def new_life(uid: bytes) -> BootId:
    """A fresh id for this life of the store with this id (8 bytes, of its segments)."""
    return BootId(secrets.token_hex(_HALF // 2) + uid.hex()[:_HALF])


def epoch_of(life: BootId) -> int:
    """The boot epoch that index records carry."""
    return int(life[:_HALF], 16)


def same_store(one: BootId, other: BootId) -> bool:
    """Whether two lives are of one store."""
    return one[_HALF:] == other[_HALF:]
