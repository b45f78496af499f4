"""For whom a prefill job's product is: the decode replica bound to it, and what it is to be told.

    free --near--> asked --named--> linking --linked--> bound
      \\__________named____________^   ^ \\________gone____/ \\__ named: another one
                                       \\___ asked <__/

A job may be bound at any time and more than once; each bind has the epoch of its decode attempt.
The product is kept in order, so that whoever is bound later is told all of it. No input or output
here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from headrace.core.ids import JobKey
from headrace.core.messages import BindDecode, BlocksReady, PrefillDone, StateReady, WindowReady
from headrace.core.peers import Peer
from headrace.core.states import StateTable

Announcement: TypeAlias = BlocksReady | WindowReady | StateReady | PrefillDone


class BindState(StrEnum):
    FREE = "free"  # rows run; nobody was asked for a decode replica
    ASKED = "asked"  # the router was told that one is wanted, and is told again
    LINKING = "linking"  # one is named and being reached
    BOUND = "bound"  # it is told what is sealed, and the rest as it comes


class BindEvent(StrEnum):
    NEAR = "near"  # at most one chunk of rows is left
    NAMED = "named"  # BindDecode
    LINKED = "linked"
    GONE = "gone"  # it cannot be reached, or its connection ended
    AGAIN = "again"  # a BindDecode that is in force already, or older than that


_S, _E = BindState, BindEvent

BIND_TABLE: StateTable[BindState, BindEvent] = StateTable(
    "bind",
    {
        (_S.FREE, _E.NEAR): _S.ASKED,
        **{(s, _E.NAMED): _S.LINKING for s in _S},
        (_S.LINKING, _E.LINKED): _S.BOUND,
        (_S.LINKING, _E.GONE): _S.ASKED,
        (_S.BOUND, _E.GONE): _S.ASKED,
    },
    ignored=frozenset(
        {(s, _E.AGAIN) for s in _S}
        | {(s, _E.NEAR) for s in (_S.ASKED, _S.LINKING, _S.BOUND)}
        | {(s, _E.GONE) for s in (_S.FREE, _S.ASKED)}  # told of twice
    ),
)


@dataclass(eq=False)
class Binding:
    """Mutable; `state` moves by `BIND_TABLE` only. `message` is the newest BindDecode, `peer` the
    replica it names, once reached; `told` whether that one was told everything. `telling` is the
    task that tells it."""

    state: BindState = BindState.FREE
    message: BindDecode | None = None
    peer: Peer | None = None
    told: bool = False
    telling: asyncio.Task[None] | None = None

    def step(self, event: BindEvent, who: object = "") -> bool:
        """Move by one event; False when it was late or a duplicate. Raises `IllegalTransition`."""
        return BIND_TABLE.move(self, event, who)

    @property
    def decode_key(self) -> JobKey | None:
        """The decode attempt of the newest bind."""
        return self.message.decode_key if self.message is not None else None

    def name(self, message: BindDecode) -> bool:
        """Take a BindDecode; False when it is late or a duplicate. After a loss the same one may
        come again: then that replica is tried once more."""
        known = self.message.decode_epoch if self.message is not None else -1
        linked = self.state in (_S.LINKING, _S.BOUND)
        if message.decode_epoch < known or (linked and message.decode_epoch == known):
            self.step(_E.AGAIN, message.key)
            return False
        self.step(_E.NAMED, message.key)
        self.stop()
        self.message, self.peer, self.told = message, None, False
        return True

    def stop(self) -> None:
        """Tell no more. Idempotent."""
        telling, self.telling = self.telling, None
        if telling is not None:
            telling.cancel()


@dataclass(eq=False)
class Product:
    """What a job has to announce, in order; PrefillDone is the last. Only grows. The keys in it are
    those of the prefill attempt: who sends one puts the decode attempt's in its place."""

    items: list[Announcement] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, item: Announcement) -> None:
        self.items.append(item)
        self._news.set()

    async def item(self, index: int) -> Announcement:
        """Item `index`, when it is there. For one reader at a time."""
        while index >= len(self.items):
            self._news.clear()
            await self._news.wait()
        return self.items[index]
