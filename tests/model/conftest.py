"""Shared by the model's tests: cached tiny models and a driver that builds row batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from headrace_tests import module

from headrace.model import (
    CacheLayout,
    KvState,
    ModelConfig,
    Numerics,
    RowBatch,
    RowResult,
    Trunk,
    build_token_map,
    package_tokenizer,
)

torch.set_num_threads(1)


@dataclass(frozen=True)
class Text:
    """Token ids of one sequence, and which positions lie in an image with which rows."""

    ids: tuple[int, ...]
    image: frozenset[int] = frozenset()
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Rows [lo, hi) of one sequence in one call."""

    text: Text
    lo: int
    hi: int
    slot: int
    table: tuple[int, ...]
    swa_floor: int = 0
    decoder_floor: int = 0
    write_floor: int = 0
    decoder_from: int = 0
    logits_from: int | None = None  # None = the last row only


class Driver:
    """A model and one state, filled with NaN, that runs parts of sequences."""

    def __init__(
        self,
        trunk: Trunk,
        *,
        backtrack_rows: int = 6,
        n_blocks: int = 16,
        n_slots: int = 4,
        ring_rows: int | None = None,
        kv_quant: bool = True,
    ) -> None:
        self.trunk = trunk
        self.layout = CacheLayout.of(
            trunk.config, backtrack_rows, ring_rows=ring_rows, kv_quant=kv_quant
        )
        self.state = KvState(
            trunk.config,
            self.layout,
            n_blocks,
            n_slots,
            trunk.numerics,
            trunk.device,
            poison=True,
        )
        self.encoder_rows = self.decoder_rows = 0

    def batch(self, parts: Sequence[Part]) -> RowBatch:
        grams, dim = self.trunk.config.engram_max_ngram_size, self.trunk.config.hidden_size
        history, image, columns, rows = [], [], [], []
        with_image = any(p.text.image for p in parts)
        for number, p in enumerate(parts):
            first_logits = p.hi - 1 if p.logits_from is None else p.logits_from
            for at in range(p.lo, p.hi):
                back = [at - k for k in range(grams)]
                history.append([p.text.ids[b] if b >= 0 else -1 for b in back])
                image.append([b in p.text.image for b in back])
                decoder = at >= p.decoder_from
                columns.append(
                    (at, p.slot, number, p.swa_floor, p.decoder_floor, p.write_floor)
                    + (decoder, decoder and at >= first_logits)
                )
                rows.append(p.text.embeddings.get(at, torch.zeros(dim)))
        tables = torch.full((len(parts), max(len(p.table) for p in parts)), -1)
        for number, p in enumerate(parts):
            tables[number, : len(p.table)] = torch.tensor(p.table)
        position, slot, sequence, swa, dec_floor, write, decoder_row, logits = (
            torch.tensor(column) for column in zip(*columns, strict=True)
        )
        return RowBatch(
            history_ids=torch.tensor(history),
            history_image=torch.tensor(image),
            positions=position,
            slots=slot,
            sequence=sequence,
            block_tables=tables,
            swa_floor=swa,
            decoder_floor=dec_floor,
            write_floor=write,
            decoder=decoder_row,
            logits=logits,
            embeddings=torch.stack(rows) if with_image else None,
        )

    def call(self, *parts: Part, capture: bool = False) -> RowResult:
        result = self.trunk.forward(self.batch(parts), self.state, capture=capture)
        self.encoder_rows += result.encoder_rows
        self.decoder_rows += result.decoder_rows
        return result

    def run(self, part: Part, splits: Sequence[int] | None = None) -> RowResult:
        """Run a part in calls of the given sizes (one call by default); the last call's result."""
        lo = part.lo
        for m in splits or [part.hi - part.lo]:
            result = self.call(_replace(part, lo=lo, hi=lo + m))
            lo += m
        assert lo == part.hi
        return result


def _replace(part: Part, **changes: int) -> Part:
    return Part(**{**part.__dict__, **changes})


@lru_cache(maxsize=8)
def _trunk(name: str, numerics: Numerics, seed: int) -> Trunk:
    config = ModelConfig.load(name)
    has_engram = bool(config.engram_layer_ids)
    ids = build_token_map(package_tokenizer(config.vocab_size)).ids if has_engram else None
    return Trunk.random(config, seed, numerics, token_map=ids)


@pytest.fixture(scope="session")
def make_trunk() -> Callable[..., Trunk]:
    """make_trunk(name, numerics=INVARIANT, seed=1): a cached random model, nothing masked."""

    def make(name: str, numerics: Numerics = Numerics.INVARIANT, seed: int = 1) -> Trunk:
        return _trunk(name, numerics, seed)

    return make


@pytest.fixture(scope="session")
def driver_type() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def part_type() -> type[Part]:
    return Part


@pytest.fixture(scope="session")
def make_text() -> Callable[..., Text]:
    """make_text(n, seed, config): n seeded ids without special ones, never pad."""

    def make(n: int, seed: int, config: ModelConfig) -> Text:
        rng = np.random.default_rng(seed)
        high = min(config.vocab_size, 1000)
        return Text(tuple(int(i) for i in rng.integers(31, high, n)))

    return make


@pytest.fixture(scope="session")
def text_type() -> type[Text]:
    return Text


@pytest.fixture(scope="session")
def dense() -> ModuleType:
    return module("tests/model/oracle/dense.py")


@pytest.fixture
def state_and_logits(
    driver_type: Any, part_type: Any, make_text: Callable[..., Any]
) -> Callable[[Trunk], tuple[Any, ...]]:
    """What 150 rows in three calls leave behind and give."""

    def run(trunk: Trunk) -> tuple[Any, ...]:
        driver, text = driver_type(trunk), make_text(150, 3, trunk.config)
        logits = [
            driver.call(part_type(text, lo, hi, 0, (0, 1), logits_from=lo)).logits
            for lo, hi in ((0, 120), (120, 149), (149, 150))
        ]
        assert not any(x.isnan().any() for x in logits)
        swa = driver.state.export_slot(0, 150).swa
        return torch.cat(logits).cpu().numpy().tobytes(), driver.state.read_block(0), swa

    return run
