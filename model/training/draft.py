"""Training of the drafter on a frozen trunk: what the trunk would say, and how sure it is.

For sampled anchors a the stages see what `model.dspark` lets them see: the keys of the W rows
before a, made of the trunk's taps, and all rows of the own block. Step i learns the trunk's
distribution after the true tokens up to a + i (their divergence is the loss); the confidence learns
the chance that a draft would be accepted there, the sum of the lesser of both probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

from headrace.kernels.balance import balance
from headrace.model.config import ModelConfig
from headrace.model.training import fake
from headrace.model.training.fake import wide
from headrace.model.training.net import Texts
from headrace.model.training.optim import Optimiser, Rates, clip
from headrace.model.training.pieces import (
    expand,
    experts,
    gates,
    project_out,
    rms_norm,
    rotate,
)
from headrace.model.training.weights import Stack, Used

CONFIDENCE_LIMIT = 60.0


class Drafter:
    """The stages as a differentiable function. `base` are cos, sin [B, T, rd / 2] of the rows."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def hidden(
        self,
        w: Used,
        embed: torch.Tensor,
        taps: torch.Tensor,
        texts: Texts,
        anchors: torch.Tensor,
        phases: tuple[torch.Tensor, torch.Tensor],
        block_phases: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[A, block, D] after the last stage for flat anchors int64 [A] (places in B * T).

        `taps` [B * T, taps, D]; `phases` of all rows [B * T, rd / 2], `block_phases` of the blocks'
        rows [A, block, rd / 2].
        """
        c, block = self.config, self.config.dspark_block_size
        ids = torch.full((len(anchors), block), c.dspark_noise_token_id, device=anchors.device)
        ids[:, 0] = texts.ids.flatten()[anchors]
        main = rms_norm(
            taps.flatten(1) @ w["mtp.0.main_proj.weight"].T,
            w["mtp.0.main_norm.weight"],
            c.rms_norm_eps,
        )
        before = anchors.unsqueeze(-1) - torch.arange(c.sliding_window, 0, -1, device=ids.device)
        document = texts.document.flatten()
        row = anchors // texts.ids.shape[1] * texts.ids.shape[1]
        seen = (before >= row.unsqueeze(-1)) & (
            document[before.clamp(min=0)] == document[anchors].unsqueeze(-1)
        )
        before = before.clamp(min=0)
        h = F.embedding(ids.flatten(), embed).unsqueeze(1).repeat(1, c.hc_mult, 1)
        pre = wide(F.one_hot(torch.zeros(len(h), dtype=torch.int64, device=h.device), c.hc_mult))
        pre = pre.to(wide(h).dtype)
        for stage in range(c.num_nextn_predict_layers):
            h, pre = self._stage(w, stage, h, pre, main, before, seen, phases, block_phases)
        mixed = (pre.unsqueeze(-1) * wide(h)).sum(1).to(h.dtype)
        return mixed.view(len(anchors), block, -1)

    def _stage(self, w, stage, h, pre, main, before, seen, phases, block_phases):  # type: ignore[no-untyped-def]
        c, p = self.config, f"mtp.{stage}."
        y = None
        for half in ("attn", "ffn"):
            mix = [w[f"{p}hc_{half}_{k}"] for k in ("fn", "base", "scale")]
            mixed = (pre.unsqueeze(-1) * wide(h)).sum(1).to(h.dtype)
            x = rms_norm(mixed, w[f"{p}{half}_norm.weight"], c.rms_norm_eps)
            fn, base, scale = mix
            pre, post, raw = gates(h, fn, base, scale, c.rms_norm_eps, c.hc_eps)
            comb = balance(raw, c.hc_sinkhorn_iters, c.hc_eps)
            if half == "attn":
                y = self._attend(w, p, x, main, before, seen, phases, block_phases)
            else:
                y = self._experts(w, p, stage, x)
            h = expand(y, h, post, comb)
        return h, pre

    def _attend(self, w, p, x, main, before, seen, phases, block_phases):  # type: ignore[no-untyped-def]
        c, a = self.config, f"{p}attn."
        n, block = before.shape[0], c.dspark_block_size
        cos, sin = block_phases
        qr = rms_norm(x @ w[f"{a}wq_a.weight"].T, w[f"{a}q_norm.weight"], c.rms_norm_eps)
        q = (qr @ w[f"{a}wq_b.weight"].T).view(n, block, c.num_attention_heads, -1).transpose(1, 2)
        q = rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))
        wkv, norm = w[f"{a}wkv.weight"], w[f"{a}kv_norm.weight"]
        own = rms_norm(x @ wkv.T, norm, c.rms_norm_eps).view(n, block, -1)
        own = fake.fp8(rotate(own, cos, sin))
        far = rms_norm(main @ wkv.T, norm, c.rms_norm_eps)
        far = fake.fp8(rotate(far, *phases))
        keys = torch.cat((far[before], own), dim=1).unsqueeze(1)
        scores = wide(q @ keys.transpose(2, 3)) * c.head_dim**-0.5
        live = F.pad(seen, (0, block), value=True).view(n, 1, 1, -1)
        scores = scores.masked_fill(~live, -torch.inf)
        sink = wide(w[f"{a}attn_sink"]).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        out = weights.to(q.dtype) @ keys
        projections = w[f"{a}wo_a.weight"], w[f"{a}wo_b.weight"]
        return project_out(out, *projections, c.o_groups, cos, sin)

    def _experts(self, w: Used, p: str, stage: int, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        matrices = [
            torch.cat(
                (
                    w.experts("mtp", stage, c.num_nextn_predict_layers, name),
                    w[f"{p}ffn.shared_experts.{name}.weight"].unsqueeze(0),
                )
            )
            for name in ("w1", "w3", "w2")
        ]
        w1, w3, w2 = matrices
        gate, bias = w[f"{p}ffn.gate.weight"], w[f"{p}ffn.gate.bias"]
        image = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        top_k, factor = c.dspark_num_experts_per_tok, c.routed_scaling_factor
        return experts(x, gate, bias, bias, image, w1, w3, w2, top_k, factor, c.swiglu_limit)[0]

    def heads(
        self, w: Used, head: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [A, block, vocab], confidence logits [A, block]); `previous` int64 [A, block] are
        the tokens before. The confidence's gradient stops at its own projection."""
        p = f"mtp.{self.config.num_nextn_predict_layers - 1}."
        normed = rms_norm(hidden, w[f"{p}norm.weight"], self.config.rms_norm_eps)
        e = F.embedding(previous, w[f"{p}markov_head.embed.weight"])
        logits = wide(normed @ head.T + e @ w[f"{p}markov_head.head.weight"].T)
        both = torch.cat((hidden, e), dim=-1).detach()
        sure = wide(both @ w[f"{p}confidence_head.proj.weight"].T).squeeze(-1)
        return logits, sure.clamp(-CONFIDENCE_LIMIT, CONFIDENCE_LIMIT)


def draft_losses(
    logits: torch.Tensor, sure: torch.Tensor, teacher: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and figures. `teacher` [A, block, vocab] are the trunk's logits; `valid` [A, block]:
    the true text goes on that far."""
    count = valid.sum().clamp(min=1)
    given, wanted = torch.log_softmax(logits, -1), torch.log_softmax(wide(teacher), -1)
    loss = ((wanted.exp() * (wanted - given)).sum(-1) * valid).sum() / count
    accepted = torch.minimum(wanted.exp(), given.exp()).sum(-1).detach()
    doubt = F.binary_cross_entropy_with_logits(sure, accepted, reduction="none")
    doubt = (doubt * valid).sum() / count
    agree = (logits.argmax(-1) == teacher.argmax(-1)) & valid
    figures = {
        "divergence": loss.detach(),
        "confidence": doubt.detach(),
        "accepted": (accepted * valid).sum(0) / valid.sum(0).clamp(min=1),
        "greedy": agree.sum(0) / valid.sum(0).clamp(min=1),
    }
    return loss + doubt, figures


def sample_anchors(
    batch: Mapping[str, torch.Tensor], count: int, block: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(anchors [A], valid [A, block]): places whose next token is an answer's, and how far the
    answer goes on."""
    counts = (batch["weights"] > 0.5).float()
    counts[:, -block - 1 :] = 0
    anchors = torch.multinomial(counts.flatten(), count, replacement=True, generator=generator)
    steps = torch.arange(block, device=anchors.device)
    goes_on = counts.flatten()[anchors.unsqueeze(-1) + steps] > 0
    return anchors, goes_on.cumprod(-1).bool()


class DrafterTrainer:
    """Steps the drafter's tensors only; the trunk's forward is `run`, its values stay."""

    def __init__(
        self,
        config: ModelConfig,
        stacks: Mapping[str, Stack],
        values: Mapping[str, torch.Tensor],
        compute: torch.dtype,
        steps: int,
        anchors: int = 4096,
    ) -> None:
        self.config, self.stacks, self.values = config, stacks, values
        self.drafter = Drafter(config)
        self.optimiser = Optimiser(stacks, values, Rates())
        self.compute, self.steps, self.anchors, self.step = compute, steps, anchors, 0

    def learn(
        self,
        batch: Mapping[str, torch.Tensor],
        texts: Texts,
        taps: torch.Tensor,
        trunk_hidden: torch.Tensor,
        trunk: Used,
        phases_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """One step on detached taps and hidden rows of the trunk."""
        block, embed, head = (
            self.config.dspark_block_size,
            trunk["embed.weight"],
            trunk["head.weight"],
        )
        generator = torch.Generator(taps.device).manual_seed(self.step)
        anchors, valid = sample_anchors(batch, self.anchors, block, generator)
        places = anchors.unsqueeze(-1) + torch.arange(block, device=anchors.device)
        positions = texts.positions.flatten()
        ahead = positions[anchors].unsqueeze(-1) + torch.arange(block, device=anchors.device)
        w = Used(self.stacks, self.values, self.compute, rounded=True)
        hidden = self.drafter.hidden(
            w, embed.detach(), taps, texts, anchors, phases_of(positions), phases_of(ahead)
        )
        previous = texts.ids.flatten()[places]
        logits, sure = self.drafter.heads(w, head.detach(), hidden, previous)
        with torch.no_grad():
            teacher = trunk_hidden[places] @ head.T
        loss, figures = draft_losses(logits, sure, teacher, valid)
        loss.backward()
        # Nothing is refused here: an untrained drafter's gradients have norms of 10 and more.
        clip(self.values, 1.0, torch.inf)
        rise, fall = (self.step + 1) / 40, (self.steps - self.step) / (0.7 * self.steps)
        self.optimiser.step(min(1.0, rise, fall))
        self.optimiser.clear()
        self.step += 1
        return figures
