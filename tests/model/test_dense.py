"""`invariant` runs against a second implementation without caches (oracle/dense.py).

Both compute in float64, so they choose the same codes; logits agree to the grid of 2^-16.
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.model.weights import random_tensors

GRID = 2.0**-16


@pytest.fixture(scope="module")
def make_dense(dense, make_trunk):
    def make(name: str):
        trunk = make_trunk(name)
        tensors = {k: v.double().numpy() for k, v in random_tensors(trunk.config, seed=1).items()}
        return dense.Dense(trunk.config, tensors, trunk.token_map, trunk.hashes)

    return make


def close(ours, theirs) -> bool:
    return bool(np.abs(ours.double().numpy() - theirs).max() <= GRID)


@pytest.mark.parametrize(("name", "n"), [("t1", 100), ("toy", 90)])
def test_whole_text(name, n, make_dense, dense, make_trunk, make_text, driver_type, part_type):
    trunk, reference = make_trunk(name), make_dense(name)
    text = make_text(n, 21, trunk.config)
    ids = [*text.ids[:30], trunk.config.engram_pad_token_id, *text.ids[31:]]  # a dead n-gram
    text = type(text)(tuple(ids))
    want = reference.run(np.array(ids), dense.Truncation())
    driver = driver_type(trunk)
    result = driver.call(part_type(text, 0, n, 0, (0,), logits_from=0), capture=True)
    assert close(result.logits, want)
    for layer, chosen in reference.selections.items():
        got = [[j for j in row if j >= 0] for row in result.selections[layer].tolist()]
        assert got == chosen


@pytest.mark.parametrize("keep", [32, 44])
def test_truncated_decoder(keep, make_dense, dense, make_trunk, make_text, driver_type, part_type):
    """Decoder rows from N - keep on see nothing below, then decode goes on by single rows."""
    trunk, n, more = make_trunk("t1"), 90, 4
    text = make_text(n + more, 22, trunk.config)
    floor = n - keep
    want = make_dense("t1").run(np.array(text.ids), dense.Truncation(decoder_from=floor))
    driver = driver_type(trunk)
    floors = {"decoder_from": floor, "decoder_floor": floor}
    result = driver.call(part_type(text, 0, n, 0, (0,), **floors, logits_from=floor))
    assert close(result.logits, want[:keep])
    for at in range(n, n + more):
        step = driver.call(part_type(text, at, at + 1, 0, (0,), **floors))
        assert close(step.logits, want[at - floor : at - floor + 1])


def test_bounded_replay(make_dense, dense, make_trunk, make_text, driver_type, part_type):
    """A replay equals a reference doing the same replay: rows from 96, entries below 128 stored."""
    trunk, n, first, hit, keep = make_trunk("t1"), 150, 96, 128, 32
    text = make_text(n, 23, trunk.config)
    ids = np.array(text.ids)
    cold, replay = make_dense("t1"), make_dense("t1")
    cold.run(ids, dense.Truncation())
    truncation = dense.Truncation(first, n - keep, hit, cold.entries)
    want = replay.run(ids, truncation)

    source, driver = driver_type(trunk), driver_type(trunk)
    source.call(part_type(text, 0, hit, 0, (0,)))
    driver.state.write_block(3, source.state.read_block(0))
    floors = {"swa_floor": first, "decoder_floor": n - keep, "write_floor": hit}
    part = part_type(
        text, first, n, 0, (3, 1), **floors, decoder_from=n - keep, logits_from=n - keep
    )
    assert close(driver.call(part).logits, want)
    assert not close(driver.call(part).logits[-1:], cold.run(ids, dense.Truncation())[-1:])
