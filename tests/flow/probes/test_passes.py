"""P5, P6, P7, P13 and P14 of the trained model through a hand-off, against one engine alone.

20 prompts a cell, all at once, in `invariant` numerics, so equal means equal in every bit of every
logit; a quarter of them once more with everything stored. The prompts are of the grid's kinds, as
short as a hand-off allows; the whole grid is `bench/probes/handoff.py --cases 20`, its figures are
in docs/model-card.md. The last tests show that these would find a fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(600)  # 20 prompts in float64; a busy core takes minutes

CELLS = [
    *(("P5", "20"), ("P5", "24")),
    *(("P6", "2"), ("P6", "4")),
    *(("P7", "a, b"), ("P13", "a, b")),
]


@pytest.mark.parametrize(("probe", "cell"), CELLS)
def test_a_handed_over_answer_is_that_of_one_engine(
    probes: Any, pools: Any, cases: Any, check_bits: Any, keep: int, probe: str, cell: str
) -> None:
    own = cases(probe, cell, 20, short=True)
    passes = ("handed", "again") if probe == "P5" else ("grown", "again")
    grid = probes.handoff.Grid(pools, keep, None)
    rows = grid.ask(own, probes.handoff.Cold(pools), passes, len(own) // 4).rows
    assert set(rows) == {"cold", *passes}
    assert len(own) == (40 if cell == "a, b" else 20)
    assert len(rows[passes[0]]) == len(own) * (2 if probe == "P6" else 1)
    assert len(rows["again"]) == len(own) // 4
    for name in passes:
        check_bits(rows[name])
    check_what_was_found(probe, rows, keep)
    right = sum(pools.right(prompt, cold) for prompt, _, cold in rows["cold"])
    assert 2 * right >= len(rows["cold"])


def check_what_was_found(probe: str, rows: Any, keep: int) -> None:
    """That a store and a hand-off took part: what each pass found, and that decode ran a part."""
    for prompt, got, _ in rows["handed"]:
        n = len(prompt.ids)
        assert (got.found_tokens, got.hit_tokens) == (0, n // 128 * 128 if n >= keep + 128 else 0)
        if n >= keep + 128:
            assert got.start_kind == "window"
            assert got.encoder_rows <= max(n - got.hit_tokens, keep + 127) < n
    for prompt, got, _ in rows["again"]:
        assert got.found_tokens == len(prompt.ids) // 128 * 128
    assert any(got.start_kind == "window" for name in rows for _, got, _ in rows[name])
    grown = [got.found_tokens for _, got, _ in rows["grown"]]
    if probe == "P7":  # the first ending finds nothing, the second one what both share
        assert set(grown[: len(grown) // 2]) == {0} and min(grown[len(grown) // 2 :]) >= 128
    elif probe == "P13":  # the picture stands in the first block: nothing of another's is found
        assert set(grown) == {0}
    elif probe == "P6":
        assert max(grown) >= 256


@pytest.fixture(scope="module")
def alone(probes: Any, pools: Any, keep: int) -> Any:
    """Prompts of many sizes, and the beginning of what each is answered by itself."""
    prompts = [p for p in probes.batch.prompts_of(pools, 40) if len(p.ids) < 500][:20]
    prompts = [replace(p, max_tokens=min(p.max_tokens, 10)) for p in prompts]
    assert len(prompts) == 20 and len({len(p.ids) for p in prompts}) > 10
    return prompts, probes.batch.alone(pools, prompts, keep)


@pytest.mark.parametrize("how", ["at once", "parked"])
def test_company_and_parking_change_no_bit(
    probes: Any, pools: Any, alone: Any, keep: int, how: str
) -> None:
    """P14."""
    batch = probes.batch
    prompts, ones = alone
    kind, size = (batch.Interrupted, 3) if how == "parked" else (batch.Engine, len(prompts))
    answers, engine = batch.together(pools, prompts, keep, size, kind)
    assert how != "parked" or engine.parks > 20
    for one, other in zip(ones, answers, strict=True):
        assert one.tokens == other.tokens
        assert all(map(torch.equal, one.logits, other.logits))


def test_replay_of_the_exact_depth_changes_no_bit_and_a_short_one_does(
    probes: Any, pools: Any, cases: Any, keep: int
) -> None:
    own, cold = cases("P5", "40", 2), probes.handoff.Cold(pools)
    exact = probes.handoff.Grid(pools, keep, pools.geometry.replay_rows).ask(own, cold)
    short = probes.handoff.Grid(pools, keep, pools.window_tokens).ask(own, cold)
    for name in ("handed", "grown", "again"):
        assert all(
            got.tokens == want.tokens and all(map(torch.equal, got.logits, want.logits))
            for _, got, want in exact.rows[name]
        )
    rows = [row for name in ("handed", "grown", "again") for row in short.rows[name]]
    assert {got.start_kind for _, got, _ in rows} == {"bounded"}
    assert any(not torch.equal(got.logits[0], want.logits[0]) for _, got, want in rows)


# ---- that a fault would be found -----------------------------------------------------------------


def test_a_key_that_forgets_the_picture_is_found(
    probes: Any, pools: Any, cases: Any, keep: int
) -> None:
    """P13 asks the second picture in a store whose addresses leave pictures out."""
    own = cases("P13", "a, b", 3)
    first, second = ([pools.prompts(c)[-1] for c in own if c.cell == cell] for cell in "ab")
    session = probes.pools.Session(pools, keep, key_spans=False)
    session.ask(first)
    wrong, cold = session.ask(second), pools.cold(second, keep)
    assert all(got.found_tokens > 0 for got in wrong)
    assert not any(probes.pools.compare(a, b).same_bits for a, b in zip(wrong, cold, strict=True))


def test_a_block_of_the_other_branch_is_found(
    probes: Any, pools: Any, cases: Any, keep: int
) -> None:
    """P7 with the last block of the first ending under the address of the second's."""
    own = cases("P7", "a, b", 2)
    first, second = ([pools.prompts(c)[-1] for c in own if c.cell == cell] for cell in "ab")
    session = probes.pools.Session(pools, keep)
    session.ask(first)
    session.ask(second)
    pools.decode = pools.engine(probes.pools.Half.FULL, backtrack_rows=9, rows=205)  # holds none
    differ = 0
    for a, b, cold in zip(first, second, pools.cold(second, keep), strict=True):
        theirs_last, own_last = (session.digests(p)[-1] for p in (a, b))
        if own_last == theirs_last:
            continue  # both endings stand in the block that is not complete
        session.blocks[own_last] = session.blocks[theirs_last]
        (wrong,) = session.ask([b])
        assert not probes.pools.compare(wrong, cold).same_bits
        differ += 1
    assert differ
