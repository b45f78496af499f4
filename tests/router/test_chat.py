"""Chat: templates, special names in content, reasoning, tools, characters."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.limits import EdgeLimits
from headrace.router.jsonbody import parse_object
from headrace.router.protocol import Protocols
from headrace.router.tokens import Vocabulary
from headrace.router.validate import read_chat

V = Vocabulary("tokenizer-4096")
P = Protocols(V)
LIMITS = EdgeLimits()
BOS, USER, ASSISTANT, SYSTEM, THINK_END = (
    V.added[name]
    for name in (
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜System｜>",
        "</think>",
    )
)


def encode(messages: list[dict[str, Any]], **more: Any) -> list[int]:
    body = json.dumps({"model": "m", "messages": messages} | more).encode()
    ask = read_chat(parse_object(body, LIMITS.json_depth), LIMITS)
    assert ask.chat is not None
    return list(P.chat_prompt(ask.chat).token_ids)


def plain(text: str) -> list[int]:
    return list(V.encode_plain(text))


def added(ids: list[int]) -> list[int]:
    known = set(V.added.values())
    return [i for i in ids if i in known]


def test_the_template_of_a_conversation() -> None:
    ids = encode(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Ho."},
            {"role": "user", "content": "He."},
        ]
    )
    expected = [BOS, SYSTEM, *plain("Be brief."), USER, *plain("Hi."), ASSISTANT, THINK_END]
    expected += [*plain("Ho."), 1, USER, *plain("He."), ASSISTANT, THINK_END]
    assert ids == expected
    # The newer name of the role gives the same.
    assert (
        encode([{"role": "developer", "content": "Be brief."}, *turn("Hi.")])
        == expected[: expected.index(ASSISTANT) + 2]
    )


def turn(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", sorted(V.added))
def test_a_special_name_in_content_stays_plain(name: str) -> None:
    """C1: the ids are those of the characters, and the only special ones are the template's."""
    frame = [BOS, USER, ASSISTANT, THINK_END]
    for text in (name, f"a {name} b", name * 3, name[: len(name) // 2] + name[len(name) // 2 :]):
        ids = encode(turn(text))
        assert ids == [BOS, USER, *plain(text), ASSISTANT, THINK_END]
        assert added(ids) == frame
    half = len(name) // 2
    parts = [{"type": "text", "text": name[:half]}, {"type": "text", "text": name[half:]}]
    assert added(encode(turn(parts))) == frame
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert added(encode(turn(unicodedata.normalize(form, name)))) == frame
    system = [{"role": "system", "content": name}, *turn("a")]
    assert added(encode(system)) == [BOS, SYSTEM, USER, ASSISTANT, THINK_END]
    assistant = [*turn("a"), {"role": "assistant", "content": name}, *turn("b")]
    assert added(encode(assistant)) == [*frame, 1, USER, ASSISTANT, THINK_END]
    said = encode(assistant)
    begin, end = said.index(THINK_END) + 1, said.index(1)
    assert b"".join(map(V.token_bytes, said[begin:end])) == name.encode()


@pytest.mark.parametrize("name", sorted(V.added))
def test_a_special_name_in_what_a_client_says_the_model_said_stays_plain(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]

    def history(text: str) -> list[int]:
        said = {"role": "assistant", "tool_calls": [call], "reasoning_content": text}
        result = {"role": "tool", "tool_call_id": "1", "content": "x"}
        messages = [*turn("a"), said | {"content": text}, result, *turn("b")]
        return encode(messages, tools=tools, thinking={"type": "enabled"})

    said, reference = history(f"an {name}"), history("an answer")
    assert added(said) == added(reference)
    text = b"".join(map(V.token_bytes, said)).decode()
    assert text.count(f"an {name}") == 2


def test_a_special_name_in_a_tool_result_stays_plain() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        *turn("a"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    frame = added(encode(history))
    for name in V.added:
        history[-1]["content"] = name
        assert added(encode(history)) == frame, name


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=60))
def test_any_text_is_in_the_prompt_byte_for_byte(text: str) -> None:
    ids = encode(turn(text))
    assert ids == [BOS, USER, *plain(text), ASSISTANT, THINK_END]
    assert b"".join(map(V.token_bytes, ids[2:-2])) == text.encode()


def test_nul_marks_and_bidi_round_trip() -> None:
    """C3."""
    for text in ("a\x00b", "\ufeffa", "\u202eabc\u202c", "\u200d", "e\u0301"):
        assert encode(turn(text))[2:-2] == plain(text)


async def test_reasoning_is_split_off(rigs: Any) -> None:
    async with rigs() as rig:
        text = V.encode_plain("Let me see.")
        rig.decodes[0].script.token_ids = [*text, THINK_END, *V.encode_plain("Yes.")]
        body = {"model": "scripted", "messages": turn("a"), "thinking": {"type": "enabled"}}
        answer = (await rig.client.post("/v1/chat/completions", json=body)).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len(text)
        request = rig.decodes[0].jobs[0].request
        assert V.added["<think>"] in request.token_ids
        assert request.sampling.temperature == 1.0  # thinking fixes it


async def test_think_in_user_text_opens_no_reasoning(rigs: Any) -> None:
    """C7: documented split, never a crash: without thinking, marks in the answer are text."""
    async with rigs() as rig:
        rig.decodes[0].script.token_ids = [V.added["<think>"], *V.encode_plain("Yes.")]
        for text in ("<think>", "</think>", "<think><think>a", "</think></think>"):
            body = {"model": "scripted", "messages": turn(text)}
            answer = await rig.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"]["content"] == "<think>Yes."


async def test_a_tool_call_is_parsed(rigs: Any) -> None:
    async with rigs() as rig:
        dsml = V.added["｜DSML｜"]
        ids: list[int] = []
        for part in (
            "\n\n<", dsml, " calls>\n<", dsml, ' invoke name="f">\n<', dsml,
            ' parameter name="x" string="true">hi</', dsml, " parameter>\n</", dsml,
            " invoke>\n</", dsml, " calls>",
        ):  # fmt: skip
            ids += [part] if isinstance(part, int) else V.encode_plain(part)
        rig.decodes[0].script.token_ids = ids
        schema = {"type": "object", "properties": {"x": {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {"model": "scripted", "messages": turn("a"), "tools": tools}
        answer = (await rig.client.post("/v1/chat/completions", json=body)).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert json.loads(call["function"]["arguments"]) == {"x": "hi"}


async def test_stream_events_join_to_the_plain_answer(rigs: Any) -> None:
    """Multi-byte characters across tokens, a stop string across tokens."""
    async with rigs() as rig:
        text = "Grüße, 水車 😀 and so on. STOP not this"
        rig.decodes[0].script.token_ids = V.encode_plain(text).tolist()
        rig.decodes[0].script.hit_tokens = 0
        body = {"model": "scripted", "messages": turn("a"), "stop": ["STOP"], "max_tokens": 200}
        answer = (await rig.client.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "Grüße, 水車 😀 and so on. "
        assert answer["choices"][0]["finish_reason"] == "stop"
        streamed = await rig.client.post("/v1/chat/completions", json=body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(streamed)]
        joined = "".join(delta.get("content") or "" for delta in deltas)
        assert joined == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stop", [[], ["mill"]], ids=["to the end", "to a stop string"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_tells_its_usage_when_asked_and_then_last(
    rigs: Any, path: str, stop: list[str]
) -> None:
    """The shape that OpenAI documents: an event without choices, and null in all before it."""
    async with rigs() as rig:
        rig.decodes[0].script.hit_tokens = 128
        text = "word " * 200
        body = {"model": "scripted", "stop": stop}
        body |= {"messages": turn(text)} if "chat" in path else {"prompt": text}
        plain = (await rig.client.post(path, json=body)).json()
        reasons = [plain["choices"][0]["finish_reason"]]
        if not stop:  # the replica's word comes with its end, which nobody waits for after a stop
            assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}
            assert rig.records()[-1]["cached_tokens"] == 128
        for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
            events = chunks_of(await rig.client.post(path, json=body | {"stream": True} | options))
            assert not any("usage" in event for event in events)
            assert [r for e in events if (r := e["choices"][0]["finish_reason"])] == reasons
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = chunks_of(await rig.client.post(path, json=body | options))
        told = plain["usage"].keys() - ({"prompt_tokens_details"} if stop else set())
        assert last["choices"] == [] and last["usage"].keys() == plain["usage"].keys()
        assert {n: last["usage"][n] for n in told} == {n: plain["usage"][n] for n in told}
        assert {event["usage"] for event in events} == {None}
        assert [r for e in events if (r := e["choices"][0]["finish_reason"])] == reasons
        names = ("id", "object", "model", "created")
        assert [last[name] for name in names] == [events[0][name] for name in names]


def chunks_of(streamed: httpx.Response) -> list[Any]:
    """The events of a stream that ended with its end mark."""
    *events, end, nothing = streamed.text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
