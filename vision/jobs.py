"""A vision job as an automaton: one picture for one attempt at one request.

    looking -> queued -> encoding -> done
       \\__________________________^       (the object is there already)

`looking` asks the store, `queued` waits for the tower, `encoding` opens pixels, runs the tower and
seals. Whatever is not written in the table raises.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.ids import Digest, JobKey
from headrace.core.messages import VisionJob
from headrace.core.peers import Peer
from headrace.core.states import StateTable


class JobState(StrEnum):
    LOOKING = "looking"
    QUEUED = "queued"
    ENCODING = "encoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobEvent(StrEnum):
    FOUND = "found"  # the object is in the store and leased
    MISSING = "missing"
    TAKEN = "taken"  # the tower has room
    SEALED = "sealed"
    ERROR = "error"
    CANCEL = "cancel"  # by the router, by its connection's end, or by a newer epoch
    AGAIN = "again"  # the same VisionJob once more


_S, _E = JobState, JobEvent
TERMINAL = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})
_LIVE = (_S.LOOKING, _S.QUEUED, _S.ENCODING)

JOB_TABLE: StateTable[JobState, JobEvent] = StateTable(
    "vision job",
    {
        (_S.LOOKING, _E.FOUND): _S.DONE,
        (_S.LOOKING, _E.MISSING): _S.QUEUED,
        (_S.QUEUED, _E.TAKEN): _S.ENCODING,
        (_S.ENCODING, _E.FOUND): _S.DONE,  # another job made it meanwhile
        (_S.ENCODING, _E.SEALED): _S.DONE,
        **{(s, _E.ERROR): _S.FAILED for s in _LIVE},
        **{(s, _E.CANCEL): _S.CANCELLED for s in _LIVE},
    },
    ignored=frozenset(
        {(s, _E.AGAIN) for s in JobState}
        # What the job's tasks had in hand when it ended under them.
        | {(s, e) for s in TERMINAL for e in JobEvent}
    ),
)


@dataclass
class Counts:
    """What this replica saw since it started. Mutable, owned by the role's loop."""

    jobs: int = 0
    late: int = 0  # jobs of older epochs, duplicates, and cancels of what is over
    found: int = 0  # answered without opening pixels
    encoded: int = 0  # pictures that went through the tower, sealed or not
    failed: int = 0


@dataclass(eq=False)
class Job:
    """One job. Mutable; `state` moves by `JOB_TABLE` only. `patches` is its cost."""

    message: VisionJob
    router: Peer
    patches: int
    arrived_s: float
    state: JobState = JobState.LOOKING
    looking: asyncio.Task[None] | None = None

    @property
    def key(self) -> JobKey:
        return self.message.key

    @property
    def digest(self) -> Digest:
        return self.message.digest

    def step(self, event: JobEvent) -> bool:
        """Move by one event; False when it was late or a duplicate. Raises `IllegalTransition`."""
        return JOB_TABLE.move(self, event, self.key)
