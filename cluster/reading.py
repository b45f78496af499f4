"""Strict reading: plain values from YAML into frozen dataclasses, every refusal with its key.

Unknown keys, wrong types and duplicate keys are refused; bounds are those of the dataclass itself
(its __post_init__), reported under the key's full name. Supported field types: bool, int, float,
str, StrEnums, other dataclasses, and tuples of these.
"""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from headrace.core.errors import ConfigError, HeadraceError

T = TypeVar("T")


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping in a YAML text. Raises `ConfigError` naming `name` and the line; a key that
    stands twice is refused too, where yaml itself would take the last one."""
    try:
        loader = yaml.SafeLoader(text)  # composed once: it takes nearly all of the time
        root = loader.get_single_node()
        if root is not None:
            _refuse_duplicates(root, name)
        values = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name} is no valid YAML{where}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply, or holds itself") from None
    except (TypeError, ValueError, OverflowError) as error:  # a list as a key, a 13th month
        raise ConfigError(f"{name} holds a value that is none: {str(error)[:100]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must hold a mapping of keys, got {_kind(values)}")
    return values


def read_record(
    cls: type[T],
    values: object,
    where: str,
    *,
    fixed: Mapping[str, object] | None = None,
    hidden: Collection[str] = (),
) -> T:
    """A `cls` from the mapping `values`; `where` is the key it stood under, for messages.

    `fixed` are fields that the caller decides, `hidden` fields that keep their default: neither
    may be given. Raises `ConfigError` naming the key, what is allowed and what was found."""
    fixed = fixed or {}
    if values is None:  # an empty section: all defaults
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'the configuration'} must be a mapping, got {_kind(values)}")
    known = {f.name: f for f in fields(cls) if f.name not in fixed and f.name not in hidden}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown key {_join(where, str(key)[:60])}; known here: {', '.join(sorted(known))}"
            )
    hints = get_type_hints(cls)
    given = {key: _value(hints[key], value, _join(where, key)) for key, value in values.items()}
    try:
        return cls(**fixed, **given)
    except HeadraceError as error:
        raise ConfigError(f"{where}: {error.message}" if where else error.message) from None
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_range(where: str, value: float, low: float, high: float) -> None:
    """Raises `ConfigError` with key, bounds and value when `value` lies outside [low, high]."""
    if not low <= value <= high:
        raise ConfigError(f"{where} must be between {low} and {high}, got {value}")


def _value(hint: Any, value: object, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        choices = [choice for choice in get_args(hint) if choice is not types.NoneType]
        return None if value is None else _value(choices[0], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {_kind(value)}")
        item = get_args(hint)[0]
        return tuple(_value(item, one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) and value is not None:
            raise ConfigError(f"{where} must be a mapping, got {_kind(value)}")
        return value or {}
    if is_dataclass(hint):
        return read_record(hint, value, where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if not isinstance(value, str) or value not in list(hint):
            raise ConfigError(f"{where} must be one of {', '.join(hint)}, got {value!r:.60}")
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number, got {value}")
    if hint not in (bool, int, float, str) or type(value) is not hint:
        wanted = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        raise ConfigError(f"{where} must be {wanted.get(hint, str(hint))}, got {_kind(value)}")
    return value


def _refuse_duplicates(node: yaml.Node, name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"{name}: a key must be plain text, in line {key.start_mark.line + 1}"
                )
            if key.value in seen:
                raise ConfigError(
                    f"{name}: key {key.value!r:.60} stands twice, again in line"
                    f" {key.start_mark.line + 1}"
                )
            seen.add(key.value)
            _refuse_duplicates(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, name)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _kind(value: object) -> str:
    if isinstance(value, bool | int | float | str):
        return f"{type(value).__name__} {value!r:.40}"
    return {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), "something")
