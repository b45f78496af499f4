"""Which parts a checkpoint's folder holds, by its index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.index import present_entries, read_index
from headrace.model.checkpoint.json_files import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, read_json
from headrace.model.checkpoint.names import Selection, select, tensor_table, unread_prefixes
from headrace.model.checkpoint.parts import Part
from headrace.model.checkpoint.release import read_config
from headrace.model.checkpoint.shards import Meter


def check_holds(folder: Path, selection: Selection) -> None:
    """Whether the index names something of each part of `selection`; a folder without one holds
    what its roles will say. Raises `CheckpointError` naming the parts that are there and lacking.
    """
    if not (folder / INDEX_NAME).exists() and not (folder / SINGLE_NAME).exists():
        return
    release = read_config(read_json(folder / CONFIG_NAME))
    index = read_index(folder, Meter()).without(unread_prefixes(release.model))
    table = tensor_table(release.model, release.quantisation)
    held = {entry.part for entry in present_entries(index, table)}
    lacking = {entry.part for entry in select(release.model, table, selection)} - held
    if lacking:
        raise CheckpointError(
            f"deployment.checkpoint {folder.name}: this folder holds {shown(held)} only, wanted"
            f" also {shown(lacking)}: take one that was converted with --parts full"
            " (`headrace model inspect` shows the parts)"
        )


def shown(parts: Iterable[Part]) -> str:
    """Parts in their order, as a sentence names them."""
    found = set(parts)
    return ", ".join(part.value.replace("_", " ") for part in Part if part in found) or "nothing"
