"""Files of a checkpoint: bounded JSON, safetensors headers, and reads that count their bytes.

The header is parsed here and not by the safetensors library because a release is read in pieces
straight into place, with every byte counted, and because a mapped file that is cut short under the
reader ends the process. The library is the oracle in the tests.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.model.checkpoint.errors import CheckpointError
from headrace.model.checkpoint.json_files import MAX_JSON_BYTES, parse_json
from headrace.model.checkpoint.stored import DTYPE_BYTES, StoredSpec
from headrace.model.engram_store import map_bytes

MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 63


@dataclass(slots=True)
class Meter:
    """What was read and what is in hand. `held_bytes` counts buffers of this package only."""

    read_bytes: int = 0
    held_bytes: int = 0
    peak_held_bytes: int = 0

    def hold(self, n_bytes: int) -> None:
        self.held_bytes += n_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    def drop(self, n_bytes: int) -> None:
        self.held_bytes -= n_bytes


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes lie: `offset` counts from the start of the file."""

    spec: StoredSpec
    offset: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A shard's tensors in the order of its header, and its free-text metadata."""

    places: tuple[TensorPlace, ...]
    metadata: Mapping[str, str] | None
    data_offset: int


def parse_header(name: str, raw: bytes, data_offset: int, file_bytes: int) -> ShardHeader:
    """Check a safetensors header against the file's length.

    The tensors must cover the data without gaps or overlap. Raises CheckpointError.
    """
    document = parse_json(f"{name}: header", raw)
    metadata = document.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise CheckpointError(
            f"{name}: __metadata__: found {_shown(metadata)}, wanted a table of strings"
        )
    places = tuple(_place(name, key, value, data_offset) for key, value in document.items())
    end = data_offset
    for place in sorted(places, key=lambda p: (p.offset, p.spec.n_bytes)):
        if place.offset != end:
            raise CheckpointError(
                f"{name}: {place.spec.name}: found its start at byte {place.offset}, wanted {end}: "
                "tensors overlap or leave a gap"
            )
        end += place.spec.n_bytes
    if file_bytes < end:
        raise CheckpointError(f"{name}: truncated, found {file_bytes} bytes, wanted {end}")
    if file_bytes > end:
        raise CheckpointError(f"{name}: found {file_bytes} bytes, wanted {end}: bytes of no tensor")
    return ShardHeader(places, metadata, data_offset)


def _shown(value: object) -> str:
    """A value of a file in an error: short, whatever the file holds."""
    return f"{value!r:.100}"


_FILE_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def _is_sizes(value: object) -> bool:
    """Bounded, for a product of them must still print: an integer of 4,300 digits does not."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(n) is int and 0 <= n < MAX_SIZE for n in value)


def _place(file: str, name: str, value: Any, data_offset: int) -> TensorPlace:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{file}: {name}: found {_shown(value)}, wanted dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        wanted = ", ".join(DTYPE_BYTES)
        raise CheckpointError(
            f"{file}: {name}: found dtype {_shown(dtype)}, wanted one of {wanted}"
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: {name}: found shape {_shown(shape)} and data_offsets {_shown(offsets)}, "
            f"wanted at most {MAX_DIMENSIONS} sizes from 0 up"
        )
    spec = StoredSpec(name, dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.n_bytes:
        raise CheckpointError(
            f"{file}: {name}: found {offsets[1] - offsets[0]} bytes, wanted {spec.n_bytes} for "
            f"{dtype} {list(spec.shape)}"
        )
    return TensorPlace(spec, data_offset + offsets[0])


@dataclass(slots=True)
class Shard:
    """One open file. `read` may be called from several threads; `close` ends it."""

    name: str
    header: ShardHeader
    meter: Meter
    _fd: int = field(repr=False)

    @classmethod
    def open(cls, path: Path, meter: Meter) -> Self:
        """Open a shard and check its header. Raises CheckpointError."""
        try:
            # A pipe would block the open and give other bytes at each read.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.name}: shard missing from the checkpoint: found no file, wanted one"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from None
        try:
            header = cls._header(path.name, fd, meter)
        except BaseException:
            os.close(fd)
            raise
        return cls(path.name, header, meter, fd)

    @staticmethod
    def _header(name: str, fd: int, meter: Meter) -> ShardHeader:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                f"{name}: found {_FILE_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, "
                "wanted a regular file"
            )
        file_bytes = status.st_size
        if file_bytes < 8:
            raise CheckpointError(f"{name}: truncated, found {file_bytes} bytes, wanted a header")
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > file_bytes - 8:
            raise CheckpointError(
                f"{name}: found a header of {length} bytes, wanted at most {file_bytes - 8}: "
                "the file ends there"
            )
        if length > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{name}: found a header of {length} bytes, wanted at most {MAX_JSON_BYTES}"
            )
        raw = os.pread(fd, length, 8)
        meter.read_bytes += 8 + len(raw)
        return parse_header(name, raw, 8 + length, file_bytes)

    def read(self, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8, contiguous, CPU) from `offset`. Raises CheckpointError at the end."""
        view = out.numpy().data.cast("B") if out.numel() else memoryview(b"")
        done = 0
        while done < len(view):
            n = os.preadv(self._fd, [view[done:]], offset + done)
            if n == 0:
                raise CheckpointError(f"{self.name}: cut short while it was read")
            done += n
        self.meter.read_bytes += done

    def map(self, place: TensorPlace) -> NDArray[np.uint8]:
        """The tensor's bytes through a read-only mapping of the file, which stays mapped as long
        as the array and must not be cut short meanwhile. Not counted as read."""
        return map_bytes(self._fd)[place.offset : place.offset + place.spec.n_bytes]

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def header_bytes(specs: list[StoredSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Length prefix and header of a shard that holds `specs` in this order, back to back."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        document[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text
