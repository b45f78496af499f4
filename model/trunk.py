"""The text trunk: embedding, residual streams, layers, head. One entry for rows of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headrace.kernels import frequencies, kernels_for, phases, yarn_frequencies
from headrace.model.attention import Attention, Capture, HalfScratch
from headrace.model.config import ModelConfig
from headrace.model.dspark import DraftBatch, DraftBlock, commit, draft_block
from headrace.model.engram_hash import hashes_of, map_history
from headrace.model.engram_store import EngramTable
from headrace.model.errors import BatchError, ConfigError, StateError
from headrace.model.numerics import Numerics, Precision
from headrace.model.params import LayerParams, ParamBuilder
from headrace.model.plan import CallPlan, HalfPlan, Planner
from headrace.model.rows import RowBatch, RowResult
from headrace.model.state import KvState
from headrace.model.sublayers import Streams, Sublayers
from headrace.model.weights import RandomTensors, random_weights_id


class Trunk(nn.Module):
    """A text model of either family on one device in one numerics class; weights never change."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        numerics: Numerics,
        device: str | torch.device = "cpu",
        *,
        token_map: NDArray[np.int64],
        weights_id: str,
        masked_token_ids: Sequence[int] = (),
        compute_dtype: torch.dtype | None = None,
        encoder_only: bool = False,
        engram_tables: Mapping[int, EngramTable] | None = None,
        widen_on_use: bool = False,
    ) -> None:
        """`tensors` are checkpoint names -> values of any float dtype ([out, in] matrices).

        `token_map` is int64 [vocab]; its ids must be 0..engram_compressed_vocab_size-1 (read by
        Engram alone).
        Logits at `masked_token_ids` are -inf. With `encoder_only` the decoder layers' weights are
        not looked up, but for the first one's KV source, and batches with decoder rows are
        refused. `engram_tables` (by layer) stand in place of the tables' tensors.
        With `widen_on_use` layers are built from `tensors` whenever they run. Raises ConfigError.
        """
        super().__init__()
        _check_token_map(config, token_map)
        self.config = config
        self.numerics = numerics
        self.weights_id = weights_id
        self.device = torch.device(device)
        self.precision = Precision.of(numerics, compute_dtype)
        self.token_map = np.ascontiguousarray(token_map, dtype=np.int64)
        self.kernels = kernels_for(self.device)
        self.encoder_only = encoder_only
        builder = ParamBuilder(
            config, tensors, self.precision, self.device, engram_tables, on_use=widen_on_use
        )
        self.params = builder.build_encoder() if encoder_only else builder.build()
        self.engram = [p.engram.table for p in self.params.layers if p.engram is not None]
        self.hashes = hashes_of(config)
        ids = sorted(set(masked_token_ids))
        if ids and not 0 <= ids[0] <= ids[-1] < config.vocab_size:
            raise ConfigError(f"masked_token_ids: found {ids}, wanted 0..{config.vocab_size - 1}")
        self.masked = torch.tensor(ids, dtype=torch.int64, device=self.device)
        self._base_freqs, self._compressed_freqs = _rope_tables(config, self.precision)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int,
        numerics: Numerics,
        device: str | torch.device = "cpu",
        masked_token_ids: Sequence[int] = (),
        *,
        token_map: NDArray[np.int64] | None = None,
        compute_dtype: torch.dtype | None = None,
        encoder_only: bool = False,
        engram_tables: Mapping[int, EngramTable] | None = None,
    ) -> Trunk:
        """Seeded random weights, equal on every platform; only the tensors that the build needs
        are drawn.

        Without `token_map` ids are folded modulo `engram_compressed_vocab_size`.
        """
        if token_map is None:
            token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
        return cls(
            config,
            RandomTensors(config, seed),
            numerics,
            device,
            token_map=token_map,
            weights_id=random_weights_id(config, seed, token_map),
            masked_token_ids=masked_token_ids,
            compute_dtype=compute_dtype,
            encoder_only=encoder_only,
            engram_tables=engram_tables,
        )

    def forward(self, batch: RowBatch, state: KvState, *, capture: bool = False) -> RowResult:
        """Run all rows once; mutates `state` and nothing else.

        Order inside a layer: ring history is read, keys of all rows are made, sources write
        their groups, rows score and select, attend, and the newest ring rows stay. A call may
        be longer than the ring. Raises BatchError or StateError before anything is changed.
        """
        self._check_state(state)
        captured = Capture() if capture else None
        with torch.inference_mode():
            ratios = tuple(sorted({s.ratio for s in state.layout.sources}))
            planner = Planner(
                state.layout,
                ratios,
                self.config.engram_max_ngram_size,
                self.device,
                state.ring_layers,
            )
            plan = planner.plan(batch)
            self._check_limits(batch, plan, state)
            run = _Call(self, state, plan, captured)
            logits = run.forward(batch.embeddings)
        return RowResult(
            logits=logits.clone(),  # outside inference mode: a tensor like any other
            encoder_rows=run.encoder_rows,
            decoder_rows=run.decoder_rows,
            groups_written=run.attention.groups_written,
            selections={} if captured is None else captured.selections,
            candidates=None if captured is None else captured.candidates,
        )

    def draft(
        self, batch: DraftBatch, state: KvState, *, temperatures: Sequence[float] = ()
    ) -> DraftBlock:
        """A block of drafts for every sequence of `batch`; changes nothing.

        `temperatures`: one a step for the confidences, 1 by default. Raises BatchError without a
        drafter or for a value out of range, StateError as `forward`."""
        self._check_state(state)
        return draft_block(self, batch, state, temperatures)

    @property
    def reads_ahead(self) -> bool:
        """Whether `expect` does anything: some Engram table lies in a file."""
        return any(table.reads_ahead for table in self.engram)

    def expect(self, history_ids: NDArray[np.int64], history_image: NDArray[np.bool_]) -> None:
        """Rows with these histories (as in `RowBatch`) will run in a later call: a hint to the
        Engram tables, which changes no result. From the thread of `forward`."""
        if self.reads_ahead:
            for table, rows in self.engram_rows(history_ids, history_image):
                table.expect(rows)

    def engram_rows(
        self, history_ids: NDArray[np.int64], history_image: NDArray[np.bool_]
    ) -> list[tuple[EngramTable, NDArray[np.int64]]]:
        """Every Engram layer's table and the rows [n, k] of it that these histories read."""
        pad = self.config.engram_pad_token_id
        mapped = map_history(history_ids, history_image, self.token_map, pad)
        hashes = self.hashes[: len(self.engram)]
        return [(t, h.rows(mapped)) for t, h in zip(self.engram, hashes, strict=True)]

    def _check_state(self, state: KvState) -> None:
        if state.config is not self.config and state.config != self.config:
            raise StateError("state was made for another model configuration")
        if state.accumulate != self.precision.accumulate or state.numerics != self.numerics:
            raise StateError(f"state is {state.numerics}, the model {self.numerics}")
        if state.device != self.device:
            raise StateError(f"state lies on {state.device}, the model on {self.device}")

    def _check_limits(self, batch: RowBatch, plan: CallPlan, state: KvState) -> None:
        ids, c = plan.history, self.config
        if plan.decoder is not None:
            if self.encoder_only:
                raise BatchError("decoder: found rows, this model holds the encoder half only")
            if state.ring_layers < self.config.num_hidden_layers:
                raise BatchError("decoder: found rows, this state holds the encoder half only")
        if c.is_v4 and plan.history_image.any():
            raise BatchError("history_image: found image rows, this model has no vision")
        if ids.max() >= c.vocab_size or ids.min() < -1 or ids[:, 0].min() < 0:
            raise BatchError(f"history_ids: found outside 0..{c.vocab_size - 1} (-1 = before)")
        longest = max(s.longest for s in plan.encoder.segments)
        if longest > c.max_position_embeddings:
            raise BatchError(f"position {longest - 1} is not below {c.max_position_embeddings}")
        if int(batch.slots.max()) >= state.n_slots or int(batch.slots.min()) < 0:
            raise BatchError(f"slots: found outside 0..{state.n_slots - 1}")
        if int(batch.block_tables.max()) >= state.n_blocks:
            raise BatchError(f"block_tables: found outside 0..{state.n_blocks - 1}")

    def phases(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(base, compressed) rotations of int64 positions [n]: complex [n, rd/2] each."""
        base = phases(positions, self._base_freqs.to(self.device))
        return base, phases(positions, self._compressed_freqs.to(self.device))


def _check_token_map(config: ModelConfig, token_map: NDArray[np.int64]) -> None:
    if not config.engram_layer_ids:
        return  # nothing reads it
    if token_map.shape != (config.vocab_size,):
        raise ConfigError(f"token map: found {token_map.shape}, wanted ({config.vocab_size},)")
    size = int(token_map.max()) + 1
    if size != config.engram_compressed_vocab_size or token_map.min() < 0:
        raise ConfigError(
            f"engram_compressed_vocab_size: found {config.engram_compressed_vocab_size}, "
            f"wanted {size}, the size of the token map"
        )


def _rope_tables(config: ModelConfig, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    rd, dtype, y = config.qk_rope_head_dim, precision.accumulate, config.rope_scaling
    base = frequencies(rd, config.rope_theta, dtype)
    compressed = yarn_frequencies(
        rd,
        config.compress_rope_theta,
        y.factor,
        y.beta_fast,
        y.beta_slow,
        y.original_max_position_embeddings,
        dtype,
    )
    return base, compressed


class _Call:
    """One forward: carries the streams through the layers and counts the rows that passed."""

    def __init__(
        self, trunk: Trunk, state: KvState, plan: CallPlan, capture: Capture | None
    ) -> None:
        self.trunk = trunk
        self.config = trunk.config
        self.kernels = trunk.kernels
        self.sublayers = Sublayers(trunk.config, trunk.kernels)
        self.plan = plan
        self.state = state
        self.taps: list[torch.Tensor] = []
        self.attention = Attention(trunk.config, trunk.kernels, state, plan, capture)
        self.image = plan.history_image[:, 0]
        self.encoder_rows = 0
        self.decoder_rows = 0
        self._group_phase = {
            ratio: trunk.phases(w.positions)[1] for ratio, w in plan.writes.items()
        }

    def forward(self, embeddings: torch.Tensor | None) -> torch.Tensor:
        """float32 logits [n_logits, vocab]."""
        c = self.config
        streams = self._embed(embeddings)
        engram_rows = self._fetch_engram()
        half = self._half(self.plan.encoder)
        for p in self.trunk.params.layers:
            if p.engram is not None:
                self._engram(p, streams, engram_rows[p.engram.number](), half.plan)
            if p.spec.index in c.dspark_target_layer_ids:
                self.taps.append(streams.h.mean(1))
            x = self.sublayers.enter(p.attn_mix, p.attn_norm, streams)
            if p.spec.owns_kv:
                self.attention.publish(p, x, self._group_phase[p.spec.ratio])
            if p.spec.index == c.first_decoder_layer:
                if self.plan.decoder is None:
                    break
                half = self._half(self.plan.decoder)
                if (index := half.plan.row_index) is not None:
                    x, streams.h, streams.pre = x[index], streams.h[index], streams.pre[index]
                    self.taps = [tap[index] for tap in self.taps]
            attend = partial(self.attention.run, p, s=half)
            self.sublayers.run(p, x, streams, attend, half.plan.image, self._hashed_ids(p))
            if p.spec.index == c.first_decoder_layer - 1:
                self.encoder_rows = streams.h.shape[0]
        else:
            if c.n_decoder_layers:
                self.decoder_rows = streams.h.shape[0]
            self._commit_drafter(half)
            return self._logits(streams)
        return torch.zeros((0, c.vocab_size), dtype=torch.float32, device=self.trunk.device)

    def _hashed_ids(self, p: LayerParams) -> torch.Tensor | None:
        """Token ids of the call's rows where the layer's experts follow from them."""
        if p.experts_by_token is None:
            return None
        ids = np.ascontiguousarray(self.plan.history[:, 0])
        return torch.from_numpy(ids).to(self.trunk.device)

    def _embed(self, embeddings: torch.Tensor | None) -> Streams:
        t = self.trunk
        ids = torch.from_numpy(np.ascontiguousarray(self.plan.history[:, 0])).to(t.device)
        x = t.params.embed[ids]
        if embeddings is not None and self.image.any():
            image = torch.from_numpy(self.image).to(t.device).unsqueeze(-1)
            x = torch.where(image, embeddings.to(t.device, x.dtype), x)
        return self.sublayers.start(x, t.precision.accumulate)

    def _half(self, plan: HalfPlan) -> HalfScratch:
        base, compressed = self.trunk.phases(plan.positions)
        return HalfScratch(
            plan=plan,
            base_phase=base,
            compressed_phase=compressed,
            base_back=base.conj().resolve_conj(),
            compressed_back=compressed.conj().resolve_conj(),
        )

    def _fetch_engram(self) -> list[Callable[[], torch.Tensor]]:
        """Rows [n, rows per token * width] of every Engram layer, begun before a layer runs."""
        if not self.trunk.engram:
            return []
        wanted = self.trunk.engram_rows(self.plan.history, self.plan.history_image)
        return [table.fetch(rows) for table, rows in wanted]

    def _engram(self, p: LayerParams, streams: Streams, rows: torch.Tensor, plan: HalfPlan) -> None:
        e = p.engram
        assert e is not None
        streams.h = self.kernels.add_engram(
            streams.h, rows, e.wkv, e.qk_weight, plan.image, self.config.rms_norm_eps
        )

    def _commit_drafter(self, half: HalfScratch) -> None:
        """Drafter rows of the decoder rows, or of all rows where there is no decoder half."""
        if (drafter := self.trunk.params.drafter) is not None:
            c, k, phase = self.config, self.kernels, half.base_phase
            commit(c, k, drafter, self.taps, half.plan, phase, self.state)

    def _logits(self, streams: Streams) -> torch.Tensor:
        t, decoder = self.trunk, self.plan.decoder
        h, pre = streams.h, streams.pre
        if not self.config.n_decoder_layers:  # nothing has dropped the other rows yet
            if decoder is None:
                h, pre = h[:0], pre[:0]
            elif decoder.row_index is not None:
                h, pre = h[decoder.row_index], pre[decoder.row_index]
        if (rows := self.plan.logits_rows) is not None:
            h, pre = h[rows], pre[rows]
        if (mix := t.params.head_mix) is not None:
            c = self.config
            pre = self.kernels.head_gates(h, mix.fn, mix.base, mix.scale, c.rms_norm_eps, c.hc_eps)
        streams = Streams(h, pre)
        x = self.sublayers.collapse(streams, t.params.norm)
        logits = t.precision.publish_logits(x.to(t.params.head.dtype) @ t.params.head)
        if t.masked.numel():
            logits[:, t.masked] = -torch.inf
        return logits
