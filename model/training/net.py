"""The architecture as one differentiable function of whole texts: what `Trunk` computes, untiled.

Texts lie packed in rows [B, T]; `document` numbers them inside a row, a text sees itself alone,
and begins at a multiple of eight columns, so that groups of two tokens and candidate blocks are its
own.
Rows of the published model's caches are rounded to their formats here too (`fake`), with
straight-through gradients.
Pieces are pure functions that torch.compile takes one by one: layers share the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from headrace.kernels import frequencies, yarn_frequencies
from headrace.kernels.balance import balance
from headrace.model.config import LayerKind, LayerSpec, ModelConfig
from headrace.model.training.attend import Attend, MainKeys, Masks
from headrace.model.training.fake import wide
from headrace.model.training.pieces import (
    collapse,
    compress,
    engram,
    expand,
    experts,
    gates,
    index_queries,
    project_out,
    project_qkv,
)
from headrace.model.training.weights import Used


@dataclass
class Texts:
    """One batch. Integers are int64 unless said otherwise; all [B, T] but for the pictures."""

    ids: torch.Tensor
    positions: torch.Tensor  # restart with each text
    document: torch.Tensor  # int32
    history: torch.Tensor  # int32: decoder windows do not look across its borders
    image: torch.Tensor  # bool
    engram_rows: torch.Tensor  # int32 [engram layers, B, T, rows a token]
    pictures: torch.Tensor  # uint8 [n, H, W, 3], one geometry
    picture_places: torch.Tensor  # int64 [n, span]: flat places in [B * T]


@dataclass
class Outcome:
    """`hidden` [B * T, D] before the head; `taps` [B * T, taps, D] (only when asked for);
    `loads` [2, layers, E]: tokens an expert got, text and image; `index_loss` a scalar."""

    hidden: torch.Tensor
    taps: torch.Tensor | None
    loads: torch.Tensor
    index_loss: torch.Tensor


@dataclass
class _Scratch:
    """What layers hand to later ones."""

    keys: dict[int, MainKeys] = field(default_factory=dict)  # by kv source
    logits: torch.Tensor | None = None  # index scores of the sampled rows
    targets: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


class Net:
    """The text trunk over packed texts. `compiled` wraps each piece (torch.compile or nothing)."""

    def __init__(
        self,
        config: ModelConfig,
        attend: Attend,
        *,
        compiled: Callable[[Callable], Callable] = lambda f: f,
    ) -> None:
        self.config = config
        self.attend = attend
        self.mix = compiled(self._mix)
        self.turn = compiled(self._turn)
        self.expand = compiled(expand)
        self.collapse = compiled(collapse)
        self.engram = compiled(engram)
        self.experts = compiled(experts)
        self.project_qkv = compiled(project_qkv)
        self.project_out = compiled(project_out)
        self.compress = compiled(compress)
        self.index_queries = compiled(index_queries)

    def _mix(self, h, pre, fn, base, scale, norm):  # type: ignore[no-untyped-def]
        """One sublayer's input and its own gates; the collapse takes the `pre` handed in."""
        c = self.config
        x = collapse(h, pre, norm, c.rms_norm_eps)
        new, post, logits = gates(h, fn, base, scale, c.rms_norm_eps, c.hc_eps)
        return x, new, post, logits

    def _turn(self, y, h, post, comb, pre, fn, base, scale, norm):  # type: ignore[no-untyped-def]
        """Expand one sublayer's output, then `_mix` of the next."""
        h = expand(y, h, post, comb)
        return h, *self._mix(h, pre, fn, base, scale, norm)

    def phases(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
        """compressed? -> (cos, sin) [B, T, rd / 2]."""
        c, y = self.config, self.config.rope_scaling
        tables = {
            False: frequencies(c.qk_rope_head_dim, c.rope_theta, torch.float64),
            True: yarn_frequencies(
                c.qk_rope_head_dim,
                c.compress_rope_theta,
                y.factor,
                y.beta_fast,
                y.beta_slow,
                y.original_max_position_embeddings,
                torch.float64,
            ),
        }
        angles = {k: positions.unsqueeze(-1) * t.to(positions.device) for k, t in tables.items()}
        return {k: (a.cos().to(dtype), a.sin().to(dtype)) for k, a in angles.items()}

    def forward(
        self,
        w: Used,
        t: Texts,
        masks: Masks,
        rows: torch.Tensor,
        *,
        selecting: bool,
        taps: bool = False,
    ) -> Outcome:
        """`rows` [images' rows, D] stand at the pictures' places. With `selecting` rows attend to
        the entries that the index chose, without it to all that are visible."""
        c, (b, n) = self.config, t.ids.shape
        x = F.embedding(t.ids.flatten(), w["embed.weight"])
        if t.picture_places.numel():
            x = x.index_copy(0, t.picture_places.flatten(), rows.to(x.dtype))
        h = x.unsqueeze(1).repeat(1, c.hc_mult, 1)
        pre = F.one_hot(torch.zeros(b * n, dtype=torch.int64, device=h.device), c.hc_mult)
        pre = wide(pre.to(x.dtype))
        phases, image, scratch = self.phases(t.positions, pre.dtype), t.image.flatten(), _Scratch()
        tapped, loads = [], []
        y = post = comb = None
        for spec in c.layers:
            p = f"layers.{spec.index}."
            mix = [w[f"{p}hc_attn_{k}"] for k in ("fn", "base", "scale")]
            if (
                y is None
                or spec.index in c.engram_layer_ids
                or (taps and spec.index in c.dspark_target_layer_ids)
            ):
                if y is not None:
                    h = self.expand(y, h, post, comb)
                if spec.index in c.engram_layer_ids:
                    h = self._add_engram(w, h, t, spec.index, image)
                if taps and spec.index in c.dspark_target_layer_ids:
                    tapped.append(wide(h).mean(1).to(h.dtype))
                x, pre, post, raw = self.mix(h, pre, *mix, w[f"{p}attn_norm.weight"])
            else:
                h, x, pre, post, raw = self.turn(
                    y, h, post, comb, pre, *mix, w[f"{p}attn_norm.weight"]
                )
            comb = balance(raw, c.hc_sinkhorn_iters, c.hc_eps)
            y = self._attention(w, spec, x.view(b, n, -1), phases, masks, scratch, selecting)
            mix = [w[f"{p}hc_ffn_{k}"] for k in ("fn", "base", "scale")]
            h, x, pre, post, raw = self.turn(y, h, post, comb, pre, *mix, w[f"{p}ffn_norm.weight"])
            comb = balance(raw, c.hc_sinkhorn_iters, c.hc_eps)
            y, load = self._experts(w, f"{p}ffn.", spec.index, x, image)
            loads.append(load)
        h = self.expand(y, h, post, comb)
        hidden = self.collapse(h, pre, w["norm.weight"], c.rms_norm_eps)
        self._finish_group(scratch)
        lost = torch.stack(scratch.losses).mean() if scratch.losses else hidden.new_zeros(())
        tap = torch.stack(tapped, dim=1) if tapped else None
        return Outcome(hidden, tap, torch.stack(loads, dim=1), lost)

    def _add_engram(
        self, w: Used, h: torch.Tensor, t: Texts, layer: int, image: torch.Tensor
    ) -> torch.Tensor:
        p, number = f"layers.{layer}.engram.", self.config.engram_layer_ids.index(layer)
        rows = F.embedding(t.engram_rows[number].flatten(0, 1).long(), w[f"{p}embed.weight"])
        qk = w[f"{p}q_weight"] * w[f"{p}k_weight"]
        return self.engram(
            h, rows.flatten(1), w[f"{p}wkv.weight"], qk, image, self.config.rms_norm_eps
        )

    def _experts(
        self, w: Used, p: str, layer: int, x: torch.Tensor, image: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        matrices = [
            torch.cat(
                (
                    w.experts("layers", layer, c.num_hidden_layers, name),
                    w[f"{p}shared_experts.{name}.weight"].unsqueeze(0),
                )
            )
            for name in ("w1", "w3", "w2")
        ]
        router = [w[f"{p}gate.{name}"] for name in ("weight", "bias", "bias_vl")]
        limits = c.num_experts_per_tok, c.routed_scaling_factor, c.swiglu_limit
        return self.experts(x, *router, image, *matrices, *limits)

    def _attention(
        self,
        w: Used,
        spec: LayerSpec,
        x: torch.Tensor,
        phases: dict[bool, tuple[torch.Tensor, torch.Tensor]],
        masks: Masks,
        s: _Scratch,
        selecting: bool,
    ) -> torch.Tensor:
        c, a = self.config, f"layers.{spec.index}.attn."
        cos, sin = phases[spec.ratio > 0]
        names = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
        qr, q, key = self.project_qkv(x, *(w[a + name] for name in names), cos, sin, c.rms_norm_eps)
        if spec.kind is LayerKind.FULL:
            gate = w[f"{a}compressor.wgate.weight"] if spec.ratio > 1 else None
            main, index = self.compress(
                x,
                w[f"{a}compressor.wkv.weight"],
                gate,
                w[f"{a}compressor.norm.weight"],
                w[f"{a}indexer.wk.weight"],
                w[f"{a}indexer.k_norm.weight"],
                cos,
                sin,
                c.rms_norm_eps,
            )
            s.keys[spec.index] = MainKeys(main, index, spec.ratio)
        main_keys = None if spec.kv_source is None else s.keys[spec.kv_source]
        if main_keys is not None and spec.kind in (LayerKind.FULL, LayerKind.REINDEX):
            self._finish_group(s)
            queries = self.index_queries(
                x,
                qr,
                w[f"{a}indexer.wq_b.weight"],
                w[f"{a}indexer.weights_proj.weight"],
                c.index_head_dim,
                cos,
                sin,
            )
            s.logits = self.attend.index_logits(queries, main_keys, masks)
            if selecting:
                self.attend.select(spec, queries, main_keys, masks)
        is_decoder = spec.index >= c.first_decoder_layer
        out = self.attend(q, key, main_keys, w[f"{a}attn_sink"], masks, spec, is_decoder, selecting)
        if main_keys is not None:
            s.targets.append(self.attend.target(q, key, main_keys, w[f"{a}attn_sink"], masks))
        return self.project_out(
            out, w[f"{a}wo_a.weight"], w[f"{a}wo_b.weight"], c.o_groups, cos, sin
        )

    def _finish_group(self, s: _Scratch) -> None:
        """The index loss of the layers that shared one selection."""
        if s.logits is not None and s.targets:
            s.losses.append(self.attend.index_loss(s.logits, s.targets))
        s.logits, s.targets = None, []
