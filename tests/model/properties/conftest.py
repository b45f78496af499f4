"""Random models of both families, and how the properties of this folder are run.

A property is a function of hypothesis' `data`; `holds` runs it over a fixed number of examples, the
same ones each time, and `caught` demands that a deliberately wrong variant of it fails. Eight times
as many, others every time, and a search of any size:

    pytest tests/model/properties -m slow
    pytest tests/model/properties --hypothesis-profile=large --timeout=3600
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.core.rows import Geometry
from headrace.model import CacheLayout, DraftBatch, KvState, ModelConfig, Numerics, Trunk
from headrace.model.engram_hash import sum_of_primes
from headrace.model.slot_bytes import pack_state, unpack_state

BLOCK = 128
SLOW_FACTOR, LARGE_FACTOR = 8, 25
ENGRAM_BOUND = 53

Check = Callable[[Any], None]


def _settings(examples: int, factor: int) -> settings:
    large = settings.get_current_profile_name() == "large"
    return settings(
        max_examples=examples * (LARGE_FACTOR if large else factor),
        derandomize=not large and factor == 1,
        print_blob=True,  # how to run a failing example again
        phases=tuple(Phase) if large else (Phase.generate,),  # shrinking takes minutes
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def _plain(check: Check) -> Check:
    """hypothesis takes neither partial functions nor ones with defaults."""

    def body(data: Any) -> None:
        check(data)

    return body


_SLOW = (pytest.mark.slow, pytest.mark.timeout(900))


@pytest.fixture(
    scope="session", params=[1, pytest.param(SLOW_FACTOR, marks=_SLOW)], ids=["few", "many"]
)
def holds(request: pytest.FixtureRequest) -> Callable[[Check, int], None]:
    """holds(check, examples): no example fails."""

    def run(check: Check, examples: int) -> None:
        _settings(examples, request.param)(given(st.data())(_plain(check)))()

    return run


@pytest.fixture(scope="session")
def caught() -> Callable[[Check, int], None]:
    """caught(check, examples): some example fails by an assertion."""

    def run(check: Check, examples: int) -> None:
        # Fixed examples in every profile: a control asks whether the property can fail at all.
        once = settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        with pytest.raises(AssertionError):
            once(given(st.data())(_plain(check)))()

    return run


# ---- random models -------------------------------------------------------------------------


def _shared(draw: Any) -> dict[str, Any]:
    """Keys of both families."""
    heads = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.integers(2, 4))
    return {
        "vocab_size": draw(st.integers(64, 160)),
        "hidden_size": draw(st.sampled_from([16, 32, 48])),
        "num_attention_heads": heads,
        "o_groups": draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0])),
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "sliding_window": draw(st.integers(5, 20)),
        "index_n_heads": draw(st.sampled_from([1, 2, 4])),
        "index_head_dim": 32,
        "index_topk": draw(st.integers(1, 24)),
        "hc_mult": draw(st.integers(1, 4)),
        "max_position_embeddings": 1024,
    }


def _draw_v41(draw: Any) -> ModelConfig:
    ratios: list[int] = []
    kv: list[int] = []
    index: list[int] = []
    for group in draw(st.lists(st.sampled_from(["window", "source"]), min_size=1, max_size=2)):
        _group(draw, group, 2, draw(st.integers(0, 1)), ratios, kv, index)
    first = len(ratios)
    _group(draw, "source", 1, draw(st.integers(0, 3)), ratios, kv, index)
    n = len(ratios)
    stages = draw(st.integers(0, 2))
    engram = sorted(draw(st.sets(st.integers(0, first), max_size=2)))
    taps = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=2)))
    grams, tables = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    shared = _shared(draw)
    head_dim = draw(st.sampled_from([32, 64]))
    return replace(
        ModelConfig.load("toy"),
        **shared,
        head_dim=head_dim,
        qk_rope_head_dim=draw(st.sampled_from([8, 16, 32])),
        num_hidden_layers=n,
        compress_ratios=(*ratios, *[0] * stages),
        kv_source_layer_ids=tuple(kv),
        index_source_layer_ids=tuple(index),
        candidate_source_layer_id=draw(st.sampled_from([-1, kv[-1]])),
        candidate_topk_blocks=4,
        candidate_block_size=draw(st.sampled_from([8, 16])),
        engram_layer_ids=tuple(engram),
        engram_num_embeddings=sum_of_primes(len(engram), grams, tables, ENGRAM_BOUND),
        engram_compressed_vocab_size=draw(st.integers(20, shared["vocab_size"])),
        engram_max_ngram_size=grams,
        engram_n_heads=tables,
        engram_vocab_size=ENGRAM_BOUND,
        num_nextn_predict_layers=stages,
        dspark_block_size=draw(st.integers(1, 5)),
        dspark_target_layer_ids=tuple(taps) if stages else (),
        dspark_noise_token_id=5,
        image_token_id=6,
        vision=None,
    )


def _group(
    draw: Any, kind: str, ratio: int, more: int, ratios: list[int], kv: list[int], index: list[int]
) -> None:
    """A window-only layer, or a source and `more` layers that read it in one way or another."""
    if kind == "window":
        ratios.append(0)
        return
    kv.append(len(ratios))
    index.append(len(ratios))
    ratios.append(ratio)
    for follower in draw(
        st.lists(st.sampled_from(["reuse", "reindex", "window"]), min_size=more, max_size=more)
    ):
        if follower == "reindex":
            index.append(len(ratios))
        ratios.append(0 if follower == "window" else ratio)


def _draw_v4(draw: Any) -> ModelConfig:
    ratios = tuple(draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=5)))
    sources = tuple(i for i, ratio in enumerate(ratios) if ratio)
    return replace(
        ModelConfig.load("v4-toy"),
        **_shared(draw),
        head_dim=96,
        qk_rope_head_dim=32,
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=sources,
        index_source_layer_ids=tuple(i for i in sources if ratios[i] == 4),
        num_hash_layers=draw(st.integers(0, len(ratios))),
        engram_compressed_vocab_size=1,
    )


V41 = st.composite(_draw_v41)()
V4 = st.composite(_draw_v4)()


@lru_cache(maxsize=32)
def _trunk(config: ModelConfig, seed: int) -> Trunk:
    return Trunk.random(config, seed, Numerics.INVARIANT)


@dataclass
class World:
    """One random model and one random text of it."""

    trunk: Trunk
    text: Any
    seed: int
    types: tuple[Any, Any]  # Driver, Part

    @property
    def config(self) -> ModelConfig:
        return self.trunk.config

    @property
    def window(self) -> int:
        return self.config.sliding_window

    @property
    def geometry(self) -> Geometry:
        c = self.config
        return Geometry(c.sliding_window, c.n_encoder_layers, c.n_decoder_layers)

    def driver(self, **sizes: Any) -> Any:
        """A model with a fresh state full of NaN."""
        return self.types[0](self.trunk, **({"n_blocks": 6, "n_slots": 2} | sizes))

    def part(self, lo: int, hi: int, **more: Any) -> Any:
        values = {"slot": 0, "table": (0, 1, 2, 3), "logits_from": lo} | more
        return self.types[1](self.text, lo, hi, **values)

    def with_ids(self, ids: Sequence[int]) -> Any:
        return type(self.text)(tuple(ids))


@pytest.fixture(scope="session")
def world(driver_type: Any, part_type: Any, text_type: Any) -> Callable[..., World]:
    """world(data, tokens, family=None): a model of either family, a text of `tokens` ids.

    `accept` draws again until it likes the configuration."""

    def build(data: Any, tokens: int, family: str | None = None, accept: Any = None) -> World:
        family = family or data.draw(st.sampled_from(["v41", "v4"]))
        strategy = V4 if family == "v4" else V41
        config = data.draw(strategy if accept is None else strategy.filter(accept))
        seed = data.draw(st.integers(0, 1000))
        ids = np.random.default_rng(seed).integers(2, config.vocab_size, tokens)
        text = text_type(tuple(int(i) for i in ids))
        return World(_trunk(config, seed % 3), text, seed, (driver_type, part_type))

    return build


# ---- what a run leaves ---------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """Everything that a later row may read, in a form without rings and block numbers."""

    blocks: tuple[bytes, ...]
    entries: bytes
    swa: bytes
    drafter: bytes
    tails: np.ndarray

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Left)
        # V4.1's tails are private float64 sums, whose last bits depend on the call's rows.
        return (
            (self.blocks, self.entries, self.swa, self.drafter)
            == (other.blocks, other.entries, other.swa, other.drafter)
            and self.tails.dtype == other.tails.dtype
            and np.allclose(self.tails, other.tails, rtol=1e-11, atol=1e-11)
        )


@pytest.fixture(scope="session")
def left() -> Callable[..., Left]:
    """left(driver, part, length): what a sequence has left after `length` rows."""

    def read(driver: Any, part: Any, length: int) -> Left:
        whole = length // BLOCK
        last = part.table[whole] if length % BLOCK else None
        found = unpack_state(pack_state(driver.state, part.slot, length, 0, last))
        kind = np.float64 if driver.state.tail_dtype == torch.float64 else np.float32
        return Left(
            tuple(driver.state.read_block(b) for b in part.table[:whole]),
            found.entries,
            found.slot.swa,
            found.slot.drafter,
            np.frombuffer(found.slot.tails, kind),
        )

    return read


@pytest.fixture(scope="session")
def run_cut() -> Callable[..., torch.Tensor]:
    """run_cut(driver, part, cuts, between=None): calls that end at each of `cuts` and at the end;
    the logits of all rows from `part.logits_from` on. `between(position)` runs after each call."""

    def run(driver: Any, part: Any, cuts: Sequence[int] = (), between: Any = None) -> torch.Tensor:
        edges = sorted({part.lo, part.hi, *(c for c in cuts if part.lo < c < part.hi)})
        logits = []
        for lo, hi in zip(edges, edges[1:], strict=False):
            logits.append(driver.call(replace(part, lo=lo, hi=hi)).logits)
            if between is not None:
                between(hi)
        return torch.cat(logits)

    return run


@pytest.fixture(scope="session")
def draw_cuts() -> Callable[..., list[int]]:
    """draw_cuts(data, n, most=5): where the calls of a run over n rows end."""

    def cuts(data: Any, n: int, most: int = 5) -> list[int]:
        return data.draw(st.lists(st.integers(1, max(1, n)), max_size=most))

    return cuts


@pytest.fixture(scope="session")
def first_drafts() -> Callable[..., torch.Tensor]:
    """first_drafts(world, driver, part, length): logits of the first step of a block of drafts."""

    def draft(world: World, driver: Any, part: Any, length: int) -> torch.Tensor:
        if not world.config.num_nextn_predict_layers:
            return torch.zeros(0)
        columns = (part.slot, 7, length, part.decoder_floor)
        batch = DraftBatch(*(torch.tensor([x]) for x in columns))
        return world.trunk.draft(batch, driver.state).step(0, torch.tensor([7]))[0]

    return draft


@pytest.fixture(scope="session")
def replace_rings() -> Callable[[Any, int], None]:
    """replace_rings(driver, ring_rows): rings of a size that no configuration allows."""

    def change(driver: Any, ring_rows: int) -> None:
        layout = replace(driver.layout, ring_rows=ring_rows)
        assert isinstance(layout, CacheLayout)
        state = driver.state
        driver.layout = layout
        driver.state = KvState(
            driver.trunk.config, layout, state.n_blocks, state.n_slots, state.numerics, poison=True
        )

    return change
