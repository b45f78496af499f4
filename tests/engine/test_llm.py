"""The offline door and the factory behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError, InvalidRequest
from headrace.core.request import FinishReason, Sampling
from headrace.engine import (
    LLM,
    BlockDone,
    Engine,
    EngineSettings,
    Event,
    Half,
    WindowDone,
    load_engine,
    resolve_numerics,
)
from headrace.model import CacheLayout, ModelConfig, Numerics


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("t1", settings=EngineSettings(n_blocks=8, n_slots=2), poison=True)


def test_prompts_and_ids_complete_in_their_order(llm: LLM) -> None:
    text = "It is a truth universally acknowledged"
    ids = list(llm.encode(text))
    assert ids[0] == llm.engine.model.config.bos_token_id
    assert llm.tokenizer.decode(ids[1:]) == text
    first, second, third = llm.generate([text, ids, ids[:5]], max_tokens=6)
    assert first.prompt_ids == second.prompt_ids == tuple(ids)
    assert first.token_ids == second.token_ids and len(first.token_ids) == 6
    assert first.text == llm.tokenizer.decode(list(first.token_ids))
    assert third.prompt_ids == tuple(ids[:5]) and third.token_ids != first.token_ids
    assert first.finish is FinishReason.LENGTH
    assert first.encoder_rows == len(ids) + 5 == first.decoder_rows
    assert llm.engine.stats().free_slots == 2 and llm.engine.stats().held_blocks == 0


def test_added_tokens_never_come_from_text(llm: LLM) -> None:
    added = llm.tokenizer.get_added_tokens_decoder()
    for number, token in added.items():
        assert number not in list(llm.encode(f"a {token.content} b"))[1:]


def test_one_sampling_a_prompt_and_stop_ids(llm: LLM) -> None:
    ids = list(llm.encode("Hello there"))
    hot = Sampling(temperature=1.0, seed=4)
    greedy, drawn = llm.generate([ids, ids], [Sampling(), hot], max_tokens=8)
    assert greedy.token_ids != drawn.token_ids
    (again,) = llm.generate([ids], hot, max_tokens=8)
    assert again == drawn
    stop = greedy.token_ids[3]
    (stopped,) = llm.generate([ids], max_tokens=8, stop_token_ids=[stop])
    assert stopped.finish is FinishReason.STOP
    assert stopped.token_ids == greedy.token_ids[: greedy.token_ids.index(stop)]
    with pytest.raises(InvalidRequest, match="2 samplings for 1 prompts"):
        llm.generate([ids], [hot, hot])


def test_the_hook_reads_blocks_and_windows(llm: LLM) -> None:
    ids = [17 + i % 900 for i in range(300)]
    seen: list[tuple[str, int, bytes]] = []

    def look(engine: Engine, event: Event) -> None:
        if isinstance(event, BlockDone):
            seen.append(("block", event.index, engine.state.read_block(event.block)))
        if isinstance(event, WindowDone):
            seen.append(("window", event.position, event.payload))

    (one,) = llm.generate([ids], max_tokens=2, on_event=look)
    assert [(kind, place) for kind, place, _ in seen] == [
        ("block", 0),
        ("block", 1),
        ("window", 256),
    ]
    layout = llm.engine.state.layout
    assert {len(b) for kind, _, b in seen if kind == "block"} == {layout.block_bytes}
    assert len(seen[2][2]) == layout.window_record_bytes
    assert (one.encoder_rows, one.decoder_rows) == (301, 45)


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    good = list(llm.encode("Hello"))
    with pytest.raises(InvalidRequest, match="8 blocks of 128 tokens here, got 9"):
        llm.generate([good, good, [17] * 1100], max_tokens=2)
    llm.engine.check_integrity()
    assert llm.engine.stats().free_slots == 2
    assert len(llm.generate([good], max_tokens=2)[0].token_ids) == 2


def test_keep_is_checked_and_defaulted() -> None:
    with pytest.raises(ConfigError, match=r"window \(32\), got 31"):
        LLM("t1", keep_tokens=31)
    assert LLM("t1").keep_tokens == 44
    with pytest.raises(ConfigError, match="not known"):
        LLM("t9")


def test_numerics_and_card(llm: LLM, new_request: Callable[..., Any]) -> None:
    assert resolve_numerics("auto", "cpu") is Numerics.INVARIANT
    assert resolve_numerics("auto", "cuda:1") is Numerics.FAST
    assert resolve_numerics("fast", "cpu") is Numerics.FAST
    card = llm.engine.card("t1")
    layout = CacheLayout.of(ModelConfig.load("t1"))
    assert card.layout_id == layout.layout_id and len(card.layout_id) == 32
    assert (card.block_bytes, card.window_record_bytes) == (17_920, 6 * 31 * 66)
    assert (card.window_tokens, card.n_encoder_layers, card.n_decoder_layers) == (32, 6, 6)
    assert card.geometry == llm.engine.geometry
    assert card.numerics == "invariant-fp64"
    fast = load_engine(
        Deployment(model="t1", numerics="fast"), EngineSettings(8, 2), Half.ENCODER
    ).card("t1")
    assert fast.numerics == "fast-fp32"
    assert fast.weights == card.weights
    assert fast.namespace().digest() != card.namespace().digest()
    other = load_engine(Deployment(model="t1", seed=1), EngineSettings(8, 2), Half.FULL)
    assert other.card("t1").weights != card.weights
