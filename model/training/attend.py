"""Attention of packed texts over window keys and compressed entries, and the index branch.

`Attend` writes the masks out and multiplies everything with everything: small sizes, any device.
`FlexAttend` hands the same masks to flex_attention, which skips what nobody sees (CUDA only).
The index branch learns from the attention itself: for sampled rows the Kullback-Leibler divergence
between where all heads of a group of layers look and where its scores point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from headrace.model.config import LayerKind, LayerSpec, ModelConfig
from headrace.model.training.fake import wide

BLOCK = 128  # side of a tile of flex_attention's masks


@dataclass(frozen=True)
class MainKeys:
    """Entries of one kv source: `main` [B, N, hd], `index` [B, N, ihd]."""

    main: torch.Tensor
    index: torch.Tensor
    ratio: int


@dataclass(frozen=True)
class Masks:
    """What decides who sees what: int32 [B, T] each. `sample` int64 [S]: columns whose attention
    teaches the index."""

    document: torch.Tensor
    history: torch.Tensor
    sample: torch.Tensor


def visible_entries(masks: Masks, ratio: int, columns: torch.Tensor) -> torch.Tensor:
    """bool [B, columns, N]: whether the row sees the entry, complete and of its own text."""
    owner = masks.document[:, ::ratio]
    entry = torch.arange(owner.shape[1], device=owner.device)
    complete = entry * ratio + ratio - 1 <= columns.unsqueeze(-1)
    return complete & (masks.document[:, columns].unsqueeze(-1) == owner.unsqueeze(1))


def visible_blocks(document: torch.Tensor, ratio: int, width: int) -> torch.Tensor:
    """bool [B, 1, T / 128, (N + T) / 128]: tiles in which a row may see something; entries first.

    Documents are numbered upwards along a row, so the ranges of two tiles tell.
    """
    length = document.shape[1]
    tile = torch.arange(length // BLOCK, device=document.device)
    reach = tile.unsqueeze(-1) - tile
    parts = [((reach >= 0) & (reach <= -(-(width - 1) // BLOCK))).expand(len(document), -1, -1)]
    if ratio:
        owner = document[:, ::ratio].unflatten(1, (-1, BLOCK)).amax(-1)
        first = document.unflatten(1, (-1, BLOCK))[:, :, 0]
        begin = torch.arange(owner.shape[1], device=document.device) * BLOCK * ratio + ratio - 1
        complete = begin <= (tile * BLOCK + BLOCK - 1).unsqueeze(-1)
        parts.insert(0, complete & (owner.unsqueeze(1) >= first.unsqueeze(-1)))
    return torch.cat(parts, dim=-1).unsqueeze(1)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [B, S, N] of q [B, S, heads, ihd], weights [B, S, heads], keys [B, N, ihd]."""
    total = None
    for head in range(q.shape[2]):
        dots = wide(torch.bmm(q[:, :, head], keys.transpose(1, 2))).relu()
        part = dots * wide(weights[:, :, head]).unsqueeze(-1)
        total = part if total is None else total + part
    assert total is not None
    return total


def choose(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool [B, T, N]: the k best of every row; -inf never, equals by the lowest entry."""
    n = scores.shape[-1]
    falling = scores - torch.arange(n, device=scores.device) * 1e-7
    best = falling.topk(min(k, n), dim=-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(-1, best.indices, best.values > -torch.inf)


def candidates(scores: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
    """bool [B, T, N]: entries of each row's best blocks; its newest visible block always stays."""
    n = scores.shape[-1]
    padded = F.pad(scores, (0, -n % size), value=-torch.inf).unflatten(-1, (-1, size))
    best = padded.amax(-1)
    numbers = torch.arange(best.shape[-1], device=scores.device)
    last = torch.where(best > -torch.inf, numbers, -1).amax(-1, keepdim=True)
    best = best.masked_fill((numbers == last) & (best > -torch.inf), torch.inf)
    return choose(best, blocks).repeat_interleave(size, dim=-1)[..., :n]


def attention_target(
    q: torch.Tensor,
    key: torch.Tensor,
    main: torch.Tensor,
    sink: torch.Tensor,
    seen: torch.Tensor,
    window: torch.Tensor,
    columns: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[B, S, N]: the heads' attention to the entries, summed. q [B, heads, S, hd] of the sampled
    columns, `seen` [B, S, N], `window` bool [B, S, W] of the keys before them."""
    b, heads, s, _ = q.shape
    reach = (columns.unsqueeze(-1) - torch.arange(window.shape[-1], device=q.device)).clamp(min=0)
    near = key[:, reach]  # [B, S, W, hd]
    far = wide(q.flatten(1, 2) @ main.transpose(1, 2)).unflatten(1, (heads, s)) * scale
    close = wide(torch.einsum("bhsd,bswd->bhsw", q, near)) * scale
    parts = (
        far.masked_fill(~seen.unsqueeze(1), -torch.inf),
        close.masked_fill(~window.unsqueeze(1), -torch.inf),
        wide(sink).view(1, heads, 1, 1).expand(b, heads, s, 1),
    )
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    return weights[..., : main.shape[1]].sum(1)


def under_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Attention [B, heads, T, hd] less the share of the sum that the sink takes."""
    kept = torch.sigmoid(lse - sink.view(1, -1, 1))
    return (out.float() * kept.unsqueeze(-1)).to(out.dtype)


def divergence(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target || softmax(logits)) per row, averaged with the row's attention as weight."""
    mass = target.sum(-1, keepdim=True)
    wanted = target / mass.clamp(min=1e-6)
    given = torch.log_softmax(logits, dim=-1).clamp(min=-40)
    rows = (wanted * (torch.log(wanted.clamp(min=1e-9)) - given)).sum(-1)
    return (rows * mass.squeeze(-1)).sum() / mass.sum().clamp(min=1e-6)


class Attend:
    """Attention with masks written out, [B, heads, T, N + T] in memory."""

    def __init__(
        self,
        config: ModelConfig,
        compiled: Callable[[Any], Any] = lambda f: f,
    ) -> None:
        self.config = config
        self.selected: dict[int, torch.Tensor] = {}  # by index source
        self._candidates: torch.Tensor | None = None
        self._scores = compiled(index_scores)
        self._target = compiled(attention_target)
        self._divergence = compiled(divergence)

    def __call__(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        main: MainKeys | None,
        sink: torch.Tensor,
        masks: Masks,
        spec: LayerSpec,
        is_decoder: bool,
        selecting: bool,
    ) -> torch.Tensor:
        """[B, heads, T, hd] of q [B, heads, T, hd] and window keys [B, T, hd]."""
        columns = torch.arange(key.shape[1], device=q.device)
        seen, keys = [self._window_mask(masks, columns, is_decoder)], [key]
        if main is not None:
            mask = visible_entries(masks, main.ratio, columns)
            if selecting:
                assert spec.index_source is not None
                mask = mask & self.selected[spec.index_source]
            seen.insert(0, mask)
            keys.insert(0, main.main)
        values = torch.cat(keys, dim=1).unsqueeze(1)
        scores = wide(q @ values.transpose(2, 3)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.cat(seen, dim=-1).unsqueeze(1), -torch.inf)
        last = wide(sink).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, last), dim=-1), dim=-1)[..., :-1]
        return weights.to(q.dtype) @ values

    def _window_mask(self, masks: Masks, columns: torch.Tensor, is_decoder: bool) -> torch.Tensor:
        distance = columns.unsqueeze(-1) - columns
        near = (distance >= 0) & (distance < self.config.sliding_window)
        own = masks.history if is_decoder else masks.document
        return near & (own.unsqueeze(-1) == own.unsqueeze(1))

    # ---- the index branch ------------------------------------------------------------------

    def index_logits(
        self, queries: tuple[torch.Tensor, torch.Tensor], main: MainKeys, masks: Masks
    ) -> torch.Tensor:
        """Scores [B, S, N] of the sampled rows, -inf where nothing is to be seen."""
        q, weights = (part[:, masks.sample] for part in queries)
        scores = self._scores(q, weights, main.index)
        return scores.masked_fill(~visible_entries(masks, main.ratio, masks.sample), -1e9)

    @torch.no_grad()
    def select(
        self,
        spec: LayerSpec,
        queries: tuple[torch.Tensor, torch.Tensor],
        main: MainKeys,
        masks: Masks,
    ) -> None:
        """Keep, for this index source and all columns, the entries that its scores choose."""
        c, columns = self.config, torch.arange(queries[0].shape[1], device=queries[0].device)
        scores = self._scores(*queries, main.index)
        scores = scores.masked_fill(~visible_entries(masks, main.ratio, columns), -torch.inf)
        if spec.index == c.candidate_source_layer_id:
            self._candidates = candidates(scores, c.candidate_topk_blocks, c.candidate_block_size)
        elif 0 <= c.candidate_source_layer_id < spec.index:
            assert spec.kind is LayerKind.REINDEX and self._candidates is not None
            scores = scores.masked_fill(~self._candidates, -torch.inf)
        self._keep(spec.index, choose(scores, c.index_topk), main, masks)

    def _keep(self, layer: int, chosen: torch.Tensor, main: MainKeys, masks: Masks) -> None:
        self.selected[layer] = chosen

    @torch.no_grad()
    def target(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        main: MainKeys,
        sink: torch.Tensor,
        masks: Masks,
    ) -> torch.Tensor:
        """[B, S, N]: where this layer's heads look, of all that is visible."""
        at, width = masks.sample, self.config.sliding_window
        distance = torch.arange(width, device=q.device)
        before = at.unsqueeze(-1) - distance
        own = masks.document[:, before.clamp(min=0)] == masks.document[:, at].unsqueeze(-1)
        seen = visible_entries(masks, main.ratio, at)
        window = own & (before >= 0)
        scale = q.shape[-1] ** -0.5
        return self._target(q[:, :, at], key, main.main, sink, seen, window, at, scale)

    def index_loss(self, logits: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
        return self._divergence(logits, torch.stack(targets).sum(0))


class FlexAttend(Attend):
    """The same by flex_attention. `start` takes a batch's masks before its forward."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: str) -> None:
        super().__init__(config, lambda f: torch.compile(f, dynamic=False))
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        self._block_mask_type = BlockMask
        self._flex: Any = torch.compile(flex_attention, dynamic=False)
        self._under_sink = torch.compile(under_sink, dynamic=False)
        # Rules read these, so they keep their place from step to step.
        self._document = torch.zeros((batch, length), dtype=torch.int32, device=device)
        self._history = torch.zeros_like(self._document)
        self._blocks: dict[tuple[int, bool, int], Any] = {}
        self._rules: dict[tuple[int, bool, int], Any] = {}  # one object each, or it is recompiled
        self._chosen: dict[int, torch.Tensor] = {}

    def start(self, masks: Masks) -> None:
        self._document.copy_(masks.document)
        self._history.copy_(masks.history)
        self._blocks.clear()

    def _rule(self, ratio: int, is_decoder: bool, chosen: torch.Tensor | None) -> Any:
        width, length = self.config.sliding_window, self._document.shape[1]
        document, own = self._document, self._history if is_decoder else self._document
        entries = length // ratio if ratio else 0

        def window(b: Any, h: Any, row: Any, column: Any) -> Any:
            near = (column <= row) & (row - column < width)
            return near & (own[b, row] == own[b, column])

        if not ratio:
            return window

        def both(b: Any, h: Any, row: Any, column: Any) -> Any:
            entry = column.clamp(max=entries - 1)
            seen = (entry * ratio + ratio - 1 <= row) & (
                document[b, row] == document[b, entry * ratio]
            )
            if chosen is not None:
                seen = seen & chosen[b, row, entry]
            is_main = column < entries
            return (is_main & seen) | (
                ~is_main & window(b, h, row, (column - entries).clamp(min=0))
            )

        return both

    def _block_mask(self, ratio: int, is_decoder: bool, source: int) -> Any:
        """`source` is the index source whose choice counts, -1 for all that is visible."""
        place = (ratio, is_decoder, source)
        if place not in self._blocks:
            if place not in self._rules:
                chosen = self._chosen[source] if source >= 0 else None
                self._rules[place] = self._rule(ratio, is_decoder, chosen)
            length = self._document.shape[1]
            near = visible_blocks(self._document, ratio, self.config.sliding_window)
            self._blocks[place] = self._block_mask_type.from_kv_blocks(
                near.sum(-1).int(),
                near.int().argsort(dim=-1, descending=True, stable=True).int(),
                BLOCK_SIZE=BLOCK,
                mask_mod=self._rules[place],
                seq_lengths=(length, length + (length // ratio if ratio else 0)),
            )
        return self._blocks[place]

    def _keep(self, layer: int, chosen: torch.Tensor, main: MainKeys, masks: Masks) -> None:
        if layer in self._chosen:
            self._chosen[layer].copy_(chosen)
        else:
            self._chosen[layer] = chosen

    def __call__(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        main: MainKeys | None,
        sink: torch.Tensor,
        masks: Masks,
        spec: LayerSpec,
        is_decoder: bool,
        selecting: bool,
    ) -> torch.Tensor:
        keys = key if main is None else torch.cat((main.main, key), dim=1)
        source = -1
        if selecting and main is not None:
            assert spec.index_source is not None
            source = spec.index_source
        mask = self._block_mask(0 if main is None else main.ratio, is_decoder, source)
        keys = keys.unsqueeze(1)
        out, lse = self._flex(q, keys, keys, block_mask=mask, enable_gqa=True, return_lse=True)
        return self._under_sink(out, lse, sink)
