"""Whether bytes that are about to be shared hold a NaN.

Logits are looked at in every step, but the encoder half has none, and a block goes to others as
soon as it is complete. The formats keep a NaN visible: a main entry with one has a scale of code
0x7f or 0xff (e4m3, whose numbers end at 0x7e), a window row has such a code among its channels.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.model import CacheLayout, KvState

_E4M3_CODE = 0x7F  # without the sign: the one code that is no number


class FiniteCheck:
    """Reads scales only; holds the places of a layout's main scales."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        places = []
        for source in layout.sources:
            rows = np.arange(source.rows_per_block) * source.main_row_bytes + source.main_offset
            # hd/2 data bytes, then hd/16 scales: one ninth of the row
            scales = np.arange(source.main_row_bytes * 8 // 9, source.main_row_bytes)
            places.append((rows[:, None] + scales).ravel())
        self._scales = torch.from_numpy(np.concatenate(places)).to(device)
        self._row_bytes = layout.swa_row_bytes
        self._row_channels = layout.swa_row_bytes * 32 // 33

    def blocks(self, state: KvState, blocks: list[int]) -> bool:
        """Whether these complete blocks hold numbers only."""
        return not any(
            bool(((state.blocks[block][self._scales] & _E4M3_CODE) == _E4M3_CODE).any())
            for block in blocks
        )

    def window(self, payload: bytes) -> bool:
        """Whether a window record holds numbers only."""
        rows = np.frombuffer(payload, dtype=np.uint8).reshape(-1, self._row_bytes)
        channels = rows[:, : self._row_channels] & _E4M3_CODE
        return not bool((channels == _E4M3_CODE).any())
