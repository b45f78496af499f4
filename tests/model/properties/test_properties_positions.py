"""Properties of positions: which entries a row may choose, where they lie, and what a picture
hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headrace.core.chain import as_token_ids
from headrace.core.ids import Digest
from headrace.core.images import ImageSpan, span_block_digests
from headrace.model import ModelConfig
from headrace.model.weights import random_tensors

BLOCK = 128


def blocks_of(entries: set[int], size: int, n: int) -> set[int]:
    """The blocks whose visible entries are exactly `entries`, of n visible ones."""
    blocks = {j // size for j in entries}
    assert entries == {j for b in blocks for j in range(b * size, min(n, (b + 1) * size))}
    return blocks


@pytest.fixture(scope="module")
def selections(world: Any) -> Callable[..., None]:
    def check(data: Any, early: int = 0) -> None:
        """`early`: entries that a row would see before they are complete."""
        n = data.draw(st.integers(BLOCK, 150))
        w = world(data, n, accept=lambda c: bool(c.index_source_layer_ids))
        c = w.config
        found = w.driver().call(w.part(0, n, logits_from=n - 1), capture=True)
        assert set(found.selections) == set(c.index_source_layer_ids)
        kept: dict[int, set[int]] = {}
        if c.candidate_source_layer_id >= 0:
            for p, row in enumerate(found.candidates.tolist()):
                visible = p + 1
                kept[p] = {j for j, yes in enumerate(row) if yes and j < visible}
                blocks = blocks_of(kept[p], c.candidate_block_size, visible)
                total = -(-visible // c.candidate_block_size)
                assert len(blocks) == min(c.candidate_topk_blocks, total)
                assert total - 1 in blocks  # the last one, complete or not
        for layer, chosen in found.selections.items():
            ratio = c.layer(layer).ratio
            for p, row in enumerate(chosen.tolist()):
                visible = (p + 1) // ratio + early
                real = [j for j in row if j >= 0]
                assert row[len(real) :] == [-1] * (len(row) - len(real))
                assert real == sorted(set(real)) and all(j < visible for j in real)
                allowed = set(range(visible))
                if 0 <= c.candidate_source_layer_id < layer:
                    allowed = kept[p]
                assert set(real) <= allowed
                assert len(real) == min(c.index_topk, len(allowed))

    return check


def test_9_what_a_row_may_choose(selections: Any, holds: Any) -> None:
    """Every row of a text chooses min(topk, N(p)) of the N(p) = floor((p + 1) / r) complete
    entries, after the candidate source of those in its whole candidate blocks, the last one
    included: so at 0, r - 1, and on both sides of a block's edge."""
    holds(selections, 12)


def test_9_control(selections: Any, caught: Any) -> None:
    caught(partial(selections, early=1), 6)


def shifted(dense: Any, by: int) -> Any:
    """The program without caches, with entries turned to a position `by` too high."""

    class Shifted(dense.Dense):
        def rope(self, x: Any, positions: Any, compressed: bool, sign: int = 1) -> Any:
            if len(positions) == 1:  # an entry: rows come many at a time
                positions = positions + by
            return super().rope(x, positions, compressed, sign)

    return Shifted


@pytest.fixture(scope="module")
def entries(world: Any, dense: Any, run_cut: Any, draw_cuts: Any) -> Callable[..., None]:
    def check(data: Any, by: int = 0) -> None:
        n = data.draw(st.integers(2, 40))
        w = world(data, n, "v41")
        tensors = random_tensors(w.config, w.seed % 3)
        weights = {name: x.double().numpy() for name, x in tensors.items()}
        reference = shifted(dense, by)(w.config, weights, w.trunk.token_map, w.trunk.hashes)
        reference.run(np.array(w.text.ids), dense.Truncation())
        driver = w.driver()
        run_cut(driver, w.part(0, n), draw_cuts(data, n))
        block, form = driver.state.blocks[0], driver.layout.formats.main
        for source in driver.layout.sources:
            main, _ = reference.entries[source.layer]
            assert len(main) == n // source.ratio
            end = source.main_offset + len(main) * source.main_row_bytes
            rows = block[source.main_offset : end].view(len(main), source.main_row_bytes)
            ours = form.decode(w.trunk.kernels, rows, torch.float64).numpy()
            assert np.array_equal(ours, main)

    return check


def test_9_where_an_entry_lies(entries: Any, holds: Any) -> None:
    """The bytes of entry j of a source are those of a key turned to j r, its first token."""
    holds(entries, 8)


def test_9_entries_control(entries: Any, caught: Any) -> None:
    caught(partial(entries, by=1), 4)


def with_engram_first(c: ModelConfig) -> bool:
    return c.engram_layer_ids[:1] == (0,)


@pytest.fixture(scope="module")
def pictures(world: Any, run_cut: Any, draw_cuts: Any) -> Callable[..., None]:
    def check(data: Any, shown: bool = True) -> None:
        n = data.draw(st.integers(6, 60))
        w = world(data, n, "v41", accept=with_engram_first)
        c = w.config
        begin = data.draw(st.integers(1, n - 2))
        end = data.draw(st.integers(begin + 1, n - 1))
        reach = min(begin, c.engram_max_ngram_size - 1)
        generator = torch.Generator().manual_seed(w.seed)
        rows = {p: torch.randn(c.hidden_size, generator=generator) for p in range(begin, end)}
        ids = [*w.text.ids]
        ids[begin:end] = [c.image_token_id] * (end - begin)
        other = list(ids)
        for p in range(begin - reach, begin):
            other[p] = ids[p] + 3 if ids[p] + 3 < c.vocab_size else ids[p] - 3

        def layer_0(tokens: list[int]) -> torch.Tensor:
            """Window keys of the first layer: made of embedding and Engram, before attention."""
            driver = w.driver(ring_rows=max(n, w.window) + 6)
            mask = frozenset(range(begin, end)) if shown else frozenset()
            text = type(w.text)(tuple(tokens), mask, rows if shown else {})
            run_cut(driver, replace(w.part(0, n), text=text), draw_cuts(data, n))
            return driver.state.rings[0, 0, :n]

        changed = (layer_0(ids) != layer_0(other)).any(-1)
        assert not changed[begin:].any() and not changed[: begin - reach].any()
        assert changed[begin - reach : begin].any()

    return check


def test_10_a_picture_hides_the_text_before_it(pictures: Any, holds: Any) -> None:
    """Other tokens inside the n-gram reach before a picture change the Engram of no row of it, nor
    of any row behind it."""
    holds(pictures, 8)


def test_10_control(pictures: Any, caught: Any) -> None:
    """The same ids without a picture do."""
    caught(partial(pictures, shown=False), 8)


def test_10_keys(holds: Any) -> None:
    """The same ids with another picture have other keys, from the first block it touches on."""

    def check(data: Any) -> None:
        n = data.draw(st.integers(BLOCK, 700))
        begin = data.draw(st.integers(0, n - 1))
        length = data.draw(st.integers(1, n - begin))
        ids = as_token_ids([6] * n)
        keys = []
        for name in (b"1", b"2"):
            span = ImageSpan(begin, length, Digest(name * 32))
            keys.append(span_block_digests(bytes(32), ids, (span,)))
        same = [a == b for a, b in zip(*keys, strict=True)]
        assert same == [(block + 1) * BLOCK <= begin for block in range(n // BLOCK)]

    holds(check, 40)
