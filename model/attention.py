"""One layer's attention: window keys, global KV entries, selection, output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from headrace.kernels import Kernels
from headrace.model.config import LayerKind, ModelConfig
from headrace.model.layout import CacheLayout, SourceLayout
from headrace.model.params import LayerParams
from headrace.model.plan import CallPlan, GroupWrites, HalfPlan, Segment
from headrace.model.state import KvState

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass
class HalfScratch:
    """What layers of one half hand to later ones inside a call; nothing survives the call."""

    plan: HalfPlan
    base_phase: torch.Tensor
    compressed_phase: torch.Tensor
    base_back: torch.Tensor
    compressed_back: torch.Tensor
    selection: torch.Tensor | None = None  # int64 [n, width], -1 padded
    main: torch.Tensor | None = None  # selected main entries [n, width, hd], dead ones zero
    main_dead: torch.Tensor | None = None
    candidates: list[torch.Tensor] = field(default_factory=list)  # per segment
    index_keys: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass
class Capture:
    """Selections of a call for tests and tools."""

    selections: dict[int, torch.Tensor] = field(default_factory=dict)
    candidates: torch.Tensor | None = None


def project_rows(
    c: ModelConfig, k: Kernels, p: LayerParams, x: torch.Tensor, phase: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query latents [n, q_lora], rotated queries [n, heads, hd] and packed window keys of x [n, D]
    at the positions of `phase`."""
    projected = x @ p.qkv
    qr = k.rms_norm(projected[:, : c.q_lora_rank], p.q_norm, c.rms_norm_eps)
    q = (qr @ p.wq_b).view(-1, c.num_attention_heads, c.head_dim)
    k.rotate_(q, phase)
    keys = k.rms_norm(projected[:, c.q_lora_rank :], p.kv_norm, c.rms_norm_eps)
    return qr, q, k.quantize_fp8_rows(k.rotate_(keys, phase))


def project_output(
    c: ModelConfig,
    k: Kernels,
    p: LayerParams,
    out: torch.Tensor,
    back: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attended values [n, heads, hd] -> the sublayer's output [n, D]; `back` undoes the rotation
    of the query positions."""
    out = k.rotate_(out, back).to(dtype)
    groups = out.reshape(out.shape[0], c.o_groups, -1).transpose(0, 1)
    low = torch.bmm(groups, p.wo_a).transpose(0, 1).flatten(1)
    return low @ p.wo_b


class Attention:
    """Runs attention sublayers of one call against one state (which it mutates)."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        state: KvState,
        plan: CallPlan,
        capture: Capture | None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.state = state
        self.layout: CacheLayout = state.layout
        self.plan = plan
        self.capture = capture
        self.groups_written = 0

    # ---- global KV -------------------------------------------------------------------------

    def publish(self, p: LayerParams, x: torch.Tensor, group_phase: torch.Tensor) -> None:
        """Write the groups of source layer `p` that complete in this call; keep the tails.

        `x` holds all rows of the call; `group_phase` is the rotation at each group's first token.
        """
        params = p.compressor
        if params is None:
            raise ValueError(f"layer {p.spec.index} is no kv source")
        writes, k, eps = self.plan.writes[p.spec.ratio], self.kernels, self.config.rms_norm_eps
        if p.spec.ratio == 1:
            latent = (
                x[writes.rows] @ params.project
                if writes.count != x.shape[0]
                else (x @ params.project)
            )
        else:
            latent = self._pooled(p, x, writes)
        if not writes.count:
            return
        latent = k.rms_norm(latent, params.norm, eps)
        index = k.rms_norm(latent @ params.index_k, params.index_norm, eps)
        packed, scales = k.quantize_mxfp4(k.rotate_(index, group_phase))
        main = k.quantize_nvfp4_rows(k.rotate_(latent, group_phase))
        source = self.layout.source(p.spec.index)
        main_view, data_view, scale_view = self._source_views(source)
        main_view[writes.blocks, writes.entries] = main
        data_view[writes.blocks, writes.entries] = packed
        scale_view[writes.blocks, writes.entries] = scales
        self.groups_written += writes.count

    def _source_views(self, s: SourceLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Main rows, index data, index scales of a source: views [n_blocks, rows, bytes]."""
        blocks, rows = self.state.blocks, s.rows_per_block

        def view(offset: int, width: int) -> torch.Tensor:
            return blocks[:, offset : offset + rows * width].view(-1, rows, width)

        return (
            view(s.main_offset, s.main_row_bytes),
            view(s.index_data_offset, s.index_data_bytes),
            view(s.index_scale_offset, s.index_scale_bytes),
        )

    def _main_words(self, s: SourceLayout) -> torch.Tensor:
        """Main rows of a source in the widest integers that divide them: gathers go by element."""
        size = math.gcd(8, s.main_offset, s.main_row_bytes, self.layout.block_bytes)
        words = self.state.blocks.view(_WORDS[size])
        first, count = s.main_offset // size, s.rows_per_block * s.main_row_bytes // size
        return words[:, first : first + count].view(-1, s.rows_per_block, s.main_row_bytes // size)

    def _pooled(self, p: LayerParams, x: torch.Tensor, w: GroupWrites) -> torch.Tensor:
        params = p.compressor
        assert params is not None
        tails = self.state.tails[:, self.layout.tail_layers.index(p.spec.index)]
        both = (x.to(params.project.dtype) @ params.project).unflatten(-1, (2, -1))
        latent = x.new_empty((0, self.config.head_dim))
        if w.count:
            kept = tails[w.slots.unsqueeze(-1), w.earlier_tail]
            inside = w.earlier_in_call[..., None, None]
            earlier = torch.where(inside, both[w.earlier_rows], kept)
            group = torch.cat((earlier, both[w.rows].unsqueeze(1)), dim=1)
            latent = self.kernels.pool(group[:, :, 0], group[:, :, 1]).to(x.dtype)
        # Read before stored: a call longer than the tail ring overwrites what it read.
        tails[self.plan.tail_slots, self.plan.tail_ring] = both[self.plan.tail_rows]
        return latent

    # ---- selection -------------------------------------------------------------------------

    def select(self, p: LayerParams, x: torch.Tensor, qr: torch.Tensor, s: HalfScratch) -> None:
        """Choose entries for every row and gather them; replaces the half's selection."""
        c, k, params = self.config, self.kernels, p.index
        kv_source = p.spec.kv_source
        assert params is not None and kv_source is not None
        source = self.layout.source(kv_source)
        q = (qr @ params.wq).view(s.plan.n, c.index_n_heads, c.index_head_dim)
        q = k.round_mxfp4(k.rotate_(q, s.compressed_phase))
        weights = (x @ params.weights) * (c.index_n_heads**-0.5 * c.index_head_dim**-0.5)
        visible = s.plan.visible[source.ratio]
        is_candidate_source = p.spec.index == c.candidate_source_layer_id
        uses_candidates = 0 <= c.candidate_source_layer_id < p.spec.index
        if is_candidate_source:
            s.candidates = []
        width = min(c.index_topk, max(g.longest for g in s.plan.segments) // source.ratio)
        parts = []
        for number, segment in enumerate(s.plan.segments):
            total = segment.longest // source.ratio
            if total == 0:
                parts.append(q.new_full((segment.m * segment.n_sequences, width), -1.0).long())
                if is_candidate_source:
                    s.candidates.append(q.new_zeros((parts[-1].shape[0], 0), dtype=torch.bool))
                continue
            keys = self._index_keys(source, segment, number, s)
            shape = (segment.n_sequences, segment.m)
            scores = k.index_scores(
                q[segment.rows].view(*shape, c.index_n_heads, c.index_head_dim).to(keys.dtype),
                keys,
                weights[segment.rows].view(*shape, c.index_n_heads).to(keys.dtype),
            ).view(-1, total)
            seen = visible[segment.rows]
            entry = torch.arange(total, device=scores.device)
            scores = scores.masked_fill(entry >= seen.unsqueeze(-1), -torch.inf)
            if is_candidate_source:
                s.candidates.append(
                    k.candidate_entries(
                        scores, seen, c.candidate_topk_blocks, c.candidate_block_size
                    )
                )
            elif uses_candidates:
                scores = scores.masked_fill(~s.candidates[number], -torch.inf)
            parts.append(k.select_top(scores, min(width, c.index_topk), width))
        s.selection = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._gather_main(source, s)
        self._record(p.spec.index, is_candidate_source, s)

    def _record(self, layer: int, is_candidate_source: bool, s: HalfScratch) -> None:
        if self.capture is None or s.selection is None:
            return
        pad = self.config.index_topk - s.selection.shape[1]
        self.capture.selections[layer] = torch.nn.functional.pad(s.selection, (0, pad), value=-1)
        if is_candidate_source:
            longest = max(part.shape[1] for part in s.candidates)
            self.capture.candidates = torch.cat(
                [torch.nn.functional.pad(m, (0, longest - m.shape[1])) for m in s.candidates]
            )

    def _index_keys(
        self, source: SourceLayout, segment: Segment, number: int, s: HalfScratch
    ) -> torch.Tensor:
        """Index keys [sequences, entries, ihd] of a segment, decoded once per call and half."""
        key = (source.layer, number)
        if key not in s.index_keys:
            _, data_view, scale_view = self._source_views(source)
            total = segment.longest // source.ratio
            tables = segment.tables
            data = data_view[tables].flatten(1, 2)[:, :total]
            scales = scale_view[tables].flatten(1, 2)[:, :total]
            s.index_keys[key] = self.kernels.dequantize_mxfp4(data, scales, self.state.tail_dtype)
        return s.index_keys[key]

    def _gather_main(self, source: SourceLayout, s: HalfScratch) -> None:
        selection = s.selection
        assert selection is not None
        if selection.shape[1] == 0:
            s.main, s.main_dead = None, None
            return
        dead = selection < 0
        entry = selection.clamp(min=0)
        block = self.plan.tables[s.plan.sequence.unsqueeze(-1), entry // source.rows_per_block]
        rows = self._main_words(source)[block, entry % source.rows_per_block].view(torch.uint8)
        # Bytes of dead entries may decode to NaN, which a weight of zero would not silence.
        rows.masked_fill_(dead.unsqueeze(-1), 0)
        s.main = self.kernels.dequantize_nvfp4_rows(rows, self.state.tail_dtype)
        s.main_dead = dead

    # ---- one sublayer ----------------------------------------------------------------------

    def run(self, p: LayerParams, x: torch.Tensor, s: HalfScratch) -> torch.Tensor:
        """Attention output [n, D] of normed rows x [n, D]; stores the rows' window keys."""
        c, k = self.config, self.kernels
        phase = s.compressed_phase if p.compressed_rope else s.base_phase
        back = s.compressed_back if p.compressed_rope else s.base_back
        qr, q, own = project_rows(c, k, p, x, phase)
        if p.index is not None:
            self.select(p, x, qr, s)
        use_main = p.spec.kind is not LayerKind.SWA_ONLY and s.main is not None
        windows = self._windows(p.spec.index, own, s.plan)
        parts = []
        for segment, window in zip(s.plan.segments, windows, strict=True):
            rows = segment.rows
            parts.append(
                k.attend(
                    q[rows],
                    window,
                    segment.dead,
                    s.main[rows] if use_main and s.main is not None else None,
                    s.main_dead[rows] if use_main and s.main_dead is not None else None,
                    p.sink,
                    c.head_dim**-0.5,
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return project_output(c, k, p, out, back, x.dtype)

    def _windows(self, layer: int, own: torch.Tensor, plan: HalfPlan) -> list[torch.Tensor]:
        """Per segment the window keys [rows, W, hd], dead ones finite; stores `own` rows.

        History of long segments is read before anything is stored.
        """
        # Ring rows of all slots and layers as one list that starts at this layer's first row.
        rings = self.state.rings.view(-1, self.layout.swa_row_bytes)[
            layer * self.layout.ring_rows :
        ]
        dtype, decode = self.state.tail_dtype, self.kernels.dequantize_fp8_rows
        histories: dict[int, torch.Tensor] = {}
        for number, segment in enumerate(plan.segments):
            if segment.history_dead is not None:
                history = rings.index_select(0, segment.ring_index)
                history.masked_fill_(segment.history_dead, 0)
                histories[number] = torch.cat((history, own[segment.rows]))
        stored = own if plan.stored_rows is None else own[plan.stored_rows]
        rings.index_copy_(0, plan.stored_index, stored)
        width, windows = self.layout.window_tokens, []
        for number, segment in enumerate(plan.segments):
            if segment.short:
                rows = rings.index_select(0, segment.ring_index)
                rows = rows.view(-1, width, self.layout.swa_row_bytes)
                rows.masked_fill_(segment.dead.unsqueeze(-1), 0)
                windows.append(decode(rows, dtype))
            else:
                bank = decode(histories[number], dtype)
                windows.append(bank.unfold(0, width, 1).transpose(1, 2))
        return windows
