"""Reading a checkpoint tensor by tensor, with bounded memory and every byte counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.checkpoint.encoding import widen
from headrace.model.checkpoint.index import (
    Index,
    check_shard,
    complete_parts,
    present_entries,
    read_index,
    require,
)
from headrace.model.checkpoint.json_files import CONFIG_NAME, read_json
from headrace.model.checkpoint.names import Selection, select, tensor_table, unread_prefixes
from headrace.model.checkpoint.parts import TensorEntry
from headrace.model.checkpoint.release import ReleaseConfig, read_config
from headrace.model.checkpoint.remarks import check_architectures, say_odd_sizes
from headrace.model.checkpoint.shards import Meter, Shard, TensorPlace
from headrace.model.checkpoint.stored import Kind, StoredSpec

STAGE_BYTES = 4 << 20  # stored bytes in hand while a tensor is decoded or copied


@dataclass(frozen=True, slots=True)
class Progress:
    """Stored bytes of the weights that will be read, and of those read so far."""

    name: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as it lies in the file, for whoever decodes on use.

    `data` is uint8 [bytes], `scale` uint8 [scale rows, scale columns] or None. Both are owned by
    the holder.
    """

    entry: TensorEntry
    data: torch.Tensor
    scale: torch.Tensor | None

    def widen(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, in a new tensor. Raises CheckpointError if one is not finite."""
        out = torch.empty(self.entry.shape, dtype=Checkpoint.dtype_of(self.entry, dtype))
        widen(self.entry.name, self.entry.encoding, self.data, self.scale, out)
        return out


@dataclass(slots=True)
class Checkpoint:
    """An open checkpoint whose headers agree with its configuration; no weight is read yet.

    `entries` are the weights that the selection loads, in file order. `meter.read_bytes` counts
    bytes taken from the shards. Close it, or use it as a context manager.
    """

    release: ReleaseConfig
    selection: Selection | None
    entries: tuple[TensorEntry, ...]
    index: Index
    meter: Meter
    _places: dict[str, tuple[Shard, TensorPlace]] = field(repr=False)
    _shards: dict[str, Shard] = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path, selection: Selection | None = Selection.FULL) -> Self:
        """Read config.json, the index and the headers of the shards that `selection` needs.

        None selects every part that the files hold; each must be complete. Shards without a
        selected tensor are not touched. Raises CheckpointError or ConfigError before any weight
        is read.
        """
        folder = Path(folder)
        document = read_json(folder / CONFIG_NAME)
        release = read_config(document)
        check_architectures(document, release.model)
        meter = Meter()
        unread = unread_prefixes(release.model)
        index = read_index(folder, meter).without(unread)
        table = tensor_table(release.model, release.quantisation)
        present = present_entries(index, table)
        if selection is None:
            wanted = complete_parts(table, present)
        else:
            wanted = select(release.model, table, selection)
        entries = require(index, wanted)
        specs = {spec.name: spec for entry in table for spec in entry.stored}
        files = {index.tensors[s.name].file for entry in entries for s in entry.stored}
        promised = index.names_by_file()
        shards: dict[str, Shard] = {}
        places: dict[str, tuple[Shard, TensorPlace]] = {}
        try:
            for file in sorted(files):
                shards[file] = shard = Shard.open(folder / file, meter)
                found = check_shard(shard, index, promised[file], specs, unread)
                for name, place in found.items():
                    places[name] = (shard, place)
        except BaseException:
            for shard in shards.values():
                shard.close()
            raise
        if not unread:
            say_odd_sizes(folder, index, shards)
        return cls(release, selection, entries, index, meter, places, shards)

    def close(self) -> None:
        """Close the files; calling it again does nothing."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        """Stored bytes of the selected weights."""
        return sum(entry.n_bytes for entry in self.entries)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(self._shards.values())

    # ---- stored ----------------------------------------------------------------------------

    def pieces(self, spec: StoredSpec) -> Iterator[torch.Tensor]:
        """The bytes of one stored tensor in order, at most STAGE_BYTES each (uint8, owned)."""
        shard, place = self._places[spec.name]
        for lo in range(0, spec.n_bytes, STAGE_BYTES):
            piece = torch.empty(min(STAGE_BYTES, spec.n_bytes - lo), dtype=torch.uint8)
            with _held(self.meter, piece):
                shard.read(place.offset + lo, piece)
                yield piece

    def read_stored(self, entry: TensorEntry) -> StoredWeight:
        """One weight without decoding it."""
        parts = []
        for spec in entry.stored:
            shard, place = self._places[spec.name]
            part = torch.empty(spec.n_bytes, dtype=torch.uint8)
            with _held(self.meter, part):
                shard.read(place.offset, part)
            parts.append(part)
        scale = parts[1].view(entry.stored[1].shape) if len(parts) > 1 else None
        return StoredWeight(entry, parts[0], scale)

    def map_stored(self, entry: TensorEntry) -> tuple[NDArray[np.uint8], ...]:
        """One weight's stored tensors, each uint8 [rows, bytes a row], through mappings that
        outlive this object. Their values are not looked at."""
        places = (self._places[spec.name] for spec in entry.stored)
        return tuple(shard.map(at).reshape(entry.shape[0], -1) for shard, at in places)

    # ---- widened ---------------------------------------------------------------------------

    def widened_rows(
        self, entry: TensorEntry, dtype: torch.dtype, align_rows: int = 1
    ) -> Iterator[torch.Tensor]:
        """A weight's values in bands of whole rows, in order; each is owned by the receiver.

        A band holds at most STAGE_BYTES of stored data, but at least `align_rows` rows or one
        block, and begins at a multiple of both. A weight of one dimension is one band.
        """
        for lo, n_rows in self._bands(entry, align_rows):
            shape = entry.shape if n_rows is None else (n_rows, *entry.shape[1:])
            out = torch.empty(shape, dtype=self.dtype_of(entry, dtype))
            with _held(self.meter, out):
                self._widen_band(entry, lo, n_rows, out)
            yield out

    @staticmethod
    def _bands(entry: TensorEntry, align_rows: int) -> Iterator[tuple[int, int | None]]:
        """(first row, number of rows) of each band; None for a weight of one dimension."""
        if len(entry.shape) < 2:
            yield 0, None
            return
        n_rows = entry.shape[0]
        unit = max(entry.encoding.block[0], align_rows)  # powers of two
        row_bytes = entry.stored[0].n_bytes // max(1, n_rows)
        rows = max(1, STAGE_BYTES // max(1, unit * row_bytes)) * unit
        for lo in range(0, n_rows, rows):
            yield lo, min(rows, n_rows - lo)

    def _widen_band(
        self, entry: TensorEntry, lo: int, n_rows: int | None, out: torch.Tensor
    ) -> None:
        """Fill `out` with rows [lo, lo + n_rows) of a weight, or with the whole of it."""
        spec = entry.stored[0]
        shard, place = self._places[spec.name]
        row_bytes = spec.n_bytes if n_rows is None else spec.n_bytes // entry.shape[0]
        count = 1 if n_rows is None else n_rows
        stage = torch.empty(count * row_bytes, dtype=torch.uint8)
        with _held(self.meter, stage):
            shard.read(place.offset + lo * row_bytes, stage)
            scale = self._scale_rows(entry, lo, count) if entry.encoding.has_scale else None
            widen(entry.name, entry.encoding, stage, scale, out)

    def _scale_rows(self, entry: TensorEntry, lo: int, n_rows: int) -> torch.Tensor:
        spec, rows_per_scale = entry.stored[1], entry.encoding.block[0]
        shard, place = self._places[spec.name]
        first, last = lo // rows_per_scale, -(-(lo + n_rows) // rows_per_scale)
        columns = spec.shape[1]
        scale = torch.empty((last - first, columns), dtype=torch.uint8)
        with _held(self.meter, scale):
            shard.read(place.offset + first * columns, scale)
        return scale

    @staticmethod
    def dtype_of(entry: TensorEntry, dtype: torch.dtype) -> torch.dtype:
        """`dtype`, but never narrower than what an F32 weight needs; int64 for I64."""
        if entry.encoding.kind is Kind.I64:
            return torch.int64
        keeps = entry.encoding.kind is Kind.F32 and dtype == torch.bfloat16
        return torch.float32 if keeps else dtype

    def widen(self, entry: TensorEntry, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One weight's values. In hand: the result and one band. F32 weights stay float32.

        Raises CheckpointError on a value that is not finite.
        """
        out = torch.empty(entry.shape, dtype=self.dtype_of(entry, dtype))
        with _held(self.meter, out):
            for lo, n_rows in self._bands(entry, 1):
                part = out if n_rows is None else out[lo : lo + n_rows]
                self._widen_band(entry, lo, n_rows, part)
        return out

    def stream(
        self, dtype: torch.dtype = torch.float32, on_progress: OnProgress | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and values of every selected weight in file order, one in hand at a time."""
        done, total = 0, self.total_bytes
        for entry in self.entries:
            values = self.widen(entry, dtype)
            with _held(self.meter, values):
                done += entry.n_bytes
                if on_progress is not None:
                    on_progress(Progress(entry.name, done, total))
                yield entry.name, values
            del values

    def tensors(
        self,
        dtype: torch.dtype = torch.float32,
        on_progress: OnProgress | None = None,
        mapped: Container[str] = (),
    ) -> Mapping[str, torch.Tensor]:
        """Name -> values, read and decoded anew at each look-up; valid while this is open. Progress
        counts first look-ups, and ends at its total when a model has asked for all but `mapped`."""
        return _Tensors(self, dtype, on_progress, self.asked_bytes(mapped))

    def asked_bytes(self, mapped: Container[str] = ()) -> int:
        """Stored bytes of the weights that a model asks for: all selected but optional ones, which
        no model reads, and those in `mapped`, which it has from elsewhere."""
        asked = (e for e in self.entries if not e.optional and e.name not in mapped)
        return sum(entry.n_bytes for entry in asked)


@contextmanager
def _held(meter: Meter, buffer: torch.Tensor) -> Iterator[None]:
    """Counts a buffer as in hand for the length of a block."""
    n_bytes = buffer.numel() * buffer.element_size()
    meter.hold(n_bytes)
    try:
        yield
    finally:
        meter.drop(n_bytes)


class _Tensors(Mapping[str, torch.Tensor]):
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        on_progress: OnProgress | None,
        total_bytes: int,
    ) -> None:
        self._checkpoint, self._dtype, self._on_progress = checkpoint, dtype, on_progress
        self._entries = {entry.name: entry for entry in checkpoint.entries}
        self._total_bytes = total_bytes
        self._seen: set[str] = set()
        self._done_bytes = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        values = self._checkpoint.widen(entry, self._dtype)
        if self._on_progress is not None and not entry.optional and name not in self._seen:
            self._seen.add(name)
            self._done_bytes += entry.n_bytes
            self._on_progress(Progress(name, self._done_bytes, self._total_bytes))
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


# ---- identity ------------------------------------------------------------------------------


def combine_digests(digests: Mapping[StoredSpec, str]) -> str:
    """Hex SHA-256 of a set of tensors: names, dtypes, shapes and the SHA-256 of their bytes.

    It depends neither on how they are spread over files nor on a prefix.
    """
    lines = [
        json.dumps([spec.name, spec.dtype, list(spec.shape), digest])
        for spec, digest in sorted(digests.items(), key=lambda item: item[0].name)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensors_digest(checkpoint: Checkpoint, on_progress: OnProgress | None = None) -> str:
    """`combine_digests` of the selected tensors: reads every byte of them."""
    digests: dict[StoredSpec, str] = {}
    done, total = 0, checkpoint.total_bytes
    for entry in checkpoint.entries:
        for spec in entry.stored:
            digest = hashlib.sha256()
            for piece in checkpoint.pieces(spec):
                digest.update(piece.numpy().data)
            digests[spec] = digest.hexdigest()
        done += entry.n_bytes
        if on_progress is not None:
            on_progress(Progress(entry.name, done, total))
    return combine_digests(digests)
