"""The index of a checkpoint: which file holds which tensor, checked against files and table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.json_files import INDEX_NAME, SINGLE_NAME, read_json
from headrace.model.checkpoint.parts import Part, TensorEntry
from headrace.model.checkpoint.shards import Meter, Shard, TensorPlace
from headrace.model.checkpoint.stored import StoredSpec

PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor as the index gives it: its name in the files (perhaps with a prefix), its file."""

    raw_name: str
    file: str


@dataclass(frozen=True, slots=True)
class Index:
    """Tensor name without prefix -> where it lies. `metadata` is that of the index file."""

    tensors: Mapping[str, Located]
    metadata: Mapping[str, object]

    def without(self, prefixes: tuple[str, ...]) -> Index:
        """The same without the names that begin so."""
        kept = {n: at for n, at in self.tensors.items() if not n.startswith(prefixes)}
        return Index(kept, self.metadata)

    def names_by_file(self) -> dict[str, list[str]]:
        """File -> names without prefix that the index promises there."""
        names: dict[str, list[str]] = {}
        for name, located in self.tensors.items():
            names.setdefault(located.file, []).append(name)
        return names


def read_index(folder: Path, meter: Meter) -> Index:
    """From model.safetensors.index.json, or from the header of a single model.safetensors.

    Raises CheckpointError: no index and no single file, names that are not a file of the folder, a
    tensor that comes twice, a map without tensors, a total that is no size.
    """
    if (folder / INDEX_NAME).exists():
        document = read_json(folder / INDEX_NAME)
        weight_map, metadata = document.get("weight_map"), document.get("metadata") or {}
        if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
            found = f"weight_map {type(weight_map).__name__}, metadata {type(metadata).__name__}"
            raise CheckpointError(f"{INDEX_NAME}: found {found}, wanted two objects")
        if not weight_map:
            raise CheckpointError(f"{INDEX_NAME}: found an empty weight_map, wanted tensors in it")
        _check_total(metadata.get("total_size", 0))
    elif (folder / SINGLE_NAME).exists():
        with Shard.open(folder / SINGLE_NAME, meter) as shard:
            weight_map = {place.spec.name: SINGLE_NAME for place in shard.header.places}
        metadata = {}
    else:
        raise CheckpointError(
            f"{INDEX_NAME}: missing: found neither it nor {SINGLE_NAME}, wanted one of them"
        )
    tensors: dict[str, Located] = {}
    for raw_name, file in weight_map.items():
        if not isinstance(file, str) or not _is_file_name(file):
            raise CheckpointError(
                f"{raw_name}: found file {str(file)[:200]!r} in the index, wanted the name of a "
                ".safetensors file in the checkpoint's own folder"
            )
        name = raw_name.removeprefix(PREFIX)
        if name in tensors:
            raise CheckpointError(f"{name}: found with and without prefix {PREFIX!r}, wanted once")
        tensors[name] = Located(raw_name, file)
    return Index(tensors, metadata)


def _check_total(found: object) -> None:
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if not number or not 0 <= found < 1 << 63:  # type: ignore[operator]
        raise CheckpointError(f"{INDEX_NAME}: total_size: found {found!r:.100}, wanted bytes")


def _is_file_name(file: str) -> bool:
    """No folder, no drive, no hidden file. Links are followed: download caches are made of them."""
    plain = not set(file) & set("/\\:\0") and not file.startswith(".")
    return plain and file.endswith(".safetensors")


def present_entries(index: Index, table: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Entries of the table that the index has. Raises CheckpointError on a tensor of no entry."""
    known = {spec.name: entry for entry in table for spec in entry.stored}
    for name in index.tensors:
        if name not in known:
            raise CheckpointError(
                f"{name}: unknown tensor: found in the index, wanted by no part of the model"
            )
    found = {known[name].name for name in index.tensors}
    return tuple(dict.fromkeys(e for e in known.values() if e.name in found))


def require(index: Index, entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """The entries to load: all of `entries` but optional ones that are absent.

    Raises CheckpointError for a missing tensor.
    """
    wanted = []
    for entry in entries:
        missing = [spec.name for spec in entry.stored if spec.name not in index.tensors]
        if entry.optional and len(missing) == len(entry.stored):
            continue
        if missing:
            raise CheckpointError(
                f"{missing[0]}: missing: not found in the index, wanted for the {entry.part} part"
            )
        wanted.append(entry)
    return tuple(wanted)


def complete_parts(
    entries: Iterable[TensorEntry], present: Iterable[TensorEntry]
) -> tuple[TensorEntry, ...]:
    """All entries of the parts that have at least one entry present."""
    parts: set[Part] = {entry.part for entry in present}
    return tuple(entry for entry in entries if entry.part in parts)


def check_shard(
    shard: Shard,
    index: Index,
    promised: Iterable[str],
    specs: Mapping[str, StoredSpec],
    unread: tuple[str, ...] = (),
) -> dict[str, TensorPlace]:
    """Places of a shard's tensors by name without prefix; every one checked.

    `promised` are the names that the index has in this file, `specs` the table's tensors; names
    that begin as `unread` says are passed over. Raises CheckpointError: a tensor that the index has
    in another file or not at all, one that it promises here and that is absent, another dtype or
    shape.
    """
    places: dict[str, TensorPlace] = {}
    for place in shard.header.places:
        raw_name = place.spec.name
        name = raw_name.removeprefix(PREFIX)
        if name.startswith(unread):
            continue
        located = index.tensors.get(name)
        if located is None or located.raw_name != raw_name:
            raise CheckpointError(
                f"{raw_name}: found in {shard.name} and not in the index, wanted in both"
            )
        if located.file != shard.name:
            raise CheckpointError(
                f"{name}: found in {shard.name} and, by the index, in {located.file}, wanted once"
            )
        _check_spec(place.spec, specs[name])
        places[name] = place
    for name in promised:
        if name not in places:
            raise CheckpointError(f"{name}: not found in {shard.name}, wanted there by the index")
    return places


def _check_spec(found: StoredSpec, wanted: StoredSpec) -> None:
    if found.dtype != wanted.dtype:
        raise CheckpointError(f"{wanted.name}: found dtype {found.dtype}, wanted {wanted.dtype}")
    if found.shape != wanted.shape:
        raise CheckpointError(
            f"{wanted.name}: found shape {list(found.shape)}, wanted {list(wanted.shape)}"
        )
