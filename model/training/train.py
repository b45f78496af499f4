"""Train the demo model: one command, resumable, everything it learns from made on the way.

    python -m headrace.model.training.train --config configs/models/demo/config.json \
        --corpus CORPUS --out OUT --steps 2400

Phases by share of the steps: all entries visible while the index learns to choose; then its real
choice and random cuts in the decoder's history; then the weights as they will be stored. Writes
OUT/log.jsonl (a line every few steps; `export` keeps its curves beside the checkpoint) and
OUT/weights-*.safetensors (bfloat16, by checkpoint name); `--state` keeps everything for `--resume`.
`--drafter-seconds` then trains the drafter on the frozen trunk (OUT/drafter.safetensors).
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from headrace.model.training.data import PARTS, Corpus, Mixer
from headrace.model.training.draft import DrafterTrainer
from headrace.model.training.progress import Log, held_out
from headrace.model.training.trainer import Plan, Trainer
from headrace.model.training.weights import Used, build_stacks, start_weights, unstack

SELECT_COST, SELECT_S = 1.4, 15.0  # a step with selection against one without; its compilation
WARM_STEPS = 25  # before, and while, a step's time is taken


def train_drafter(
    trainer: Trainer, batches: Iterator[Any], seconds: float, anchors: int, out: Path
) -> None:
    """The drafter on the trunk as it is now; the number of steps follows from the first ones."""
    stacks = {p: s for p, s in build_stacks(trainer.config).items() if p.startswith("mtp.")}
    start = start_weights(stacks, trainer.config, trainer.plan.seed)
    values = {
        p: v.to(trainer.device).requires_grad_(not stacks[p].is_bias_of_router)
        for p, v in start.items()
    }
    learner = DrafterTrainer(trainer.config, stacks, values, trainer.compute, 1 << 20, anchors)
    began = time.monotonic()
    used: Used | None = None

    def phases_of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return trainer.net.phases(positions, torch.float32)[False]

    while learner.step < learner.steps:
        batch = trainer.to_device(next(batches))
        # Compiled code wants gradients as in training; elsewhere they would only cost memory.
        with torch.set_grad_enabled(trainer.is_cuda):
            trunk, used = trainer.run(
                batch, selecting=True, rounded=True, cut=False, taps=True, used=used
            )
        assert trunk.taps is not None
        texts = trainer.texts(batch, cut=False)
        figures = learner.learn(
            batch, texts, trunk.taps.detach(), trunk.hidden.detach(), used, phases_of
        )
        del trunk
        if learner.step == WARM_STEPS:
            torch.cuda.synchronize() if trainer.is_cuda else None
            warm = time.monotonic()
        if learner.step == 2 * WARM_STEPS:
            torch.cuda.synchronize() if trainer.is_cuda else None
            now = time.monotonic()
            left = max(0.0, seconds - (now - began))
            learner.steps = learner.step + int(left / (now - warm) * WARM_STEPS)
            print(f"drafter: {learner.steps} steps", flush=True)
        if learner.step % 50 == 0 or learner.step == learner.steps:
            line: dict[str, Any] = {"drafter_step": learner.step}
            line |= {k: [round(x, 4) for x in v.reshape(-1).tolist()] for k, v in figures.items()}
            with (out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    named = unstack(stacks, {p: v.detach() for p, v in values.items()})
    save_file({k: v.cpu().contiguous() for k, v in named.items()}, out / "drafter.safetensors")


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    return name, float(share)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train the demo model")
    parser.add_argument("--config", required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="where the whole state is kept for --resume")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--fit-seconds", type=float, help="choose the steps to end after so long")
    parser.add_argument(
        "--stop-at", type=int, help="end after this step, to be resumed; 0: the drafter alone"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--seed", type=int, default=1, help="of the data, and of fresh weights")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: at the end alone")
    parser.add_argument("--select-from", type=float, default=0.62, help="share of the steps")
    parser.add_argument("--round-from", type=float, default=0.88, help="share of the steps")
    parser.add_argument("--rate", type=float, default=1.0, help="all step sizes times this")
    parser.add_argument(
        "--mix",
        type=_share,
        nargs="+",
        default=[],
        metavar="PART=SHARE",
        help=f"shares of the tokens other than the usual: {', '.join(PARTS)} (but pictures)",
    )
    parser.add_argument(
        "--long-recall",
        type=float,
        default=0.0,
        help="share of the rows without pictures that begin with a recall task of half a row",
    )
    parser.add_argument("--drafter-seconds", type=float, default=0.0)
    parser.add_argument("--drafter-anchors", type=int, default=4096, help="blocks a step")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--pictures", type=int, default=2, help="pictures a row")
    parser.add_argument(
        "--resume", type=Path, help="a state, or a folder: a run's --out, or a checkpoint"
    )
    parser.add_argument(
        "--cache", type=Path, help="compiled code of an earlier run; written if absent"
    )
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def _train(trainer: Trainer, batches: Iterator[Any], log: Log, a: argparse.Namespace) -> None:
    """Steps until the plan, `--stop-at` or the clock ends it."""
    first = trainer.step
    while True:
        done = trainer.step - first
        if done in (WARM_STEPS, 2 * WARM_STEPS) and a.fit_seconds:
            if trainer.is_cuda:
                torch.cuda.synchronize()
            now = time.monotonic()
            if done == WARM_STEPS:
                warm = now
            else:
                left, cost = a.fit_seconds - (now - log.started), 1.0
                if not trainer.plan.selecting(trainer.step):  # the steps timed had no selection
                    left, cost = left - SELECT_S, 1 + (SELECT_COST - 1) * (1 - a.select_from)
                more = int(max(0.0, left) / (now - warm) * WARM_STEPS / cost)
                trainer.plan = replace(trainer.plan, steps=trainer.step + more)
                print(f"steps: {trainer.plan.steps}", flush=True)
        last = trainer.plan.steps if a.stop_at is None else min(a.stop_at, trainer.plan.steps)
        if trainer.step >= last or time.monotonic() - log.started > a.seconds:
            return
        batch = trainer.to_device(next(batches))
        log.add(trainer, trainer.learn(batch), batch["ids"].numel())
        if a.save_every and trainer.step % a.save_every == 0:
            trainer.save(a.out, a.state)


def main() -> None:
    a = _arguments()
    plan = Plan(
        a.config,
        a.steps,
        batch=a.batch,
        length=a.length,
        seed=a.seed,
        select_from=a.select_from,
        round_from=a.round_from,
        pictures=a.pictures,
        rate=a.rate,
    )
    a.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if a.cache and a.cache.is_file():
        torch.compiler.load_cache_artifacts(zlib.decompress(a.cache.read_bytes()))
    log = Log(a.out / "log.jsonl", a.every)
    if a.resume and a.resume.is_dir():
        log.follow(a.resume / "log.jsonl")
    trainer = Trainer(plan, a.device)
    if a.resume:
        trainer.resume(a.resume)
    corpus = Corpus(a.corpus)
    mixer = Mixer(
        trainer.config,
        corpus,
        seed=plan.seed,
        batch=plan.batch,
        length=plan.length,
        pictures=plan.pictures,
        first=trainer.step,
        shares=dict(a.mix),
        long_recall=a.long_recall,
    )
    loader = DataLoader(
        mixer,
        batch_size=None,
        num_workers=a.workers,
        prefetch_factor=8 if a.workers else None,
    )
    print(json.dumps(asdict(plan)), flush=True)
    batches = iter(loader)
    _train(trainer, batches, log, a)
    if a.stop_at != 0:
        trainer.save(a.out, a.state)
        print(f"saved after {time.monotonic() - log.started:.0f} s", flush=True)
    if a.drafter_seconds:
        train_drafter(trainer, batches, a.drafter_seconds, a.drafter_anchors, a.out)
    if corpus.held_out and trainer.plan.selecting(trainer.step):
        figures = held_out(trainer, corpus, mixer)
        with log.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"held_out_bits_a_byte": figures}) + "\n")
        print("held out, bits a byte:", figures, flush=True)
    if a.cache and not a.cache.is_file() and (saved := torch.compiler.save_cache_artifacts()):
        a.cache.write_bytes(zlib.compress(saved[0]))


if __name__ == "__main__":
    main()
