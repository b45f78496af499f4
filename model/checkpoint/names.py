"""Which tensors a checkpoint holds: the table's types, what a role needs of it, and totals.

A family's table is a function from (config, quantisation) to entries in file order: `names_v41`,
`names_v4`. Another family enters by a function of its own in `_TABLES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from headrace.model.checkpoint.names_v4 import UNREAD_PREFIXES, v4_entries
from headrace.model.checkpoint.names_v41 import v41_entries
from headrace.model.checkpoint.parts import Part, TensorEntry
from headrace.model.checkpoint.release import Quantisation
from headrace.model.checkpoint.stored import Encoding, StoredSpec
from headrace.model.config import ModelConfig
from headrace.model.config_file import Family
from headrace.model.errors import ConfigError

__all__ = [
    "Encoding",
    "Part",
    "PartTotal",
    "Selection",
    "StoredSpec",
    "TensorEntry",
    "select",
    "tensor_table",
    "totals_by_part",
    "unread_prefixes",
]

Table = Callable[[ModelConfig, Quantisation | None], Iterator[TensorEntry]]
_TABLES: dict[Family, Table] = {Family.V41: v41_entries, Family.V4: v4_entries}


class Selection(StrEnum):
    """What a role loads."""

    FULL = "full"
    TEXT = "text"  # the trunk and its drafter: no vision
    ENCODER = "encoder"  # the encoder half and the first decoder layer's KV source
    VISION = "vision"

    @property
    def parts(self) -> frozenset[Part]:
        return _SELECTED[self]


_ENCODER = frozenset({Part.EMBEDDING, Part.ENGRAM, Part.ENCODER, Part.KV_SOURCE})
_SELECTED: dict[Selection, frozenset[Part]] = {
    Selection.FULL: frozenset(Part),
    Selection.TEXT: _ENCODER | {Part.DECODER, Part.HEAD, Part.DRAFTER},
    Selection.ENCODER: _ENCODER,
    Selection.VISION: frozenset({Part.VISION}),
}


@lru_cache(maxsize=4)
def tensor_table(config: ModelConfig, quantisation: Quantisation | None) -> tuple[TensorEntry, ...]:
    """Every weight of a checkpoint of `config`, in file order; names are unique."""
    return tuple(_TABLES[config.family](config, quantisation))


def unread_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Names that files of this family hold and nothing here looks at."""
    return UNREAD_PREFIXES if config.is_v4 else ()


def select(
    config: ModelConfig, entries: Iterable[TensorEntry], selection: Selection
) -> tuple[TensorEntry, ...]:
    """The entries that a selection loads, in file order.

    Raises ConfigError where a selection has no meaning: an encoder without a decoder half, a vision
    tower that the configuration does not have.
    """
    if selection is Selection.ENCODER and config.n_decoder_layers == 0:
        raise ConfigError(
            "compress_ratios: found no layer of ratio 1, wanted one: without a decoder half "
            "an encoder-only build is the whole model"
        )
    if selection is Selection.VISION and config.vision is None:
        raise ConfigError("vision_config: found nothing, wanted the tower's keys")
    return tuple(entry for entry in entries if entry.part in selection.parts)


@dataclass(frozen=True, slots=True)
class PartTotal:
    """`n_tensors` and `n_bytes` count what lies in files, scales included."""

    part: Part
    n_tensors: int
    n_parameters: int
    n_bytes: int


def totals_by_part(entries: Iterable[TensorEntry]) -> dict[Part, PartTotal]:
    """Sums of every part that has an entry, in the order of `Part`."""
    grouped: dict[Part, list[TensorEntry]] = {}
    for entry in entries:
        grouped.setdefault(entry.part, []).append(entry)
    return {
        part: PartTotal(
            part,
            sum(len(e.stored) for e in grouped[part]),
            sum(math.prod(e.shape) for e in grouped[part]),
            sum(e.n_bytes for e in grouped[part]),
        )
        for part in Part
        if part in grouped
    }
