"""The unit of work: rows of many sequences, and what a call gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RowBatch:
    """n rows; rows of one sequence are adjacent and have consecutive positions.

    Index tensors may lie on the CPU whatever the model's device: the call is planned on the
    host. Every block that a row reads or writes must be in its sequence's table.

    A row at p sees the window keys t with max(floor, p-W+1) <= t <= p, where floor is `swa_floor`
    in the encoder half and `decoder_floor` in the decoder half, and chooses among all global KV
    groups that are complete at p, whoever wrote them. Rows with `decoder` False stop after the
    encoder half and the first decoder layer's KV source. For one sequence the decoder rows are
    a suffix of its rows.
    """

    history_ids: torch.Tensor  # int64 [n, max_ngram]: ids at p, p-1, ..; -1 before the start
    history_image: torch.Tensor  # bool [n, max_ngram]: that position lies in an image span
    positions: torch.Tensor  # int64 [n]
    slots: torch.Tensor  # int64 [n]
    sequence: torch.Tensor  # int64 [n]: row -> line of block_tables
    block_tables: torch.Tensor  # int64 [n_sequences, max_blocks]; -1 = none
    swa_floor: torch.Tensor  # int64 [n]
    decoder_floor: torch.Tensor  # int64 [n]
    write_floor: torch.Tensor  # int64 [n]: a group is written iff its LAST token >= write_floor
    decoder: torch.Tensor  # bool [n]
    logits: torch.Tensor  # bool [n], subset of decoder
    embeddings: torch.Tensor | None = None  # [n, D]; replaces the embedding of image rows

    @property
    def n_rows(self) -> int:
        return int(self.positions.shape[0])


@dataclass(frozen=True)
class RowResult:
    """`logits` is float32 [rows with logits=True, vocab], in row order; it owns its memory.

    The counts are taken where the work is done: rows that left the last encoder layer, rows
    that left the last layer, and global KV entries written, summed over the sources.
    `selections` (only with capture=True) holds for each index source layer the entry numbers
    int64 [rows of that layer, index_topk], ascending, -1 padded; `candidates` the kept entries
    of the candidate source as bool [rows, entries of the longest sequence].
    """

    logits: torch.Tensor
    encoder_rows: int
    decoder_rows: int
    groups_written: int
    selections: Mapping[int, torch.Tensor] = field(default_factory=dict)
    candidates: torch.Tensor | None = None
