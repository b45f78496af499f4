"""Writing a checkpoint in release form: shards, index, config.json; streamed, never half there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.model.checkpoint.encoding import quantise
from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.index import PREFIX
from headrace.model.checkpoint.json_files import CONFIG_NAME, INDEX_NAME
from headrace.model.checkpoint.names import Selection, select, tensor_table, unread_prefixes
from headrace.model.checkpoint.parts import TensorEntry
from headrace.model.checkpoint.reader import (
    Checkpoint,
    OnProgress,
    Progress,
    combine_digests,
)
from headrace.model.checkpoint.release import ReleaseConfig, config_document
from headrace.model.checkpoint.shards import header_bytes
from headrace.model.checkpoint.stored import StoredSpec
from headrace.model.errors import ConfigError

DEFAULT_SHARD_BYTES = 10 << 30
BAND_ROWS = 1024  # rows of a matrix that are encoded at once
DIGEST_KEY = "tensors_sha256"  # in the index's metadata
# Files of a release that say nothing of weights; a conversion takes them along.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

Pieces = Callable[[StoredSpec], Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file to write: tensors by their name without prefix, in file order."""

    file: str
    specs: tuple[StoredSpec, ...]
    raw_names: tuple[str, ...]
    metadata: Mapping[str, str] | None = None


def plan_shards(
    entries: Iterable[TensorEntry], max_shard_bytes: int = DEFAULT_SHARD_BYTES, prefix: str = ""
) -> tuple[ShardPlan, ...]:
    """Fill shards in table order; a weight and its scale share one, a larger weight has its own.

    Raises ConfigError for a bound below 1 or a prefix that no reader knows.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes: found {max_shard_bytes}, wanted at least 1")
    if prefix not in ("", PREFIX):
        raise ConfigError(f"prefix: found {prefix!r}, wanted '' or {PREFIX!r}")
    shards: list[list[StoredSpec]] = []
    room = 0
    for entry in entries:
        if not shards or entry.n_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].extend(entry.stored)
        room -= entry.n_bytes
    return tuple(
        ShardPlan(
            f"model-{number:05d}-of-{len(shards):05d}.safetensors",
            tuple(specs),
            tuple(prefix + spec.name for spec in specs),
            {"format": "pt"},
        )
        for number, specs in enumerate(shards, 1)
    )


def same_shards(checkpoint: Checkpoint) -> tuple[ShardPlan, ...]:
    """The plan that an open checkpoint was written by: files, names, order, metadata.

    Raises ConfigError if a file holds a tensor that is never read.
    """
    plans = []
    unread = unread_prefixes(checkpoint.release.model)
    for shard in checkpoint.shards:
        for place in shard.header.places:
            if place.spec.name.removeprefix(PREFIX).startswith(unread):
                raise ConfigError(f"{place.spec.name}: is not read, so a copy would lack it")
        places = sorted(shard.header.places, key=lambda place: place.offset)
        raw_names = tuple(place.spec.name for place in places)
        specs = tuple(
            StoredSpec(p.spec.name.removeprefix(PREFIX), p.spec.dtype, p.spec.shape) for p in places
        )
        plans.append(ShardPlan(shard.name, specs, raw_names, shard.header.metadata))
    return tuple(plans)


def write_files(
    folder: Path,
    document: Mapping[str, object],
    plan: tuple[ShardPlan, ...],
    pieces: Pieces,
    *,
    index_metadata: Mapping[str, object] | None = None,
    companions: Mapping[str, bytes] | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Write a whole checkpoint folder and return its `tensors_sha256`.

    `pieces(spec)` yields a tensor's bytes (uint8) in order. Everything is written beside `folder`
    and renamed at the end: a failure leaves nothing behind. `index_metadata` replaces total_size
    and tensors_sha256. Raises ConfigError if `folder` exists, CheckpointError if a tensor comes out
    with another length than planned.
    """
    if folder.exists():
        raise ConfigError(f"{folder.name}: exists already; name a new folder or remove it")
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        raise ConfigError(f"{partial.name}: left by a run that was ended; remove it")
    partial.mkdir(parents=True)
    try:
        total = sum(spec.n_bytes for shard in plan for spec in shard.specs)
        digests: dict[StoredSpec, str] = {}
        done = 0
        for shard in plan:
            done = _write_shard(partial, shard, pieces, digests, done, total, on_progress)
        digest = combine_digests(digests)
        metadata = index_metadata
        if metadata is None:
            metadata = {"total_size": total, DIGEST_KEY: digest}
        weight_map = {name: shard.file for shard in plan for name in shard.raw_names}
        _write_json(partial / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map}, True)
        _write_json(partial / CONFIG_NAME, document, False)
        for name, content in (companions or {}).items():
            (partial / name).write_bytes(content)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return digest


def _write_json(path: Path, document: Mapping[str, object], sort: bool) -> None:
    text = json.dumps(document, indent=2, sort_keys=sort, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _write_shard(
    folder: Path,
    shard: ShardPlan,
    pieces: Pieces,
    digests: dict[StoredSpec, str],
    done: int,
    total: int,
    on_progress: OnProgress | None,
) -> int:
    """Write one file; returns the bytes done after it and fills `digests`."""
    raw = [
        StoredSpec(name, spec.dtype, spec.shape)
        for name, spec in zip(shard.raw_names, shard.specs, strict=True)
    ]
    with (folder / shard.file).open("xb") as file:
        file.write(header_bytes(raw, shard.metadata))
        for spec in shard.specs:
            digest, written = hashlib.sha256(), 0
            for piece in pieces(spec):
                view = piece.numpy().data
                digest.update(view)
                written += file.write(view)
            if written != spec.n_bytes:
                raise CheckpointError(
                    f"{spec.name}: got {written} bytes to write, wanted {spec.n_bytes}"
                )
            digests[spec] = digest.hexdigest()
            done += written
            if on_progress is not None:
                on_progress(Progress(spec.name, done, total))
    return done


class _Encoder:
    """Pieces of weights that are encoded on the way; the scale is made with the data."""

    def __init__(
        self,
        entries: Iterable[TensorEntry],
        bands: Callable[[TensorEntry], Iterable[torch.Tensor]],
    ) -> None:
        self._entries = {entry.stored[0].name: entry for entry in entries}
        self._bands = bands
        self._scales: dict[str, torch.Tensor] = {}

    def __call__(self, spec: StoredSpec) -> Iterator[torch.Tensor]:
        if spec.name in self._scales:  # the data of this weight has just been written
            yield self._scales.pop(spec.name).reshape(-1)
            return
        entry = self._entries[spec.name]
        scales = []
        for band in self._bands(entry):
            data, scale = quantise(entry.name, entry.encoding, band)
            if scale is not None:
                scales.append(scale)
            yield data
        if scales:
            self._scales[entry.stored[1].name] = torch.cat(scales)


def write_values(
    folder: str | Path,
    release: ReleaseConfig,
    values: Mapping[str, torch.Tensor],
    *,
    selection: Selection = Selection.TEXT,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    prefix: str = "",
    companions: Mapping[str, bytes] | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Write the selected parts of a model from its weights (float32 or bfloat16), encoded.

    Each name of `values` is looked up once. Returns `tensors_sha256`. Raises CheckpointError for a
    missing weight, another shape, and values that are not finite.
    """
    table = tensor_table(release.model, release.quantisation)
    entries = tuple(
        entry
        for entry in select(release.model, table, selection)
        if not (entry.optional and entry.name not in values)
    )

    def bands(entry: TensorEntry) -> Iterator[torch.Tensor]:
        if entry.name not in values:
            raise CheckpointError(f"{entry.name}: missing from the weights to write")
        value = values[entry.name].detach().cpu()
        if tuple(value.shape) != entry.shape:
            raise CheckpointError(
                f"{entry.name}: found shape {list(value.shape)}, wanted {list(entry.shape)}"
            )
        yield from value.split(BAND_ROWS) if value.ndim > 1 else (value,)

    return write_files(
        Path(folder),
        config_document(release),
        plan_shards(entries, max_shard_bytes, prefix),
        _Encoder(entries, bands),
        companions=companions,
        on_progress=on_progress,
    )


def convert(
    source: Checkpoint,
    folder: str | Path,
    release: ReleaseConfig | None = None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    prefix: str = "",
    companions: Mapping[str, bytes] | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Write an open checkpoint's selected weights anew: other shards, prefix or quantisation.

    Weights that keep their format are copied byte for byte, the others are widened and encoded.
    Returns `tensors_sha256`.
    """
    target = release or source.release
    if target.model != source.release.model:
        raise ConfigError("model configuration: found another, wanted the source's")
    formats = {e.name: e for e in tensor_table(target.model, target.quantisation)}
    entries = tuple(formats[entry.name] for entry in source.entries)
    before = {entry.name: entry for entry in source.entries}
    kept = {
        spec.name
        for entry in entries
        if entry.encoding == before[entry.name].encoding
        for spec in entry.stored
    }
    encoder = _Encoder(
        entries,
        lambda entry: source.widened_rows(
            before[entry.name], torch.float32, align_rows=entry.encoding.block[0]
        ),
    )
    return write_files(
        Path(folder),
        config_document(target),
        plan_shards(entries, max_shard_bytes, prefix),
        lambda spec: source.pieces(spec) if spec.name in kept else encoder(spec),
        companions=companions,
        on_progress=on_progress,
    )


def copy(source: Checkpoint, folder: str | Path, document: Mapping[str, object]) -> str:
    """Write every selected shard of `source` as it is; `document` becomes config.json."""
    return write_files(
        Path(folder),
        document,
        same_shards(source),
        source.pieces,
        index_metadata=source.index.metadata,
    )


def companions_of(folder: Path) -> dict[str, bytes]:
    """Tokenizer and generation files that lie beside the weights."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
