"""Checkpoints in the published layout: names, reading, writing, random ones.

`tensor_table` names every weight of a configuration with shape, stored format and part. An open
`Checkpoint` has been checked against it (index, headers, shapes, dtypes; damage is refused with
the tensor, the found and the wanted) and reads weights one by one, widened or as stored, counting
bytes and what it holds; a `Selection` says which parts. `write_values` encodes a model, `convert`
rewrites a checkpoint, `copy` repeats its bytes, `write_random` makes one up; a folder appears
complete or not at all. `load_trunk` leads from a folder to a running model, `weights_id` is its
name in the store.
"""

from typing import TYPE_CHECKING

from headrace.core.doors import names_of

if TYPE_CHECKING:
    from headrace.model.checkpoint.encoding import quantise, widen
    from headrace.model.checkpoint.errors import CheckpointError
    from headrace.model.checkpoint.load import load_trunk, load_vision, weights_id
    from headrace.model.checkpoint.names import PartTotal, Selection, tensor_table, totals_by_part
    from headrace.model.checkpoint.parts import Part, TensorEntry
    from headrace.model.checkpoint.reader import (
        Checkpoint,
        OnProgress,
        Progress,
        StoredWeight,
        tensors_digest,
    )
    from headrace.model.checkpoint.release import (
        Quantisation,
        ReleaseConfig,
        config_document,
        read_config,
        released_quantisation,
    )
    from headrace.model.checkpoint.stored import Encoding, Kind, StoredSpec
    from headrace.model.checkpoint.synthetic import write_random
    from headrace.model.checkpoint.writer import convert, copy, write_values
else:
    __getattr__ = names_of(__name__, __file__)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Encoding",
    "Kind",
    "OnProgress",
    "Part",
    "PartTotal",
    "Progress",
    "Quantisation",
    "ReleaseConfig",
    "Selection",
    "StoredSpec",
    "StoredWeight",
    "TensorEntry",
    "config_document",
    "convert",
    "copy",
    "load_trunk",
    "load_vision",
    "quantise",
    "read_config",
    "released_quantisation",
    "tensor_table",
    "tensors_digest",
    "totals_by_part",
    "weights_id",
    "widen",
    "write_random",
    "write_values",
]
