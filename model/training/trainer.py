"""What changes during training, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from headrace.model.config import ModelConfig
from headrace.model.training.attend import Attend, FlexAttend, Masks
from headrace.model.training.data import PART_NAMES
from headrace.model.training.net import Net, Outcome, Texts
from headrace.model.training.optim import Optimiser, Rates, clip
from headrace.model.training.tower import picture_rows
from headrace.model.training.weights import (
    Stack,
    Used,
    build_stacks,
    load_folder,
    stack_tensors,
    start_weights,
    unstack,
)

SAMPLED_ROWS = 48
CLIP = 1.0
REFUSE = 5.0  # gradients beyond this norm are not used; usual are 0.1 to 1
SET_BACK = 0.4  # rise of a report's mean loss at which values return to the last good report's
FILE_BYTES = 15 << 20  # of a weights file


@dataclass(frozen=True)
class Plan:
    """What a run does. `decay_from`, `select_from` and `round_from` are shares of `steps`."""

    config: str
    steps: int
    batch: int = 32
    length: int = 2048
    seed: int = 1
    warmup: int = 100
    decay_from: float = 0.3  # share of the steps after which the rates fall to nothing
    select_from: float = 0.6
    round_from: float = 0.88
    pictures: int = 2
    rate: float = 1.0  # all step sizes times this: less than 1 to go on from trained weights

    def schedule(self, step: int) -> float:
        """Rise, hold, fall in a straight line; 1 at the most, `rate` apart."""
        rise = min(1.0, (step + 1) / self.warmup)
        fall = (self.steps - step) / max(1.0, self.steps * (1 - self.decay_from))
        return min(rise, fall, 1.0)

    def selecting(self, step: int) -> bool:
        return step >= self.select_from * self.steps

    def rounded(self, step: int) -> bool:
        return step >= self.round_from * self.steps


def part_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    part: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted mean loss, [2, parts]: sum of the loss and count of the tokens of answers)."""
    logits = (hidden @ head.T).float()
    loss = F.cross_entropy(logits, targets, reduction="none")
    total = (loss * weights).sum() / weights.sum().clamp(min=1.0)
    counted = (weights > 0.5).float()
    which = F.one_hot(part, len(PART_NAMES)).float() * counted.unsqueeze(-1)
    sums = torch.stack(((loss.detach().unsqueeze(-1) * which).sum(0), which.sum(0)))
    return total, sums


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


class Trainer:
    """All that changes during training, on one device."""

    def __init__(self, plan: Plan, device: str, rates: Rates | None = None) -> None:
        self.plan, self.device = plan, device
        self.config = ModelConfig.load(plan.config)
        every = build_stacks(self.config)
        self.stacks: dict[str, Stack] = {p: s for p, s in every.items() if not p.startswith("mtp.")}
        start = start_weights(self.stacks, self.config, plan.seed)
        self.values = {
            p: v.to(device).requires_grad_(not self.stacks[p].is_bias_of_router)
            for p, v in start.items()
        }
        self.optimiser = Optimiser(self.stacks, self.values, rates or Rates())
        self.is_cuda = device.startswith("cuda")
        self.compute = torch.bfloat16 if self.is_cuda else torch.float32
        self.attend: Attend
        if self.is_cuda:
            self.attend = FlexAttend(self.config, plan.batch, plan.length, device)
        else:
            self.attend = Attend(self.config)
        wrap = _compile if self.is_cuda else (lambda f: f)
        self.net = Net(self.config, self.attend, compiled=wrap)
        self.loss = wrap(part_losses)
        self.rows = wrap(picture_rows) if self.is_cuda else picture_rows
        self.step = 0
        self.tokens = 0
        self.damping = 1.0  # of all rates, halved at every set-back
        self._good: tuple[float, dict[str, torch.Tensor]] | None = None

    # ---- one step --------------------------------------------------------------------------

    def to_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}

    def texts(self, batch: Mapping[str, torch.Tensor], *, cut: bool) -> Texts:
        document = batch["document"]
        return Texts(
            ids=batch["ids"].long(),
            positions=batch["positions"].long(),
            document=document,
            history=batch["history"] if cut else document,
            image=batch["image"],
            engram_rows=batch["engram_rows"],
            pictures=batch["pictures"],
            picture_places=batch["picture_places"],
        )

    def run(
        self,
        batch: Mapping[str, torch.Tensor],
        *,
        selecting: bool,
        rounded: bool,
        cut: bool,
        taps: bool = False,
        used: Used | None = None,
    ) -> tuple[Outcome, Used]:
        """The forward of one batch (on the device). `used`: weights of an earlier call, unchanged
        since."""
        if used is None:
            used = Used(self.stacks, self.values, self.compute, rounded=rounded)
        texts = self.texts(batch, cut=cut)
        length = texts.ids.shape[1]
        generator = torch.Generator().manual_seed(self.step)
        sample = torch.randperm(length, generator=generator)[:SAMPLED_ROWS].sort().values
        masks = Masks(texts.document, texts.history, sample.to(self.device))
        if isinstance(self.attend, FlexAttend):
            self.attend.start(masks)
        rows = torch.zeros(0)
        if texts.picture_places.numel():
            rows = self.rows(used, self.config, texts.pictures)
        out = self.net.forward(used, texts, masks, rows, selecting=selecting, taps=taps)
        return out, used

    def learn(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step; returns figures that still lie on the device."""
        selecting, rounded = self.plan.selecting(self.step), self.plan.rounded(self.step)
        out, used = self.run(batch, selecting=selecting, rounded=rounded, cut=selecting)
        flat = {k: batch[k].flatten().long() for k in ("targets", "part")}
        loss, sums = self.loss(
            out.hidden,
            used["head.weight"],
            flat["targets"],
            batch["weights"].flatten(),
            flat["part"],
        )
        (loss + out.index_loss).backward()
        refuse = REFUSE if self.step >= self.plan.warmup else math.inf
        norm = clip(self.values, CLIP, refuse)
        self.optimiser.step(self.plan.schedule(self.step) * self.plan.rate * self.damping)
        self.optimiser.clear()
        self.balance(out.loads.detach())
        self.step += 1
        self.tokens += batch["ids"].numel()
        return {"loss": loss.detach(), "sums": sums, "index": out.index_loss.detach(), "norm": norm}

    @torch.no_grad()
    def guard(self, mean_loss: float) -> bool:
        """Judge a report's mean loss: remember the values, or set them back; True if set back."""
        if self._good is not None and not mean_loss < self._good[0] + SET_BACK:
            for pattern, value in self._good[1].items():
                self.values[pattern].copy_(value)
            self.optimiser.forget()
            self.damping *= 0.5
            self._good = None
            return True
        if self._good is None or self.step % (4 * 25) == 0 or mean_loss < self._good[0]:
            self._good = (mean_loss, {p: v.detach().clone() for p, v in self.values.items()})
        return False

    @torch.no_grad()
    def balance(self, loads: torch.Tensor) -> None:
        """Move router biases against the load: loads [2 (text, image), layers, E]."""
        rate = 2e-3 * max(0.05, self.plan.schedule(self.step))
        for kind, name in enumerate(("bias", "bias_vl")):
            load = loads[kind]
            off = torch.sign(load.mean(-1, keepdim=True) - load)
            self.values[f"layers.*.ffn.gate.{name}"].add_(off, alpha=rate)

    # ---- files -----------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        return unstack(self.stacks, {p: v.detach() for p, v in self.values.items()})

    def save(self, out: Path, state_file: Path | None) -> None:
        """Weights in files of at most FILE_BYTES, and the whole state."""
        files: list[dict[str, torch.Tensor]] = [{}]
        room = FILE_BYTES
        for name, value in self.tensors().items():
            part = value.to("cpu", torch.bfloat16).contiguous()
            if name.endswith((".bias", ".bias_vl")) or ".hc_" in name:
                part = value.cpu().contiguous()
            room -= part.nbytes
            if room < 0:
                files.append({})
                room = FILE_BYTES - part.nbytes
            files[-1][name] = part
        for number, tensors in enumerate(files):
            save_file(tensors, out / f"weights-{number}.safetensors")
        state = {
            "values": self.values,
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "tokens": self.tokens,
        }
        if state_file is not None:
            torch.save(state, state_file)

    def resume(self, path: Path) -> None:
        """From a state file, or a folder as `load_folder` takes (the optimiser starts anew)."""
        if path.is_dir():
            restored = stack_tensors(self.stacks, load_folder(path))
        else:
            state = torch.load(path, map_location=self.device, weights_only=True)
            restored, self.step, self.tokens = state["values"], state["step"], state["tokens"]
            self.optimiser.restore(state["optimiser"])
        with torch.no_grad():
            for pattern, value in restored.items():
                self.values[pattern].copy_(value)
