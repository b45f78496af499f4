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
    """What travels between layers: H [n, hc, D] and the newest `pre` [n, hc]."""

    h: torch.Tensor
    pre: torch.Tensor


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
    ) -> None:
        """Attention of the normed rows x and experts; each collapse uses the mixes of the one
        before."""
        pre, post, comb = self.mixes(streams.h, p.attn_mix)
        y = attend(x)
        streams.h, streams.pre = self.kernels.expand(y, streams.h, post, comb), pre
        pre, post, comb = self.mixes(streams.h, p.ffn_mix)
        y = self.experts(p, self.collapse(streams, p.ffn_norm), image)
        streams.h, streams.pre = self.kernels.expand(y, streams.h, post, comb), pre

    def experts(self, p: LayerParams, x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        """Routed and shared experts of rows [n, D]; `image` (bool [n]) rows have their own bias."""
        c, k = self.config, self.kernels
        bias = p.gate_bias
        if image is not None:
            bias = torch.where(image.unsqueeze(-1), p.gate_bias_image, bias)
        experts, weights = k.route(x, p.gate, bias, p.experts_per_token, c.routed_scaling_factor)
        routed = k.expert_sum(x, experts, weights, p.w13, p.w2, c.swiglu_limit)
        shared = k.shared_expert(x, p.shared_w13, p.shared_w2, c.swiglu_limit, weights.dtype)
        return routed.add_(shared).to(x.dtype)
