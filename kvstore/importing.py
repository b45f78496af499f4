"""What an import asks of a running store: whether a prefix file fits, what is there already, and
how much can be written before anything would have to go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from headrace.core.ids import Digest
from headrace.kvstore.layout import SEGMENT_HEADER_BYTES, slot_bytes
from headrace.kvstore.objects import PENDING, Entry
from headrace.kvstore.segments import SegmentFiles
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.state import StoreState

# One letter an object of `ROOM`.
ABSENT, ON_ITS_WAY, IN_MEMORY, ON_DISK = "-", "w", "m", "d"


class ImportDesk:
    """Answers for one store; changes nothing."""

    def __init__(self, state: StoreState, files: SegmentFiles, settings: StoreSettings) -> None:
        self._state = state
        self._files = files
        self._settings = settings

    async def layout(self, namespace: bytes) -> dict[str, Any]:
        """All namespaces that are stored (hex), the payload sizes of this one by kind, the
        largest payload that a kind's slots take, and how many blocks the arena holds."""
        facts = [entry.facts for entry in tuple(self._state.objects.values())]

        def survey() -> tuple[list[str], dict[str, list[int]]]:
            sizes = {(one.kind, one.payload_bytes) for one in facts if one.namespace == namespace}
            by_kind: dict[str, list[int]] = {}
            for kind, size in sorted(sizes):
                by_kind.setdefault(kind.value, []).append(size)
            return sorted({one.namespace.hex() for one in facts}), by_kind

        namespaces, sizes = await asyncio.to_thread(survey)
        regions = self._state.residents.regions
        most = {kind.value: region.payload_bytes for kind, region in regions.items()}
        slots = regions[Kind.KV].slots
        return {"namespaces": namespaces, "sizes": sizes, "most_bytes": most, "slots": slots}

    def room(self, kind: Kind, namespace: bytes, digests: Sequence[Digest]) -> dict[str, Any]:
        """A letter for each digest, and how many objects of this kind find a slot on disk that
        nothing is in and nothing is on its way to."""
        found = [self._state.find(kind, namespace, digest) for digest in digests]
        waiting = sum(entry.kind is kind for entry in self._state.pending)
        return {
            "states": "".join(map(_letter, found)),
            "free_slots": max(0, self._free_slots(kind) - waiting),
        }

    def _free_slots(self, kind: Kind) -> int:
        size = self._settings.payload_bytes().get(kind)
        if size is None:
            return 0
        each = (self._settings.segment_bytes - SEGMENT_HEADER_BYTES) // slot_bytes(size)
        unused = sum(segment.header.kind is None for segment in self._files.segments)
        return self._files.left(kind) + unused * each


def _letter(entry: Entry | None) -> str:
    if entry is None:
        return ABSENT
    if entry.disk is not None:
        return ON_DISK
    return ON_ITS_WAY if entry.saving in PENDING else IN_MEMORY
