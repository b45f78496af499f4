"""The messages and tools of a chat request: structure and sizes, before templates see them."""

from __future__ import annotations

import math
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.limits import EdgeLimits, Limit
from headrace.router.jsonbody import Json, check_text, show_name
from headrace.router.pictures import IMAGE_KINDS, Schemes, part_chars, read_image_part

TOOLS = Limit("tools", 0, 128, "tools")
# Of a tool's schema: what the protocol library's JSON holds as an integer.
NUMBER = Limit("tools", -(2**63), 2**64 - 1, "of an integer in a schema")
CALLS = Limit("tool_calls", 1, 128, "calls")
# Fields of an answer that clients send back with the history; only null has a meaning here.
NULL_FIELDS = frozenset({"refusal", "audio", "annotations", "function_call"})
FIELDS: dict[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset(
        {"role", "content", "name", "tool_calls", "reasoning_content", "prefix"} | NULL_FIELDS
    ),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}


def read_messages(value: Any, limits: EdgeLimits, *, images: Schemes = ()) -> list[Json]:
    """Checked messages, with only the fields a template needs; image parts of users with URLs of
    the schemes `images`. Raises `InvalidRequest`.

    Texts stay texts: that a content spells a special token's name is legal, since prompt encoding
    never gives such a token to content."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a non-empty list", param="messages")
    Limit("messages", 1, limits.messages, "messages").at_most(len(value))
    out = [_message(item, f"messages[{i}]", images) for i, item in enumerate(value)]
    if not any(message["role"] in ("user", "tool") for message in out):
        raise InvalidRequest("messages must hold one of role user", param="messages")
    chars = sum(_text_chars(message) for message in out)
    Limit("messages", 0, limits.prompt_chars, "characters in all").at_most(chars)
    return out


def read_tools(value: Any) -> list[Json]:
    """Tool definitions of type function. Raises `InvalidRequest`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest("tools must be a list", param="tools")
    TOOLS.at_most(len(value))
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        _object(tool, {"type", "function"}, where)
        if tool.get("type") != "function":
            raise InvalidRequest(f"{where}.type must be function", param=where)
        function = tool.get("function")
        _object(function, {"name", "description", "parameters", "strict"}, f"{where}.function")
        _string(function.get("name"), f"{where}.function.name")
        if function.get("description") is not None:
            _string(function["description"], f"{where}.function.description", empty=True)
        if function.get("parameters") is not None and not isinstance(function["parameters"], dict):
            raise InvalidRequest(f"{where}.function.parameters must be an object", param=where)
        if function.get("strict") is not None and function["strict"] is not False:
            raise InvalidRequest("strict tools are not offered", param=f"{where}.function.strict")
        _check_values(function, where)
    return value


def _message(item: Any, where: str, images: Schemes) -> Json:
    role = item.get("role") if isinstance(item, dict) else None
    if role == "developer":
        role = "system"  # its newer name
    if not isinstance(role, str) or role not in FIELDS:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(FIELDS)}", param=f"{where}.role"
        )
    _object(item, FIELDS[role], where)
    for name in NULL_FIELDS & item.keys():
        if item[name] not in (None, []):
            raise InvalidRequest(f"{where}.{name} is not supported", param=f"{where}.{name}")
    if item.get("name") is not None:
        _string(item["name"], f"{where}.name")
    out: Json = {"role": role}
    if role == "assistant":
        out |= _assistant(item, where)
    elif role == "tool":
        out["tool_call_id"] = _string(item.get("tool_call_id"), f"{where}.tool_call_id")
    may_be_empty = role == "tool" or (role == "assistant" and len(out) > 1)
    content = item.get("content")
    if content is None and role == "assistant" and "tool_calls" in out:
        out["content"] = None
    else:
        shown = images if role == "user" else ()
        out["content"] = _content(content, f"{where}.content", may_be_empty, shown)
    return out


def _assistant(item: Json, where: str) -> Json:
    out: Json = {}
    if item.get("reasoning_content") is not None:
        out["reasoning_content"] = _string(
            item["reasoning_content"], f"{where}.reasoning_content", empty=True
        )
    if item.get("prefix") is not None and item["prefix"] is not False:
        raise InvalidRequest(f"{where}.prefix is not offered", param=f"{where}.prefix")
    if item.get("tool_calls") is None:
        return out
    calls = item["tool_calls"]
    if not isinstance(calls, list) or not calls:
        raise InvalidRequest(f"{where}.tool_calls must be a non-empty list", param="tool_calls")
    CALLS.at_most(len(calls))
    out["tool_calls"] = []
    for i, call in enumerate(calls):
        at = f"{where}.tool_calls[{i}]"
        _object(call, {"id", "type", "function", "index"}, at)
        function = call.get("function")
        _object(function, {"name", "arguments"}, f"{at}.function")
        out["tool_calls"].append(
            {
                "id": _string(call.get("id"), f"{at}.id"),
                "type": "function",
                "function": {
                    "name": _string(function.get("name"), f"{at}.function.name"),
                    "arguments": _string(
                        function.get("arguments"), f"{at}.function.arguments", empty=True
                    ),
                },
            }
        )
    return out


def _content(value: Any, where: str, may_be_empty: bool, images: Schemes) -> str | list[Json]:
    if isinstance(value, str):
        return _string(value, where, empty=may_be_empty)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    parts: list[Json] = []
    for i, part in enumerate(value):
        at = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in IMAGE_KINDS:
            if not images:
                raise InvalidRequest("images are not offered here", param=at)
            parts.append(read_image_part(part, at, images))
            continue
        if kind != "text":
            raise InvalidRequest(f"{at}.type must be text", param=at)
        _object(part, {"type", "text"}, at)
        parts.append({"type": "text", "text": _string(part.get("text"), f"{at}.text")})
    return parts


def _string(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where)
    if not value and not empty:
        raise InvalidRequest(f"{where} must not be empty", param=where)
    return check_text(value, where)


def _object(value: Any, fields: frozenset[str] | set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    for name in value:
        if name not in fields:
            full = f"{where}.{show_name(name)}"
            raise InvalidRequest(f"{full} is not supported", param=full, code="unknown_field")


def _check_values(value: Any, where: str) -> None:
    """Every text, key and number below `value`, as the protocol library can take it; depth is
    bounded by the body's own check."""
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, int):
        NUMBER.integer(int(value))  # true and false are ints here, and in range
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{where} holds a number beyond a double's range", param=where)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key, where)
            _check_values(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_values(item, where)


def _text_chars(message: Json) -> int:
    content = message["content"] or ""
    chars = sum(map(part_chars, content)) if isinstance(content, list) else len(content)
    texts = [message.get("reasoning_content", "")]
    texts += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return chars + sum(map(len, texts))
