"""What a request may say, checked before any protocol library sees it.

A field stands in exactly one of three lists: used, accepted and ignored, or refused by name. What
we do not offer yet is refused with a sentence that says so, never ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.core.chain import TOKEN_TYPE, TokenIds
from headrace.core.errors import InvalidRequest, LimitExceeded
from headrace.core.limits import EdgeLimits, Limit
from headrace.core.request import SEED, TEMPERATURE, TOP_P
from headrace.router.jsonbody import Json, check_text, show_name
from headrace.router.messages import read_messages, read_tools
from headrace.router.pictures import Schemes, part_chars, take_urls

# Of the API, without meaning here; and names under which others take identities from clients:
# tenant, domain and ids are ours (a client's salt would protect nobody).
IGNORED: dict[str, type] = {
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), str),
    **dict.fromkeys(("cache_salt", "request_id"), str),
    **dict.fromkeys(("store", "parallel_tool_calls"), bool),
    "metadata": dict,  # of strings
}
_TYPE_NAMES = {str: "a string", bool: "true or false", dict: "an object of strings"}
SHARED = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}
    | {"n", "logprobs", "presence_penalty", "frequency_penalty", "logit_bias"}
)
CHAT = SHARED | {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
    *("response_format", "thinking", "reasoning_effort"),
}
COMPLETION = SHARED | {"prompt", "best_of", "echo", "suffix"}

PENALTY = Limit("penalty", -2.0, 2.0)
EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request of either endpoint. `max_tokens` and `seed` are None when not given.

    Exactly one of `chat` and `prompt` is set. `chat` is a body for the protocol library that holds
    only fields checked here; `prompt` is a text or token ids."""

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    chat: Json | None = None
    prompt: str | TokenIds | None = None
    images: tuple[tuple[str, str], ...] = ()  # (place, URL) of every image part of `chat`

    @property
    def prompt_chars(self) -> int:
        """Characters of text, about; decides whether tokenising leaves the event loop."""
        if self.chat is not None:
            return sum(_chars(message) for message in self.chat["messages"])
        return len(self.prompt) if isinstance(self.prompt, str) else 0


def read_chat(body: Json, limits: EdgeLimits, *, images: Schemes = ()) -> Ask:
    """A `/v1/chat/completions` body, with pictures by URLs of the schemes `images`. Raises
    `InvalidRequest` naming the field."""
    ask = _read_shared(body, CHAT, limits, "max_completion_tokens")
    _integer(body, "top_logprobs", Limit("top_logprobs", 0, limits.top_logprobs))
    _refuse_format(body.get("response_format"))
    messages = read_messages(body.get("messages"), limits, images=images)
    urls = take_urls(messages)
    chat: Json = {"messages": messages, "stream": ask.stream}
    if ask.include_usage:
        chat["stream_options"] = {"include_usage": True}
    tools = read_tools(body.get("tools"))
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = _tool_choice(body.get("tool_choice"))
    elif body.get("tool_choice") not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    chat |= _thinking(body)
    chat |= {"temperature": ask.temperature, "top_p": ask.top_p, "stop": list(ask.stop)}
    return replace(ask, chat=chat, images=urls)


def read_completion(body: Json, limits: EdgeLimits) -> Ask:
    """A `/v1/completions` body. Raises `InvalidRequest` naming the field."""
    ask = _read_shared(body, COMPLETION, limits)
    _integer(body, "best_of", Limit("best_of", 1, limits.choices))
    for name, off in (("echo", False), ("suffix", "")):
        if (value := body.get(name)) is not None and (type(value) is not type(off) or value):
            raise InvalidRequest(f"{name} is not offered", param=name)
    return replace(ask, prompt=_prompt(body.get("prompt"), limits))


def check_prompt_ids(ids: TokenIds, vocab_size: int, placeholders: Collection[int]) -> None:
    """Ids as the model can embed them. Raises `InvalidRequest`.

    `placeholders`: ids that stand for something that is not text (an image, a pad); the image mask
    is never derived from ids, so these may not come from a client."""
    values = np.frombuffer(ids, dtype=np.uint32)  # a million ids cost 2 ms this way, not 40
    if values.max() >= vocab_size:
        raise InvalidRequest(
            f"prompt ids must be below the vocabulary's size {vocab_size}, got {values.max()}",
            param="prompt",
        )
    bad = np.isin(values, np.fromiter(placeholders, dtype=np.uint32))
    if bad.any():
        raise InvalidRequest(
            f"prompt id {values[bad].min()} is reserved and stands for no text", param="prompt"
        )


def resolve_max_tokens(
    asked: int | None, n_tokens: int, context_tokens: int, default: int, cap: int
) -> int:
    """Tokens to generate: the asked number, or without one `default`, lowered to what is left.

    Raises `InvalidRequest` when prompt and asked number exceed the context: never a silent clamp of
    what was asked."""
    if asked is None and n_tokens < context_tokens:
        return min(default, cap, context_tokens - n_tokens)
    wanted = asked or 1
    if n_tokens + wanted > context_tokens:
        raise LimitExceeded(
            f"prompt and max_tokens are limited to {context_tokens} tokens together,"
            f" got {n_tokens} + {wanted}",
            param="prompt" if n_tokens >= context_tokens else "max_tokens",
            code="context_length_exceeded",
        )
    return wanted


def _read_shared(
    body: Json, fields: frozenset[str], limits: EdgeLimits, alias: str | None = None
) -> Ask:
    for name in body:
        if name not in fields and name not in IGNORED:
            shown = show_name(name)
            raise InvalidRequest(f"{shown} is not supported", param=shown, code="unknown_field")
    _check_ignored(body)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model must be a non-empty string", param="model")
    _integer(body, "n", Limit("n", 1, limits.choices))
    _refuse_logprobs(body.get("logprobs"))
    for name in ("presence_penalty", "frequency_penalty"):
        if _number(body, replace(PENALTY, name=name), 0.0):
            raise InvalidRequest(f"{name} is not offered; only 0 is", param=name)
    if body.get("logit_bias") not in (None, {}):
        raise InvalidRequest("logit_bias is not offered", param="logit_bias")
    stream = _boolean(body, "stream")
    return Ask(
        model=model,
        max_tokens=_max_tokens(body, limits, alias),
        temperature=_number(body, TEMPERATURE, 1.0),
        top_p=_number(body, TOP_P, 1.0),
        seed=_integer(body, "seed", SEED),
        stop=_stop(body.get("stop"), limits),
        stream=stream,
        include_usage=_stream_options(body.get("stream_options"), stream),
    )


def _chars(message: Json) -> int:
    content = message.get("content")
    if isinstance(content, list):
        return sum(map(part_chars, content))
    return len(content or "")


def _check_ignored(body: Json) -> None:
    for name in body.keys() & IGNORED.keys():
        value, kind = body[name], IGNORED[name]
        right = value is None or isinstance(value, kind)
        if isinstance(value, dict):
            right = right and all(isinstance(item, str) for item in value.values())
        if not right:
            raise InvalidRequest(f"{name} must be {_TYPE_NAMES[kind]}", param=name)


def _integer(body: Json, name: str, limit: Limit) -> int | None:
    value = body.get(name)
    return None if value is None else limit.integer(value)


def _number(body: Json, limit: Limit, default: float) -> float:
    value = body.get(limit.name)
    return default if value is None else limit.number(value)


def _boolean(body: Json, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return bool(value)


def _max_tokens(body: Json, limits: EdgeLimits, alias: str | None) -> int | None:
    value = _integer(body, "max_tokens", Limit("max_tokens", 1, limits.completion_tokens))
    if alias is None:
        return value
    other = _integer(body, alias, Limit(alias, 1, limits.completion_tokens))
    if value is not None and other is not None and value != other:
        raise InvalidRequest(f"max_tokens {value} and {alias} {other} contradict", param=alias)
    return other if value is None else value


def _stop(value: Any, limits: EdgeLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequest("stop must be a string or a list of strings", param="stop")
    Limit("stop", 0, limits.stop_strings, "strings").at_most(len(strings))
    for text in strings:
        if not text:
            raise InvalidRequest("stop must not hold an empty string", param="stop")
        Limit("stop", 1, limits.stop_chars, "characters a string").at_most(len(text))
        check_text(text, "stop")
    return tuple(strings)


def _stream_options(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise InvalidRequest("stream_options may hold include_usage", param="stream_options")
    if not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return _boolean(value, "include_usage")


def _refuse_logprobs(value: Any) -> None:
    if value not in (None, False) or (isinstance(value, int | float) and value is not False):
        raise InvalidRequest("logprobs are not offered", param="logprobs")


def _refuse_format(value: Any) -> None:
    if value is not None and value != {"type": "text"}:
        raise InvalidRequest(
            'response_format is not offered but for {"type": "text"}', param="response_format"
        )


def _tool_choice(value: Any) -> str:
    if value in (None, "auto", "none") and not isinstance(value, dict):
        return value or "auto"
    raise InvalidRequest(
        "tool_choice must be auto or none; forcing a call is not offered", param="tool_choice"
    )


def _thinking(body: Json) -> Json:
    out: Json = {}
    thinking, effort = body.get("thinking"), body.get("reasoning_effort")
    if thinking is not None:
        if thinking not in ({"type": "enabled"}, {"type": "disabled"}):
            raise InvalidRequest(
                'thinking must be {"type": "enabled"} or {"type": "disabled"}', param="thinking"
            )
        out["thinking"] = thinking
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidRequest(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort"
            )
        out["reasoning_effort"] = effort
    return out


def _prompt(value: Any, limits: EdgeLimits) -> str | TokenIds:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value:
        Limit("prompt", 0, limits.prompt_chars, "characters").at_most(len(value))
        return check_text(value, "prompt")
    if isinstance(value, list) and value:
        Limit("prompt", 0, limits.prompt_tokens, "tokens").at_most(len(value))
        if all(type(item) is int for item in value):
            try:
                return array(TOKEN_TYPE, value)
            except OverflowError:
                raise InvalidRequest(
                    "prompt ids must lie between 0 and the vocabulary's size", param="prompt"
                ) from None
        if all(isinstance(item, str | list) for item in value):
            raise InvalidRequest("one prompt a request, not a list of prompts", param="prompt")
    raise InvalidRequest("prompt must be a non-empty string or list of token ids", param="prompt")
