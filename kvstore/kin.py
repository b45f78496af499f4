"""Which objects hang on which: a block on the block before it, a window record on its block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.core.ids import Digest
from headrace.kvstore.layout import NO_DIGEST
from headrace.kvstore.objects import Entry
from headrace.kvstore.settings import Kind


class Kin:
    """Known objects by the digest of their parent. One entry costs one place in a table: most
    blocks have one child, and a set is made only for further ones."""

    def __init__(self) -> None:
        self._by_parent: dict[Digest, Entry | set[Entry]] = {}

    def add(self, entry: Entry) -> None:
        parent = entry.facts.parent
        if parent == NO_DIGEST:
            return
        known = self._by_parent.get(parent)
        if known is None:
            self._by_parent[parent] = entry
        elif isinstance(known, set):
            known.add(entry)
        elif known is not entry:
            self._by_parent[parent] = {known, entry}

    def add_all(self, entries: Sequence[Entry]) -> None:
        """As `add`, of a chain in one go where each hangs on another."""
        fresh = {entry.facts.parent: entry for entry in entries}
        if len(fresh) == len(entries) and self._by_parent.keys().isdisjoint(fresh):
            fresh.pop(NO_DIGEST, None)
            self._by_parent.update(fresh)
        else:
            for entry in entries:
                self.add(entry)

    def discard(self, entry: Entry) -> None:
        parent = entry.facts.parent
        known = self._by_parent.get(parent)
        if known is entry:
            del self._by_parent[parent]
        elif isinstance(known, set):
            known.discard(entry)
            if not known:
                del self._by_parent[parent]

    def has_child(self, entry: Entry, kind: Kind) -> bool:
        """Whether an object of this kind hangs directly on an object."""
        known = self._by_parent.get(entry.facts.digest)
        if known is None or (isinstance(known, Entry) and known.facts.kind is not kind):
            return False  # the last of a chain, or a block before another
        return any(child.facts.kind is kind for child in self.children(entry))

    def children(self, entry: Entry) -> Iterator[Entry]:
        """What hangs directly on an object. The table must not change meanwhile."""
        known = self._by_parent.get(entry.facts.digest)
        for child in (known,) if isinstance(known, Entry) else known or ():
            if child.facts.namespace == entry.facts.namespace and child is not entry:
                yield child
