"""Rows of pictures: what stands in for the embeddings of a span's tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import PicturesMissing
from headrace.core.ids import Digest
from headrace.core.images import ImageSpan, spans_within
from headrace.core.request import GenRequest
from headrace.core.rows import RowPlan
from headrace.model import StateError, Trunk
from headrace.model.vision_rows import Buffer, unpack_rows

log = logging.getLogger(__name__)
PictureRows: TypeAlias = Mapping[Digest, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Picture:
    """A span of a prompt and the payload of its `mm` object, for runs without a store."""

    span: ImageSpan
    payload: bytes


def spans_to_run(request: GenRequest, plan: RowPlan) -> tuple[ImageSpan, ...]:
    """The spans whose rows a run of `plan` embeds: these objects are needed, and no others."""
    return spans_within(request.images, plan.start, plan.end)


def unpack_picture(trunk: Trunk, span: ImageSpan, payload: Buffer) -> torch.Tensor:
    """The rows [n_tokens, D] of `span` as `trunk` embeds them, checked; from any thread.

    Raises `StateError` for a payload of another length, shape or dtype, or with a value that is
    not finite: such rows are never run."""
    return unpack_rows(
        payload,
        n_rows=span.n_tokens,
        hidden_size=trunk.config.hidden_size,
        dtype=trunk.precision.accumulate,
    )


def unpack_pictures(
    trunk: Trunk, spans: Sequence[ImageSpan], payloads: Mapping[Digest, Buffer]
) -> PictureRows:
    """Rows of all `spans`; from any thread. Raises `PicturesMissing` if a payload is not there, or
    is not what `unpack_picture` wants: whoever made it did not check."""
    missing = {span.digest for span in spans} - payloads.keys()
    if missing:
        raise PicturesMissing(f"rows of {len(missing)} pictures are not in the store")
    try:
        return {span.digest: unpack_picture(trunk, span, payloads[span.digest]) for span in spans}
    except StateError as error:
        log.warning("a stored picture is refused: %s", error.message)
        raise PicturesMissing("stored rows are not those of the picture") from error


def check_pictures(request: GenRequest, plan: RowPlan, pictures: PictureRows, trunk: Trunk) -> None:
    """Raises `ValueError` unless `pictures` has rows of the right shape for every span to run."""
    for span in spans_to_run(request, plan):
        wanted = (span.n_tokens, trunk.config.hidden_size)
        rows = pictures.get(span.digest)
        if rows is None or tuple(rows.shape) != wanted or rows.dtype != trunk.precision.accumulate:
            found = "none" if rows is None else f"{rows.dtype} {tuple(rows.shape)}"
            raise ValueError(
                f"{request.key}: rows of the picture at {span.start}: found {found},"
                f" wanted {trunk.precision.accumulate} {wanted}"
            )


class PictureTable:
    """Which positions of which slot lie in a picture, and the rows that stand there.

    Belongs to the runner. The mask is made from spans, never from ids."""

    def __init__(self, n_slots: int, width: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._mask = np.zeros((n_slots, width), dtype=np.bool_)
        self._rows: dict[int, list[tuple[ImageSpan, torch.Tensor]]] = {}
        self._hidden_size = hidden_size
        self._dtype = dtype

    def open(self, slot: int, spans: tuple[ImageSpan, ...], pictures: PictureRows) -> None:
        """Take a slot into use for a text with these spans; spans without rows may not be run."""
        self._mask[slot] = False
        for span in spans:
            self._mask[slot, span.start : span.end] = True
        found = [(span, pictures[span.digest]) for span in spans if span.digest in pictures]
        if found:
            self._rows[slot] = found
        else:
            self.close(slot)

    def close(self, slot: int) -> None:
        """Drop the rows of a slot. Idempotent."""
        self._rows.pop(slot, None)

    def mask(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether these positions lie in a picture; positions before a text's start do not."""
        return self._mask[slots, np.maximum(positions, 0)] & (positions >= 0)

    def embeddings(
        self, n_rows: int, segments: list[tuple[int, int, int, int]]
    ) -> torch.Tensor | None:
        """`RowBatch.embeddings` for `segments` = (first row of the batch, slot, start, end).

        Rows that no picture fills are NaN: the model reads none of them, and would show it."""
        out: torch.Tensor | None = None
        for first, slot, start, end in segments:
            for span, rows in self._rows.get(slot, ()):
                begin, stop = max(start, span.start), min(end, span.end)
                if begin >= stop:
                    continue
                if out is None:
                    out = torch.full((n_rows, self._hidden_size), torch.nan, dtype=self._dtype)
                at = first + begin - start
                out[at : at + stop - begin] = rows[begin - span.start : stop - span.start]
        return out
