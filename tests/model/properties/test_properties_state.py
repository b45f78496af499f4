"""Properties of state: calls, rings, blocks and rejected rows leave no trace in any bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from headrace.model.slot_bytes import pack_state, restore_state, unpack_state

BACKTRACK = 6


@pytest.fixture(scope="module")
def chunks(world: Any, left: Any, run_cut: Any, draw_cuts: Any) -> Callable[..., None]:
    def check(data: Any, forgets: bool = False) -> None:
        n = data.draw(st.integers(1, 150))
        w = world(data, n)
        one, other = (
            w.driver(),
            w.driver(ring_rows=w.window + BACKTRACK + data.draw(st.integers(0, 9))),
        )
        here, there = w.part(0, n), w.part(0, n, slot=1, table=(4, 1, 5))

        def forget(position: int) -> None:
            if forgets:
                other.state.tails.zero_()

        logits = run_cut(one, here)
        assert not logits.isnan().any()
        assert torch.equal(run_cut(other, there, draw_cuts(data, n), forget), logits)
        assert left(one, here, n) == left(other, there, n)

    return check


def test_1_chunks(chunks: Any, holds: Any) -> None:
    """Every logit and every byte of a text is the same however its rows are cut into calls."""
    holds(chunks, 14)


def test_1_control(chunks: Any, caught: Any) -> None:
    """A program that forgets its compressors' tails between calls is noticed."""
    caught(partial(chunks, forgets=True), 14)


@pytest.fixture(scope="module")
def moved(
    world: Any, left: Any, run_cut: Any, draw_cuts: Any, first_drafts: Any
) -> Callable[..., None]:
    def check(data: Any, wrong: bool = False) -> None:
        n = data.draw(st.integers(3, 150))
        at = data.draw(st.integers(1, n - 1))
        back = data.draw(st.integers(at, n - 1))
        w = world(data, n)
        ring = w.window + BACKTRACK + data.draw(st.integers(0, 60))
        home, other, third = w.driver(), w.driver(ring_rows=ring), w.driver(backtrack_rows=9)
        table = tuple(data.draw(st.permutations(range(6))))[:2]
        here, there = w.part(0, n), w.part(0, n, slot=1, table=table)

        def move(source: Any, target: Any, length: int, old: Any, new: Any) -> None:
            whole = length // 128
            for a, b in zip(old.table[:whole], new.table[:whole], strict=True):
                target.state.write_block(b, source.state.read_block(a))
            packed = unpack_state(pack_state(source.state, old.slot, length, 7, old.table[whole]))
            if wrong:  # window rows one place further: positions are lost
                packed = replace(packed, slot=replace(packed.slot, swa=shifted(packed.slot.swa)))
            restore_state(target.state, new.slot, packed, new.table[whole])

        def shifted(rows: bytes) -> bytes:
            width = home.layout.swa_row_bytes
            return rows[-width:] + rows[:-width]

        run_cut(home, replace(here, hi=at), draw_cuts(data, at))
        move(home, other, at, here, there)
        middle = (
            run_cut(other, replace(there, lo=at, hi=back), draw_cuts(data, n))
            if back > at
            else None
        )
        move(other, third, back, there, here)
        logits = run_cut(home, replace(here, lo=at, logits_from=at), draw_cuts(data, n))
        if middle is not None:
            assert torch.equal(middle, logits[: back - at])
        end = run_cut(third, replace(here, lo=back), draw_cuts(data, n))
        assert torch.equal(end, logits[back - at :]) and not end.isnan().any()
        assert left(home, here, n) == left(third, here, n)
        drafts = first_drafts(w, home, here, n)
        assert torch.equal(first_drafts(w, third, here, n), drafts) and not drafts.isnan().any()

    return check


def test_2_moved_states(moved: Any, holds: Any) -> None:
    """Engines with other chunks, rings, slots and block orders go on with each other's exported
    bytes, there and back, and draft the same."""
    holds(moved, 12)


def test_2_control(moved: Any, caught: Any) -> None:
    caught(partial(moved, wrong=True), 6)


def poison_dead(driver: Any, part: Any, length: int, window: int) -> None:
    """NaN in every byte that no row from `length` on may read, given a window of that size."""
    state, layout = driver.state, driver.layout
    rows = layout.ring_rows
    for first, end, kept in (
        (0, layout.n_layers, window - 1),
        (layout.n_layers, layout.n_rings, window),
    ):
        live = {p % rows for p in range(max(0, length - kept), length)}
        dead = [r for r in range(rows) if r not in live]
        state.rings[part.slot, first:end, dead] = 0xFF
    for tail in layout.tails:
        span = tail.history_tokens
        live = {p % tail.rows for p in range(length - span + tail.dead_tokens(length), length)}
        dead = [r for r in range(tail.rows) if r not in live]
        state.tail(tail)[part.slot, dead] = float("nan")
    whole = length // 128
    for block in set(range(state.n_blocks)) - set(part.table[: whole + 1]):
        state.poison_block(block)
    if length % 128:
        packed = pack_state(state, part.slot, length, 0, part.table[whole])
        before = state.read_block(part.table[whole])
        ones = bytearray(len(before))
        for source in layout.sources:
            groups = length % 128 // source.ratio
            for begin, size in (
                (source.main_offset, source.main_row_bytes),
                (source.index_data_offset, source.index_data_bytes),
                (source.index_scale_offset, source.index_scale_bytes),
            ):
                end = begin + size * source.rows_per_block
                ones[begin + size * groups : end] = b"\xff" * (end - begin - size * groups)
        dirty = bytes(a | b for a, b in zip(before, ones, strict=True))
        state.write_block(part.table[whole], dirty)
        assert pack_state(state, part.slot, length, 0, part.table[whole]) == packed


@pytest.fixture(scope="module")
def poisoned(
    world: Any, left: Any, run_cut: Any, draw_cuts: Any, first_drafts: Any
) -> Callable[..., None]:
    def check(data: Any, missing: int = 0) -> None:
        n = data.draw(st.integers(2, 150))
        w = world(data, n)
        one, other = w.driver(), w.driver()
        part = w.part(0, n)
        logits = run_cut(one, part)

        def poison(length: int) -> None:
            poison_dead(other, part, length, w.window - missing)

        found = run_cut(other, part, draw_cuts(data, n), poison)
        assert torch.equal(found, logits) and not found.isnan().any()
        assert left(one, part, n) == left(other, part, n)
        drafts = first_drafts(w, other, part, n)
        assert torch.equal(drafts, first_drafts(w, one, part, n)) and not drafts.isnan().any()

    return check


def test_7_nothing_dead_is_read(poisoned: Any, holds: Any) -> None:
    """Between calls every ring row, tail row and block entry that is not the text's is NaN."""
    holds(poisoned, 12)


def test_7_control(poisoned: Any, caught: Any) -> None:
    """The oldest row of the window is read: with it poisoned too the property fails."""
    caught(partial(poisoned, missing=1), 6)


@pytest.fixture(scope="module")
def speculated(world: Any, left: Any, replace_rings: Any) -> Callable[..., None]:
    def check(data: Any, ring_rows: int | None = None) -> None:
        """`ring_rows`: rows beyond the window; None = those that the layout asks for."""
        start, steps = data.draw(st.integers(1, 140)), 14
        w = world(data, start)
        plain, tried = w.driver(), w.driver()
        if ring_rows is not None:
            replace_rings(tried, w.window + ring_rows)
        prompt = w.part(0, start)
        ids = [*w.text.ids, int(plain.call(prompt).logits[-1].argmax())]
        tried.call(prompt)

        def rows(driver: Any, tokens: list[int], lo: int) -> list[int]:
            part = replace(w.part(lo, len(tokens)), text=w.with_ids(tokens))
            return driver.call(part).logits.argmax(-1).tolist()

        states = {}
        for _ in range(steps):
            ids += rows(plain, ids, len(ids) - 1)
            states[len(ids) - 1] = left(plain, prompt, len(ids) - 1)
        length = start
        while length < start + steps - BACKTRACK:
            m = data.draw(st.integers(0, BACKTRACK - 1))
            right = data.draw(st.integers(0, m))
            drafts = ids[length + 1 : length + 1 + m]
            if right < m:
                drafts[right] = 2 + (drafts[right] - 1) % (w.config.vocab_size - 2)
            best = rows(tried, ids[: length + 1] + drafts, length)
            stayed = 0
            while stayed < m and best[stayed] == drafts[stayed]:
                stayed += 1
            assert stayed == right
            assert best[: right + 1] == ids[length + 1 : length + right + 2]
            length += right + 1
            assert left(tried, prompt, length) == states[length]

    return check


def test_8_rejected_drafts(speculated: Any, holds: Any) -> None:
    """Whatever is drafted and rejected, text and state are those of plain decoding; groups, blocks
    and rings end anywhere inside a step."""
    holds(speculated, 12)


def test_8_control(speculated: Any, caught: Any) -> None:
    """In rings without room for rejected rows a rejected row destroys one that is needed."""
    caught(partial(speculated, ring_rows=0), 8)
