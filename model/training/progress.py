"""What is said of a run: a line every few steps, and how well held-out prose is predicted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn import functional as F

from headrace.model.training.data import PART_NAMES, Corpus, Mixer
from headrace.model.training.trainer import Trainer


def held_out(trainer: Trainer, corpus: Corpus, mixer: Mixer) -> dict[str, float]:
    """Bits per byte of each source's held-out end, read in texts of the training length."""
    figures = {}
    for name, (lo, hi) in corpus.held_out.items():
        length, batch = trainer.plan.length, trainer.plan.batch
        count = min(batch, (hi - lo) // length)
        if not count:
            continue
        ids = torch.full((batch, length), trainer.config.pad_token_id)
        kept = torch.from_numpy(corpus.ids[lo : lo + count * length].astype("int64"))
        ids[:count] = kept.view(count, length)
        document = torch.ones_like(ids)
        positions = torch.arange(length).expand_as(ids)
        image = torch.zeros_like(ids, dtype=torch.bool)
        span = mixer.encoder.span_tokens
        made = {
            "ids": ids,
            "positions": positions,
            "document": document.int(),
            "history": document.int(),
            "image": image,
            "engram_rows": torch.from_numpy(
                mixer.engram_rows(ids.numpy(), positions.numpy(), image.numpy())
            ),
            "pictures": torch.zeros((0, 8, 8, 3), dtype=torch.uint8),
            "picture_places": torch.zeros((0, span), dtype=torch.int64),
        }
        made = {k: v.to(trainer.device) for k, v in made.items()}
        # With gradients on, since without them every piece would be compiled anew.
        out, used = trainer.run(made, selecting=True, rounded=True, cut=False)
        with torch.no_grad():
            logits = (out.hidden @ used["head.weight"].T).view(batch, length, -1)[:count, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), made["ids"][:count, 1:].flatten())
        figures[name] = loss.item() / math.log(2) / corpus.bytes_a_token[name]
    return figures


class Log:
    """A line a report on screen and in log.jsonl; figures are read from the device only here."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every
        self.started = self.last = time.monotonic()
        self.sums: torch.Tensor | None = None
        self.since = 0
        self.steps_before = self.tokens_before = 0

    def follow(self, path: Path) -> None:
        """Begin with the lines of the run whose weights this one goes on from, and count on."""
        if not path.is_file() or path.resolve() == self.path.resolve():
            return
        text = path.read_text("utf-8")
        self.path.write_text(text, "utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        steps = [line for line in lines if "step" in line]
        if steps:
            self.steps_before, self.tokens_before = steps[-1]["step"], steps[-1]["tokens"]

    def add(self, trainer: Trainer, figures: Mapping[str, torch.Tensor], tokens: int) -> None:
        self.sums = figures["sums"] if self.sums is None else self.sums + figures["sums"]
        self.since += tokens
        if trainer.step % self.every and trainer.step != trainer.plan.steps:
            return
        sums = self.sums.cpu()
        now = time.monotonic()
        parts = (sums[0] / sums[1].clamp(min=1)).tolist()
        mean = float(sums[0].sum() / sums[1].sum().clamp(min=1))
        line = {
            "step": self.steps_before + trainer.step,
            "tokens": self.tokens_before + trainer.tokens,
            "seconds": round(now - self.started, 1),
            "tokens_a_second": round(self.since / (now - self.last)),
            "loss": round(mean, 4),
            "weighted_loss": round(figures["loss"].item(), 4),
            "index": round(figures["index"].item(), 4),
            "norm": round(figures["norm"].item(), 3),
            "schedule": round(trainer.plan.schedule(trainer.step), 4),
            "parts": dict(zip(PART_NAMES, (round(p, 4) for p in parts), strict=True)),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = " ".join(f"{k}={v:.2f}" for k, v in line["parts"].items())  # type: ignore[attr-defined]
        print(
            f"{trainer.step}/{trainer.plan.steps} {line['seconds']}s "
            f"{line['tokens_a_second']}tok/s loss={line['loss']} idx={line['index']} "
            f"norm={line['norm']} {shown}",
            flush=True,
        )
        if trainer.guard(mean):
            print(f"set back to the last good values, rates times {trainer.damping}", flush=True)
        self.sums, self.since, self.last = None, 0, now
