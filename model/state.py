"""The explicit state of all sequences of one replica: global KV blocks and state slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from headrace.model.config import ModelConfig
from headrace.model.errors import StateError
from headrace.model.layout import CacheLayout, TailLayout
from headrace.model.numerics import Numerics, Precision
from headrace.model.row_format import RowKind

# 0xff is NaN as e4m3 and as E8M0, so filling a row or a block with it makes every value NaN.
POISON_BYTE = 0xFF

Layers = Literal["all", "encoder"]


@dataclass(frozen=True)
class SlotState:
    """One sequence's private state at `length_tokens`, independent of ring size and block numbers.

    `swa` holds the W-1 window rows before `length_tokens`, layer-major, in position order, zeros
    where the position would be negative; `drafter` in the same way the W rows of each drafter stage
    (empty for layers "encoder"); `tails` of each pooling compressor the last r-1 inputs, 2r-1
    with overlap, in position order, zeros where no later entry reads them. Rows that the writer
    never had (below a floor) come out as they lay.
    """

    length_tokens: int
    layers: Layers
    window_rows: int
    tail_dtype: str
    swa: bytes
    drafter: bytes
    tails: bytes


@dataclass(frozen=True, slots=True)
class _Rings:
    """`count` rings of a slot from number `first` on, and how many rows of each are meant."""

    first: int
    count: int
    rows: int

    @property
    def end(self) -> int:
        return self.first + self.count


class KvState:
    """Blocks and slots of one replica; mutated by `Trunk.forward` and the methods below.

    `blocks` is uint8 [n_blocks, block_bytes], `rings` uint8 [n_slots, L + stages, ring_rows,
    swa_row_bytes] (slot of position p is p mod ring_rows; drafter stages follow the layers),
    `tails` [n_slots, values]: a ring of (gate, value) for every `layout.tails`, see `tail`, in the
    accumulate dtype; V4's in float32, because its window records carry some of them.
    A fresh state is zero, or NaN everywhere with `poison=True`. With `encoder_only` there are rings
    of the encoder layers alone (n_enc, no stages) and a slot can be exported only as such.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: CacheLayout,
        n_blocks: int,
        n_slots: int,
        numerics: Numerics,
        device: str | torch.device = "cpu",
        *,
        poison: bool = False,
        encoder_only: bool = False,
    ) -> None:
        self.config = config
        self.layout = layout
        self.numerics = numerics
        self.device = torch.device(device)
        self.accumulate = Precision.of(numerics).accumulate
        self.tail_dtype = torch.float32 if layout.is_v4 else self.accumulate
        if numerics is Numerics.INVARIANT and layout.formats.window.kind is RowKind.FLOAT32:
            raise StateError("float32 rows keep rounding noise: wanted fast numerics")
        u8, block_shape = torch.uint8, (n_blocks, layout.block_bytes)
        n_rings = layout.n_encoder_layers if encoder_only else layout.n_rings
        ring_shape = (n_slots, n_rings, layout.ring_rows, layout.swa_row_bytes)
        self.blocks = torch.zeros(block_shape, dtype=u8, device=self.device)
        self.rings = torch.zeros(ring_shape, dtype=u8, device=self.device)
        self.tails = torch.zeros(
            (n_slots, sum(tail.n_values for tail in layout.tails)),
            dtype=self.tail_dtype,
            device=self.device,
        )
        if poison:
            self.blocks.fill_(POISON_BYTE)
            self.rings.fill_(POISON_BYTE)
            self.tails.fill_(float("nan"))

    @property
    def n_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def n_slots(self) -> int:
        return self.rings.shape[0]

    @property
    def ring_layers(self) -> int:
        """Rings of one slot here: of all layers and drafter stages, or of the encoder half."""
        return self.rings.shape[1]

    @property
    def n_drafter_rings(self) -> int:
        """Drafter stages that have rings here."""
        return max(0, self.ring_layers - self.layout.n_layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes allocated for one slot: its rings and tails."""
        return self.rings[0].nbytes + self.tails[0].nbytes

    def tail(self, t: TailLayout) -> torch.Tensor:
        """View [n_slots, rows, 2, width] of one compressor's ring: row p mod rows is position p."""
        part = self.tails[:, t.first_value : t.first_value + t.n_values]
        return part.view(-1, t.rows, 2, t.width)

    # ---- blocks ----------------------------------------------------------------------------

    def block_view(self, block: int) -> memoryview:
        """Writable zero-copy view of one block's payload; CPU only, valid as long as the state."""
        if self.device.type != "cpu":
            raise StateError(f"block_view needs a CPU state, this one is on {self.device}")
        return self.blocks[block].numpy().data

    def read_block(self, block: int) -> bytes:
        return self.blocks[block].cpu().numpy().tobytes()

    def write_block(self, block: int, buffer: bytes | bytearray | memoryview) -> None:
        """Replace one block's payload; `buffer` must have exactly `block_bytes` bytes."""
        self.blocks[block] = self._tensor(buffer, self.layout.block_bytes, "block")

    def poison_block(self, block: int) -> None:
        """Make every value of the block NaN."""
        self.blocks[block] = POISON_BYTE

    # ---- windows ---------------------------------------------------------------------------

    def read_window(self, slot: int, position: int) -> bytes:
        """The window record at `position`: W-1 encoder rows before it, and behind them what V4's
        overlapping compressors carry over a grain.

        Rows layer-major, position order, padded at the front with zeros when position < W-1. Valid
        only while the ring holds those rows: no later row than position + backtrack_rows may
        have been stored. V4: raises StateError inside a group.
        """
        rows = self._read_rows(slot, position, self._encoder_rows())
        parts = [ring[slot, at, :, :half] for ring, at, half in self._carried(position)]
        return b"".join((rows, *(part.cpu().numpy().tobytes() for part in parts)))

    def write_window(
        self, slot: int, position: int, buffer: bytes | bytearray | memoryview
    ) -> None:
        """Put a window record into the ring; rows of negative positions are dropped."""
        view = memoryview(buffer).cast("B")
        if view.nbytes != (wanted := self.layout.window_record_bytes):
            raise StateError(f"window bytes: found {view.nbytes}, wanted {wanted}")
        carried = list(self._carried(position))
        begin = wanted - sum(tail.carried_bytes for tail in self.layout.tails)
        rings = self._encoder_rows()
        self._write_rows(slot, position, rings, self._expect(view[:begin], rings, "window"))
        for ring, at, half in carried:
            target = ring[slot, at, :, :half]
            end = begin + target.numel() * 4
            raw = self._tensor(view[begin:end], end - begin, "window")
            ring[slot, at, :, :half] = raw.view(torch.float32).view(target.shape)
            begin = end

    def export_slot(self, slot: int, length_tokens: int, *, layers: Layers = "all") -> SlotState:
        """Copy out what continuing at `length_tokens` needs besides blocks and token ids."""
        tails = [self.tail(t)[slot, self._tail_rows(t, length_tokens)] for t in self.layout.tails]
        for t, part in zip(self.layout.tails, tails, strict=True):
            part[: t.dead_tokens(length_tokens)] = 0
        return SlotState(
            length_tokens=length_tokens,
            layers=layers,
            window_rows=self.layout.window_record_rows,
            tail_dtype=str(self.tail_dtype),
            swa=self._read_rows(slot, length_tokens, self._swa_rows(layers)),
            drafter=self._read_rows(slot, length_tokens, self._drafter_rows(layers)),
            tails=b"".join(part.cpu().numpy().tobytes() for part in tails),
        )

    def import_slot(self, slot: int, state: SlotState) -> None:
        """Overwrite the slot's rows before `state.length_tokens`; other rows stay as they are.

        Raises StateError when the bytes come from another window size or numerics class.
        """
        if state.window_rows != self.layout.window_record_rows:
            raise StateError(
                f"slot state has {state.window_rows} window rows, "
                f"wanted {self.layout.window_record_rows}"
            )
        if state.tail_dtype != str(self.tail_dtype):
            raise StateError(f"slot state is {state.tail_dtype}, wanted {self.tail_dtype}")
        counts = [2 * t.width * t.history_tokens for t in self.layout.tails]
        size = self.tails.element_size()
        swa, drafter = self._swa_rows(state.layers), self._drafter_rows(state.layers)
        # All sizes are looked at before the first change.
        raw = self._tensor(state.tails, sum(counts) * size, "tail")
        windows = self._expect(state.swa, swa, "window")
        stages = self._expect(state.drafter, drafter, "drafter")
        self._write_rows(slot, state.length_tokens, swa, windows)
        self._write_rows(slot, state.length_tokens, drafter, stages)
        begin = 0
        for t, count in zip(self.layout.tails, counts, strict=True):
            part = raw[begin : begin + count * size].clone().view(self.tail_dtype)
            self.tail(t)[slot, self._tail_rows(t, state.length_tokens)] = part.view(-1, 2, t.width)
            begin += count * size

    def poison_slot(self, slot: int) -> None:
        """Make every ring row and tail row of the slot NaN."""
        self.rings[slot] = POISON_BYTE
        self.tails[slot] = float("nan")

    # ---- inside ----------------------------------------------------------------------------

    def _swa_rows(self, layers: Layers) -> _Rings:
        wanted = self.layout.n_layers if layers == "all" else self.layout.n_encoder_layers
        if wanted > self.ring_layers:
            raise StateError(f"slot of {wanted} layers: this state has rings of {self.ring_layers}")
        return _Rings(0, wanted, self.layout.window_record_rows)

    def _drafter_rows(self, layers: Layers) -> _Rings:
        n = self.layout.n_stages if layers == "all" else 0
        return _Rings(self.layout.n_layers, n, self.layout.window_tokens)

    def _encoder_rows(self) -> _Rings:
        return _Rings(0, self.layout.n_encoder_layers, self.layout.window_record_rows)

    def _tail_rows(self, t: TailLayout, length_tokens: int) -> list[int]:
        return [p % t.rows for p in range(length_tokens - t.history_tokens, length_tokens)]

    def _carried(self, position: int) -> Iterator[tuple[torch.Tensor, list[int], int]]:
        """Of every overlapping compressor: its ring, the rows of the group before `position`, and
        how many values of z and v the next group reads."""
        for t in self.layout.tails:
            if not t.overlaps:
                continue
            if position % t.ratio:
                raise StateError(f"window record at {position}, inside a group of {t.ratio}")
            rows = [p % t.rows for p in range(position - t.ratio, position)]
            yield self.tail(t), rows, t.width // 2

    def _read_rows(self, slot: int, position: int, rings: _Rings) -> bytes:
        positions = np.arange(position - rings.rows, position)
        rows = torch.from_numpy(positions % self.layout.ring_rows).to(self.device)
        out = self.rings[slot, rings.first : rings.end].index_select(1, rows).cpu().numpy()
        out[:, positions < 0] = 0
        return out.tobytes()

    def _expect(
        self, buffer: bytes | bytearray | memoryview, rings: _Rings, what: str
    ) -> torch.Tensor:
        width = self.layout.swa_row_bytes
        raw = self._tensor(buffer, rings.count * rings.rows * width, what)
        return raw.view(rings.count, rings.rows, width)

    def _write_rows(self, slot: int, position: int, rings: _Rings, raw: torch.Tensor) -> None:
        positions = np.arange(position - rings.rows, position)
        keep = positions >= 0
        target = torch.from_numpy(positions[keep] % self.layout.ring_rows).to(self.device)
        self.rings[slot][rings.first : rings.end, target] = raw[:, torch.from_numpy(keep)]

    def _tensor(
        self, buffer: bytes | bytearray | memoryview, wanted: int, what: str
    ) -> torch.Tensor:
        data = np.frombuffer(buffer, dtype=np.uint8)
        if data.size != wanted:
            raise StateError(f"{what} bytes: found {data.size}, wanted {wanted}")
        # torch refuses to promise not to write into a read-only buffer, so such a one is copied.
        return torch.from_numpy(data if data.flags.writeable else data.copy()).to(self.device)
