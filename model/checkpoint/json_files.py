"""The JSON files of a checkpoint, read strictly; no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.model.checkpoint.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
# A release's index has 10 MB; the safetensors format itself allows headers up to 100 MB.
MAX_JSON_BYTES = 100_000_000


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise CheckpointError(f"{key}: found twice in one JSON object, wanted once")
        values[key] = value
    return values


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def parse_json(name: str, raw: bytes) -> dict[str, Any]:
    """A JSON object; an object that has a key twice is refused. Raises CheckpointError."""
    try:
        value = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        kind, place = type(error).__name__, ""
        if type(error) is ValueError:
            kind = str(error)
        if isinstance(error, json.JSONDecodeError):
            place = f" at line {error.lineno} column {error.colno}"
        raise CheckpointError(
            f"{name}: not valid JSON ({kind}{place}), found {len(raw)} bytes, wanted a JSON object"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: found {type(value).__name__}, wanted a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError if it is absent, too long or malformed."""
    try:
        if path.exists() and not path.is_file():  # a pipe would block the open
            raise CheckpointError(f"{path.name}: found no regular file, wanted one")
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name}: missing from the checkpoint: found no file, wanted one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from None
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path.name}: found more than {MAX_JSON_BYTES} bytes, wanted at most that"
        )
    return parse_json(path.name, raw)
