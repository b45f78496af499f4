"""The image tower as a differentiable function of one batch of equal pictures: `VisionTower`'s."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from headrace.model.config import ModelConfig, VisionConfig
from headrace.model.training.fake import wide
from headrace.model.training.pieces import rms_norm
from headrace.model.training.weights import Used


def _linear(w: Used, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = w[f"{name}.bias"].to(x.dtype) if f"{name}.bias" in w else None
    return F.linear(x, w[f"{name}.weight"], bias)


def _phases(v: VisionConfig, side: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [patches, hd / 2]: angles of the row, then of the column."""
    half = v.hidden_size // v.num_attention_heads // 2
    steps = torch.arange(0, half, 2, dtype=torch.float64, device=like.device)
    freqs = v.rope_theta ** (-steps / half)
    place = torch.arange(side, device=like.device)
    grid = torch.cartesian_prod(place, place).unsqueeze(-1) * freqs
    angles = grid.flatten(1)
    dtype = wide(like).dtype
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = wide(x).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def picture_rows(w: Used, config: ModelConfig, pictures: torch.Tensor) -> torch.Tensor:
    """Span rows [n * span, D] of uint8 pictures [n, S, S, 3]; S divides by patch * downsample."""
    v = config.vision
    assert v is not None
    compute = w["vision.patch_embed.proj.weight"].dtype
    n, side, p = pictures.shape[0], pictures.shape[1] // v.patch_size, v.patch_size
    level = ((pictures.double() / 255 - 0.5) / 0.5).to(compute)
    patches = level.view(n, side, p, side, p, 3).permute(0, 1, 3, 5, 2, 4).flatten(3)
    x = _linear(w, "vision.patch_embed.proj", patches.flatten(1, 2))
    cos, sin = _phases(v, side, x)
    for index in range(v.num_hidden_layers):
        b = f"vision.blocks.{index}."
        h = rms_norm(x, w[f"{b}norm1.weight"], v.rms_norm_eps)
        qkv = _linear(w, f"{b}attn.wqkv", h).unflatten(-1, (3, v.num_attention_heads, -1))
        q, k, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        o = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), value)
        x = x + _linear(w, f"{b}attn.wo", o.transpose(1, 2).flatten(2))
        h = rms_norm(x, w[f"{b}norm2.weight"], v.rms_norm_eps)
        gate, up = _linear(w, f"{b}mlp.w1", h).chunk(2, dim=-1)
        x = x + _linear(w, f"{b}mlp.w2", F.silu(gate) * up)
    x = rms_norm(x, w["vision.norm.weight"], v.rms_norm_eps)
    step, cells = v.downsample, side // v.downsample
    x = x.view(n, cells, step, cells, step, -1).permute(0, 1, 3, 5, 2, 4).flatten(3)
    rows = _linear(w, "aligner.w2", F.gelu(_linear(w, "aligner.w1", x)))
    newline = w["image_newline"].to(rows.dtype).expand(n, cells, 1, -1)
    lines = torch.cat((rows, newline), dim=2).flatten(1, 2)
    ends = [w[f"image_{e}"].to(rows.dtype).expand(n, 1, -1) for e in ("start", "end")]
    return torch.cat((ends[0], lines, ends[1]), dim=1).flatten(0, 1)
