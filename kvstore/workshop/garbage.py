"""What of a store nobody can reach, or somebody wants gone: for files and for running stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from headrace.kvstore.layout import NO_DIGEST, ObjectFacts
from headrace.kvstore.settings import Kind


class Flaw(StrEnum):
    """What can be wrong with a slot."""

    PAYLOAD = "payload"  # does not match its checksum
    UNREADABLE = "unreadable"  # the disk says no, or the file ends before
    DUPLICATE = "duplicate"  # a newer slot holds the same object
    ORPHAN = "orphan"  # what it hangs on is not stored: nobody can reach it
    UNWANTED = "unwanted"  # asked for by its age, namespace or domain


@dataclass(frozen=True, slots=True)
class Wishes:
    """What else is to go. Pinned chains stay whatever their age."""

    written_before_s: int = 0
    namespaces: Collection[bytes] = ()
    domains: Collection[bytes] = ()  # tags


@dataclass(frozen=True, slots=True)
class Stored:
    """One object as the rule sees it. `kept`: a pin holds it, or somebody uses it now."""

    facts: ObjectFacts
    written_at_s: int
    kept: bool


def judge(objects: Mapping[bytes, Stored], wishes: Wishes) -> Iterator[tuple[bytes, Flaw | None]]:
    """For every key why its object is to go, or None. Heads come before tails, blocks before what
    hangs on them."""
    young = _young(objects, wishes.written_before_s)
    alive: set[tuple[bytes, bytes]] = set()  # blocks that can be reached
    order = sorted(
        objects.items(), key=lambda at: (at[1].facts.kind is not Kind.KV, at[1].facts.block)
    )
    for key, stored in order:
        facts = stored.facts
        # A block without a parent follows blocks of another class (docs/kv-format.md).
        follows = facts.block > 0 and facts.parent != NO_DIGEST
        hangs = facts.kind is Kind.SWA or (facts.kind is Kind.KV and follows)
        flaw = None
        if (
            facts.namespace in wishes.namespaces
            or facts.domain in wishes.domains
            or key not in young
        ):
            flaw = Flaw.UNWANTED
        elif hangs and (facts.namespace, facts.parent) not in alive:
            flaw = Flaw.ORPHAN
        if flaw is None and facts.kind is Kind.KV:
            alive.add((facts.namespace, facts.digest))
        yield key, flaw


def _young(objects: Mapping[bytes, Stored], before_s: int) -> set[bytes]:
    """Keys of what is kept or was written since then, and of what such objects hang on: a head is
    always older than its tail."""
    needed: set[tuple[bytes, bytes]] = set()
    young: set[bytes] = set()
    for key, stored in sorted(objects.items(), key=lambda at: -at[1].facts.block):
        facts = stored.facts
        at = (facts.namespace, bytes(facts.digest))
        if stored.written_at_s >= before_s or stored.kept or at in needed:
            young.add(key)
            needed.add((facts.namespace, bytes(facts.parent)))
    return young
