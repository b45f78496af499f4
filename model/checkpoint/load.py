"""From a checkpoint folder to a running model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.index import read_index
from headrace.model.checkpoint.json_files import CONFIG_NAME, read_json
from headrace.model.checkpoint.names import Selection
from headrace.model.checkpoint.packed import PackedTensors
from headrace.model.checkpoint.parts import Part, TensorEntry
from headrace.model.checkpoint.reader import Checkpoint, OnProgress, tensors_digest
from headrace.model.checkpoint.release import read_config
from headrace.model.checkpoint.shards import Meter
from headrace.model.checkpoint.writer import DIGEST_KEY
from headrace.model.engram_store import EngramTable, Placement, StoredRows, table_of
from headrace.model.numerics import Numerics, Precision
from headrace.model.packed import Weights
from headrace.model.token_map import build_token_map
from headrace.model.trunk import Trunk
from headrace.model.vision import VisionTower

TOKENIZER_NAME = "tokenizer.json"
_RECIPE = "checkpoint-1"


def load_trunk(
    folder: str | Path,
    numerics: Numerics,
    device: str | torch.device = "cpu",
    masked_token_ids: Sequence[int] = (),
    *,
    token_map: NDArray[np.int64] | None = None,
    widen_to: torch.dtype = torch.bfloat16,
    compute_dtype: torch.dtype | None = None,
    encoder_only: bool = False,
    engram: Placement = Placement.MEMORY,
    weights: Weights = Weights.WIDENED,
    on_progress: OnProgress | None = None,
) -> Trunk:
    """The text trunk of a checkpoint, weights widened as they are read, one in hand at a time.

    Every stored value is exact in `widen_to` (bfloat16 or float32); the model then casts to its own
    compute dtype. Without `token_map` the folder's tokenizer.json gives it (V4 has none).
    `encoder_only` reads only the encoder half and the first decoder layer's KV source. `engram`
    tells where its tables lie: MAPPED ones stay in the checkpoint's files, as they are stored.
    PACKED weights are held as stored and widened on use, layer by layer and expert by expert: the
    same bits, less memory, more time. Raises CheckpointError and ConfigError.
    """
    folder = Path(folder)
    if token_map is None and read_config(read_json(folder / CONFIG_NAME)).model.is_v4:
        token_map = np.zeros(0, dtype=np.int64)  # without Engram nothing reads it
    if token_map is None:
        if not (folder / TOKENIZER_NAME).is_file():
            raise CheckpointError(
                f"{TOKENIZER_NAME}: missing from the checkpoint, wanted for the Engram token map"
            )
        token_map = build_token_map(folder / TOKENIZER_NAME).ids
    selection = Selection.ENCODER if encoder_only else Selection.TEXT
    packed = weights is Weights.PACKED
    with Checkpoint.open(folder, selection) as checkpoint:
        source = PackedTensors if packed else Checkpoint.tensors
        mapped = () if engram is Placement.MEMORY else {e.name for e in table_entries(checkpoint)}
        return Trunk(
            checkpoint.release.model,
            source(checkpoint, widen_to, on_progress, mapped),
            numerics,
            device,
            token_map=token_map,
            weights_id=weights_id(folder, token_map),
            masked_token_ids=masked_token_ids,
            compute_dtype=compute_dtype,
            encoder_only=encoder_only,
            engram_tables=stored_tables(
                checkpoint, engram, Precision.of(numerics, compute_dtype).compute, device
            ),
            widen_on_use=packed,
        )


def stored_tables(
    checkpoint: Checkpoint,
    placement: Placement,
    compute: torch.dtype,
    device: str | torch.device = "cpu",
) -> dict[int, EngramTable]:
    """Engram tables by layer in their stored format; empty for MEMORY, which widens as all else.

    Raises ConfigError for a placement that cannot be on `device`."""
    if placement is Placement.MEMORY:
        return {}
    tables: dict[int, EngramTable] = {}
    for entry in table_entries(checkpoint):
        data, *scales = checkpoint.map_stored(entry)
        dtype = torch.float8_e4m3fn if scales else torch.bfloat16
        stored = StoredRows(data, scales[0] if scales else None, dtype)
        assert entry.layer is not None
        tables[entry.layer] = table_of(stored, placement, compute, torch.device(device))
    return tables


def table_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The Engram tables among the selected weights."""
    for entry in checkpoint.entries:
        if entry.part is Part.ENGRAM and entry.name.endswith("engram.embed.weight"):
            yield entry


def load_vision(
    folder: str | Path,
    numerics: Numerics,
    device: str | torch.device = "cpu",
    *,
    compute_dtype: torch.dtype | None = None,
    on_progress: OnProgress | None = None,
) -> VisionTower:
    """The image tower and aligner of a checkpoint; nothing else of it is read or needed.

    Raises CheckpointError and ConfigError.
    """
    with Checkpoint.open(folder, Selection.VISION) as checkpoint:
        facts = {
            "recipe": f"vision-{_RECIPE}",
            "tensors": tensors_digest(checkpoint),
            "vision": dataclasses.asdict(checkpoint.release.model)["vision"],
        }
        return VisionTower(
            checkpoint.release.model,
            checkpoint.tensors(torch.float32, on_progress),
            numerics,
            device,
            weights_id=_digest(facts),
            compute_dtype=compute_dtype,
        )


def weights_id(
    folder: str | Path, token_map: NDArray[np.int64], on_progress: OnProgress | None = None
) -> str:
    """Hex digest of all that decides a model's state bytes; equal for every selection and sharding.

    Takes the digest that the writer left in the index, so a host may lack the shards that its role
    does not load; a checkpoint without a digest is read in full. `headrace model inspect --verify`
    compares the two.
    """
    folder = Path(folder)
    digest = read_index(folder, Meter()).metadata.get(DIGEST_KEY)
    if not _is_digest(digest):
        with Checkpoint.open(folder, None) as checkpoint:
            digest = tensors_digest(checkpoint, on_progress)
    config = read_config(read_json(folder / CONFIG_NAME)).model
    return _digest(
        {
            "recipe": _RECIPE,
            "tensors": digest,
            "config": dataclasses.asdict(config),
            "token_map": hashlib.sha256(token_map.astype("<i8").tobytes()).hexdigest(),
        }
    )


def _digest(facts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
