"""Blocks that a client wrote into slots granted in advance become objects, a batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.core import faults
from headrace.core.errors import WireError
from headrace.core.ids import JobKey
from headrace.core.states import VISIBILITY_TABLE, Visibility, VisibilityEvent
from headrace.kvstore.layout import ObjectFacts
from headrace.kvstore.objects import Entry, Saving, object_key
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState

_SEALED = VISIBILITY_TABLE.step(Visibility.RESERVED, VisibilityEvent.SEAL).state


def commit_blocks(
    state: StoreState,
    connection: int,
    facts: Sequence[ObjectFacts],
    written: Sequence[tuple[int, int]],
    lease: JobKey | None,
) -> bool:
    """Make blocks of one namespace and domain readable by digest whose payload and header stand in
    granted slots: `written` has a grant and a checksum for each of `facts`. Whether all were new
    and all grants the client's.

    The client has told others where they lie, so a leased second copy of a known block stays
    readable as long as its lease does (`GrantBook`). Raises `WireError` for other kinds than KV,
    numbers that do not match."""
    if len(written) != len(facts):
        raise WireError(f"{len(facts)} blocks are committed with {len(written)} grants")
    if facts and facts[0].kind is not Kind.KV:
        raise WireError("slots are granted in advance for blocks alone")
    fresh: dict[bytes, Entry] = {}
    filled: list[int] = []
    second: list[tuple[Entry, ObjectFacts, int, int]] = []
    refused, written_at_s = 0, int(state.clock.wall_s())
    namespace, domain = (facts[0].namespace, facts[0].domain) if facts else (b"", b"")
    before, objects = object_key(Kind.KV, namespace, b""), state.objects
    slots = state.granted.redeem(connection, [number for number, _ in written], domain)
    for fact, (_, total), slot in zip(facts, written, slots, strict=True):
        if slot is None or not _takes(state, slot, fact):
            refused += 1
            continue
        key = before + fact.digest
        known = objects.get(key) or fresh.get(key)
        if known is not None:
            second.append((known, fact, slot, total))
            continue
        fresh[key] = Entry(key, fact, total, written_at_s, _SEALED, Saving.WAITING)
        filled.append(slot)
    if fresh:
        _enter(state, fresh, filled, lease)
    for known, fact, slot, total in second:
        _second(state, known, fact, slot, total, lease)
    state.count.refused += refused
    return not refused and not second


def _enter(
    state: StoreState, fresh: Mapping[bytes, Entry], slots: Sequence[int], lease: JobKey | None
) -> None:
    """New blocks of one domain by key, waiting to be written, lie in these slots under headers of
    their client's. None of them may leave the arena yet."""
    entries = list(fresh.values())
    state.know(fresh)
    state.residents.enter_new(entries, slots)
    state.unsaved.extend(entries)
    state.pending.update(entries)
    state.dirty.update(dict.fromkeys(fresh))
    if lease is not None:
        state.leases.hold_all(lease, entries)
    state.on_unsaved()
    state.on_dirty()


def _takes(state: StoreState, slot: int, fact: ObjectFacts) -> bool:
    """Whether the object is taken; if not, its slot is free again."""
    region = state.residents.regions[Kind.KV]
    try:
        if 0 < fact.payload_bytes <= region.payload_bytes:
            if faults.hit("store.seal") == "flip":
                state.residents.arena.payload(region, slot, 1)[0] ^= 1
            return True
    except faults.InjectedFault:
        pass
    state.granted.free(slot, fact.domain)
    return False


def _second(
    state: StoreState,
    known: Entry,
    fact: ObjectFacts,
    slot: int,
    total: int,
    lease: JobKey | None,
) -> None:
    """Another writer was first. Its copy stays; this one becomes the arena's if that had none."""
    held = lease is not None and state.leases.hold(lease, known)
    same = (known.checksum, known.facts.payload_bytes) == (total, fact.payload_bytes)
    same = same and known.facts.domain == fact.domain  # the slot is counted as that domain's
    if known.slot is None and same:
        state.returned(known, slot)
    elif lease is not None and held:
        state.granted.keep_twin(lease, slot, fact.domain)
    else:
        state.granted.free(slot, fact.domain)
    state.residents.settle(known)
