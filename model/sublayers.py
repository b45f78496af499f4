"""What every layer does whatever its attention: stream mixes, norms, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.kernels import Kernels
from headrace.model.config import ModelConfig
from headrace.model.params import LayerParams, MixParams


@dataclass
class Streams:
    """What travels between layers: H [n, hc, D] and the newest `pre` [n, hc].

    `back` has (post [n, hc], C [n, hc, hc]) of the sublayer that was entered and not left (V4)."""

    h: torch.Tensor
    pre: torch.Tensor
    back: tuple[torch.Tensor, torch.Tensor] | None = None


class Sublayers:
    """Trunk layers and drafter stages alike; holds no state and mutates only the `Streams`."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self.config = config
        self.kernels = kernels

    def start(self, x: torch.Tensor, accumulate: torch.dtype) -> Streams:
        """Streams whose every part is the embedding row: the first collapse gives x [n, D]."""
        pre = torch.zeros((x.shape[0], self.config.hc_mult), dtype=accumulate, device=x.device)
        pre[:, 0] = 1.0
        return Streams(x.unsqueeze(1).repeat(1, self.config.hc_mult, 1), pre)

    def collapse(self, streams: Streams, norm: torch.Tensor) -> torch.Tensor:
        """The normed sublayer input [n, D]."""
        x = self.kernels.collapse(streams.h, streams.pre)
        return self.kernels.rms_norm(x, norm, self.config.rms_norm_eps)

    def enter(self, mix: MixParams, norm: torch.Tensor, streams: Streams) -> torch.Tensor:
        """The normed input [n, D] of the sublayer with these mixes. V4.1 collapses the streams with
        the `pre` of the sublayer before, V4 with the sublayer's own."""
        if self.config.is_v4:
            streams.pre, post, comb = self.mixes(streams.h, mix)
            streams.back = post, comb
        return self.collapse(streams, norm)

    def leave(self, mix: MixParams, streams: Streams, y: torch.Tensor) -> None:
        """Mix the sublayer's output y [n, D] into the streams."""
        if streams.back is not None:
            (post, comb), streams.back = streams.back, None
        else:
            streams.pre, post, comb = self.mixes(streams.h, mix)
        streams.h = self.kernels.expand(y, streams.h, post, comb)

    def mixes(self, h: torch.Tensor, m: MixParams) -> tuple[torch.Tensor, ...]:
        c = self.config
        return self.kernels.mixes(
            h, m.fn, m.base, m.scale, c.hc_sinkhorn_iters, c.rms_norm_eps, c.hc_eps
        )

    def run(
        self,
        p: LayerParams,
        x: torch.Tensor,
        streams: Streams,
        attend: Callable[[torch.Tensor], torch.Tensor],
        image: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        """Attention of the normed rows x, which `enter` gave, and experts. `token_ids` (int64 [n])
        choose the experts of a hash-routed layer."""
        self.leave(p.attn_mix, streams, attend(x))
        x = self.enter(p.ffn_mix, p.ffn_norm, streams)
        self.leave(p.ffn_mix, streams, self.experts(p, x, image, token_ids))

    def experts(
        self,
        p: LayerParams,
        x: torch.Tensor,
        image: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed and shared experts of rows [n, D]; `image` (bool [n]) rows have their own bias."""
        c, k = self.config, self.kernels
        if p.experts_by_token is not None and token_ids is not None:
            experts = p.experts_by_token[token_ids]
            weights = k.route_to(x, p.gate, experts, c.routed_scaling_factor)
            return self._run_experts(p, x, experts, weights)
        bias = p.gate_bias
        if image is not None:
            bias = torch.where(image.unsqueeze(-1), p.gate_bias_image, bias)
        experts, weights = k.route(x, p.gate, bias, p.experts_per_token, c.routed_scaling_factor)
        return self._run_experts(p, x, experts, weights)

    def _run_experts(
        self, p: LayerParams, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        c, k = self.config, self.kernels
        routed = k.expert_sum(x, experts, weights, p.w13, p.w2, c.swiglu_limit)
        shared = k.shared_expert(x, p.shared_w13, p.shared_w2, c.swiglu_limit, weights.dtype)
        return routed.add_(shared).to(x.dtype)
