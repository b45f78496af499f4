"""The pure functions that the differentiable forward is made of, one a fused piece.

Shapes are those of `net`; values that the model keeps wide are computed in float32 (float64 in
float64 runs), the rest in the dtype of the activations.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from headrace.model.training import fake
from headrace.model.training.fake import wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = wide(x)
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Adjacent pairs of the last channels; cos, sin broadcast to [..., rd / 2]."""
    width = 2 * cos.shape[-1]
    still, turned = x[..., :-width], wide(x[..., -width:]).unflatten(-1, (-1, 2))
    a, b = turned[..., 0], turned[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still, turned.to(x.dtype)), dim=-1)


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def gates(
    h: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre, post, logits of the mix) of streams h [n, hc, D], float32."""
    s = h.shape[1]
    flat = h.flatten(1)
    projected = wide(flat @ fn.to(flat.dtype).T)
    m = projected * torch.rsqrt(wide(flat).square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    return pre, post, (m[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s))


def collapse(
    h: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, norm_eps: float
) -> torch.Tensor:
    """The normed input of a sublayer, [n, D]."""
    mixed = (pre.unsqueeze(-1) * wide(h)).sum(1)
    return rms_norm(mixed.to(h.dtype), norm, norm_eps)


def expand(y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    streams = wide(h)
    mixed = _total([c[:, j, :, None] * streams[:, j, None, :] for j in range(h.shape[1])])
    return (post.unsqueeze(-1) * wide(y).unsqueeze(1) + mixed).to(h.dtype)


def engram(
    h: torch.Tensor,
    rows: torch.Tensor,
    wkv: torch.Tensor,
    qk: torch.Tensor,
    image: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """h [n, hc, D] with the gathered table rows [n, R] added."""
    n, s, d = h.shape
    projected = wide(rows @ wkv.T).view(n, s + 1, d)
    key, value, stream = projected[:, :s], projected[:, s:], wide(h)
    dot = (stream * qk * key).sum(-1)
    dot = dot * torch.rsqrt(stream.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + eps) * d**-0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    gate = gate.masked_fill(image.unsqueeze(-1), 0.0)
    return (stream + gate.unsqueeze(-1) * value).to(h.dtype)


def experts(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    bias_vl: torch.Tensor,
    image: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    factor: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts on all rows x [n, D], weighted; the last of w1, w3 [E + 1, I, D] is the shared
    one. Also the counts [2, E] of rows that chose each, text and image."""
    n_experts, inner = gate.shape[0], w1.shape[1]
    s = torch.sqrt(F.softplus(wide(x) @ gate.T))
    choice = s + torch.where(image.unsqueeze(-1), bias_vl, bias)
    chosen = torch.zeros_like(s)
    numbers = torch.arange(n_experts, device=x.device)
    for _ in range(top_k):  # argmax gives the lowest of equals
        best = choice.argmax(-1, keepdim=True) == numbers
        chosen = chosen + best
        choice = choice.masked_fill(best, -torch.inf)
    weights = s * chosen
    weights = weights * (factor / (weights.sum(-1, keepdim=True) + 1e-20))
    weights = torch.cat((weights, torch.ones_like(weights[:, :1])), dim=-1)
    g = wide(x @ w1.flatten(0, 1).T).clamp(max=limit)
    u = wide(x @ w3.flatten(0, 1).T).clamp(-limit, limit)
    a = (F.silu(g) * u).unflatten(-1, (n_experts + 1, inner)) * weights.unsqueeze(-1)
    y = a.to(x.dtype).flatten(1) @ w2.transpose(1, 2).flatten(0, 1)
    seen = image.unsqueeze(-1).float()
    loads = torch.stack(((chosen * (1 - seen)).sum(0), (chosen * seen).sum(0)))
    return y, loads


def project_qkv(
    x: torch.Tensor,
    wq_a: torch.Tensor,
    q_norm: torch.Tensor,
    wq_b: torch.Tensor,
    wkv: torch.Tensor,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(qr [B, T, q_lora], q [B, heads, T, hd], window keys [B, T, hd]) of x [B, T, D]."""
    qr = rms_norm(x @ wq_a.T, q_norm, eps)
    key = rms_norm(x @ wkv.T, kv_norm, eps)
    q = (qr @ wq_b.T).unflatten(-1, (-1, key.shape[-1])).transpose(1, 2)
    return qr, rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), fake.fp8(rotate(key, cos, sin))


def project_out(
    o: torch.Tensor,
    wo_a: torch.Tensor,
    wo_b: torch.Tensor,
    groups: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """o [B, heads, T, hd] rotated back and projected: [B * T, D]."""
    o = rotate(o, cos.unsqueeze(1), -sin.unsqueeze(1)).transpose(1, 2)
    o = o.flatten(0, 1).flatten(1).unflatten(-1, (groups, -1))
    low = torch.einsum("ngi,goi->ngo", o, wo_a.unflatten(0, (groups, -1)))
    return low.flatten(1) @ wo_b.T


def compress(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor | None,
    norm: torch.Tensor,
    wk: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(main entries [B, T / r, hd], index keys [B, T / r, ihd]) of x [B, T, D]."""
    value = x @ wkv.T
    if wgate is not None:
        weights = torch.softmax(wide(x @ wgate.T).unflatten(1, (-1, 2)), dim=2)
        value = (weights * wide(value).unflatten(1, (-1, 2))).sum(2).to(x.dtype)
        cos, sin = cos[:, ::2], sin[:, ::2]
    latent = rms_norm(value, norm, eps)
    key = rms_norm(latent.detach() @ wk.T, k_norm, eps)
    return fake.nvfp4(rotate(latent, cos, sin)), fake.mxfp4(rotate(key, cos, sin))


def index_queries(
    x: torch.Tensor,
    qr: torch.Tensor,
    wq: torch.Tensor,
    weights: torch.Tensor,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries [B, T, heads, ihd], weights [B, T, heads]); gradients stop at x and qr."""
    q = (qr.detach() @ wq.T).unflatten(-1, (-1, head_dim))
    q = fake.mxfp4(rotate(q, cos.unsqueeze(2), sin.unsqueeze(2)))
    heads = q.shape[2]
    w = (x.detach() @ weights.T) * (heads**-0.5 * head_dim**-0.5)
    return q, w
