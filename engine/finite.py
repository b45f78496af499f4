"""Whether bytes that are about to be shared hold a NaN.

Logits are looked at in every step, but the encoder half has none, and a block goes to others as
soon as it is complete. The formats keep a NaN visible (`RowFormat.has_nan`). Index keys come from
the same rows as main entries and are not looked at.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.model import CacheLayout, KvState


class FiniteCheck:
    """Reads what may show a NaN of a layout's blocks and window records; holds nothing else."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        row_bytes = layout.n_encoder_layers * layout.window_record_rows * layout.swa_row_bytes
        self._window_bytes = row_bytes

    def blocks(self, state: KvState, blocks: list[int]) -> bool:
        """Whether these complete blocks hold numbers only."""
        form = self._layout.formats.main
        for block in blocks:
            payload = state.blocks[block]
            for source in self._layout.sources:
                end = source.main_offset + source.rows_per_block * source.main_row_bytes
                rows = payload[source.main_offset : end].view(-1, source.main_row_bytes)
                if form.has_nan(rows):
                    return False
        return True

    def window(self, payload: bytes) -> bool:
        """Whether a window record holds numbers only."""
        data = np.frombuffer(payload, dtype=np.uint8)
        rows = data[: self._window_bytes].reshape(-1, self._layout.swa_row_bytes)
        if self._layout.formats.window.has_nan(torch.from_numpy(rows.copy())):
            return False
        return not bool(np.isnan(data[self._window_bytes :].view("<f4")).any())
