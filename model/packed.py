"""Weights that stay as they are stored, widened when they are multiplied with.

A layer of such a trunk is built anew each time that it runs, from the tensors of a mapping that
holds the stored bytes; its experts one by one, as rows choose them. The matrices are those of a
widened trunk, so are the results' bits; what is saved in memory is paid for in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeVar, overload

T = TypeVar("T")


class Weights(StrEnum):
    WIDENED = "widened"  # at load
    PACKED = "packed"  # on use


class OnUse(Sequence[T]):
    """Items that are made at each look-up and belong to whoever looked."""

    def __init__(self, makers: Sequence[Callable[[], T]]) -> None:
        self._makers = tuple(makers)

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> OnUse[T]: ...
    def __getitem__(self, index: int | slice) -> T | OnUse[T]:
        if isinstance(index, slice):
            return OnUse(self._makers[index])
        return self._makers[index]()
