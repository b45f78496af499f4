"""What looks wrong in a checkpoint and harms nothing that is read: a line in the log.

Published files carry such things, so they are not refused; what has the wrong type is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.index import Index
from headrace.model.checkpoint.json_files import INDEX_NAME
from headrace.model.checkpoint.shards import Shard
from headrace.model.config import ModelConfig

log = logging.getLogger(__name__)


def check_architectures(document: Mapping[str, object], model: ModelConfig) -> None:
    """Logs an `architectures` of another family: the keys decide what is read, not the name.

    Raises CheckpointError if it is no list of names."""
    found = document.get("architectures")
    if found is None:
        return
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"architectures: found {found!r:.100}, wanted a list of names")
    wanted = "DeepseekV4For" if model.is_v4 else "DeepseekV41For"
    if not any(name.startswith(wanted) for name in found):
        log.warning("architectures: found %.100r, wanted %s..; read by its keys", found, wanted)


def say_odd_sizes(folder: Path, index: Index, shards: Mapping[str, Shard]) -> None:
    """Logs files that the index does not list, and another sum of bytes than it says (where all its
    files are open)."""
    listed = index.names_by_file().keys()
    if beside := sorted({p.name for p in folder.glob("*.safetensors")} - listed):
        log.warning("%.100s: found beside the checkpoint, not in the index: not read", beside[0])
    said = index.metadata.get("total_size")
    held = sum(place.spec.n_bytes for shard in shards.values() for place in shard.header.places)
    if said is not None and listed == shards.keys() and said != held:
        log.warning("%s: total_size: found %s, the files hold %d bytes", INDEX_NAME, said, held)
