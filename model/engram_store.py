"""Where Engram tables lie, and how their rows reach a layer before it runs.

    memory  values on the model's device
    mapped  a file's bytes as they are stored, through one read-only mapping: the host holds them
            once, whatever number of processes reads them
    pinned  the same bytes in page-locked memory of the host, for a CUDA device

Rows depend on token ids alone, so `fetch` is called when a call of the model begins and its result
is asked for when the layer runs. For tables that are not on the device it gathers meanwhile in
threads: a fault on a cold page waits in one of them, without the interpreter's lock. What a layer
near the embedding reads is hidden that way in part only; so whoever knows the tokens of a later
call says so by `expect`, and pages that lie on a disk are read in while other rows run.

A mapped file must not be cut short while it is mapped: the system ends a process that reads behind
its end. Values of a stored table are not looked at when it is opened (a release's have 94 GiB).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.kernels.formats import decode_e4m3, e8m0_values
from headrace.model.errors import ConfigError

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_GROUP = 32  # stored codes that share a scale
_THREADS = 8  # faults that wait side by side
_AHEAD_THREADS = 4  # of their own: what is only expected never stands before what is waited for
_ROWS_PER_TASK = 64


class Placement(StrEnum):
    MEMORY = "memory"
    MAPPED = "mapped"
    PINNED = "pinned"

    def check(self, device: torch.device) -> None:
        """Raises `ConfigError` for page-locked memory without a device that reads it."""
        if self is Placement.PINNED and device.type != "cuda":
            raise ConfigError(f"engram: found 'pinned' on {device}, wanted it on a CUDA device")


class EngramTable(Protocol):
    """Rows of one layer's table; `fetch` may be called from one thread at a time."""

    @property
    def n_rows(self) -> int: ...

    @property
    def reads_ahead(self) -> bool:
        """Whether `expect` does anything."""

    def fetch(self, rows: Ints) -> Callable[[], torch.Tensor]:
        """Begin to gather rows [n, k]; the result, to be asked for once, is [n, k * width] in the
        compute dtype on the model's device."""

    def expect(self, rows: Ints) -> None:
        """A later `fetch` will ask for these rows: a hint, returns at once, changes no result."""


@dataclass(frozen=True, slots=True)
class HeldTable:
    """`values` keep their stored dtype on the model's device; gathered rows are cast."""

    values: torch.Tensor
    compute: torch.dtype

    @property
    def n_rows(self) -> int:
        return self.values.shape[0]

    @property
    def reads_ahead(self) -> bool:
        return False

    def expect(self, rows: Ints) -> None:
        """It is all there."""

    def fetch(self, rows: Ints) -> Callable[[], torch.Tensor]:
        def gather() -> torch.Tensor:
            index = torch.from_numpy(rows).to(self.values.device)
            return self.values[index].flatten(1).to(self.compute)

        return gather


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A table's bytes: `data` [rows, bytes a row] of values of `dtype`, or of e4m3 codes with
    E8M0 `scale` [rows, width / 32]."""

    data: Bytes
    scale: Bytes | None
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return self.data.size + (0 if self.scale is None else self.scale.size)


@dataclass(frozen=True, slots=True)
class HostTable:
    """A table on the host, mapped or page-locked (`reads_ahead` False). `prefetch` False gathers
    when the result is asked for: to measure what it hides."""

    stored: StoredRows
    compute: torch.dtype
    device: torch.device
    prefetch: bool = True
    reads_ahead: bool = True

    @property
    def n_rows(self) -> int:
        return self.stored.data.shape[0]

    def fetch(self, rows: Ints) -> Callable[[], torch.Tensor]:
        flat, n = np.ascontiguousarray(rows).reshape(-1), rows.shape[0]
        if not self.prefetch:
            return lambda: self._decode([self._take(flat)], n)
        pending: list[Future[tuple[Bytes, Bytes | None]]] = [
            _pool().submit(self._take, part) for part in _parts(flat, _THREADS)
        ]
        return lambda: self._decode([future.result() for future in pending], n)

    def expect(self, rows: Ints) -> None:
        if self.reads_ahead:
            for part in _parts(np.ascontiguousarray(rows).reshape(-1), _AHEAD_THREADS):
                _ahead().touch(self._take, part)

    def _take(self, rows: Ints) -> tuple[Bytes, Bytes | None]:
        scale = self.stored.scale
        data = self.stored.data.take(rows, axis=0)
        return data, None if scale is None else scale.take(rows, axis=0)

    def _decode(self, parts: list[tuple[Bytes, Bytes | None]], n: int) -> torch.Tensor:
        """Stored bytes travel to the device and widen there: every value is exact."""
        data = self._send([data for data, _ in parts])
        if self.stored.scale is None:
            values = data.view(self.stored.dtype).to(self.compute)
        else:
            scale = self._send([scale for _, scale in parts if scale is not None])
            values = decode_e4m3(data, self.compute)
            spread = e8m0_values(scale, self.compute).repeat_interleave(_GROUP, dim=1)
            values.mul_(spread[:, : values.shape[1]])  # a last group may be cut
        return values.view(n, -1)

    def _send(self, parts: list[Bytes]) -> torch.Tensor:
        whole = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
        if self.device.type == "cuda":
            whole = whole.pin_memory()
        return whole.to(self.device, non_blocking=True)


def _parts(flat: Ints, most: int) -> list[Ints]:
    return np.array_split(flat, max(1, min(most, flat.size // _ROWS_PER_TASK)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "engram")


class _Ahead:
    """Touches rows in the background. Of more work than its threads have at hand it drops the new:
    a hint that comes too late is worth nothing."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AHEAD_THREADS, "engram-ahead")
        self._room = BoundedSemaphore(4 * _AHEAD_THREADS)

    def touch(self, take: Callable[[Ints], object], rows: Ints) -> None:
        if self._room.acquire(blocking=False):
            self._pool.submit(take, rows).add_done_callback(lambda _: self._room.release())


@cache
def _ahead() -> _Ahead:
    return _Ahead()


def map_file(path: Path, n_bytes: int) -> Bytes:
    """The file's bytes, read-only, shared by all processes of the host; valid as long as the array.

    Raises `ConfigError` when it has another size."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path.name}: cannot be mapped ({error.strerror})") from None
    try:
        found = os.fstat(fd).st_size
        if found != n_bytes:
            raise ConfigError(f"{path.name}: found {found} bytes, wanted {n_bytes}")
        return map_bytes(fd)
    finally:
        os.close(fd)


def map_bytes(fd: int) -> Bytes:
    """All bytes of an open file, as `map_file`; the descriptor is not needed afterwards."""
    mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    mapping.madvise(mmap.MADV_RANDOM)  # rows lie anywhere: what follows one is not wanted
    return np.frombuffer(mapping, dtype=np.uint8)


def write_once(path: Path, values: Callable[[], torch.Tensor]) -> None:
    """Put float32 values into a file unless it is there; appears complete or not at all, also when
    several processes do it at once."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    values().to(torch.float32).contiguous().numpy().tofile(partial)
    partial.replace(path)


def table_of(
    values: torch.Tensor | StoredRows,
    placement: Placement,
    compute: torch.dtype,
    device: torch.device,
) -> EngramTable:
    """A table of these values or stored bytes; PINNED copies the bytes into page-locked memory.

    Raises `ConfigError` as `Placement.check`."""
    placement.check(device)
    if isinstance(values, torch.Tensor):
        if placement is Placement.MEMORY:
            return HeldTable(values.to(device), compute)
        raw = values.contiguous().view(torch.uint8).numpy()
        values = StoredRows(raw.reshape(values.shape[0], -1), None, values.dtype)
    if placement is Placement.PINNED:
        values = StoredRows(
            _pinned(values.data),
            None if values.scale is None else _pinned(values.scale),
            values.dtype,
        )
    return HostTable(values, compute, device, reads_ahead=placement is Placement.MAPPED)


def _pinned(array: Bytes) -> Bytes:
    out = torch.empty(array.shape, dtype=torch.uint8, pin_memory=True).numpy()
    out[:] = array
    return out
