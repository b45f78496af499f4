"""Makes the fixtures of an independent program's outputs for `test_oracle.py`.

The program is the CPU path of NeMo Automodel 0.7.0 (`nemo-automodel`, Apache-2.0), module
`components/models/deepseek_v41`, with eager attention, torch linear layers, torch_fp32 norms and
torch experts. It has no KV cache: it runs whole sequences, float32, quantised KV. Only outputs are
kept (ids, some logit rows, every argmax, selections, candidates, and for long cases the quantised
keys and queries); weights are ours, made from (config, seed) and copied into it by name.

Run in a throw-away environment, never in the project's own:

    python -m venv v
    v/bin/pip install 'torch>=2.11,<2.14' 'numpy<2.4' 'transformers>=5.18,<5.19' pillow \
        torchdata torchao pyyaml msgpack
    v/bin/pip install --no-deps nemo-automodel==0.7.0
    make build/ns
    OMP_NUM_THREADS=1 PYTHONPATH=build/ns v/bin/python tests/model/oracle/make_nemo_fixtures.py

Its top-k leaves ties open, ours goes to the lowest entry, so `topk` is replaced while it runs.

Two kinds of case. In float32 any two programs, or one program on two processors, differ in last
bits; a value that lies on a rounding border then gets another 4- or 8-bit code, the code moves a
selection, and logits move by up to 3. Of 814 random prompts of 64 tokens two kept every code under
twelve perturbations of all weights by 1.5e-7, of shorter ones more: the `plain` cases are such and
also hold under other instruction sets (MKL_CBWR, ATEN_CPU_CAPABILITY); longer prompts always have
such a value, so they also keep the program's codes: the test follows them and checks every
difference to be a border case.
"""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.kernels import kernels_for
from headrace.model import ModelConfig
from headrace.model.weights import random_tensors

FIXTURES = Path(__file__).parent / "fixtures"
# Smaller than any package tokenizer's: the fixtures must not change with a tokenizer.
COMPRESSED_VOCAB = 3000
NEMO_VERSION = "0.7.0"


class Case(NamedTuple):
    name: str
    config: str
    seed: int
    n_tokens: int
    text_seed: int
    image: tuple[int, int] | None = None  # span [first, end) with random embeddings
    codes: bool = False


CASES = (
    Case("t1-plain-a", "t1", 21, 64, 98),
    Case("t1-plain-b", "t1", 21, 48, 663),
    Case("t1-text", "t1", 11, 320, 11, codes=True),
    Case("t1-image", "t1", 12, 160, 12, image=(40, 66), codes=True),
    Case("t2-text", "t2", 13, 400, 13, codes=True),
)


def stable_topk(self: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    values, indices = torch.sort(self, dim=dim, descending=True, stable=True)
    kept = slice(0, k)
    return torch.return_types.topk(
        (
            values.movedim(dim, -1)[..., kept].movedim(-1, dim),
            indices.movedim(dim, -1)[..., kept].movedim(-1, dim),
        )
    )


def build(case: Case) -> tuple[torch.nn.Module, ModelConfig]:
    """The program with our weights, and our configuration of it."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import config as nemo_config
    from nemo_automodel.components.models.deepseek_v41 import engram, model

    path = resources.files("headrace.configs") / "models" / f"{case.config}.json"
    data = json.loads(path.read_text())
    text = data["text_config"] | {
        "dtype": "float32",
        "engram_compressed_vocab_size": COMPRESSED_VOCAB,
    }
    vocab = text["vocab_size"]
    token_map = tuple(i % COMPRESSED_VOCAB for i in range(vocab))
    engram._compressed_token_map = lambda _: (token_map, COMPRESSED_VOCAB)
    vision = {k: v for k, v in data["vision_config"].items() if k != "downsample"}
    theirs = nemo_config.DeepseekV41Config(
        text_config=text,
        vision_config=vision | {"num_hidden_layers": 0},
        image_token_id=data["image_token_id"],
        dtype="float32",
    )
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        experts="torch",
        dispatcher="torch",
        enable_hf_state_dict_adapter=False,
    )
    module = model.DeepseekV41ForCausalLM(theirs, backend=backend, tokenizer=object())
    ours = dataclasses.replace(
        ModelConfig.load(case.config), engram_compressed_vocab_size=COMPRESSED_VOCAB
    )
    trunk = {k: v for k, v in random_tensors(ours, case.seed).items() if not k.startswith("mtp.")}
    copy_weights(module, trunk, ours)
    return module.eval(), ours


def copy_weights(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], config: ModelConfig
) -> None:
    """Fill every parameter from our tensors; both sides must be used up."""
    used: set[str] = set()

    def take(name: str) -> torch.Tensor:
        used.add(name)
        return tensors[name]

    for name, target in module.state_dict().items():
        value = ours_for(name.removeprefix("model."), take, config)
        assert target.shape == value.shape, (name, target.shape, value.shape)
        target.copy_(value)
    assert used == set(tensors), sorted(set(tensors) - used)[:5]


def ours_for(name: str, take: Any, config: ModelConfig) -> torch.Tensor:
    renamed = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
    prefix = name.rsplit("experts.", 1)[0]
    experts = range(config.n_routed_experts)
    if name.endswith("experts.gate_and_up_projs"):
        halves = [
            torch.cat([take(f"{prefix}experts.{e}.{w}.weight") for w in ("w1", "w3")]).T
            for e in experts
        ]
        return torch.stack(halves)
    if name.endswith("experts.down_projs"):
        return torch.stack([take(f"{prefix}experts.{e}.w2.weight").T for e in experts])
    for theirs, ours in (
        ("attn.sinks_param.weight", "attn.attn_sink"),
        ("gate.e_score_correction_bias", "gate.bias"),
        ("attn_hc.", "hc_attn_"),
        ("ffn_hc.", "hc_ffn_"),
        ("gate_proj.", "w1."),
        ("up_proj.", "w3."),
        ("down_proj.", "w2."),
    ):
        name = name.replace(theirs, ours)
    return take(renamed.get(name, name))


def record_selections(module: torch.nn.Module, found: dict[str, np.ndarray]) -> None:
    """Keep each indexer's chosen entries and the candidate source's mask."""
    for number, layer in module.model.layers.items():
        indexer = layer.attn.indexer
        if indexer is None:
            continue

        def keep(mod: Any, args: Any, out: Any, number: str = number) -> None:
            chosen = out.topk_indices[0].numpy()
            ordered = np.sort(np.where(chosen < 0, np.iinfo(np.int64).max, chosen), axis=1)
            ordered = np.where(ordered == np.iinfo(np.int64).max, -1, ordered)
            found[f"selection_{number}"] = ordered.astype(np.int16)
            if mod.is_candidate_source:
                found["candidates"] = np.packbits(out.candidates[0].numpy(), axis=1)
                found["candidate_entries"] = np.int64(out.candidates.shape[2])

        indexer.register_forward_hook(keep)


def record_codes(found: dict[str, np.ndarray]) -> Any:
    """Keep what the program quantises, packed by our kernels (its values are on the grid)."""
    from nemo_automodel.components.models.deepseek_v41 import attention

    kernels, original = kernels_for("cpu"), attention.quantize_cache
    counts: dict[str, int] = {}

    def quantize(values: torch.Tensor, *, format: str, block_size: int) -> torch.Tensor:
        out = original(values, format=format, block_size=block_size)
        kind = f"mxfp4{'q' if values.dim() == 4 else 'k'}" if format == "mxfp4" else format
        grid = out[0]
        if format == "fp8":
            packed = kernels.quantize_fp8_rows(grid)
            again = kernels.dequantize_fp8_rows(packed, grid.dtype)
        elif format == "nvfp4":
            packed = kernels.quantize_nvfp4_rows(grid)
            again = kernels.dequantize_nvfp4_rows(packed, grid.dtype)
        else:
            data, scales = kernels.quantize_mxfp4(grid)
            again = kernels.dequantize_mxfp4(data, scales, grid.dtype)
            packed = torch.cat((data, scales), dim=-1)
        assert torch.equal(again, grid)
        found[f"{kind}_{counts.setdefault(kind, 0)}"] = packed.numpy()
        counts[kind] += 1
        return out

    attention.quantize_cache = quantize
    return lambda: setattr(attention, "quantize_cache", original)


def make(case: Case) -> None:
    module, config = build(case)
    rng = np.random.default_rng(case.text_seed)
    ids = rng.integers(31, 3900, case.n_tokens)
    found: dict[str, np.ndarray] = {}
    record_selections(module, found)
    restore = record_codes(found) if case.codes else lambda: None
    kwargs: dict[str, Any] = {}
    if case.image is not None:
        first, end = case.image
        ids[first:end] = config.image_token_id
        rows = rng.standard_normal((end - first, config.hidden_size)).astype(np.float32)
        found["image_rows"] = rows
        embedded = module.model.embed_tokens(torch.from_numpy(ids)).clone()
        embedded[first:end] = torch.from_numpy(rows)
        mask = torch.zeros((1, case.n_tokens), dtype=torch.bool)
        mask[0, first:end] = True
        kwargs = {"inputs_embeds": embedded.unsqueeze(0), "image_mask": mask}
    hidden, _ = module.model(torch.from_numpy(ids).unsqueeze(0), **kwargs)
    restore()
    logits = module.lm_head(hidden)[0].float().numpy()
    shown = np.unique(np.linspace(0, case.n_tokens - 1, 14).astype(np.int64))
    np.savez_compressed(
        FIXTURES / f"{case.name}.npz",
        ids=ids,
        seed=np.int64(case.seed),
        compressed_vocab=np.int64(COMPRESSED_VOCAB),
        image=np.asarray(case.image or (0, 0), dtype=np.int64),
        argmax=logits.argmax(-1).astype(np.int16),
        logit_rows=shown,
        logits=logits[shown],
        **found,
    )
    print(case.name, "logit std", logits.std(), "kept", len(found))


def main() -> None:
    from importlib.metadata import version

    assert version("nemo-automodel") == NEMO_VERSION
    torch.set_num_threads(1)
    torch.Tensor.topk = stable_topk
    torch.topk = stable_topk
    with torch.no_grad():
        for case in CASES:
            make(case)


if __name__ == "__main__":
    main()
