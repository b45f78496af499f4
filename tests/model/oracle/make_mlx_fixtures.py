"""Makes the fixtures of a second independent program's outputs: mlx-lm's `deepseek_v41`, on CPU.

It has what the first one lacks, a cache: the prompt is run in one call, and once more as a chunk
followed by single tokens. It has no Engram, so the configuration is T1 without, and no drafter, no
vision, no truncation. float32, quantised keys, our seeded weights under checkpoint names (its own
`sanitize` renames them).

Run in a throw-away environment, never in the project's own:

    python -m venv v
    v/bin/pip install 'mlx[cpu]' mlx-lm==0.32.2 torch numpy msgpack
    make build/ns
    OMP_NUM_THREADS=1 PYTHONPATH=build/ns v/bin/python tests/model/oracle/make_mlx_fixtures.py

Its `argpartition` leaves ties open, ours goes to the lowest entry, so it is replaced.

In float32 two programs differ in last bits, and a value on a rounding border gets another code,
which moves selections and logits. `--search LENGTH COUNT` runs texts 0 to COUNT-1 and prints the
largest differences from our own program, in one call and cached, and the first row that differs: of
the first six of 48 tokens three stayed within 1.2e-5. CASES are of those that stayed together, and
also with other instruction sets (ATEN_CPU_CAPABILITY default, avx2; MKL_CBWR=COMPATIBLE).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v41

from headrace.model import CacheLayout, KvState, ModelConfig, Numerics, RowBatch, Trunk
from headrace.model.weights import random_tensors

FIXTURES = Path(__file__).parent / "fixtures"
SEED = 41
MLX_LM_VERSION = "0.32.2"


class Case(NamedTuple):
    name: str
    n_tokens: int
    text_seed: int
    prefill: int  # the rest is decoded token by token


CASES = (Case("t1-mlx-a", 48, 7, 28), Case("t1-mlx-b", 48, 11, 28))


def config() -> ModelConfig:
    return dataclasses.replace(
        ModelConfig.load("t1"),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_compressed_vocab_size=4096,
    )


def stable_partition(a: mx.array, kth: int, axis: int = -1) -> mx.array:
    order = np.argsort(np.array(a), axis=axis, kind="stable")
    return mx.array(order.astype(np.int32))


def build(c: ModelConfig) -> deepseek_v41.Model:
    values = dataclasses.asdict(c)
    values["rope_scaling"] = {"type": "yarn", **values["rope_scaling"]}
    known = {f.name for f in dataclasses.fields(deepseek_v41.ModelArgs)}
    kept: dict[str, Any] = {k: v for k, v in values.items() if k in known}
    model = deepseek_v41.Model(deepseek_v41.ModelArgs(**kept))
    weights = {k: mx.array(v.numpy()) for k, v in random_tensors(c, SEED).items()}
    clean = model.sanitize(weights)
    assert set(clean) == {name for name, _ in tree_flatten(model.parameters())}
    model.load_weights(list(clean.items()), strict=True)
    return model


def run(model: deepseek_v41.Model, ids: np.ndarray, pieces: list[int]) -> np.ndarray:
    """float32 logits [n, vocab] of a prompt in calls of those sizes, over its own cache."""
    cache, parts, lo = model.make_cache(), [], 0
    for m in pieces:
        part = model(mx.array(ids[None, lo : lo + m]), cache)[0]
        mx.eval(part)
        parts.append(np.array(part))
        lo += m
    assert lo == len(ids)
    return np.concatenate(parts)


def ours(c: ModelConfig, ids: np.ndarray) -> np.ndarray:
    n, grams = len(ids), c.engram_max_ngram_size
    trunk = Trunk.random(c, SEED, Numerics.FAST)
    state = KvState(c, CacheLayout.of(c), -(-n // 128), 1, Numerics.FAST)
    zero, yes = torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)
    history = torch.full((n, grams), -1)
    history[:, 0] = torch.from_numpy(ids)
    batch = RowBatch(
        history_ids=history,
        history_image=torch.zeros((n, grams), dtype=torch.bool),
        positions=torch.arange(n),
        slots=zero,
        sequence=zero,
        block_tables=torch.arange(-(-n // 128))[None],
        swa_floor=zero,
        decoder_floor=zero,
        write_floor=zero,
        decoder=yes,
        logits=yes,
    )
    return trunk.forward(batch, state).logits.numpy()


def prompt(n_tokens: int, text_seed: int, c: ModelConfig) -> np.ndarray:
    return np.random.default_rng(text_seed).integers(31, c.vocab_size - 100, n_tokens)


def search(model: deepseek_v41.Model, c: ModelConfig, n_tokens: int, count: int) -> None:
    for text_seed in range(count):
        ids = prompt(n_tokens, text_seed, c)
        whole, cached = run(model, ids, [n_tokens]), run(model, ids, [n_tokens - 20] + [1] * 20)
        mine = ours(c, ids)
        rows = np.abs(whole - mine).max(1)
        first = int(np.argmax(rows > 1e-4)) if (rows > 1e-4).any() else n_tokens
        print(text_seed, n_tokens, rows.max(), np.abs(cached - mine).max(), first, flush=True)


def main() -> None:
    mx.set_default_device(mx.cpu)
    deepseek_v41.mx.argpartition = stable_partition
    c = config()
    model = build(c)
    if "--search" in sys.argv:
        return search(model, c, int(sys.argv[-2]), int(sys.argv[-1]))
    for case in CASES:
        ids = prompt(case.n_tokens, case.text_seed, c)
        rest = case.n_tokens - case.prefill
        whole, cached = run(model, ids, [len(ids)]), run(model, ids, [case.prefill] + [1] * rest)
        np.savez_compressed(
            FIXTURES / f"{case.name}.npz",
            mlx_lm=np.array(MLX_LM_VERSION),
            ids=ids.astype(np.int32),
            prefill=case.prefill,
            argmax=whole.argmax(-1).astype(np.int32),
            logits=whole[-8:],
            decoded=cached[case.prefill :][::4],
            decoded_argmax=cached[case.prefill :].argmax(-1).astype(np.int32),
        )
    return None


if __name__ == "__main__":
    main()
