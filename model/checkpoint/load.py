"""From a checkpoint folder to a running model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.names import Selection
from headrace.model.checkpoint.reader import Checkpoint, OnProgress, tensors_digest
from headrace.model.checkpoint.writer import DIGEST_KEY
from headrace.model.numerics import Numerics
from headrace.model.token_map import build_token_map
from headrace.model.trunk import Trunk

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
    on_progress: OnProgress | None = None,
) -> Trunk:
    """The text trunk of a checkpoint, weights widened as they are read, one in hand at a time.

    Every stored value is exact in `widen_to` (bfloat16 or float32); the model then casts to its own
    compute dtype. Without `token_map` the folder's tokenizer.json gives it. Raises CheckpointError
    and ConfigError.
    """
    folder = Path(folder)
    if token_map is None:
        if not (folder / TOKENIZER_NAME).is_file():
            raise CheckpointError(
                f"{TOKENIZER_NAME}: missing from the checkpoint, wanted for the Engram token map"
            )
        token_map = build_token_map(folder / TOKENIZER_NAME).ids
    with Checkpoint.open(folder, Selection.TEXT) as checkpoint:
        return Trunk(
            checkpoint.release.model,
            checkpoint.tensors(widen_to, on_progress),
            numerics,
            device,
            token_map=token_map,
            weights_id=weights_id(folder, token_map),
            masked_token_ids=masked_token_ids,
            compute_dtype=compute_dtype,
        )


def weights_id(
    folder: str | Path, token_map: NDArray[np.int64], on_progress: OnProgress | None = None
) -> str:
    """Hex digest of all that decides a model's state bytes; equal for every selection and sharding.

    Takes the digest that the writer left in the index; a checkpoint without one is read in full.
    `headrace model inspect --verify` compares the two.
    """
    with Checkpoint.open(folder, None) as checkpoint:
        recorded = checkpoint.index.metadata.get(DIGEST_KEY)
        digest = recorded if _is_digest(recorded) else tensors_digest(checkpoint, on_progress)
        facts = {
            "recipe": _RECIPE,
            "tensors": digest,
            "config": dataclasses.asdict(checkpoint.release.model),
            "token_map": hashlib.sha256(token_map.astype("<i8").tobytes()).hexdigest(),
        }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
