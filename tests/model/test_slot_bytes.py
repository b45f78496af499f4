"""Packed states: exactly one form, exactly the complete groups, refused when anything differs."""

from __future__ import annotations

import pytest
import torch

from headrace.model import CacheLayout, KvState, Numerics, StateError, load_named
from headrace.model.slot_bytes import most_bytes, pack_state, restore_state, unpack_state


@pytest.fixture(scope="module")
def layout_and_states() -> tuple[CacheLayout, KvState, KvState]:
    """A state full of seeded bytes, and one full of NaN with another ring size."""
    config = load_named("toy", 0, Numerics.FAST).config
    layout = CacheLayout.of(config, 6)
    one = KvState(config, layout, 2, 2, Numerics.INVARIANT)
    two = KvState(config, CacheLayout.of(config, 3), 2, 2, Numerics.INVARIANT, poison=True)
    draw = torch.Generator().manual_seed(1)
    for part in (one.blocks, one.rings):
        part.copy_(torch.randint(0, 256, part.shape, generator=draw, dtype=torch.uint8))
    one.tails.copy_(torch.rand(one.tails.shape, generator=draw, dtype=one.tails.dtype))
    return layout, one, two


@pytest.mark.parametrize("length", [1, 2, 127, 129, 130, 201, 255])
def test_a_state_comes_back_and_nothing_else_does(layout_and_states, length: int) -> None:
    layout, one, two = layout_and_states
    data = pack_state(one, 0, length, 4000, 1)
    found = unpack_state(data)
    assert (found.anchor, found.slot.length_tokens) == (4000, length)
    restore_state(two, 1, found, 0)
    assert pack_state(two, 1, length, 4000, 0) == data
    assert two.export_slot(1, length) == one.export_slot(0, length)
    source, target = one.read_block(1), two.read_block(0)
    kept = bytearray(layout.block_bytes)
    for part in layout.sources:
        groups = length % 128 // part.ratio
        for begin, size in (
            (part.main_offset, part.main_row_bytes),
            (part.index_data_offset, part.index_data_bytes),
            (part.index_scale_offset, part.index_scale_bytes),
        ):
            kept[begin : begin + groups * size] = source[begin : begin + groups * size]
    assert target == bytes(kept)  # what lay behind in the source's block is not handed on
    assert len(data) <= most_bytes(layout)


def test_a_parked_slot_has_no_entries(layout_and_states) -> None:
    _, one, _ = layout_and_states
    data = pack_state(one, 0, 200, 7, None)
    assert unpack_state(data).entries == b""
    assert len(data) < len(pack_state(one, 0, 200, 7, 1))


def test_what_is_no_state_of_this_layout_is_refused_before_anything_changes(
    layout_and_states,
) -> None:
    _, one, two = layout_and_states
    data = pack_state(one, 0, 200, 7, 1)
    header = bytearray(data)
    header[4] = 9  # version
    for bad in (b"", data[:20], data[:-1], data + b"x", b"XXXX" + data[4:], bytes(header)):
        with pytest.raises(StateError):
            unpack_state(bad)
    other = unpack_state(data)
    wrong = unpack_state(pack_state(one, 0, 198, 7, 1))
    before = two.read_block(1)
    with pytest.raises(StateError, match="another layout"):
        restore_state(two, 0, type(other)(wrong.slot, 7, other.entries), 1)
    with pytest.raises(StateError, match="no block"):
        restore_state(two, 0, other, None)
    assert two.read_block(1) == before
