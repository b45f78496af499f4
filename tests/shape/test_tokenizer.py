"""The committed tokenizers carry the release's special names and work with its chat encoding.

Chat text goes through deepseek-recipe, as in the router; `tokenizers` is the second opinion.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# size -> (noise id, image id); the first pair is in the configurations T1 and T2
FIXED_IDS = {4096: (4000, 4001), 1024: (1000, 1001)}
ENCODINGS = {"v4.1": recipe.DeepseekV41Encoding, "v4": recipe.DeepseekV4Encoding}
# Places in a picture. The model writes them, so recipe keeps them special in an assistant's turn.
GROUNDING = {
    f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")
}
OPTIONS = (
    recipe.ConversionOptions()
    .with_default_thinking_mode(False)
    .with_model_alias("headrace-tiny", recipe.ModelVersion.DeepseekV41Flash)
)


@pytest.fixture(params=FIXED_IDS, scope="module")
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def path(size: int) -> Path:
    return CONFIGS / "tokenizer" / f"tokenizer-{size}.json"


@pytest.fixture(scope="module")
def content(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def added(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}


@pytest.fixture(params=ENCODINGS, scope="module")
def encoding(request: pytest.FixtureRequest, path: Path) -> Any:
    return ENCODINGS[request.param]().with_tokenizer(recipe.Tokenizer.from_file(str(path)))


def chat(messages: list[dict[str, Any]], **fields: Any) -> recipe.Conversation:
    body = {"model": "headrace-tiny", "messages": messages, **fields}
    return recipe.ChatCompletionRequest(json.dumps(body)).convert(OPTIONS).conversation


def test_ids_are_complete_and_fixed(
    size: int, content: dict[str, Any], tokenizer: Tokenizer
) -> None:
    assert sorted(content["model"]["vocab"].values()) == list(range(size))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == size
    assert [tokenizer.token_to_id(name) for name in (BOS, EOS, PAD)] == [0, 1, 2]
    noise, image = FIXED_IDS[size]
    assert tokenizer.id_to_token(image) == "<｜image｜>"
    assert tokenizer.id_to_token(noise) == "<｜place▁holder▁no▁799｜>"


def test_every_merge_makes_a_token_and_none_a_special_one(
    content: dict[str, Any], added: dict[int, str]
) -> None:
    made = ["".join(pair) for pair in content["model"]["merges"]]
    vocabulary = content["model"]["vocab"]
    assert set(made) <= vocabulary.keys() and not set(made) & set(added.values())
    assert len(vocabulary) == len(set(made)) + 256 + len(added)


def test_every_name_that_recipe_can_ask_for_is_there(added: dict[int, str]) -> None:
    kinds = [kind for kind in vars(recipe.SpecialToken).values() if hasattr(kind, "default_str")]
    names = {kind.default_str() for kind in kinds if isinstance(kind, recipe.SpecialToken)}
    assert len(names) == 18
    assert names <= set(added.values())


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("in 1813 or 0x2F, 3.14159").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == [*"1813", *"02", *"314159"]
    assert not [
        t for t in tokenizer.get_vocab() if sum(c.isdigit() for c in t) > 1 and "｜" not in t
    ]


@functools.cache
def loaded(size: int) -> Tokenizer:
    return Tokenizer.from_file(str(CONFIGS / "tokenizer" / f"tokenizer-{size}.json"))


@given(text=st.text(max_size=80))
def test_any_text_comes_back(text: str) -> None:
    for size in FIXED_IDS:
        tokenizer = loaded(size)
        if not any(t.content in text for t in tokenizer.get_added_tokens_decoder().values()):
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert not set(ids) & tokenizer.get_added_tokens_decoder().keys()


def test_a_long_text_is_read_alike_by_both_libraries(path: Path, tokenizer: Tokenizer) -> None:
    text = (CONFIGS / "texts" / "austen-excerpt.txt").read_text("utf-8")
    ids = tokenizer.encode(text).ids
    assert recipe.Tokenizer.from_file(str(path)).encode(text) == ids
    assert 50_000 < len(text) < 60_001 and 2.3 < len(text) / len(ids) < 3.6
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("thinking", [False, True])
def test_every_part_of_the_chat_format_encodes(
    encoding: Any, tokenizer: Tokenizer, size: int, thinking: bool
) -> None:
    tool = recipe.ToolDefinition("weather", "asks", {"type": "object"})
    picture = recipe.DataUrlImageSource("data:image/png;base64,AAAA")
    conversation = recipe.Conversation(
        [
            recipe.SystemMessage("Be brief.", tools=[tool]),
            recipe.UserMessage("What is <｜image｜>?", [picture]),
            recipe.AssistantMessage(
                "Wait.", "hm", [recipe.ToolCall("1", "weather", '{"in": "Ely"}')]
            ),
            recipe.ToolMessage("rain", "1"),
            recipe.LatestReminderMessage("It is late."),
            recipe.UserMessage("And now?"),
        ],
        thinking_mode=thinking,
        tools=[tool],
    )
    ids = encoding.encode(conversation)
    prompt = encoding.render_conversation(conversation)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt.prompt
    # The beginning is put there by the encoding, once: the tokenizer must not add a second one.
    assert ids[0] == 0 and ids.count(0) == 1
    assert ids.count(FIXED_IDS[size][1]) == 1
    assert len(prompt.special_ranges) == sum(i in tokenizer.get_added_tokens_decoder() for i in ids)


def test_second_turn_begins_with_the_first(path: Path, tokenizer: Tokenizer) -> None:
    """What the store lives on: ids of turn two = ids of turn one + answer + end + more."""
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(path)))
    text = (CONFIGS / "texts" / "austen-excerpt.txt").read_text("utf-8")
    answer = "Mr. Bingley, who has 5,000 a year."
    first = [{"role": "system", "content": "Answer."}, {"role": "user", "content": text + "Who?"}]
    reply = {"role": "assistant", "content": answer}
    one = encoding.encode(chat(first))
    two = encoding.encode(chat([*first, reply, {"role": "user", "content": "Why?"}]))
    said = [*one, *tokenizer.encode(answer).ids, tokenizer.token_to_id(EOS)]
    assert two[: len(said)] == said
    assert len(two) < len(said) + 20


def spellings(name: str) -> list[str]:
    """The name alone, in words, twice in a row, after another, and cut in two."""
    return [name, f"say {name} to him", name * 2, f"</think>{name}", f"{name[:3]}{name}{name[3:]}"]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_that_spells_a_special_token_stays_text(
    encoding: Any, tokenizer: Tokenizer, added: dict[int, str], role: str
) -> None:
    def encode(content: str) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        talk: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        if role == "tool":
            talk += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        spoken = {"role": role, "content": content} | (
            {"tool_call_id": "1"} if role == "tool" else {}
        )
        talk = [spoken, *talk] if role == "system" else [*talk, spoken]
        ids: list[int] = encoding.encode(chat([*talk, {"role": "user", "content": "and?"}]))
        return ids

    plain = Counter(i for i in encode("a plain word") if i in added)
    for name in set(added.values()) - (GROUNDING if role == "assistant" else set()):
        for text in spellings(name):
            ids = encode(text)
            assert Counter(i for i in ids if i in added) == plain, text
            assert text in tokenizer.decode(ids, skip_special_tokens=False)


def test_without_its_added_tokens_the_tokenizer_reads_any_text_as_text(
    content: dict[str, Any], added: dict[int, str]
) -> None:
    """How raw prompts are encoded safely.

    `Tokenizer.encode_special_tokens` would not do: it spares only tokens marked special, and
    `<｜User｜>`, `<think>` and others are not, here as in the release.
    """
    plain = Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
    for name in added.values():
        for text in spellings(name):
            ids = plain.encode(text).ids
            assert not set(ids) & added.keys()
            assert plain.decode(ids, skip_special_tokens=False) == text


def test_an_answer_streams_back_as_text(path: Path, tokenizer: Tokenizer) -> None:
    body = {
        "model": "headrace-tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    }
    request = recipe.ChatCompletionRequest(json.dumps(body)).convert(OPTIONS)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "1", "headrace-tiny")
    stream = recipe.StreamProcessor(
        generator, request.parsing_options, recipe.Tokenizer.from_file(str(path))
    )
    answer = "Größe 12 € 日本 🙂, done."
    chunks = []
    for i in tokenizer.encode(answer).ids:
        chunks += stream.push(recipe.InferenceChunk.tokens([i]))
    chunks += stream.finish()
    deltas = [json.loads(chunk.to_json())["choices"] for chunk in chunks]
    assert "".join(d[0]["delta"].get("content") or "" for d in deltas if d) == answer
