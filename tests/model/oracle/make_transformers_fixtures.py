"""V4 against an independent program: transformers' `deepseek_v4`, on CPU in float32.

Our seeded weights are copied into it by name. It quantises neither keys nor entries, so it is
compared with a state of float32 rows (`CacheLayout.of(kv_quant=False)`). The tests run it live;
what this file writes is kept besides, so that a new version of transformers that answers otherwise
is told apart from a change of ours:

    .venv/bin/python tests/model/oracle/make_transformers_fixtures.py

Its top-k leaves ties open, ours goes to the lowest entry, so `topk` is replaced while it runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, __version__

from headrace.model import LayerKind, ModelConfig
from headrace.model.weights import random_tensors

FIXTURES = Path(__file__).parent / "fixtures"
SEED = 31


class Case(NamedTuple):
    name: str
    n_tokens: int
    text_seed: int
    logit_rows: int  # the last ones are kept; of the others the argmax only


CASES = (Case("v4-short", 70, 1, 16), Case("v4-long", 300, 2, 16))

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
_POOL_NAMES = {
    "ape": "position_bias",
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "norm.weight": "kv_norm.weight",
}
_TOP_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def their_names(layer: int) -> dict[str, str]:
    """Our name -> theirs for everything of a layer but the routed experts, which they fuse."""
    names = dict(_LAYER_NAMES)
    for ours, theirs in _POOL_NAMES.items():
        names[f"attn.compressor.{ours}"] = f"self_attn.compressor.{theirs}"
        names[f"attn.indexer.compressor.{ours}"] = f"self_attn.compressor.indexer.{theirs}"
    return {f"layers.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in names.items()}


def build(name: str, seed: int) -> tuple[DeepseekV4ForCausalLM, ModelConfig]:
    """Their model with our weights of (configuration, seed); every parameter is set."""
    config = ModelConfig.load(name)
    text = (resources.files("headrace.configs") / "models" / f"{name}.json").read_text()
    document = json.loads(text)
    scaling = document.pop("rope_scaling")
    scaling["rope_type"] = scaling.pop("type")
    for key in ("quantization_config", "torch_dtype", "architectures", "model_type"):
        document.pop(key)
    theirs = DeepseekV4Config(
        **document, rope_parameters=scaling, attn_implementation="eager", use_cache=False
    )
    model = DeepseekV4ForCausalLM(theirs).to(torch.float32).eval()
    ours = random_tensors(config, seed)
    found = {_TOP_NAMES[k]: v for k, v in ours.items() if k in _TOP_NAMES}
    for layer in range(config.num_hidden_layers):
        names = their_names(layer)
        found |= {b: ours[a] for a, b in names.items() if a in ours}
        p = f"layers.{layer}.ffn.experts."
        parts = [
            {w: ours[f"{p}{e}.{w}.weight"] for w in ("w1", "w2", "w3")}
            for e in range(config.n_routed_experts)
        ]
        gate_up = torch.stack([torch.cat((x["w1"], x["w3"])) for x in parts])
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = gate_up
        down = torch.stack([x["w2"] for x in parts])
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    model.load_state_dict(found, strict=True)
    return model, config


def stable_topk(self: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    values, indices = torch.sort(self, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))


@contextmanager
def ties_to_the_lowest() -> Iterator[None]:
    theirs = torch.Tensor.topk
    torch.Tensor.topk = stable_topk  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = theirs  # type: ignore[method-assign]


def run(
    model: DeepseekV4ForCausalLM, config: ModelConfig, ids: np.ndarray
) -> tuple[torch.Tensor, dict[int, np.ndarray]]:
    """float32 logits [n, vocab] of a prompt in one call, and every indexer's choice [n, k], sorted,
    -1 first."""
    selections: dict[int, np.ndarray] = {}
    hooks = []
    for spec in config.layers:
        if spec.kind is LayerKind.FULL:
            indexer = model.model.layers[spec.index].self_attn.compressor.indexer

            def keep(_m: Any, _i: Any, out: torch.Tensor, layer: int = spec.index) -> None:
                selections[layer] = out[0].sort(dim=-1).values.numpy()

            hooks.append(indexer.register_forward_hook(keep))
    with torch.no_grad(), ties_to_the_lowest():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, selections


def prompt(case: Case, config: ModelConfig) -> np.ndarray:
    return np.random.default_rng(case.text_seed).integers(3, config.vocab_size, case.n_tokens)


def main() -> None:
    torch.manual_seed(0)
    model, config = build("v4-toy", SEED)
    for case in CASES:
        ids = prompt(case, config)
        logits, selections = run(model, config, ids)
        np.savez_compressed(
            FIXTURES / f"{case.name}.npz",
            transformers=np.array(__version__),
            ids=ids.astype(np.int32),
            logits=logits[-case.logit_rows :].numpy(),
            argmax=logits.argmax(-1).numpy().astype(np.int32),
            **{f"selection_{layer}": x.astype(np.int16) for layer, x in selections.items()},
        )


if __name__ == "__main__":
    main()
