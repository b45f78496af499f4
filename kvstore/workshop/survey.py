"""Sums over what a store holds: by kind, namespace and domain, and its chains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from headrace.core.chain import BLOCK_TOKENS
from headrace.kvstore.layout import NO_DIGEST, ObjectFacts, domain_tag
from headrace.kvstore.settings import Kind


@dataclass(frozen=True, slots=True)
class Seen:
    """One object as a survey sees it."""

    facts: ObjectFacts
    written_at_s: int
    host: bool
    ssd: bool


@dataclass(slots=True)
class Sum:
    """Objects of one kind, namespace and domain."""

    kind: str
    namespace: str
    domain: str
    objects: int = 0
    payload_bytes: int = 0
    host_objects: int = 0
    ssd_objects: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """A stored prefix, named by its last block. `whole`: every block down to the root is there, so
    a request can hit it. `behind_exact`: its first block here follows blocks of class `exact`, a
    chain of another namespace, so a request that finds that one can hit it. Blocks may be shared
    with other chains."""

    tip: str
    namespace: str
    domain: str
    blocks: int
    tokens: int
    payload_bytes: int
    windows: int
    written_at_s: int
    whole: bool
    behind_exact: bool = False


class _Above(NamedTuple):
    """What is known of a chain down to one of its blocks."""

    whole: bool = False
    behind_exact: bool = False
    payload_bytes: int = 0
    windows: int = 0


def domain_label(tag: bytes, names: Iterable[str] = ()) -> str:
    """The name behind a domain's tag where it is among `names`, else the tag's first digits: a
    store keeps tags, not names."""
    known = {domain_tag(name): name for name in names}
    return known.get(tag, tag.hex()[:12])


def sums(objects: Iterable[Seen], names: Iterable[str] = ()) -> list[Sum]:
    """One row for every kind, namespace and domain, largest first."""
    known = tuple(names)
    rows: dict[tuple[Kind, bytes, bytes], Sum] = {}
    for seen in objects:
        facts = seen.facts
        key = (facts.kind, facts.namespace, facts.domain)
        row = rows.get(key)
        if row is None:
            row = rows[key] = Sum(
                facts.kind.value, facts.namespace.hex()[:16], domain_label(facts.domain, known)
            )
        row.objects += 1
        row.payload_bytes += facts.payload_bytes
        row.host_objects += seen.host
        row.ssd_objects += seen.ssd
    return sorted(rows.values(), key=lambda row: -row.payload_bytes)


def chains(objects: Iterable[Seen], names: Iterable[str] = ()) -> list[Chain]:
    """Every stored chain by its last block, the newest first."""
    known = tuple(names)
    by_digest: dict[tuple[bytes, bytes], Seen] = {}
    windows: dict[tuple[bytes, bytes], int] = {}
    for seen in objects:
        facts = seen.facts
        if facts.kind is Kind.KV:
            by_digest[facts.namespace, facts.digest] = seen
        elif facts.kind is Kind.SWA:
            below: tuple[bytes, bytes] = (facts.namespace, facts.parent)
            windows[below] = windows.get(below, 0) + 1
    # heads first, so that what is known of a parent is known when its child comes
    order = sorted(by_digest.items(), key=lambda item: item[1].facts.block)
    whole: dict[tuple[bytes, bytes], _Above] = {}
    inner: set[tuple[bytes, bytes]] = set()
    for at, seen in order:
        facts = seen.facts
        if not facts.block:
            above = _Above(whole=True)
        elif facts.parent == NO_DIGEST:
            above = _Above(behind_exact=True)
        else:
            above = whole.get((facts.namespace, facts.parent), _Above())
        whole[at] = above._replace(
            payload_bytes=above.payload_bytes + facts.payload_bytes,
            windows=above.windows + windows.get(at, 0),
        )
        inner.add((facts.namespace, facts.parent))
    made = [
        Chain(
            tip=seen.facts.digest.hex(),
            namespace=seen.facts.namespace.hex(),
            domain=domain_label(seen.facts.domain, known),
            blocks=seen.facts.block + 1,
            tokens=(seen.facts.block + 1) * BLOCK_TOKENS,
            payload_bytes=whole[at].payload_bytes,
            windows=whole[at].windows,
            written_at_s=seen.written_at_s,
            whole=whole[at].whole,
            behind_exact=whole[at].behind_exact,
        )
        for at, seen in order
        if at not in inner
    ]
    return sorted(made, key=lambda chain: (-chain.written_at_s, chain.tip))


def path_to(
    tip: bytes, namespace: bytes, blocks: Mapping[tuple[bytes, bytes], ObjectFacts]
) -> list[ObjectFacts] | None:
    """The blocks of a chain from the root to `tip`; None unless all of them are there. `blocks` are
    the facts of `kv` objects by (namespace, digest)."""
    found: list[ObjectFacts] = []
    at: bytes = tip
    while (facts := blocks.get((namespace, at))) is not None:
        found.append(facts)
        if not facts.block or len(found) > len(blocks):
            break
        at = facts.parent
    whole = bool(found) and not found[-1].block and len(found) == found[0].block + 1
    return found[::-1] if whole else None


def find_tip(start: str, tips: Iterable[str]) -> Sequence[str]:
    """The tips that begin with these hex digits: people type the first few."""
    return sorted({tip for tip in tips if tip.startswith(start.lower())})


def plain(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Records as plain values, for JSON."""
    return [asdict(row) for row in rows]
