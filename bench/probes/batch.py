"""P14: the same prompts alone, in batches of growing size, and parked again and again on the way.

    python bench/probes/batch.py --cases 64 --sizes 2 8 64
    python bench/probes/batch.py --cases 64 --numerics fast        # the gap that it leaves

Prompts of very different length (P1, P3, P4, P5, P8, P9) share the steps of one engine, joining and
leaving at any time. Per size: answers equal to those of the prompt alone in every bit, in every
token, and the largest difference of a logit up to the first difference.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence

import torch
from grid import text_cases
from pools import Answer, Pools, Prompt, compare

from headrace.core.ids import JobKey
from headrace.engine import Engine, Event, Half, TokenSampled

PROBES = ("P1", "P3", "P4", "P5", "P8", "P9")


class Interrupted(Engine):
    """Parks a sequence that decodes in every second step, and lets it go on when a slot is free:
    behind one that waited, where one did. `parks` counts."""

    parks = 0

    def step(self) -> tuple[Event, ...]:
        if not hasattr(self, "_parked"):
            self._parked: deque[tuple[JobKey, bytes]] = deque()
            self._decoding: deque[JobKey] = deque()
        while self._parked and self.parking.unpark(*self._parked[0]):
            self._decoding.append(self._parked.popleft()[0])
        events = super().step()
        for event in events:
            if isinstance(event, TokenSampled) and event.index == 0:
                self._decoding.append(event.key)
            if isinstance(event, TokenSampled) and event.finish is not None:
                self._decoding.remove(event.key)
        if self._decoding and self._steps % 2:
            key = self._decoding.popleft()
            payload = self.parking.hold(key)
            if payload is not None and self.parking.park(key):
                self._parked.append((key, payload))
                self.parks += 1
        return events


def prompts_of(pools: Pools, n: int) -> list[Prompt]:
    """`n` prompts, probes and sizes in turn."""
    by_number = sorted(text_cases(n // 16 + 1, PROBES), key=lambda case: case.number)
    return [pools.prompts(case)[-1] for case in by_number[:n]]


def alone(pools: Pools, prompts: Sequence[Prompt], keep_tokens: int) -> list[Answer]:
    return [pools.cold([prompt], keep_tokens)[0] for prompt in prompts]


def together(
    pools: Pools, prompts: Sequence[Prompt], keep_tokens: int, size: int, kind: type[Engine]
) -> tuple[list[Answer], Engine]:
    """At most `size` at once, in an engine of its own."""
    engine = pools.engine(Half.FULL, backtrack_rows=4, rows=256, n_slots=size, kind=kind)
    return pools.cold(prompts, keep_tokens, engine), engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cases", type=int, default=64, help="prompts in all")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--numerics", default="invariant", choices=("invariant", "fast"))
    a = parser.parse_args()
    torch.set_num_threads(1)
    pools = Pools(a.model, a.numerics)
    keep, began = pools.geometry.keep_for(0), time.monotonic()
    prompts = prompts_of(pools, a.cases)
    ones = alone(pools, prompts, keep)
    right = sum(pools.right(p, one) for p, one in zip(prompts, ones, strict=True))
    print(f"{len(prompts)} prompts alone: {right} right, {time.monotonic() - began:.0f} s\n")
    print(
        "| at once | all bits equal | tokens equal | logits apart | parked |\n" + "|---" * 5 + "|"
    )
    runs: list[tuple[str, int, type[Engine]]] = [(f"{size}", size, Engine) for size in a.sizes]
    for name, size, kind in [*runs, ("4, parking", 4, Interrupted)]:
        answers, engine = together(pools, prompts, keep, size, kind)
        found = [compare(x, y) for x, y in zip(answers, ones, strict=True)]
        tokens = sum(x.tokens == y.tokens for x, y in zip(answers, ones, strict=True))
        print(
            f"| {name} | {sum(d.same_bits for d in found)}/{len(found)} | {tokens}/{len(found)} |"
            f" {max(d.logits for d in found):.3g} | {getattr(engine, 'parks', 0)} |",
            flush=True,
        )
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
