"""Names of things: requests, attempts, replicas, digests.

A *request id* names what a client asked for; an *epoch* numbers our attempts at it, where prefill,
decode and vision have one each. Whatever a replica holds, it holds for one `JobKey`, and messages
of an older epoch are ignored and counted. A *boot id* names one life of one process, so that a
restart faster than a heartbeat is seen.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
BootId = NewType("BootId", str)
Digest = NewType("Digest", bytes)  # 32 bytes, SHA-256

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, order=True)
class JobKey:
    """One attempt at one request: the owner of every lease."""

    request_id: RequestId
    epoch: int

    def __str__(self) -> str:
        return f"{self.request_id[:8]}#{self.epoch}"


def new_request_id() -> RequestId:
    """A fresh random id (128 bits, hex). Never taken from a client."""
    return RequestId(secrets.token_hex(16))


def new_boot_id() -> BootId:
    """A fresh id for this life of this process (64 bits, hex)."""
    return BootId(secrets.token_hex(8))
