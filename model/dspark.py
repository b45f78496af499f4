"""The DSpark drafter: keys from the target's taps, and a block of tokens drafted in one call.

A stage's ring holds projections of what the target felt at a position (its taps), not of the
stage's own hidden rows: `commit` writes them with every decoder row of the target. `draft_block`
then runs the anchor and block - 1 noise rows through the stages; each row sees the W ring rows
before the anchor and all rows of its own block, later ones too. Nothing of a draft is kept.

For an anchor at position a (the newest token, which has no row yet) step i drafts position a+1+i:

    logits_i     = head(norm(h_i)) + markov_head(e_i),  e_i = markov_embed[the token before]
    confidence_i = sigmoid(proj . [h_i ; e_i] / T_i),   h_i before the norm, logit within +-60
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from headrace.kernels import Kernels
from headrace.model.attention import project_output, project_rows
from headrace.model.config import ModelConfig
from headrace.model.errors import BatchError
from headrace.model.numerics import LOGIT_GRID, Numerics
from headrace.model.params import DrafterParams, LayerParams
from headrace.model.plan import HalfPlan
from headrace.model.state import KvState
from headrace.model.sublayers import Sublayers

if TYPE_CHECKING:
    from headrace.model.trunk import Trunk

_CONFIDENCE_LIMIT = 60.0  # of a confidence's logit: its sigmoid is 0 or 1 to 26 digits there


@dataclass(frozen=True)
class DraftBatch:
    """s sequences, one block each; CPU tensors int64 [s].

    `positions` are the anchors': all tokens before have target rows, the drafter rows of
    [max(floors, position - W), position) are committed. `anchors` are token ids.
    """

    slots: torch.Tensor
    anchors: torch.Tensor
    positions: torch.Tensor
    floors: torch.Tensor


class DraftBlock:
    """What the stages made of one `DraftBatch`; steps may be asked for in any order and again.

    Owns its memory; reads the model's weights. `n_steps` is the configuration's block size.
    """

    def __init__(
        self,
        trunk: Trunk,
        hidden: torch.Tensor,
        temperatures: tuple[float, ...],
    ) -> None:
        """`hidden` [s, block, D] are the collapsed streams after the last stage."""
        self._trunk, self._hidden, self._temperatures = trunk, hidden, temperatures
        p, head = _drafter(trunk), trunk.params.head
        normed = trunk.kernels.rms_norm(hidden.flatten(0, 1), p.norm, trunk.config.rms_norm_eps)
        self._base = (normed.to(head.dtype) @ head).view(*hidden.shape[:2], -1)

    @property
    def n_steps(self) -> int:
        return self._hidden.shape[1]

    def step(self, index: int, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [s, vocab], confidences [s]), float32, given the tokens int64 [s] before."""
        t, p = self._trunk, _drafter(self._trunk)
        with torch.inference_mode():
            e = p.markov_embed[previous.to(t.device)].to(p.markov_head.dtype)
            logits = t.precision.publish_logits(self._base[:, index] + e @ p.markov_head)
            if t.masked.numel():
                logits[:, t.masked] = -torch.inf
            both = torch.cat((self._hidden[:, index].to(e.dtype), e), dim=-1)
            scaled = (both @ p.confidence) / self._temperatures[index]
            if t.numerics is Numerics.INVARIANT:  # the grid of the logits, for the same reason
                scaled = torch.round(scaled / LOGIT_GRID) * LOGIT_GRID
            limit = _CONFIDENCE_LIMIT
            confidence = torch.sigmoid(scaled.clamp(-limit, limit)).to(torch.float32)
        return logits.clone(), confidence.clone()


def _drafter(trunk: Trunk) -> DrafterParams:
    if trunk.params.drafter is None:
        raise BatchError("draft: this model holds no drafter")
    return trunk.params.drafter


def commit(
    config: ModelConfig,
    kernels: Kernels,
    p: DrafterParams,
    taps: Sequence[torch.Tensor],
    plan: HalfPlan,
    base_phase: torch.Tensor,
    state: KvState,
) -> None:
    """Write every stage's keys of the target's decoder rows; of long runs the last ring of them.

    `taps` are [n, D], one per target layer, `base_phase` the rows' rotation [n, rd/2].
    """
    joined = torch.cat(tuple(taps), dim=-1)
    if (stored := plan.stored_rows) is not None:
        joined, base_phase = joined[stored], base_phase[stored]
    eps, layout = config.rms_norm_eps, state.layout
    main = kernels.rms_norm(joined @ p.main_proj, p.main_norm, eps)
    rings = state.rings.view(-1, layout.swa_row_bytes)
    for stage, params in enumerate(p.stages):
        keys = main @ params.qkv[:, config.q_lora_rank :]
        keys = kernels.rms_norm(keys, params.kv_norm, eps)
        rows = layout.formats.window.encode(kernels, kernels.rotate_(keys, base_phase))
        first = (layout.n_layers + stage) * layout.ring_rows
        rings[first:].index_copy_(0, plan.stored_index, rows)


def draft_block(
    trunk: Trunk, batch: DraftBatch, state: KvState, temperatures: Sequence[float] = ()
) -> DraftBlock:
    """Run the stages once for all sequences; reads `state`, changes nothing.

    `temperatures`: one a step for the confidences, 1 by default. Raises BatchError."""
    p, c = _drafter(trunk), trunk.config
    temperatures = tuple(temperatures) or (1.0,) * c.dspark_block_size
    if len(temperatures) != c.dspark_block_size or min(temperatures) <= 0:
        raise BatchError(
            f"temperatures: found {temperatures}, wanted {c.dspark_block_size} numbers above 0"
        )
    _check(trunk, batch, state)
    with torch.inference_mode():
        block, n_sequences = c.dspark_block_size, batch.slots.shape[0]
        ids = torch.full((n_sequences, block), c.dspark_noise_token_id)
        ids[:, 0] = batch.anchors
        positions = batch.positions.unsqueeze(-1) + torch.arange(block)
        keys = _Keys(trunk, batch, state, positions.flatten())
        sublayers = Sublayers(c, trunk.kernels)
        x = trunk.params.embed[ids.flatten().to(trunk.device)]
        streams = sublayers.start(x, trunk.precision.accumulate)
        for stage, params in enumerate(p.stages):
            x = sublayers.collapse(streams, params.attn_norm)
            sublayers.run(params, x, streams, partial(keys.attend, params, stage))
        hidden = trunk.kernels.collapse(streams.h, streams.pre)
        return DraftBlock(trunk, hidden.view(n_sequences, block, -1), temperatures)


def _check(trunk: Trunk, batch: DraftBatch, state: KvState) -> None:
    c = trunk.config
    if state.n_drafter_rings < c.num_nextn_predict_layers:
        raise BatchError("draft: this state holds the encoder half only")
    for name, x, end in (
        ("slots", batch.slots, state.n_slots),
        ("anchors", batch.anchors, c.vocab_size),
        ("positions", batch.positions, c.max_position_embeddings),
    ):
        if x.numel() == 0 or int(x.min()) < 0 or int(x.max()) >= end:
            raise BatchError(f"{name}: found {x.tolist()}, wanted one or more below {end}")


class _Keys:
    """The keys that the rows of a block see, and their attention."""

    def __init__(
        self, trunk: Trunk, batch: DraftBatch, state: KvState, positions: torch.Tensor
    ) -> None:
        self.trunk, self.state = trunk, state
        layout, device = state.layout, trunk.device
        seen = batch.positions.unsqueeze(-1) - torch.arange(layout.window_tokens, 0, -1)
        dead = seen < batch.floors.clamp(min=0).unsqueeze(-1)
        slots = batch.slots.unsqueeze(-1) * (state.ring_layers * layout.ring_rows)
        self._ring_index = (slots + seen % layout.ring_rows).flatten().to(device)
        self._dead = dead.to(device)
        block = positions.shape[0] // batch.slots.shape[0]
        self._dead_all = torch.nn.functional.pad(self._dead, (0, block))
        self._phase = trunk.phases(positions.to(device))[0]
        self._back = self._phase.conj().resolve_conj()

    def attend(self, p: LayerParams, stage: int, x: torch.Tensor) -> torch.Tensor:
        """Output [s * block, D] of normed rows: all rows of a block see the same keys, so they
        attend as one row with block * heads heads."""
        c, k = self.trunk.config, self.trunk.kernels
        layout, form = self.state.layout, self.state.layout.formats.window
        _, q, own = project_rows(c, k, p, x, self._phase, form)
        n_sequences, window = self._dead.shape
        rings = self.state.rings.view(-1, layout.swa_row_bytes)
        rings = rings[(layout.n_layers + stage) * layout.ring_rows :]
        rows = rings.index_select(0, self._ring_index).view(n_sequences, window, -1)
        rows.masked_fill_(self._dead.unsqueeze(-1), 0)
        keys = torch.cat((rows, own.view(n_sequences, -1, own.shape[-1])), dim=1)
        block = keys.shape[1] - window
        out = k.attend(
            q.view(n_sequences, block * c.num_attention_heads, c.head_dim),
            form.decode(k, keys, self.state.accumulate),
            self._dead_all,
            None,
            None,
            p.sink.repeat(block),
            c.head_dim**-0.5,
        )
        out = out.view(-1, c.num_attention_heads, c.head_dim)
        return project_output(c, k, p, out, self._back, x.dtype)
