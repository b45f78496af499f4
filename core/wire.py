"""Frozen dataclasses to msgpack arrays and back, with every field checked on the way in.

A message is `[kind, field, field, ...]`; nested records are plain arrays. Decoding builds only
classes named in an explicit table, checks type and length of every field, and never looks a name up
that came over the wire. Supported annotations: bool, int, float, str, bytes, `T | None`,
`tuple[T, ...]`, NewTypes and StrEnums over these, token ids (`TokenIds`, u32le bytes on the wire)
and other registered dataclasses.
"""

from __future__ import annotations

import math
import types
from array import array
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from headrace.core.chain import TokenIds, as_token_ids
from headrace.core.errors import HeadraceError, WireError

T = TypeVar("T")
MAX_ITEMS = 1 << 20


def pack_record(record: Any) -> list[Any]:
    """A dataclass as a plain array, recursively."""
    return [_plain(getattr(record, name)) for name in _names(type(record))]  # type: ignore[arg-type]  # as below


def unpack_record(cls: type[T], values: object) -> T:
    """The dataclass `cls` from a plain array. Raises `WireError` naming the class and field."""
    readers = _readers(cls)  # type: ignore[arg-type]  # classes hash; mypy sees type[T]
    if not isinstance(values, list) or len(values) != len(readers):
        raise WireError(f"{cls.__name__}: expected an array of {len(readers)} fields")
    arguments = []
    for (name, reader), value in zip(readers, values, strict=True):
        try:
            arguments.append(reader(value))
        except WireError as error:
            raise WireError(f"{cls.__name__}.{name}: {error.message}") from None
    try:
        return cls(*arguments)
    except (HeadraceError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{cls.__name__}: {error}") from None


class MessageTable:
    """The messages one kind of connection may carry. Kinds are small ints, fixed for ever."""

    def __init__(self, kinds: dict[int, type[Any]]) -> None:
        self._by_kind = dict(kinds)
        self._by_type = {cls: kind for kind, cls in kinds.items()}
        if len(self._by_type) != len(kinds):
            raise ValueError("one message class under two kinds")

    def encode(self, message: Any) -> bytes:
        """msgpack bytes of one message. Raises `KeyError` for a class not in the table."""
        kind = self._by_type[type(message)]
        return bytes(msgpack.packb([kind, *pack_record(message)], use_bin_type=True))

    def decode(self, payload: bytes | memoryview) -> Any:
        """The message in `payload`. Raises `WireError` on anything that is not exactly one."""
        try:
            values = msgpack.unpackb(
                payload,
                raw=False,
                strict_map_key=True,
                max_ext_len=0,
                # An item takes a byte at least. Without this a thousand nested headers that each
                # promise a million items cost 0.7 s, from 5 kB.
                max_array_len=min(MAX_ITEMS, len(payload)),
                max_map_len=0,
            )
        except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not a message: {type(error).__name__}") from None
        if not isinstance(values, list) or not values or type(values[0]) is not int:
            raise WireError("not a message: no kind")
        cls = self._by_kind.get(values[0])
        if cls is None:
            raise WireError(f"unknown message kind {values[0] & 0xFFFF}")
        return unpack_record(cls, values[1:])

    def classes(self) -> Iterable[type[Any]]:
        return self._by_type.keys()


_AS_THEY_ARE = frozenset((bool, int, float, str, bytes, types.NoneType))


def _plain(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return pack_record(value)
    if isinstance(value, StrEnum):
        return value.value
    return value


@cache
def _names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _readers(cls: type[Any]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    hints = get_type_hints(cls)
    return tuple((field.name, _reader(hints[field.name])) for field in fields(cls))


def _reader(hint: Any) -> Callable[[Any], Any]:
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in get_args(hint) if argument is not types.NoneType]
        if len(inner) != 1:
            raise TypeError(f"unsupported union {hint}")
        read = _reader(inner[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        read_item = _reader(get_args(hint)[0])
        return lambda value: tuple(read_item(item) for item in _list(value))
    if hint is TokenIds:
        return _read_tokens
    if hint in (bool, int, str, bytes):
        return lambda value: _exactly(hint, value)
    if hint is float:
        return _read_float
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value: _read_enum(hint, value)
    if is_dataclass(hint):
        return lambda value: unpack_record(hint, value)  # type: ignore[arg-type]
    raise TypeError(f"unsupported field type {hint}")


def _exactly(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise WireError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(f"expected an array, got {type(value).__name__}")
    return value


def _read_float(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        what = value if isinstance(value, float) else type(value).__name__
        raise WireError(f"expected a finite number, got {what}")
    return float(value)


def _read_tokens(value: Any) -> TokenIds:
    if type(value) is not bytes or len(value) % 4:
        raise WireError("expected token ids as u32le bytes")
    return as_token_ids(value)


def _read_enum(kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"not a {kind.__name__}") from None
