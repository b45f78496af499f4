"""The trained model's probes (bench/probes) through a hand-off, against one engine without caches.

`invariant` numerics, so equal means equal in every bit of every logit. Few cases a cell, for the
sake of time; `bench/probes/handoff.py --cases 20` is the whole grid, its figures are in
docs/model-card.md. The last tests show that these would find a fault.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "bench" / "probes"
MODULES = ("grid", "pools", "handoff", "batch", "forward")
CASES = {"P2": 2, "P5": 2, "P6": 2, "P7": 2, "P13": 3}
CELLS = [
    *(("P2", str(n)) for n in (40, 63, 64, 65, 75, 76, 77, 127, 128, 129)),
    *(("P5", str(n)) for n in (8, 40, 120)),
    *(("P6", str(n)) for n in (2, 4, 6)),
    ("P7", "a, b"),
    ("P13", "a, b"),
]
KEEP = 76  # W + 12


@pytest.fixture(scope="module")
def probes() -> Any:
    """The modules of bench/probes, which import each other as scripts do."""
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**{name: import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def pools(probes: Any) -> Any:
    torch.set_num_threads(1)
    return probes.pools.Pools("demo", "invariant", n_blocks=200, poison=True)


@pytest.fixture(scope="module")
def cases(probes: Any) -> Any:
    def of(probe: str, cell: str, count: int) -> list[Any]:
        made = probes.grid.all_cases(count, [probe])
        return {c: own for _, c, own in probes.handoff.by_cell(made)}[cell]

    return cache(of)


@pytest.mark.parametrize(("probe", "cell"), CELLS)
def test_a_handed_over_answer_is_that_of_one_engine(
    probes: Any, pools: Any, cases: Any, probe: str, cell: str
) -> None:
    own = cases(probe, cell, CASES[probe])
    asked = probes.handoff.Grid(pools, KEEP, None).ask(own, probes.handoff.Cold(pools))
    for name in ("handed", "grown", "again"):
        for prompt, got, cold in asked.rows[name]:
            assert got.tokens == cold.tokens
            assert len(got.logits) == len(cold.logits) == len(got.tokens)
            assert all(map(torch.equal, got.logits, cold.logits)), (name, len(prompt.ids))
    check_what_was_found(probe, asked.rows)
    right = sum(pools.right(prompt, cold) for prompt, _, cold in asked.rows["cold"])
    assert 2 * right >= len(asked.rows["cold"])


def check_what_was_found(probe: str, rows: Any) -> None:
    """That a store and a hand-off took part: what each pass found, and that decode ran a part."""
    for prompt, got, _ in rows["handed"]:
        n = len(prompt.ids)
        assert (got.found_tokens, got.hit_tokens) == (0, n // 128 * 128 if n >= KEEP + 128 else 0)
        if n >= KEEP + 128:
            assert got.start_kind == "window"
            assert got.encoder_rows <= max(n - got.hit_tokens, KEEP + 127) < n
    for prompt, got, _ in rows["again"]:
        assert got.found_tokens == len(prompt.ids) // 128 * 128
    grown = [got.found_tokens for _, got, _ in rows["grown"]]
    if probe == "P7":  # the first ending finds nothing, the second one what both share
        assert set(grown[: len(grown) // 2]) == {0} and min(grown[len(grown) // 2 :]) >= 256
    elif probe == "P13":  # the picture stands in the first block: nothing of another's is found
        assert set(grown) == {0}
    elif probe == "P2":
        assert min(grown) >= 128


def test_a_clue_stands_where_its_cell_says(probes: Any, pools: Any, cases: Any) -> None:
    for _, cell in CELLS[:10]:
        for case in cases("P2", cell, 3):
            (prompt,) = pools.prompts(case)
            ids, code = list(prompt.ids), case.task.answer.rstrip(".").rpartition(" ")[2]
            before = pools.tokenizer.decode(ids[: -int(cell)], skip_special_tokens=False)
            assert before.endswith(f" is {code}") and before.count(code) == 1


@pytest.fixture(scope="module")
def alone(probes: Any, pools: Any) -> Any:
    """Prompts of many sizes, and what each is answered by itself."""
    prompts = [p for p in probes.batch.prompts_of(pools, 16) if len(p.ids) < 600]
    assert len(prompts) > 8
    return prompts, probes.batch.alone(pools, prompts, KEEP)


@pytest.mark.parametrize("how", ["at once", "parked"])
def test_company_and_parking_change_no_bit(probes: Any, pools: Any, alone: Any, how: str) -> None:
    """P14."""
    batch = probes.batch
    prompts, ones = alone
    kind, size = (batch.Interrupted, 3) if how == "parked" else (batch.Engine, len(prompts))
    answers, engine = batch.together(pools, prompts, KEEP, size, kind)
    assert how != "parked" or engine.parks > 20
    for one, other in zip(ones, answers, strict=True):
        assert one.tokens == other.tokens
        assert all(map(torch.equal, one.logits, other.logits))


def test_replay_of_the_exact_depth_changes_no_bit_and_a_short_one_does(
    probes: Any, pools: Any, cases: Any
) -> None:
    own, cold = cases("P5", "40", 2), probes.handoff.Cold(pools)
    exact = probes.handoff.Grid(pools, KEEP, pools.geometry.replay_rows).ask(own, cold)
    short = probes.handoff.Grid(pools, KEEP, pools.window_tokens).ask(own, cold)
    for name in ("handed", "grown", "again"):
        assert all(
            got.tokens == want.tokens and all(map(torch.equal, got.logits, want.logits))
            for _, got, want in exact.rows[name]
        )
    rows = [row for name in ("handed", "grown", "again") for row in short.rows[name]]
    assert {got.start_kind for _, got, _ in rows} == {"bounded"}
    assert any(not torch.equal(got.logits[0], want.logits[0]) for _, got, want in rows)


# ---- what the model must be able to do, with room below the figures of the card ------------------


LINES = {  # probe, cell -> right answers wanted of 20
    ("P3", "5"): 19,
    ("P4", "16"): 19,
    ("P8", "2"): 18,
    ("P9", "0"): 16,
    ("P10", "0"): 18,
    ("P12", "caption"): 16,
    ("P12", "colour"): 17,
    ("P12", "digits"): 18,
}


def test_pass_lines(probes: Any, cases: Any) -> None:
    pools = probes.pools.Pools("demo", "fast", n_blocks=200)
    for (probe, cell), wanted in LINES.items():
        own = cases(probe, cell, 20)
        prompts = [pools.prompts(case)[-1] for case in own]
        answers = pools.cold(prompts, KEEP)
        right = sum(pools.right(p, a) for p, a in zip(prompts, answers, strict=True))
        assert right >= wanted * len(own) / 20, (probe, cell, right, len(own))


def test_facts_lie_in_the_engram_tables(probes: Any, cases: Any) -> None:
    """P10 with tables of zeros."""
    own = cases("P10", "0", 8)
    with_tables, without = (
        sum(probes.forward.Forward("demo", without_engram=off).judge(case) for case in own)
        for off in (False, True)
    )
    assert with_tables >= 7 and without <= 1


# ---- that a fault would be found -----------------------------------------------------------------


def test_a_key_that_forgets_the_picture_is_found(probes: Any, pools: Any, cases: Any) -> None:
    """P13 asks the second picture in a store whose addresses leave pictures out."""
    own = cases("P13", "a, b", 3)
    first, second = ([pools.prompts(c)[-1] for c in own if c.cell == cell] for cell in "ab")
    session = probes.pools.Session(pools, KEEP, key_spans=False)
    session.ask(first)
    wrong, cold = session.ask(second), pools.cold(second, KEEP)
    assert all(got.found_tokens > 0 for got in wrong)
    assert not any(probes.pools.compare(a, b).same_bits for a, b in zip(wrong, cold, strict=True))


def test_a_block_of_the_other_branch_is_found(probes: Any, pools: Any, cases: Any) -> None:
    """P7 with the last block of the first ending under the address of the second's."""
    own = cases("P7", "a, b", 2)
    first, second = ([pools.prompts(c)[-1] for c in own if c.cell == cell] for cell in "ab")
    session = probes.pools.Session(pools, KEEP)
    session.ask(first)
    session.ask(second)
    pools.decode = pools.engine(probes.pools.Half.FULL, backtrack_rows=9, rows=205)  # holds none
    differ = 0
    for a, b, cold in zip(first, second, pools.cold(second, KEEP), strict=True):
        theirs_last, own_last = (session.digests(p)[-1] for p in (a, b))
        if own_last == theirs_last:
            continue  # both endings stand in the block that is not complete
        session.blocks[own_last] = session.blocks[theirs_last]
        (wrong,) = session.ask([b])
        assert not probes.pools.compare(wrong, cold).same_bits
        differ += 1
    assert differ
