"""What the trained model must be able to do, with room below the figures of docs/model-card.md."""

from __future__ import annotations

from typing import Any

LINES = {  # probe, cell -> right answers wanted of 20
    ("P3", "5"): 19,
    ("P4", "16"): 19,
    ("P8", "2"): 18,
    ("P9", "0"): 16,
    ("P10", "0"): 18,
    ("P12", "caption"): 18,
    ("P12", "colour"): 18,
    ("P12", "place"): 17,
    ("P12", "digits"): 18,
}


def test_pass_lines(probes: Any, cases: Any, keep: int) -> None:
    pools = probes.pools.Pools("demo", "fast", n_blocks=200)
    for (probe, cell), wanted in LINES.items():
        own = cases(probe, cell, 20)
        prompts = [pools.prompts(case)[-1] for case in own]
        answers = pools.cold(prompts, keep)
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
