"""Checkpoint tensors -> the fused, transposed, typed tensors that the forward multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from headrace.model.config import LayerKind, LayerSpec, ModelConfig
from headrace.model.engram_store import EngramTable, HeldTable
from headrace.model.errors import ConfigError
from headrace.model.numerics import Precision
from headrace.model.packed import OnUse


@dataclass(frozen=True, slots=True)
class MixParams:
    """`fn` is [hc D, hc (2 + hc)]; `scale` is spread to one value per output."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class CompressorParams:
    """`project` is [D, w] (ratio 1) or [D, 2 w], gate half first; w is the entry's width, with V4's
    overlap twice that. `ape` ([r, w], V4) is added to the gate by p mod r."""

    project: torch.Tensor
    norm: torch.Tensor
    ape: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SourceParams:
    """What makes a layer's entries. Index keys come from the latent by `index_k` [hd, ihd] and
    `index_norm` (V4.1), from a compressor of their own (V4, ratio 4), or there are none."""

    main: CompressorParams
    index: CompressorParams | None = None
    index_k: torch.Tensor | None = None
    index_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexParams:
    """`wq` is [q_lora, inh ihd]; `weights` is [D, inh]."""

    wq: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class EngramParams:
    """`table` is where the rows lie; `wkv` and `qk_weight` are on the model's device."""

    number: int  # position among the Engram layers
    table: EngramTable
    wkv: torch.Tensor
    qk_weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Everything of one layer; absent parts are None. Matrices are [in, out]."""

    spec: LayerSpec
    compressed_rope: bool
    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    attn_mix: MixParams
    ffn_mix: MixParams
    qkv: torch.Tensor  # [D, q_lora + hd]
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    wq_b: torch.Tensor
    wo_a: torch.Tensor  # [groups, heads/groups * hd, o_lora]
    wo_b: torch.Tensor
    sink: torch.Tensor
    compressor: SourceParams | None
    index: IndexParams | None
    engram: EngramParams | None
    experts_per_token: int
    experts_by_token: torch.Tensor | None  # int64 [vocab, k], V4's hash-routed layers
    gate: torch.Tensor  # [D, E]
    gate_bias: torch.Tensor  # empty in a hash-routed layer
    gate_bias_image: torch.Tensor
    w13: torch.Tensor | OnUse[torch.Tensor]  # [E, D, 2 I]
    w2: torch.Tensor | OnUse[torch.Tensor]  # [E, I, D]
    shared_w13: torch.Tensor
    shared_w2: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrafterParams:
    """`stages` are window-only layers; their keys come from taps and from drafted rows alike."""

    main_proj: torch.Tensor  # [taps * D, D]
    main_norm: torch.Tensor
    stages: Sequence[LayerParams]
    norm: torch.Tensor
    markov_embed: torch.Tensor  # [vocab, rank]
    markov_head: torch.Tensor  # [rank, vocab], accumulate dtype
    confidence: torch.Tensor  # [D + rank], accumulate dtype


@dataclass(frozen=True, slots=True)
class TrunkParams:
    """A trunk of width D, in the compute dtype unless said. An encoder-only build has an empty
    `head` and `norm`, and its last layer is the first decoder layer's KV source alone."""

    embed: torch.Tensor  # [vocab, D]
    head: torch.Tensor  # [D, vocab], accumulate dtype
    norm: torch.Tensor
    layers: Sequence[LayerParams]
    head_mix: MixParams | None = None  # V4: fn [hc D, hc], base [hc], scale [1]
    drafter: DrafterParams | None = None


class ParamBuilder:
    """Takes tensors out of a checkpoint mapping; a missing name is a ConfigError naming it."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        precision: Precision,
        device: torch.device,
        engram_tables: Mapping[int, EngramTable] | None = None,
        *,
        on_use: bool = False,
    ) -> None:
        """The tables of layers in `engram_tables` are not looked up. `on_use`: layers, and experts
        of a layer, are built each time that they are asked for; `tensors` must stay."""
        self.config = config
        self.tensors = tensors
        self.engram_tables = dict(engram_tables or {})
        self.on_use = on_use
        self.precision = precision
        self.device = device

    def build(self) -> TrunkParams:
        head = "embed.weight" if self.config.tie_word_embeddings else "head.weight"
        return TrunkParams(
            embed=self._compute(self._get("embed.weight")),
            head=self._wide(self._get(head).T),
            norm=self._wide(self._get("norm.weight")),
            layers=self._layers([partial(self._layer, spec) for spec in self.config.layers]),
            head_mix=self._head_mix() if self.config.is_v4 else None,
            drafter=self._drafter() if self.config.num_nextn_predict_layers else None,
        )

    def build_encoder(self) -> TrunkParams:
        """The encoder half and the first decoder layer's KV source; all else is an empty tensor.

        Raises ConfigError without a decoder half to leave out.
        """
        c = self.config
        if not c.n_decoder_layers:
            raise ConfigError(
                "compress_ratios: found no layer of ratio 1, wanted one: without a decoder half "
                "an encoder-only build is the whole model"
            )
        nothing = torch.empty(0, dtype=self.precision.accumulate, device=self.device)
        makers = [partial(self._layer, spec) for spec in c.layers[: c.n_encoder_layers]]
        source = partial(self._source, c.layers[c.first_decoder_layer], nothing)
        embed = self._compute(self._get("embed.weight"))
        layers = self._layers([*makers, source])
        return TrunkParams(embed=embed, head=nothing, norm=nothing, layers=layers)

    def _source(self, spec: LayerSpec, nothing: torch.Tensor) -> LayerParams:
        """A layer that publishes global KV and never runs a sublayer."""
        p = f"layers.{spec.index}."
        tensors = {f.name: nothing for f in fields(LayerParams) if f.type == "torch.Tensor"}
        no_mix = MixParams(nothing, nothing, nothing)
        has_engram = spec.index in self.config.engram_layer_ids
        return LayerParams(
            spec=spec,
            compressed_rope=spec.ratio > 0,
            attn_mix=no_mix,
            ffn_mix=no_mix,
            compressor=self._compressor(f"{p}attn.", spec),
            index=None,
            engram=self._engram(p, spec.index) if has_engram else None,
            experts_per_token=0,
            w13=nothing,
            w2=nothing,
            experts_by_token=None,
            **tensors | {"attn_norm": self._wide(self._get(f"{p}attn_norm.weight"))},
        )

    def _drafter(self) -> DrafterParams:
        get, n_stages = self._get, self.config.num_nextn_predict_layers
        last = f"mtp.{n_stages - 1}."
        return DrafterParams(
            main_proj=self._compute(get("mtp.0.main_proj.weight").T),
            main_norm=self._wide(get("mtp.0.main_norm.weight")),
            stages=self._layers([partial(self._stage, stage) for stage in range(n_stages)]),
            norm=self._wide(get(f"{last}norm.weight")),
            markov_embed=self._compute(get(f"{last}markov_head.embed.weight")),
            markov_head=self._wide(get(f"{last}markov_head.head.weight").T),
            confidence=self._wide(get(f"{last}confidence_head.proj.weight").reshape(-1)),
        )

    def _get(self, name: str) -> torch.Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ConfigError(f"checkpoint lacks tensor {name}") from None

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.precision.compute).contiguous()

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.precision.accumulate).contiguous()

    def _stage(self, stage: int) -> LayerParams:
        spec = LayerSpec(stage, LayerKind.SWA_ONLY, 0, None, None)
        return self._layer(spec, f"mtp.{stage}.")

    def _layer(self, spec: LayerSpec, prefix: str = "") -> LayerParams:
        """A trunk layer, or with `prefix` a drafter stage, which has experts of its own number."""
        p = prefix or f"layers.{spec.index}."
        a, c = f"{p}attn.", self.config
        n_experts, top_k = c.n_routed_experts, c.num_experts_per_tok
        if prefix:
            n_experts, top_k = c.dspark_n_routed_experts, c.dspark_num_experts_per_tok
        get = self._get
        indexed = spec.kind in (LayerKind.FULL, LayerKind.REINDEX)
        wo_a = get(f"{a}wo_a.weight").view(c.o_groups, c.o_lora_rank, -1).transpose(1, 2)
        qkv = torch.cat((get(f"{a}wq_a.weight"), get(f"{a}wkv.weight"))).T
        experts = [f"{p}ffn.experts.{e}" for e in range(n_experts)]
        hashed = not prefix and spec.index < c.num_hash_layers
        bias = self._wide(get(f"{p}ffn.gate.bias")) if not hashed else torch.empty(0)
        # Neither a stage nor V4 ever sees an image row.
        by_image = bias if prefix or c.is_v4 else self._wide(get(f"{p}ffn.gate.bias_vl"))
        has_engram = not prefix and spec.index in c.engram_layer_ids
        return LayerParams(
            spec=spec,
            compressed_rope=spec.ratio > 0,
            attn_norm=self._wide(get(f"{p}attn_norm.weight")),
            ffn_norm=self._wide(get(f"{p}ffn_norm.weight")),
            attn_mix=self._mix(f"{p}hc_attn"),
            ffn_mix=self._mix(f"{p}hc_ffn"),
            qkv=self._compute(qkv),
            q_norm=self._wide(get(f"{a}q_norm.weight")),
            kv_norm=self._wide(get(f"{a}kv_norm.weight")),
            wq_b=self._compute(get(f"{a}wq_b.weight").T),
            wo_a=self._compute(wo_a),
            wo_b=self._compute(get(f"{a}wo_b.weight").T),
            sink=self._wide(get(f"{a}attn_sink")),
            compressor=self._compressor(a, spec) if spec.owns_kv else None,
            index=self._index(a) if indexed else None,
            engram=self._engram(p, spec.index) if has_engram else None,
            experts_per_token=top_k,
            gate=self._wide(get(f"{p}ffn.gate.weight").T),
            experts_by_token=self._experts_by_token(p) if hashed else None,
            gate_bias=bias,
            gate_bias_image=by_image,
            w13=self._experts(experts, self._w13),
            w2=self._experts(experts, lambda e: get(f"{e}.w2.weight").T),
            shared_w13=self._compute(self._w13(f"{p}ffn.shared_experts")),
            shared_w2=self._compute(get(f"{p}ffn.shared_experts.w2.weight").T),
        )

    def _layers(self, makers: Sequence[Callable[[], LayerParams]]) -> Sequence[LayerParams]:
        return OnUse(makers) if self.on_use else tuple(make() for make in makers)

    def _experts(
        self, names: Sequence[str], make: Callable[[str], torch.Tensor]
    ) -> torch.Tensor | OnUse[torch.Tensor]:
        if self.on_use:
            return OnUse([partial(self._expert, make, name) for name in names])
        return self._compute(torch.stack([make(name) for name in names]))

    def _expert(self, make: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
        return self._compute(make(name))

    def _w13(self, prefix: str) -> torch.Tensor:
        return torch.cat((self._get(f"{prefix}.w1.weight"), self._get(f"{prefix}.w3.weight"))).T

    def _mix(self, prefix: str) -> MixParams:
        streams = self.config.hc_mult
        counts = torch.tensor([streams, streams, streams * streams])
        return MixParams(
            fn=self._wide(self._get(f"{prefix}_fn").T),
            base=self._wide(self._get(f"{prefix}_base")),
            scale=self._wide(self._get(f"{prefix}_scale").cpu().repeat_interleave(counts)),
        )

    def _head_mix(self) -> MixParams:
        return MixParams(
            fn=self._wide(self._get("hc_head_fn").T),
            base=self._wide(self._get("hc_head_base")),
            scale=self._wide(self._get("hc_head_scale")),
        )

    def _experts_by_token(self, p: str) -> torch.Tensor:
        """int64 [vocab, k]; raises ConfigError for an expert that does not exist."""
        name, count = f"{p}ffn.gate.tid2eid", self.config.n_routed_experts
        table = self._get(name).to(self.device, torch.int64).contiguous()
        low, high = int(table.min()), int(table.max())
        if low < 0 or high >= count:
            raise ConfigError(f"{name}: found experts {low}..{high}, wanted 0..{count - 1}")
        return table

    def _compressor(self, a: str, spec: LayerSpec) -> SourceParams:
        main = self._pooling(f"{a}compressor.", spec.ratio)
        if spec.kind is LayerKind.HEAVY:
            return SourceParams(main)
        if self.config.is_v4:
            return SourceParams(main, self._pooling(f"{a}indexer.compressor.", spec.ratio))
        return SourceParams(
            main,
            index_k=self._compute(self._get(f"{a}indexer.wk.weight").T),
            index_norm=self._wide(self._get(f"{a}indexer.k_norm.weight")),
        )

    def _pooling(self, p: str, ratio: int) -> CompressorParams:
        get = self._get
        project = get(f"{p}wkv.weight")
        if ratio > 1:  # pooled in the accumulate dtype, from the gate on
            project = torch.cat((get(f"{p}wgate.weight"), project))
        return CompressorParams(
            project=self._wide(project.T) if ratio > 1 else self._compute(project.T),
            norm=self._wide(get(f"{p}norm.weight")),
            ape=self._wide(get(f"{p}ape")) if self.config.is_v4 else None,
        )

    def _index(self, a: str) -> IndexParams:
        return IndexParams(
            wq=self._compute(self._get(f"{a}indexer.wq_b.weight").T),
            weights=self._compute(self._get(f"{a}indexer.weights_proj.weight").T),
        )

    def _engram(self, p: str, layer: int) -> EngramParams:
        q, k = self._get(f"{p}engram.q_weight"), self._get(f"{p}engram.k_weight")
        if (table := self.engram_tables.get(layer)) is None:
            values = self._get(f"{p}engram.embed.weight")
            table = HeldTable(values.to(self.device), self.precision.compute)
            self.engram_tables[layer] = table
        number = self.config.engram_layer_ids.index(layer)
        if table.n_rows != (wanted := self.config.engram_num_embeddings[number]):
            raise ConfigError(f"Engram table of layer {layer}: {table.n_rows} rows, not {wanted}")
        return EngramParams(
            number=number,
            table=table,
            wkv=self._compute(self._get(f"{p}engram.wkv.weight").T),
            qk_weight=self._wide(q) * self._wide(k),
        )
