"""Properties of the rows that are left out: replay, truncation, and what heals by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headrace.core.rows import RowPlan, StartKind, plan_decode
from headrace.model.weights import random_tensors

BLOCK = 128
GRID = 2.0**-16  # of logits in `invariant` numerics


@pytest.fixture(scope="module")
def replayed(run_cut: Any) -> Callable[..., tuple[Any, Any, RowPlan]]:
    """replayed(data, world, n, cuts, **wrong) -> (driver, part, plan): a driver that was given the
    stored blocks of a cold run below a hit and ran the rows of a bounded replay over n tokens."""

    def run(data: Any, w: Any, n: int, cuts: Any, **wrong: Any) -> tuple[Any, Any, RowPlan, Any]:
        hit = data.draw(st.sampled_from(range(BLOCK, n + 1, BLOCK)))
        keep = 1
        if w.geometry.has_decoder_half:
            keep = data.draw(st.integers(w.window, w.window + 20))
        depth = data.draw(st.integers(0, w.geometry.replay_rows))
        plan = plan_decode(n, hit, keep, (), w.geometry, depth_tokens=depth)
        cold, driver = w.driver(), w.driver()
        run_cut(cold, w.part(0, hit))
        part = w.part(
            plan.start,
            n,
            table=(4, 2, 0, 5),
            swa_floor=plan.encoder_floor,
            decoder_floor=plan.decoder_floor,
            decoder_from=plan.decoder_start,
            write_floor=plan.write_floor,
            logits_from=plan.decoder_start,
        )
        for mine, theirs in enumerate(part.table[: hit // BLOCK]):
            driver.state.write_block(theirs, cold.state.read_block(mine))
        part = replace(part, **wrong)
        logits = run_cut(driver, part, cuts)
        assert not logits.isnan().any()
        return driver, part, plan, (logits, cold)

    return run


@pytest.fixture(scope="module")
def write_floor(world: Any, replayed: Any, draw_cuts: Any, run_cut: Any) -> Callable[..., None]:
    def check(data: Any, **wrong: Any) -> None:
        n, more = data.draw(st.integers(BLOCK, 270)), 3
        w = world(data, n + more)
        driver, part, plan, (_, cold) = replayed(data, w, n, draw_cuts(data, n), **wrong)
        run_cut(driver, replace(part, lo=n, hi=n + more), [n + 1])
        for mine, theirs in enumerate(part.table[: plan.write_floor // BLOCK]):
            assert driver.state.read_block(theirs) == cold.state.read_block(mine)

    return check


def test_3_stored_bytes_stay(write_floor: Any, holds: Any) -> None:
    """A replay of any depth, in any calls, leaves every byte below the write floor as it was."""
    holds(write_floor, 8)


def test_3_control(write_floor: Any, caught: Any) -> None:
    """Without the floor a bounded replay writes what it computed from too few rows."""
    caught(partial(write_floor, write_floor=0), 12)


@pytest.fixture(scope="module")
def exact_keep(world: Any, left: Any, run_cut: Any, draw_cuts: Any) -> Callable[..., None]:
    def check(data: Any, decoder_floor: int | None = None) -> None:
        n = data.draw(st.integers(20, 150))
        w = world(data, n, "v41")
        keep = w.geometry.exact_keep_tokens
        assert keep == w.window + (w.config.n_decoder_layers - 1) * (w.window - 1)
        floor = max(0, n - keep)
        whole, cut = w.driver(), w.driver()
        logits = run_cut(whole, w.part(0, n))
        part = w.part(
            0,
            n,
            decoder_from=floor,
            decoder_floor=floor if decoder_floor is None else decoder_floor,
            logits_from=floor,
        )
        first = w.config.first_decoder_layer

        def poison(position: int) -> None:
            rows = cut.layout.ring_rows
            live = {p % rows for p in range(max(floor, position - rows), position)}
            dead = [r for r in range(rows) if r not in live]
            cut.state.rings[0, first:, dead] = 0xFF

        found = run_cut(cut, part, draw_cuts(data, n), poison)
        assert torch.equal(found[-1:], logits[-1:]) and not found.isnan().any()
        one, two = left(whole, part, n), left(cut, part, n)
        assert (one.blocks, one.entries) == (two.blocks, two.entries)
        layers = w.config.n_encoder_layers * (w.window - 1) * whole.layout.swa_row_bytes
        assert one.swa[:layers] == two.swa[:layers]

    return check


def test_4_exact_keep(exact_keep: Any, holds: Any) -> None:
    """With keep = W + (n_dec - 1)(W - 1) the last row is that of the untruncated run, and decoder
    and drafter rows below F, which are NaN, are not read. Global KV and encoder windows are always
    those of the untruncated run."""
    holds(exact_keep, 12)


def test_4_control(exact_keep: Any, caught: Any) -> None:
    """A decoder floor that lies below the first decoder row lets rows in that nobody wrote."""
    caught(partial(exact_keep, decoder_floor=0), 12)


@pytest.fixture(scope="module")
def healing(world: Any, run_cut: Any, draw_cuts: Any) -> Callable[..., None]:
    def check(data: Any, bounded: bool = False) -> None:
        n, floor = 150, data.draw(st.integers(2, 70))
        w = world(data, n, "v41")
        c, first = w.config, w.config.first_decoder_layer
        sizes = {"ring_rows": n + 6}
        whole, cut = w.driver(**sizes), w.driver(**sizes)
        floor -= floor % 2
        healed = floor + c.n_decoder_layers * (w.window - 1)
        logits = run_cut(whole, w.part(0, n))[healed:]
        floors = {"decoder_floor": floor, "decoder_from": floor, "logits_from": healed}
        part = w.part(0, n, **floors)
        if bounded:  # encoder rows are missing too: their global KV stays wrong
            cut.state.write_block(0, whole.state.read_block(0))
            part = w.part(floor, n, **floors, swa_floor=floor, write_floor=floor)
        found = run_cut(cut, part, draw_cuts(data, n))
        assert torch.equal(found, logits)
        for layer in range(first, c.num_hidden_layers):
            exact = floor + (layer - first) * (w.window - 1)
            rows = slice(exact, n)
            assert torch.equal(cut.state.rings[0, layer, rows], whole.state.rings[0, layer, rows])
        if c.num_nextn_predict_layers:  # rows of the drafter are as exact as the taps
            exact = floor + max(0, c.dspark_target_layer_ids[-1] - first) * (w.window - 1)
            stages, rows = slice(c.num_hidden_layers, None), slice(exact, n)
            assert torch.equal(cut.state.rings[0, stages, rows], whole.state.rings[0, stages, rows])

    return check


def test_5_truncation_heals(healing: Any, holds: Any) -> None:
    """n_dec (W - 1) rows behind the truncation every row is exact again; layer i of the decoder
    half and what is tapped from it already after i (W - 1)."""
    holds(healing, 10)


def test_5_control(healing: Any, caught: Any) -> None:
    """A replay that leaves out encoder rows does not heal."""
    caught(partial(healing, bounded=True), 10)


@pytest.fixture(scope="module")
def same_replay(world: Any, replayed: Any, draw_cuts: Any, dense: Any) -> Callable[..., None]:
    def check(data: Any, later: int = 0) -> None:
        n = data.draw(st.integers(BLOCK, 145))
        w = world(data, n, "v41")
        _, _, plan, (logits, _) = replayed(data, w, n, draw_cuts(data, n))
        tensors = random_tensors(w.config, w.seed % 3)
        weights = {name: x.double().numpy() for name, x in tensors.items()}
        ids = np.array(w.text.ids)
        cold, again = (
            dense.Dense(w.config, weights, w.trunk.token_map, w.trunk.hashes) for _ in range(2)
        )
        cold.run(ids[: plan.write_floor], dense.Truncation())
        cut = dense.Truncation(
            min(plan.start + later, plan.decoder_start),
            plan.decoder_start,
            plan.write_floor,
            cold.entries,
        )
        wanted = again.run(ids, cut)
        assert np.abs(logits.double().numpy() - wanted).max() <= GRID

    return check


def test_6_replay_equals_the_same_replay(same_replay: Any, holds: Any) -> None:
    """A replay in chunks over rings and blocks equals that of a program that has neither."""
    holds(same_replay, 5)


def test_6_control(same_replay: Any, caught: Any) -> None:
    """A reference that starts two rows later gives other numbers."""
    caught(partial(same_replay, later=2), 6)


@pytest.fixture(scope="module")
def v4_replay(world: Any, replayed: Any, draw_cuts: Any, run_cut: Any) -> Callable[..., None]:
    def check(data: Any) -> None:
        n = data.draw(st.integers(BLOCK, 200))
        w = world(data, n, "v4")
        _, part, plan, (logits, cold) = replayed(data, w, n, draw_cuts(data, n))
        other = w.driver(ring_rows=w.window + 40)
        for mine, theirs in enumerate(part.table[: plan.write_floor // BLOCK]):
            other.state.write_block(theirs, cold.state.read_block(mine))
        assert torch.equal(run_cut(other, part), logits)
        if plan.kind is not StartKind.BOUNDED:
            wanted = run_cut(w.driver(), w.part(0, n, logits_from=plan.decoder_start))
            assert torch.equal(wanted, logits)

    return check


def test_6_v4_replay(v4_replay: Any, holds: Any) -> None:
    """V4 has no reference without rings: a replay is one function of its start, and the cold run
    from n (W - 1) rows on."""
    holds(v4_replay, 6)
