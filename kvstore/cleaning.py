"""What tools have a running store do with its objects: name those of chains, and clean up."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from headrace.core.errors import ConfigError
from headrace.kvstore.objects import Entry
from headrace.kvstore.pins import PinBook
from headrace.kvstore.settings import Kind
from headrace.kvstore.state import StoreState
from headrace.kvstore.workshop.garbage import Stored, Wishes, judge

YOUNG_S = 60  # what was written so lately stays: what it hangs on may still be on its way
ROWS_AN_ANSWER = 2000  # objects of one answer
_STEP = 256  # objects removed before others have their turn


def _in_use(entry: Entry) -> bool:
    return bool(entry.leases) or entry.pins > 0


async def clean(
    state: StoreState, pins: PinBook, wishes: Wishes, *, dry_run: bool
) -> dict[str, Any]:
    """Remove what nobody can reach or what is wished away, but nothing that is pinned, leased, in
    use or not yet durable, nor anything of the last `YOUNG_S`."""
    now_s = int(state.clock.wall_s())
    before_s = min(wishes.written_before_s, now_s - YOUNG_S)  # heads of young tails stay, too
    wishes = replace(wishes, written_before_s=before_s)
    entries = tuple(state.objects.values())
    known = {
        entry.key: Stored(
            entry.facts,
            entry.written_at_s,
            _in_use(entry) or entry.disk is None or pins.holds(entry.key),
        )
        for entry in entries
    }
    verdicts = await asyncio.to_thread(lambda: tuple(judge(known, wishes)))
    flaws: Counter[str] = Counter()
    gone_bytes = 0
    for number, (key, flaw) in enumerate(verdicts):
        entry = state.objects.get(key)
        if flaw is None or entry is None:
            continue
        stored = known[key]
        if stored.kept or _in_use(entry) or entry.written_at_s > now_s - YOUNG_S:
            continue  # somebody began to use it meanwhile, or is still writing what it hangs on
        flaws[flaw.value] += 1
        gone_bytes += entry.facts.payload_bytes
        if not dry_run:
            state.drop(entry, erase=True)
        if number % _STEP == 0:
            await asyncio.sleep(0)
    total_bytes = sum(stored.facts.payload_bytes for stored in known.values())
    return {
        "read": len(known),
        "objects": len(known) - sum(flaws.values()),
        "payload_bytes": total_bytes - gone_bytes,
        "flaws": dict(flaws),
    }


def contents(
    state: StoreState, chains: list[dict[bytes, int]], offset: int
) -> tuple[list[list[Any]], int]:
    """Facts of the blocks of some chains (as `stored_chain` gives them, tip first) and of the
    window records on them, in the order of a prefix file: a part from `offset` on, and how many
    there are in all. Raises `ConfigError` when something has left the store."""
    blocks: dict[bytes, None] = {}
    for chain in chains:
        blocks.update(dict.fromkeys(reversed(chain)))
    found: list[Entry] = []
    for key in blocks:
        entry = state.objects.get(key)
        if entry is None or entry.disk is None:
            raise ConfigError("a block of the chain has left the store; ask again")
        found.append(entry)
    windows = [
        child
        for entry in found
        for child in state.kin.children(entry)
        if child.kind is Kind.SWA and child.disk is not None
    ]
    everything = found + windows
    rows = [
        [
            entry.kind.value,
            entry.facts.digest.hex(),
            entry.facts.parent.hex(),
            entry.facts.block,
            entry.facts.domain.hex(),
            entry.facts.payload_bytes,
            entry.checksum,
            entry.written_at_s,
        ]
        for entry in everything[offset : offset + ROWS_AN_ANSWER]
    ]
    return rows, len(everything)
