"""A sequence's private state as bytes: what is parked, and what hand-off mode `state` sends.

    header  magic "HRST" | version u16 | tail type u8 | layers u8 | length u32 | window rows u32 |
            anchor u32 | windows u32 | drafter u32 | tails u32 | entries u32
            (all little-endian; sizes in bytes)
    windows W-1 rows before `length_tokens` of every layer: layer-major, position order, front zero
    drafter the W rows before `length_tokens` of every drafter stage, in the same order
    tails   the last compressor inputs that an entry may read, of each pooling compressor
    entries the complete groups of the incomplete block at `length_tokens`: per source layer in
            order the main rows, the index keys' data, their scales; nothing for a parked slot

`anchor` is the newest token, which has no row yet. Which model and numerics the bytes belong to is
the business of the namespace that they are stored under.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from headrace.model.errors import StateError
from headrace.model.layout import BLOCK_TOKENS, CacheLayout
from headrace.model.state import KvState, SlotState

_HEADER = struct.Struct("<4sHBBIIIIIII")
_MAGIC, _VERSION = b"HRST", 2
_TAIL_TYPES = {str(torch.float32): 0, str(torch.float64): 1}
_TAIL_NAMES = {code: name for name, code in _TAIL_TYPES.items()}

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SequenceBytes:
    """What `unpack_state` found; `entries` as in the module's layout."""

    slot: SlotState
    anchor: int
    entries: bytes


def most_bytes(layout: CacheLayout) -> int:
    """The largest object that `pack_state` makes for this layout, whatever the numerics."""
    windows = layout.n_layers * layout.window_record_rows * layout.swa_row_bytes
    drafter = layout.n_stages * layout.window_tokens * layout.swa_row_bytes
    tails = sum(t.history_tokens * 2 * t.width for t in layout.tails) * 8
    return _HEADER.size + windows + drafter + tails + layout.block_bytes


def pack_state(
    state: KvState, slot: int, length_tokens: int, anchor: int, block: int | None
) -> bytes:
    """The slot's state at `length_tokens`. `block`: the state's block that holds the positions from
    floor(length_tokens) on, whose complete groups are packed too; None leaves them out."""
    private = state.export_slot(slot, length_tokens)
    entries = (
        b"" if block is None else _entries(state.layout, state.read_block(block), length_tokens)
    )
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        _TAIL_TYPES[private.tail_dtype],
        0,
        length_tokens,
        private.window_rows,
        anchor,
        len(private.swa),
        len(private.drafter),
        len(private.tails),
        len(entries),
    )
    return b"".join((header, private.swa, private.drafter, private.tails, entries))


def unpack_state(data: Buffer) -> SequenceBytes:
    """Raises `StateError` when `data` is not exactly one packed state of this version."""
    view = memoryview(data).cast("B")
    if view.nbytes < _HEADER.size:
        raise StateError(f"state bytes: found {view.nbytes}, wanted at least {_HEADER.size}")
    magic, version, tail, layers, length_tokens, rows, anchor, *sizes = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or layers or tail not in _TAIL_NAMES:
        raise StateError("state bytes: another format or version")
    if _HEADER.size + sum(sizes) != view.nbytes:
        raise StateError(f"state bytes: found {view.nbytes}, the header tells another size")
    parts, begin = [], _HEADER.size
    for size in sizes:
        parts.append(bytes(view[begin : begin + size]))
        begin += size
    swa, drafter, tails, entries = parts
    slot = SlotState(length_tokens, "all", rows, _TAIL_NAMES[tail], swa, drafter, tails)
    return SequenceBytes(slot, anchor, entries)


def restore_state(state: KvState, slot: int, found: SequenceBytes, block: int | None) -> None:
    """Put an unpacked state into `slot`, and its entries into `block` (None: it has none there).

    Raises `StateError`, before anything was changed, when the sizes are not this layout's."""
    entries = None
    if block is not None:
        entries = bytearray(state.layout.block_bytes)
        _place(state.layout, entries, found)
    elif found.entries:
        raise StateError("state bytes: entries of a block, and no block to put them in")
    state.import_slot(slot, found.slot)
    if block is not None and entries is not None:
        state.write_block(block, entries)


def _sections(layout: CacheLayout, length_tokens: int) -> list[tuple[int, int]]:
    """(offset in a block, bytes) of the complete groups of the incomplete block."""
    sections = []
    for source in layout.sources:
        groups = length_tokens % BLOCK_TOKENS // source.ratio
        sections += [
            (source.main_offset, groups * source.main_row_bytes),
            (source.index_data_offset, groups * source.index_data_bytes),
            (source.index_scale_offset, groups * source.index_scale_bytes),
        ]
    return sections


def _entries(layout: CacheLayout, block: bytes, length_tokens: int) -> bytes:
    return b"".join(block[begin : begin + size] for begin, size in _sections(layout, length_tokens))


def _place(layout: CacheLayout, block: bytearray, found: SequenceBytes) -> None:
    sections = _sections(layout, found.slot.length_tokens)
    if sum(size for _, size in sections) != len(found.entries):
        raise StateError("state bytes: entries of another layout")
    taken = 0
    for begin, size in sections:
        block[begin : begin + size] = found.entries[taken : taken + size]
        taken += size
