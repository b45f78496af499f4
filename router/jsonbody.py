"""A request body as JSON, strictly: UTF-8, one object, no key twice, no NaN, bounded depth."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from headrace.core.errors import InvalidRequest

Json = dict[str, Any]


def parse_object(body: bytes, max_depth: int) -> Json:
    """The JSON object in `body`. Raises `InvalidRequest` and never anything else.

    The standard parser serves because it alone can tell of a key that stands twice; it accepts
    lone surrogates in escapes, which `check_text` refuses where a text is read."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (at byte {error.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except InvalidRequest:
        raise
    except RecursionError:
        raise _too_deep(max_depth) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} (at {error.pos})") from None
    except ValueError:  # an integer of more digits than the interpreter converts
        raise InvalidRequest("the body holds a number that is too long") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_depth(value, max_depth)
    return value


def check_text(text: str, param: str) -> str:
    """`text` if it can be encoded. Raises `InvalidRequest` on lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds a lone surrogate", param=param) from None
    return text


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = show_name(key)
                raise InvalidRequest(f"{name} stands twice in one object", param=name)
            seen.add(key)
    return out


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is no JSON number")


def show_name(key: str) -> str:
    """A field name that a client made up, short and printable enough for a message."""
    shown = key.encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= 64 else shown[:61] + "..."


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {max_depth} levels")


def _check_depth(value: Any, max_depth: int) -> None:
    """Walks containers level by level; flat lists of numbers cost one type check an item."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if type(child) in (dict, list))
        if not below:
            return
        level = below
    raise _too_deep(max_depth)
