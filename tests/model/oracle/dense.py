"""A second implementation of the text trunk: numpy, float64, whole sequences, no cache, no blocks.

Written for reading: every layer makes all keys of the sequence and full masks. It knows the two
truncations of the architecture (rows that the decoder half skips, and a replay that starts late
over stored entries), so that a run with them can be compared with something that has neither
rings nor write floors. Slow and only for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)]
)[:127]


def nearest(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Round to the nearest level, ties to the even index, sign kept."""
    size = np.minimum(np.abs(x), levels[-1])
    low = np.clip(np.searchsorted(levels, size, side="right") - 1, 0, len(levels) - 2)
    middle = (levels[low] + levels[low + 1]) / 2
    up = (size > middle) | ((size == middle) & (low % 2 == 1))
    return np.copysign(levels[low + up], x)


def ceil_power(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


def quantise(x: np.ndarray, kind: str) -> np.ndarray:
    size = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}[kind]
    g = x.reshape(*x.shape[:-1], -1, size)
    amax = np.abs(g).max(-1, keepdims=True)
    if kind == "fp8":
        scale, levels = ceil_power(np.maximum(amax, 1e-4) / 448), E4M3
    elif kind == "mxfp4":
        scale, levels = ceil_power(np.maximum(amax, 6 * 2.0**-126) / 6), E2M1
    else:
        scale, levels = nearest(np.maximum(amax, 6 * 2.0**-9) / 6, E4M3), E2M1
    return (nearest(g / scale, levels) * scale).reshape(x.shape)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass
class Truncation:
    """What a run leaves out. `first` = first row that exists (its window floor too)."""

    first: int = 0
    decoder_from: int = 0
    stored_below: int = 0  # entries of groups ending below come from `stored`
    stored: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


@dataclass
class Dense:
    """`weights` are checkpoint names -> float64; `entries` and `selections` are left by `run`."""

    config: object
    weights: dict[str, np.ndarray]
    token_map: np.ndarray
    hashes: tuple
    entries: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    selections: dict[int, np.ndarray] = field(default_factory=dict)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self.weights[name + ".weight"]

    def rope(self, x: np.ndarray, positions: np.ndarray, compressed: bool, sign: int = 1):
        c = self.config
        rd, y = c.qk_rope_head_dim, c.rope_scaling
        theta = c.compress_rope_theta if compressed else c.rope_theta
        i = np.arange(rd // 2)
        f = theta ** (-2.0 * i / rd)
        if compressed:

            def turn(t: float) -> float:
                original = y.original_max_position_embeddings
                return rd * np.log(original / (2 * np.pi * t)) / (2 * np.log(theta))

            lo = max(np.floor(turn(y.beta_fast)), 0)
            hi = min(np.ceil(turn(y.beta_slow)), rd - 1)
            ramp = np.clip((i - lo) / max(hi - lo, 0.001), 0, 1)
            f = f / y.factor * ramp + f * (1 - ramp)
        angle = sign * positions[:, None] * f
        angle = angle.reshape(len(positions), *[1] * (x.ndim - 2), rd // 2)
        z = (x[..., -rd::2] + 1j * x[..., -rd + 1 :: 2]) * np.exp(1j * angle)
        out = x.copy()
        out[..., -rd::2], out[..., -rd + 1 :: 2] = z.real, z.imag
        return out

    def mixes(self, h: np.ndarray, p: str):
        c, w = self.config, self.weights
        flat = h.reshape(len(h), -1)
        rms = np.sqrt((flat**2).mean(-1, keepdims=True) + c.rms_norm_eps)
        m = flat @ w[p + "_fn"].T / rms
        s, b, k = w[p + "_scale"], w[p + "_base"], c.hc_mult
        pre = sigmoid(m[:, :k] * s[0] + b[:k]) + c.hc_eps
        post = 2 * sigmoid(m[:, k : 2 * k] * s[1] + b[k : 2 * k])
        mix = softmax((m[:, 2 * k :] * s[2] + b[2 * k :]).reshape(-1, k, k), -1) + c.hc_eps
        mix = mix / (mix.sum(1, keepdims=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(2, keepdims=True) + c.hc_eps)
            mix = mix / (mix.sum(1, keepdims=True) + c.hc_eps)
        return pre, post, mix

    @staticmethod
    def expand(y: np.ndarray, h: np.ndarray, post: np.ndarray, mix: np.ndarray) -> np.ndarray:
        return post[:, :, None] * y[:, None] + np.einsum("njk,njd->nkd", mix, h)

    def engram(self, layer: int, h: np.ndarray, ids: np.ndarray, p: str) -> np.ndarray:
        c, w = self.config, self.weights
        which = self.hashes[c.engram_layer_ids.index(layer)]
        out = h.copy()
        for row in range(len(h)):
            position, alive, tokens = self.positions[row], True, []
            for k in range(c.engram_max_ngram_size):
                at = position - k
                alive = alive and at >= 0 and ids[at] != c.engram_pad_token_id
                tokens.append(self.token_map[ids[at] if alive else c.engram_pad_token_id])
            vectors = w[p + "embed.weight"][which.rows(np.array([tokens]))[0]].ravel()
            both = (w[p + "wkv.weight"] @ vectors).reshape(c.hc_mult + 1, -1)
            for s in range(c.hc_mult):
                q, key = h[row, s], both[s]
                dot = (q * w[p + "q_weight"][s] * w[p + "k_weight"][s] * key).sum()
                dot /= np.sqrt((q**2).mean() + c.rms_norm_eps)
                dot /= np.sqrt((key**2).mean() + c.rms_norm_eps) * np.sqrt(c.hidden_size)
                root = np.sign(dot) * np.sqrt(max(abs(dot), 1e-6))
                out[row, s] += sigmoid(root) * both[-1]
        return out

    def publish(self, layer: int, ratio: int, x: np.ndarray, t: Truncation, p: str) -> None:
        w, first = self.weights, self.positions[0]
        v = x @ w[p + "compressor.wkv.weight"].T
        z = x @ w[p + "compressor.wgate.weight"].T if ratio > 1 else np.zeros_like(v)
        total = (self.positions[-1] + 1) // ratio
        main = np.zeros((total, v.shape[1]))
        index = np.zeros((total, self.config.index_head_dim))
        for j in range(total):
            if (j + 1) * ratio - 1 < t.stored_below:
                main[j], index[j] = (part[j] for part in t.stored[layer])
                continue
            rows = slice(j * ratio - first, (j + 1) * ratio - first)
            pooled = (softmax(z[rows], 0) * v[rows]).sum(0)[None]
            latent = self.norm(pooled, p + "compressor.norm")
            at = np.array([j * ratio])
            key = self.norm(latent @ w[p + "indexer.wk.weight"].T, p + "indexer.k_norm")
            index[j] = quantise(self.rope(key, at, True), "mxfp4")[0]
            main[j] = quantise(self.rope(latent, at, True), "nvfp4")[0]
        self.entries[layer] = main, index

    def select(self, layer: int, spec, x: np.ndarray, qr: np.ndarray, p: str) -> list[list[int]]:
        c, w = self.config, self.weights
        q = (qr @ w[p + "indexer.wq_b.weight"].T).reshape(len(x), c.index_n_heads, -1)
        q = quantise(self.rope(q, self.positions, True), "mxfp4")
        gate = x @ w[p + "indexer.weights_proj.weight"].T
        gate = gate / np.sqrt(c.index_n_heads) / np.sqrt(c.index_head_dim)
        keys = self.entries[spec.kv_source][1]
        chosen = []
        for row, position in enumerate(self.positions):
            n = (position + 1) // spec.ratio
            score = np.zeros(n)
            for head in range(c.index_n_heads):
                score = score + np.maximum(keys[:n] @ q[row, head], 0) * gate[row, head]
            if layer == c.candidate_source_layer_id:
                size, top = c.candidate_block_size, c.candidate_topk_blocks
                best = [score[b : b + size].max() for b in range(0, n, size)]
                best[-1] = np.inf
                kept = sorted(range(len(best)), key=lambda b: (-best[b], b))[:top]
                self.candidates[position] = {
                    j for b in kept for j in range(b * size, b * size + size)
                }
            allowed = range(n)
            if 0 <= c.candidate_source_layer_id < layer:
                allowed = [j for j in allowed if j in self.candidates[position]]
            order = sorted(allowed, key=lambda j: (-score[j], j))
            chosen.append(sorted(order[: c.index_topk]))
        return chosen

    def attention(self, spec, x: np.ndarray, floor: int, p: str) -> np.ndarray:
        c, w = self.config, self.weights
        heads, hd, window = c.num_attention_heads, c.head_dim, c.sliding_window
        compressed = spec.ratio > 0
        qr = self.norm(x @ w[p + "wq_a.weight"].T, p + "q_norm")
        q = (qr @ w[p + "wq_b.weight"].T).reshape(-1, heads, hd)
        q = self.rope(q, self.positions, compressed)
        k = self.rope(
            self.norm(x @ w[p + "wkv.weight"].T, p + "kv_norm"), self.positions, compressed
        )
        k = quantise(k, "fp8")
        if spec.index == spec.index_source:
            self.chosen = self.select(spec.index, spec, x, qr, p)
            self.selections[spec.index] = self.chosen
        out = np.zeros_like(q)
        for row, position in enumerate(self.positions):
            seen = (self.positions <= position) & (self.positions > position - window)
            keys = k[seen & (self.positions >= floor)]
            if compressed:
                keys = np.concatenate((keys, self.entries[spec.kv_source][0][self.chosen[row]]))
            score = q[row] @ keys.T / np.sqrt(hd)
            score = np.concatenate((score, w[p + "attn_sink"][:, None]), 1)
            out[row] = softmax(score, 1)[:, :-1] @ keys
        out = self.rope(out, self.positions, compressed, -1).reshape(len(x), c.o_groups, -1)
        wo_a = w[p + "wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1)
        low = np.einsum("ngi,gli->ngl", out, wo_a).reshape(len(x), -1)
        return low @ w[p + "wo_b.weight"].T

    def expert(self, x: np.ndarray, p: str, weight: float) -> np.ndarray:
        w, limit = self.weights, self.config.swiglu_limit
        g = np.minimum(w[p + "w1.weight"] @ x, limit)
        u = np.clip(w[p + "w3.weight"] @ x, -limit, limit)
        return w[p + "w2.weight"] @ (g * sigmoid(g) * u * weight)

    def moe(self, x: np.ndarray, p: str) -> np.ndarray:
        c, w = self.config, self.weights
        s = np.sqrt(np.log1p(np.exp(x @ w[p + "gate.weight"].T)))
        out = np.zeros_like(x)
        for row in range(len(x)):
            biased = s[row] + w[p + "gate.bias"]
            top = sorted(range(len(biased)), key=lambda e: (-biased[e], e))[: c.num_experts_per_tok]
            total = s[row][top].sum() + 1e-20
            out[row] = self.expert(x[row], p + "shared_experts.", 1.0)
            for e in top:
                weight = s[row][e] / total * c.routed_scaling_factor
                out[row] += self.expert(x[row], f"{p}experts.{e}.", weight)
        return out

    def run(self, ids: np.ndarray, t: Truncation) -> np.ndarray:
        """Logits of the rows [max(first, decoder_from), len(ids))."""
        c, w = self.config, self.weights
        self.positions = np.arange(t.first, len(ids))
        self.candidates: dict[int, set[int]] = {}
        h = np.repeat(w["embed.weight"][ids[t.first :]][:, None], c.hc_mult, 1)
        pre = np.zeros((len(h), c.hc_mult))
        pre[:, 0] = 1
        floor = t.first
        for spec in c.layers:
            p = f"layers.{spec.index}."
            if spec.index in c.engram_layer_ids:
                h = self.engram(spec.index, h, ids, p + "engram.")
            x = self.norm(np.einsum("nc,ncd->nd", pre, h), p + "attn_norm")
            if spec.index == spec.kv_source:
                self.publish(spec.index, spec.ratio, x, t, p + "attn.")
            if spec.index == c.first_decoder_layer:
                kept = self.positions >= t.decoder_from
                h, pre, x, self.positions = h[kept], pre[kept], x[kept], self.positions[kept]
                floor = max(floor, t.decoder_from)
            pre, post, mix = self.mixes(h, p + "hc_attn")
            h = self.expand(self.attention(spec, x, floor, p + "attn."), h, post, mix)
            pre_ffn, post, mix = self.mixes(h, p + "hc_ffn")
            x = self.norm(np.einsum("nc,ncd->nd", pre, h), p + "ffn_norm")
            h, pre = self.expand(self.moe(x, p + "ffn."), h, post, mix), pre_ffn
        x = self.norm(np.einsum("nc,ncd->nd", pre, h), "norm")
        return x @ w["head.weight"].T
