"""One layer's attention: window keys, global KV entries, selection, output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch

from headrace.kernels import Kernels
from headrace.model.config import LayerKind, ModelConfig
from headrace.model.layout import CacheLayout, SourceLayout, TailLayout
from headrace.model.params import CompressorParams, LayerParams
from headrace.model.plan import CallPlan, GroupWrites, HalfPlan, Segment
from headrace.model.row_format import RowFormat, RowKind
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
    c: ModelConfig,
    k: Kernels,
    p: LayerParams,
    x: torch.Tensor,
    phase: torch.Tensor,
    window: RowFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query latents [n, q_lora], rotated queries [n, heads, hd] and window keys of x [n, D], packed
    as `window` says, at the positions of `phase`."""
    projected = x @ p.qkv
    qr = k.rms_norm(projected[:, : c.q_lora_rank], p.q_norm, c.rms_norm_eps)
    q = (qr @ p.wq_b).view(-1, c.num_attention_heads, c.head_dim)
    if c.is_v4:
        q = k.unit_norm(q, c.rms_norm_eps, p.q_norm.dtype)
    k.rotate_(q, phase)
    keys = k.rms_norm(projected[:, c.q_lora_rank :], p.kv_norm, c.rms_norm_eps)
    return qr, q, window.encode(k, k.rotate_(keys, phase))


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
        tails = self.layout.layer_tails(p.spec.index)
        latent = self._latents(params.main, x, writes, tails[0] if tails else None)
        index = None
        if params.index is not None:
            index = self._latents(params.index, x, writes, tails[1])
        if not writes.count:
            return
        if params.index_k is not None:
            index = k.rms_norm(latent @ params.index_k, params.index_norm, eps)
        source = self.layout.source(p.spec.index)
        if index is not None:
            data_view, scale_view = self._index_views(source)
            data, scales = self._encode_index(k.rotate_(index, group_phase))
            data_view[writes.blocks, writes.entries] = data
            scale_view[writes.blocks, writes.entries] = scales
        main = self.layout.formats.main.encode(k, k.rotate_(latent, group_phase))
        self._main_view(source)[writes.blocks, writes.entries] = main
        self.groups_written += writes.count

    def _latents(
        self, c: CompressorParams, x: torch.Tensor, w: GroupWrites, tail: TailLayout | None
    ) -> torch.Tensor:
        """Normed entries [groups, channels] before rotation; the tail takes this call's rows."""
        if tail is None:  # ratio 1: nothing to pool
            latent = x[w.rows] @ c.project if w.count != x.shape[0] else (x @ c.project)
        else:
            latent = self._pooled(c, x, w, tail)
        if not w.count:
            return latent
        return self.kernels.rms_norm(latent, c.norm, self.config.rms_norm_eps)

    def _main_view(self, s: SourceLayout) -> torch.Tensor:
        """Main rows of a source, a view [n_blocks, rows, bytes]."""
        return self._section(s.main_offset, s.rows_per_block, s.main_row_bytes)

    def _index_views(self, s: SourceLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Index data and scales of a source that has them: views [n_blocks, rows, bytes]."""
        rows = s.rows_per_block
        data = self._section(s.index_data_offset, rows, s.index_data_bytes)
        return data, self._section(s.index_scale_offset, rows, s.index_scale_bytes)

    def _section(self, offset: int, rows: int, width: int) -> torch.Tensor:
        blocks = self.state.blocks
        part = blocks[:, offset : offset + rows * width]
        return part.view(blocks.shape[0], rows, width)

    def _encode_index(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scale bytes of rotated index keys [g, ihd]."""
        k, form = self.kernels, self.layout.formats.index
        if form.kind is RowKind.FLOAT32:
            return form.encode(k, x), x.new_empty((x.shape[0], 0), dtype=torch.uint8)
        data, scales = k.quantize_mxfp4(k.hadamard(x) if self.config.is_v4 else x)
        return data, scales

    def _main_words(self, s: SourceLayout) -> torch.Tensor:
        """Main rows of a source in the widest integers that divide them: gathers go by element."""
        size = math.gcd(8, s.main_offset, s.main_row_bytes, self.layout.block_bytes)
        words = self.state.blocks.view(_WORDS[size])
        first, count = s.main_offset // size, s.rows_per_block * s.main_row_bytes // size
        return words[:, first : first + count].view(-1, s.rows_per_block, s.main_row_bytes // size)

    def _pooled(
        self, c: CompressorParams, x: torch.Tensor, w: GroupWrites, t: TailLayout
    ) -> torch.Tensor:
        ring, wide = self.state.tail(t), c.project.dtype
        both = (x.to(wide) @ c.project).unflatten(-1, (2, -1))
        if c.ape is not None:
            both[:, 0] += c.ape[self.plan.encoder.positions % t.ratio]
            # What a window record carries is what is used: float32 in either numerics class.
            both = both.to(self.state.tail_dtype).to(wide)
        latent = x.new_empty((0, t.width))
        if w.count:
            kept = ring[w.slots.unsqueeze(-1), w.earlier_tail].to(wide)
            inside = w.earlier_in_call[..., None, None]
            earlier = torch.where(inside, both[w.earlier_rows], kept)
            group = torch.cat((earlier, both[w.rows].unsqueeze(1)), dim=1)
            z, v = group[:, :, 0], group[:, :, 1]
            if w.absent is None:
                latent = self.kernels.pool(z, v).to(x.dtype)
            else:
                latent = self.kernels.pool_overlapped(z, v, w.absent).to(x.dtype)
        # Read before stored: a call longer than the tail ring overwrites what it read.
        ring[w.tail_slots, w.tail_ring] = both[w.tail_rows].to(ring.dtype)
        return latent

    # ---- selection -------------------------------------------------------------------------

    def select(self, p: LayerParams, x: torch.Tensor, qr: torch.Tensor, s: HalfScratch) -> None:
        """Choose entries for every row and gather them; replaces the half's selection."""
        c, k, params = self.config, self.kernels, p.index
        kv_source = p.spec.kv_source
        assert params is not None and kv_source is not None
        source = self.layout.source(kv_source)
        q = (qr @ params.wq).view(s.plan.n, c.index_n_heads, c.index_head_dim)
        q = self._round_index(k.rotate_(q, s.compressed_phase))
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
            data_view, scale_view = self._index_views(source)
            total = segment.longest // source.ratio
            tables, wide = segment.tables, self.state.accumulate
            data = data_view[tables].flatten(1, 2)[:, :total]
            form = self.layout.formats.index
            if form.kind is RowKind.FLOAT32:
                s.index_keys[key] = form.decode(self.kernels, data, wide)
            else:
                scales = scale_view[tables].flatten(1, 2)[:, :total]
                s.index_keys[key] = self.kernels.dequantize_mxfp4(data, scales, wide)
        return s.index_keys[key]

    def _round_index(self, q: torch.Tensor) -> torch.Tensor:
        """Index queries as their keys are stored."""
        k = self.kernels
        if self.layout.formats.index.kind is RowKind.FLOAT32:
            return q
        return k.round_mxfp4(k.hadamard(q) if self.config.is_v4 else q)

    def look_at_all(self, p: LayerParams, s: HalfScratch) -> None:
        """A heavy layer's selection: every entry that is visible to the row."""
        source = self.layout.source(p.spec.index)
        visible = s.plan.visible[source.ratio].unsqueeze(-1)
        width = max(g.longest for g in s.plan.segments) // source.ratio
        entry = torch.arange(width, device=visible.device).expand(s.plan.n, width)
        s.selection = entry.masked_fill(entry >= visible, -1)
        self._gather_main(source, s)

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
        s.main = self.layout.formats.main.decode(self.kernels, rows, self.state.accumulate)
        s.main_dead = dead

    # ---- one sublayer ----------------------------------------------------------------------

    def run(self, p: LayerParams, x: torch.Tensor, s: HalfScratch) -> torch.Tensor:
        """Attention output [n, D] of normed rows x [n, D]; stores the rows' window keys."""
        c, k = self.config, self.kernels
        phase = s.compressed_phase if p.compressed_rope else s.base_phase
        back = s.compressed_back if p.compressed_rope else s.base_back
        qr, q, own = project_rows(c, k, p, x, phase, self.layout.formats.window)
        if p.index is not None:
            self.select(p, x, qr, s)
        elif p.spec.kind is LayerKind.HEAVY:
            self.look_at_all(p, s)
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
        decode = partial(self.layout.formats.window.decode, self.kernels)
        dtype = self.state.accumulate
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
