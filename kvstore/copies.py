"""Copies of other stores' objects by the batch: made, entered, held and let go.

What one step costs an object, a batch pays a few times: a chain of a long prompt is thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeAlias

from headrace.core.ids import Digest
from headrace.core.states import Visibility
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.objects import Entry, Saving, object_key
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

# Of an object that another store has: digest | block | payload bytes | checksum | written at |
# parent | domain.
Told: TypeAlias = tuple[bytes, int, int, int, int, bytes, bytes]


def offered_copies(kind: Kind, namespace: bytes, told: Iterable[Told | None]) -> list[Entry | None]:
    """Entries that no state knows yet, None for None. Their owner keeps the objects on disk and
    lists them: these copies live in the arena only."""
    before, sealed, given_up = object_key(kind, namespace, b""), Visibility.SEALED, Saving.GIVEN_UP
    out: list[Entry | None] = []
    for one in told:
        if one is None:
            out.append(None)
            continue
        digest, block, size, total, written_at_s, parent, domain = one
        about = (Digest(digest), Digest(parent), block, domain, size)
        facts = ObjectFacts(kind, namespace, *about)
        out.append(Entry(before + digest, facts, total, written_at_s, sealed, given_up, copy=True))
    return out


def take_slots(state: StoreState, copies: Sequence[Entry]) -> list[int]:
    """Reserve a slot for each of `copies`, of one kind, from the first on as far as there is room;
    the caller fills them."""
    slots: list[int] = []
    for domain, group in groupby(copies, key=_domain):
        count = len(list(group))
        taken = state.residents.take_all(copies[0].facts.kind, domain, count)
        slots += taken
        if len(taken) < count:
            break
    return slots


def enter_copies(
    state: StoreState, copies: Sequence[Entry], slots: Sequence[int], pins: int
) -> list[Entry]:
    """Make `copies`, of one kind, readable in the reserved slots that hold their verified bytes;
    the objects of their keys, with so many pins more. An earlier one of a key stays, and its slot
    is free again."""
    residents, objects = state.residents, state.objects
    out: list[Entry] = []
    old: list[Entry] = []
    for _, group in groupby(zip(copies, slots, strict=True), key=lambda pair: _domain(pair[0])):
        new: dict[bytes, Entry] = {}
        places: list[int] = []
        for copy, slot in group:
            known = objects.get(copy.key) or new.get(copy.key)
            if known is None:
                new[copy.key] = copy
                places.append(slot)
            else:
                residents.give(copy.facts.kind, slot, copy.facts.domain)
                old.append(known)
            out.append(known or copy)
        if new:
            state.know(new)
            residents.enter_new(list(new.values()), places)
            residents.show_all(new.values())
    for entry in out:
        entry.pins += pins
    residents.settle_all(old if pins else out)  # what is new may not leave yet
    return out


def find_all(
    state: StoreState, kind: Kind, namespace: bytes, digests: Iterable[Digest]
) -> list[Entry | None]:
    """The entry of each digest, as `StoreState.find`."""
    before, get = object_key(kind, namespace, b""), state.objects.get
    return [get(before + digest) for digest in digests]


def pin_all(state: StoreState, entries: Iterable[Entry]) -> None:
    """As `StoreState.pin`, for each."""
    new: list[Entry] = []
    for entry in entries:
        entry.pins += 1
        if entry.pins == 1:
            new.append(entry)
    state.residents.settle_all(new)


def _domain(entry: Entry) -> bytes:
    return entry.facts.domain
