"""P2, the clue at the borders of window, keep and grain: handed over, and against one engine.

20 prompts a cell, all at once, in `invariant` numerics, so equal means equal in every bit of every
logit; a quarter of them once more with everything stored. The prompts are of the grid's kind, as
short as a hand-off allows; `bench/probes/handoff.py --cases 20` is the whole grid, its figures are
in docs/model-card.md.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # 20 prompts in float64; a busy core takes minutes

CELLS = [str(n) for n in (40, 63, 64, 65, 75, 76, 77, 127, 128, 129)]


@pytest.mark.parametrize("cell", CELLS)
def test_a_handed_over_answer_is_that_of_one_engine(
    probes: Any, pools: Any, cases: Any, check_bits: Any, keep: int, cell: str
) -> None:
    prompts = [pools.prompts(case)[-1] for case in cases("P2", cell, 20, short=True)]
    cold = pools.cold(prompts, keep)
    session = probes.pools.Session(pools, keep)
    handed = session.ask(prompts)
    again = session.ask(prompts[:5])
    check_bits(zip(prompts, handed, cold, strict=True))
    check_bits(zip(prompts[:5], again, cold[:5], strict=True))
    for prompt, got in zip(prompts, handed, strict=True):
        n = len(prompt.ids)
        assert keep + 128 <= n < 300 and (got.found_tokens, got.hit_tokens) == (0, n // 128 * 128)
        assert got.start_kind == "window" and got.encoder_rows <= keep + 127 < n
    assert all(got.found_tokens >= 128 for got in again)
    right = sum(pools.right(prompt, one) for prompt, one in zip(prompts, cold, strict=True))
    assert right >= 15


def test_a_clue_stands_where_its_cell_says(pools: Any, cases: Any) -> None:
    for cell in CELLS:
        for case in cases("P2", cell, 3) + cases("P2", cell, 20, short=True):
            (prompt,) = pools.prompts(case)
            ids, code = list(prompt.ids), case.task.answer.rstrip(".").rpartition(" ")[2]
            before = pools.tokenizer.decode(ids[: -int(cell)], skip_special_tokens=False)
            assert before.endswith(f" is {code}") and before.count(code) == 1
