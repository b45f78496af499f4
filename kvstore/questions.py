"""What tools ask a running store: rare questions, plain values as JSON text, one topic each.

The request path never comes here; `messages` has what it needs, packed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.core.errors import HeadraceError


class StoreSilent(HeadraceError):
    """No store answers."""

    code = "store_silent"


class StoreRefused(HeadraceError):
    """The store's own words on why it will not."""

    code = "store_refused"


class Topic(StrEnum):
    CHAINS = "chains"  # {limit} -> {chains: [...], sums: [...], total}
    CHAIN = "chain"  # {namespace, tip} -> {digests: hex, blocks, payload_bytes}
    PINS = "pins"  # {} -> {pins: [...], held_bytes, quota_bytes}
    PIN = "pin"  # {name, namespace, tip, ttl_s} -> {held_bytes}
    UNPIN = "unpin"  # {name} -> {ended}
    REPUBLISH = "republish"  # {} -> {objects}
    SCRUB = "scrub"  # {segment, drop} -> {sound, sound_bytes, damaged, segments}
    CONTENTS = "contents"  # {namespace, tips, offset} -> {rows, total}, `cleaning.contents`
    CLEAN = "clean"  # {before_s, namespaces, domains, dry_run} -> what went, pins_ended
    LAYOUT = "layout"  # {namespace} -> what an import must fit, `importing.ImportDesk`
    ROOM = "room"  # {kind, namespace, digests: hex} -> {states, free_slots}, there too
    SWEEP = "sweep"  # {} -> {stores, records}: removed from the index
    METRICS = "metrics"  # {} -> {text}: Prometheus exposition


@dataclass(frozen=True, slots=True)
class Question:
    """`call` pairs it with its answer, on one connection."""

    call: int
    topic: Topic
    text: str  # JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """`good` False: `text` says in one sentence why not."""

    call: int
    good: bool
    text: str


def read_values(text: str, **wanted: type) -> dict[str, Any]:
    """The values of a question. Raises `ValueError` naming what is missing or of another type."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a question must carry an object")
    for name, kind in wanted.items():
        value = values.get(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = values[name] = float(value)
        if type(value) is not kind:
            raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r:.40}")
    return values
