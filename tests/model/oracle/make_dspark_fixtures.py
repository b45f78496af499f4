"""Makes the fixtures of an independent program's drafts for `test_dspark_oracle.py`.

The program is NeMo Automodel 0.7.0 (`nemo-automodel`, Apache-2.0): its V4.1 text model gives the
taps of a prompt, its cache-free DSpark backbone drafts from them. CPU, float32. Kept per anchor:
the greedy drafts, every eighth logit of each step, the confidences. Weights are ours, made from
(config, seed) and copied into it by name.

Run in the throw-away environment that `make_nemo_fixtures.py` describes:

    OMP_NUM_THREADS=1 PYTHONPATH=build/ns v/bin/python tests/model/oracle/make_dspark_fixtures.py

Its training variant feeds the confidence head the normed row; the release feeds the raw one. So its
head is called here on the row that enters its last norm.

Prompts are the `plain` ones of `make_nemo_fixtures.py`, which keep every code of the text model.
The drafter's keys are quantised too: kept are anchors whose block keeps its logits (to 1e-5) under
twelve perturbations of all weights by 1.5e-7, found with our own program (`settled_anchors`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from make_nemo_fixtures import (
    CASES,
    FIXTURES,
    NEMO_VERSION,
    Case,
    build,
    ours_for,
    stable_topk,
)

from headrace.model import (
    CacheLayout,
    DraftBatch,
    KvState,
    ModelConfig,
    Numerics,
    RowBatch,
    Trunk,
)
from headrace.model.weights import random_tensors

PLAIN = tuple(case for case in CASES if "plain" in case.name)
COLUMNS = slice(0, None, 8)  # of the vocabulary: what is kept of a row of logits
_PERTURBATION = 1.5e-7
_N_PERTURBED = 12


def prompt(case: Case) -> np.ndarray:
    return np.random.default_rng(case.text_seed).integers(31, 3900, case.n_tokens)


# ---- ours: which anchors have settled codes --------------------------------------------------


def our_logits(trunk: Trunk, ids: np.ndarray, anchor: int) -> torch.Tensor:
    """Draft logits [block, vocab] of the anchor at that position, the prompt in one call."""
    c, n = trunk.config, anchor
    state = KvState(c, CacheLayout.of(c), 1, 1, trunk.numerics)
    back = np.arange(n)[:, None] - np.arange(c.engram_max_ngram_size)
    zeros = torch.zeros(n, dtype=torch.int64)
    batch = RowBatch(
        history_ids=torch.from_numpy(np.where(back >= 0, ids[np.maximum(back, 0)], -1)),
        history_image=torch.zeros(back.shape, dtype=torch.bool),
        positions=torch.arange(n),
        slots=zeros,
        sequence=zeros,
        block_tables=torch.zeros((1, 1), dtype=torch.int64),
        swa_floor=zeros,
        decoder_floor=zeros,
        write_floor=zeros,
        decoder=torch.ones(n, dtype=torch.bool),
        logits=torch.zeros(n, dtype=torch.bool),
    )
    trunk.forward(batch, state)
    one = torch.tensor([0])
    previous = torch.tensor([int(ids[anchor])])
    block = trunk.draft(DraftBatch(one, previous, torch.tensor([anchor]), one), state)
    rows = []
    for index in range(block.n_steps):
        logits, _ = block.step(index, previous)
        previous = logits.argmax(-1)
        rows.append(logits[0])
    return torch.stack(rows)


def settled_anchors(case: Case, config: ModelConfig, candidates: Sequence[int]) -> list[int]:
    ids, tensors = prompt(case), random_tensors(config, case.seed)
    token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size

    def trunk(noise: int) -> Trunk:
        draw = torch.Generator().manual_seed(noise)
        changed = {
            name: value * (1 + _PERTURBATION * torch.randn(value.shape, generator=draw))
            for name, value in tensors.items()
        }
        values = changed if noise else tensors
        return Trunk(config, values, Numerics.FAST, token_map=token_map, weights_id="")

    plain, kept = trunk(0), list(candidates)
    wanted = {a: our_logits(plain, ids, a) for a in kept}
    for noise in range(1, _N_PERTURBED + 1):
        other = trunk(noise)
        kept = [a for a in kept if (our_logits(other, ids, a) - wanted[a]).abs().max() < 1e-5]
    return kept


# ---- theirs ----------------------------------------------------------------------------------


def build_drafter(module: torch.nn.Module, config: ModelConfig, seed: int) -> torch.nn.Module:
    """The program's backbone with our weights; both sides are used up."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.dspark import DeepseekV41DSparkBackbone

    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        experts="torch",
        dispatcher="torch",
        enable_hf_state_dict_adapter=False,
    )
    drafter = DeepseekV41DSparkBackbone(module.config.text_config, backend)
    tensors = random_tensors(config, seed)
    stage_config = dataclasses.replace(config, n_routed_experts=config.dspark_n_routed_experts)
    used: set[str] = set()

    def take(name: str) -> torch.Tensor:
        if name.endswith("gate.bias_vl"):  # no row of a draft lies in an image
            return torch.zeros(config.dspark_n_routed_experts)
        used.add(name)
        return tensors[name]

    for name, target in drafter.state_dict().items():
        value = ours_for(name, take, stage_config)
        assert target.shape == value.shape, (name, target.shape, value.shape)
        target.copy_(value)
    assert used == {name for name in tensors if name.startswith("mtp.")}
    return drafter.eval()


def taps_of(module: torch.nn.Module, ids: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Target features [1, n, taps * D]."""
    found: list[torch.Tensor] = []
    hooks = [
        mix.register_forward_pre_hook(lambda _, args: found.append(args[0].mean(dim=2)))
        for mix in module.get_dspark_target_feature_modules(list(layers))
    ]
    module.model(ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return torch.cat(found, dim=-1)


def draft(
    module: torch.nn.Module,
    drafter: Any,
    config: ModelConfig,
    taps: torch.Tensor,
    ids: torch.Tensor,
    position: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Greedy tokens [block], logits [block, vocab] and confidences [block] of one anchor."""
    block, n = config.dspark_block_size, ids.shape[0]
    inputs = torch.full((1, block), config.dspark_noise_token_id)
    inputs[0, 0] = ids[position]
    anchors = torch.tensor([[position]])
    raw: list[torch.Tensor] = []
    last = drafter.mtp[-1]
    hook = last.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
    out = drafter(
        module.model.embed_tokens(inputs),
        taps,
        position_ids=drafter.build_position_ids(anchors, n),
        attention_mask=drafter.build_attention_mask(
            anchors, torch.ones_like(anchors, dtype=torch.bool), n, torch.float32
        ),
    )
    hook.remove()
    base = torch.nn.functional.linear(
        out.normalized_hidden_states.float(), module.lm_head.weight.float()
    )
    previous = ids[position]
    tokens, logits, confidences = [], [], []
    for index in range(block):
        transition, embedding = last.markov_head(previous)
        row = base[0, index] + transition.float()
        score = last.confidence_head(raw[0][0, index], embedding)
        previous = row.argmax()
        tokens.append(int(previous))
        logits.append(row)
        confidences.append(torch.sigmoid(score))
    return np.array(tokens), torch.stack(logits).numpy(), torch.stack(confidences).numpy()


def main() -> None:
    from importlib.metadata import version

    assert version("nemo-automodel") == NEMO_VERSION
    torch.set_num_threads(1)
    torch.Tensor.topk = stable_topk
    torch.topk = stable_topk
    out: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for case in PLAIN:
            module, config = build(case)
            ids = torch.from_numpy(prompt(case))
            candidates = [1, 7, 31, 32, 33, *range(40, case.n_tokens, 5)]
            anchors = settled_anchors(case, config, candidates)
            taps = taps_of(module, ids, config.dspark_target_layer_ids)
            drafter = build_drafter(module, config, case.seed)
            rows = [draft(module, drafter, config, taps, ids, a) for a in anchors]
            tokens, logits, confidences = (np.stack(part) for part in zip(*rows, strict=True))
            ours = Trunk.random(config, case.seed, Numerics.FAST)
            far = max(
                float(np.abs(our_logits(ours, prompt(case), a).numpy() - row).max())
                for a, row in zip(anchors, logits, strict=True)
            )
            print(case.name, "anchors", anchors, "farthest logit", far, "std", logits.std())
            out |= {
                f"{case.name}/ids": prompt(case),
                f"{case.name}/anchors": np.array(anchors),
                f"{case.name}/tokens": tokens.astype(np.int16),
                f"{case.name}/logits": logits[..., COLUMNS],
                f"{case.name}/confidences": confidences,
            }
    np.savez_compressed(FIXTURES / "dspark.npz", **out)
    print((FIXTURES / "dspark.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
