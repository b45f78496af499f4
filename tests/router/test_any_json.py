"""Any JSON value at any field of a request: taken, or refused with a status of the 400s.

The same steps as the router's, without its sockets: bytes, parser, checks, files, template.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.images import ImageLimits
from headrace.core.limits import EdgeLimits
from headrace.router.fetch import judge_url
from headrace.router.jsonbody import parse_object
from headrace.router.pictures import WITH_FETCH, open_files
from headrace.router.protocol import Protocols
from headrace.router.settings import FetchSettings
from headrace.router.tokens import Vocabulary
from headrace.router.validate import (
    COMPLETION,
    IGNORED,
    check_prompt_ids,
    read_chat,
    read_completion,
)

LIMITS = EdgeLimits()
FETCH = FetchSettings(hosts=("*",))
URL = "data:image/png;base64,AAAA"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "strict": False,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "minimum": 1}}},
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
SHARED: dict[str, Any] = {
    **{"model": "scripted", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 1},
    **{"stop": ["x"], "stream": True, "n": 1, "logprobs": False, "logit_bias": {}},
    **{"stream_options": {"include_usage": True}},
    **{"presence_penalty": 0, "frequency_penalty": 0},
    **dict.fromkeys(IGNORED),
    "metadata": {"a": "b"},
}
CHAT: dict[str, Any] = SHARED | {
    "messages": [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, IMAGE]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "c", "tool_call_id": "c"},
        {"role": "assistant", "content": "c", "prefix": False, "refusal": None, "audio": None},
        {"role": "user", "content": "again"},
    ],
    **{"max_completion_tokens": 3, "top_logprobs": 0, "tools": [TOOL], "tool_choice": "auto"},
    **{"response_format": {"type": "text"}, "thinking": {"type": "enabled"}},
    "reasoning_effort": "high",
}
TEXT: dict[str, Any] = SHARED | {"prompt": "a", "best_of": 1, "echo": False, "suffix": ""}


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from paths(item, (*at, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(body)
    inner: Any = out
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return out


SURROGATES = st.sampled_from(
    ["\ud800", "a\udfff", "data:image/png;base64,%41\ud800", "\ud83d\u0000"]
)
URLS = st.sampled_from(
    [
        "data:image/png;base64,%",
        "data:image/gif;base64,R0lGODlh",
        "http://[::1",
        "http://a.b:99999/",
    ]
    + ["https://xn--\u00e9.de/", "http://a.b/\ud800", "data:,", "DATA:image/png;base64,\u0661"]
)
NUMBERS = st.sampled_from([10**30, -(10**30), 2**63, 2**64, 1.5, -0.0, 1e308, 0, 1, -1, 10**400])
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | NUMBERS | SURROGATES
SCALARS |= URLS | st.floats(allow_nan=False, allow_infinity=False)
KEYS = SURROGATES | st.sampled_from(["type", "text", "url", "function", "name", "role", "\u0000"])
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6
)


@pytest.fixture(scope="module")
def protocols() -> Protocols:
    return Protocols(Vocabulary("tokenizer-4096"))


def serve(protocols: Protocols, body: dict[str, Any], raw: bytes | None = None) -> None:
    """What the router does with a body before it has a ticket. Raises `HeadraceError`."""
    parsed = parse_object(raw or json.dumps(body).encode(), LIMITS.json_depth)
    if "messages" not in body:
        ask = read_completion(parsed, LIMITS)
        if isinstance(ask.prompt, str):
            protocols.vocabulary.encode_plain(ask.prompt)
        elif ask.prompt is not None:
            check_prompt_ids(ask.prompt, 4096, protocols.vocabulary.special)
        return
    ask = read_chat(parsed, LIMITS, images=WITH_FETCH)
    assert ask.chat is not None
    protocols.chat_prompt(ask.chat)
    for place, url in ask.images:
        if url[:5].lower() != "data:":
            judge_url(url, FETCH, place)
        else:
            open_files([(place, url)], ImageLimits())


def refused(protocols: Protocols, body: dict[str, Any], raw: bytes | None = None) -> bool:
    try:
        serve(protocols, body, raw)
    except HeadraceError as error:
        assert 400 <= error.status < 500, error
        json.dumps(error.body(), ensure_ascii=False).encode()  # an answer can be made of it
        return True
    return False


def test_the_bodies_are_good_but_for_the_picture(protocols: Protocols) -> None:
    assert not refused(protocols, TEXT | {"stream_options": None, "logprobs": None})
    with pytest.raises(InvalidRequest, match="image") as caught:
        serve(protocols, CHAT)  # four bytes are no picture; everything before it was passed
    assert caught.value.param == "messages[1].content[1]"
    assert set(TEXT) == COMPLETION | set(IGNORED)


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "completions"])
@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=VALUES)
def test_any_value_at_any_field(
    protocols: Protocols, body: dict[str, Any], data: st.DataObject, value: Any
) -> None:
    path = data.draw(st.sampled_from(list(paths(body))))
    refused(protocols, replaced(body, path, value))


@pytest.mark.parametrize(
    "value", [[], {}, [[]], {"a": []}, "\ud800", 10**30, 1e308, True, None, ""]
)
@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "completions"])
def test_odd_values_at_every_field(protocols: Protocols, body: dict[str, Any], value: Any) -> None:
    for path in paths(body):
        refused(protocols, replaced(body, path, value))


@pytest.mark.parametrize(
    "number", [b"1e999", b"-1e999", b"9" * 4000, b"1" * 5000, b"0." + b"1" * 9000]
)
def test_numbers_that_only_bytes_can_say(protocols: Protocols, number: bytes) -> None:
    for body in (CHAT, TEXT):
        for path in paths(body):
            raw = json.dumps(replaced(body, path, "@@")).encode().replace(b'"@@"', number)
            refused(protocols, body, raw)
