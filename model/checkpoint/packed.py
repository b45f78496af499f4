"""A checkpoint's weights in memory as they are stored."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch

from headrace.model.checkpoint.parts import Part, TensorEntry
from headrace.model.checkpoint.reader import Checkpoint, OnProgress, Progress, StoredWeight

_ONCE_PARTS = (Part.EMBEDDING, Part.HEAD, Part.VISION)
_ONCE_WORDS = ("engram.embed.", ".main_", ".markov_head.", ".confidence_head.")


class PackedTensors(Mapping[str, torch.Tensor]):
    """Name -> values, widened at each look-up from stored bytes that are held here.

    What a model asks for once is not held but read from the checkpoint, as long as it is open:
    embedding, head, Engram tables, what joins the drafter's taps and refines its drafts. Raises
    CheckpointError at a look-up of a weight with a value that is not finite."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.bfloat16,
        on_progress: OnProgress | None = None,
        mapped: Container[str] = (),
    ) -> None:
        """`mapped` as in `Checkpoint.tensors`."""
        self._dtype, self._on_progress = dtype, on_progress
        self._checkpoint = checkpoint
        self._stored: dict[str, StoredWeight] = {}
        self._elsewhere: dict[str, TensorEntry] = {}
        self._done_bytes, self._total_bytes = 0, checkpoint.asked_bytes(mapped)
        self._seen: set[str] = set()
        for entry in checkpoint.entries:
            once = entry.part in _ONCE_PARTS or any(word in entry.name for word in _ONCE_WORDS)
            if once or entry.optional:  # an optional one no model asks for
                self._elsewhere[entry.name] = entry
                continue
            self._stored[entry.name] = checkpoint.read_stored(entry)
            self._report(entry)

    def _report(self, entry: TensorEntry) -> None:
        if self._on_progress is not None and not entry.optional and entry.name not in self._seen:
            self._seen.add(entry.name)
            self._done_bytes += entry.n_bytes
            self._on_progress(Progress(entry.name, self._done_bytes, self._total_bytes))

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights held here."""
        parts = ((w.data, w.scale) for w in self._stored.values())
        return sum(t.nbytes for pair in parts for t in pair if t is not None)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._elsewhere:
            entry = self._elsewhere[name]
            values = self._checkpoint.widen(entry, self._dtype)
            self._report(entry)
            return values
        return self._stored[name].widen(self._dtype)

    def __iter__(self) -> Iterator[str]:
        yield from self._stored
        yield from self._elsewhere

    def __len__(self) -> int:
        return len(self._stored) + len(self._elsewhere)
