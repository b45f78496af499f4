"""How long requests wait for blocks that others reserve and do not use.

    .venv/bin/python bench/engine/reservation.py

A queue without a model: requests come at random to one replica of the given layout and stand in
line, first come, first served, for a slot and blocks. Compared are reservation of prompt +
max_tokens (what the engine does) and of the prompt alone. No scheme that lets sequences grow holds
less than the prompt alone, so the difference is more than growth could ever win. Lengths are drawn
(prompts lognormal, answers geometric); a step gives every running sequence one token; a wait is
counted in steps. Nothing is shared and nobody is parked.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass

from headrace.model import CacheLayout, ModelConfig

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Wish:
    arrives: float
    prompt_tokens: int
    max_tokens: int
    answer_tokens: int


def wishes(args: argparse.Namespace, max_tokens: int) -> list[Wish]:
    """Poisson arrivals at the load that the slots alone could bear `--load` of."""
    draw = random.Random(args.seed)
    rate, now, made = args.load * args.slots / args.answer, 0.0, []
    for _ in range(args.requests):
        now += draw.expovariate(rate)
        prompt = min(131_072, max(1, int(args.prompt * draw.lognormvariate(0, 1))))
        answer = min(max_tokens, 1 + int(draw.expovariate(1 / args.answer)))
        made.append(Wish(now, prompt, max_tokens, answer))
    return made


def waits(line: list[Wish], n_slots: int, n_blocks: int, *, whole: bool) -> list[float]:
    """Steps that each request stood in line. Those that could never fit are left out."""
    free_slots, free_blocks = n_slots, n_blocks
    ends: list[tuple[float, int]] = []
    waiting: deque[tuple[Wish, int]] = deque()
    out: list[float] = []

    def seat(now: float) -> None:
        nonlocal free_slots, free_blocks
        while waiting and free_slots and waiting[0][1] <= free_blocks:
            wish, blocks = waiting.popleft()
            free_slots, free_blocks = free_slots - 1, free_blocks - blocks
            out.append(now - wish.arrives)
            heapq.heappush(ends, (now + wish.answer_tokens, blocks))

    def end_until(now: float) -> None:
        nonlocal free_slots, free_blocks
        while ends and ends[0][0] <= now:
            at, blocks = heapq.heappop(ends)
            free_slots, free_blocks = free_slots + 1, free_blocks + blocks
            seat(at)

    for wish in line:
        end_until(wish.arrives)
        tokens = wish.prompt_tokens + wish.max_tokens * whole
        blocks = -(-tokens // BLOCK)
        if -(-(wish.prompt_tokens + wish.max_tokens) // BLOCK) <= n_blocks:
            waiting.append((wish, blocks))
            seat(wish.arrives)
    end_until(float("inf"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="flash")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=4000, help="median tokens of a prompt")
    parser.add_argument("--answer", type=int, default=500, help="mean tokens of an answer")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    layout = CacheLayout.of(ModelConfig.load(args.model))
    print("| GB for slots and blocks | max_tokens | blocks | mean / p99 wait, reserved whole |"
          " mean / p99 wait, prompt alone |\n|---|---|---|---|---|")  # fmt: skip
    for memory in (77.3, 40.0, 20.0, 10.0):
        n_blocks = int((memory * 1e9 - args.slots * layout.slot_bytes) // layout.block_bytes)
        for max_tokens in (4096, 65_536):
            line = wishes(args, max_tokens)
            cells = []
            for whole in (True, False):
                found = sorted(waits(line, args.slots, n_blocks, whole=whole))
                mean, p99 = sum(found) / len(found), found[int(len(found) * 0.99)]
                cells.append(f"{mean:.1f} / {p99:.0f}")
            print(f"| {memory} | {max_tokens} | {n_blocks} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
