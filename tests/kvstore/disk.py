"""File layers for tests: one that records, one that dies, one that fails, one that forgets.

All stand where `FileCalls` stands in the product. What changes a file is an *op*; ops are counted
from 1 in the order in which they took effect.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.kvstore.files import FileCalls

SECTOR = 512  # what a disk writes whole or not at all
HANGS_S = 60


@dataclass(frozen=True)
class Op:
    """One change: of a file, or (`index`: everything in Redis after it) of the index."""

    name: str  # create | allocate | truncate | write | sync | unlink | index
    file: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0
    index: dict[bytes, bytes] | None = None


class Watched(FileCalls):
    """Names every op before it is carried out; what files are behind descriptors is known."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._lock = threading.RLock()

    def op(self, op: Op, carry_out: Callable[[], Any]) -> Any:
        return carry_out()

    def open(self, path: Path, *, create=False, direct=False, read_only=False) -> int:
        def carry_out() -> int:
            return super(Watched, self).open(
                path, create=create, direct=direct, read_only=read_only
            )

        with self._lock:
            new = create and not path.exists()
            descriptor = self.op(Op("create", path.name), carry_out) if new else carry_out()
            self.names[descriptor] = path.name
            return descriptor

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        with self._lock:
            op = Op("allocate", self.names[descriptor], size=size_bytes)
            self.op(op, lambda: super(Watched, self).allocate(descriptor, size_bytes))

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        with self._lock:
            op = Op("truncate", self.names[descriptor], size=size_bytes)
            self.op(op, lambda: super(Watched, self).truncate(descriptor, size_bytes))

    def pwrite(self, descriptor: int, data, offset: int) -> int:
        with self._lock:
            op = Op("write", self.names[descriptor], offset, bytes(data))
            return self.op(op, lambda: super(Watched, self).pwrite(descriptor, data, offset))

    def pwritev(self, descriptor: int, buffers, offset: int) -> int:
        with self._lock:
            op = Op("write", self.names[descriptor], offset, b"".join(map(bytes, buffers)))
            return self.op(op, lambda: super(Watched, self).pwritev(descriptor, buffers, offset))

    def sync(self, descriptor: int) -> None:
        with self._lock:
            op = Op("sync", self.names[descriptor])
            self.op(op, lambda: super(Watched, self).sync(descriptor))

    def unlink(self, path: Path) -> None:
        with self._lock:
            self.op(Op("unlink", path.name), lambda: super(Watched, self).unlink(path))


class Recorder(Watched):
    """Keeps every op with its data, in the order of taking effect."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Op] = []

    def op(self, op: Op, carry_out: Callable[[], Any]) -> Any:
        done = carry_out()
        assert op.name != "write" or done == len(op.data), "the real disk wrote short"
        self.log.append(op)
        return done

    def index(self, state: dict[bytes, bytes]) -> None:
        """The index took a change: the step between two file ops."""
        with self._lock:
            last = next((op.index for op in reversed(self.log) if op.name == "index"), None)
            if state != last:
                self.log.append(Op("index", index=state))


class Dying(Watched):
    """SIGKILL of the own process before the n-th op, or (`half`) when half of it is done."""

    def __init__(self, at: int, half: bool = False) -> None:
        super().__init__()
        self.at, self.half, self.count = at, half, 0

    def op(self, op: Op, carry_out: Callable[[], Any]) -> Any:
        self.count += 1
        if self.count != self.at:
            return carry_out()
        if self.half and op.name == "write":
            descriptor = next(d for d, name in self.names.items() if name == op.file)
            half = op.data[: len(op.data) // 2 // SECTOR * SECTOR]
            if half:  # a write of less than a sector is done whole or not at all
                os.pwrite(descriptor, _aligned(half), op.offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL had no effect")


@dataclass
class Image:
    """What a disk holds after `n` ops: `files` as the page cache has them, `durable` as a disk has
    that lost its power, `dirty` the sectors in which the two may differ."""

    n: int = 0
    files: dict[str, bytearray] = field(default_factory=dict)
    durable: dict[str, bytearray] = field(default_factory=dict)
    dirty: dict[str, set[int]] = field(default_factory=dict)
    index: dict[bytes, bytes] = field(default_factory=dict)

    def apply(self, op: Op, share: float = 1.0) -> None:
        """`share` < 1: only the first whole sectors of a write."""
        self.n += 1
        if op.name == "index":
            self.index = dict(op.index or {})
        elif op.name == "create":
            self.files[op.file], self.durable[op.file] = bytearray(), bytearray()
            self.dirty[op.file] = set()
        elif op.name == "unlink":
            del self.files[op.file], self.durable[op.file], self.dirty[op.file]
        elif op.name in ("allocate", "truncate"):  # sizes are taken for durable at once
            for held in (self.files[op.file], self.durable[op.file]):
                if op.name == "truncate":
                    del held[op.size :]
                held.extend(bytes(max(0, op.size - len(held))))
        elif op.name == "write":
            data = op.data if share == 1.0 else op.data[: int(len(op.data) * share) & -SECTOR]
            end = op.offset + len(data)
            for held in (self.files[op.file], self.durable[op.file]):
                held.extend(bytes(max(0, end - len(held))))
            self.files[op.file][op.offset : end] = data
            self.dirty[op.file].update(range(op.offset // SECTOR, -(-end // SECTOR)))
        elif op.name == "sync":
            for sector in self.dirty[op.file]:
                at = slice(sector * SECTOR, (sector + 1) * SECTOR)
                self.durable[op.file][at] = self.files[op.file][at]
            self.dirty[op.file].clear()
        else:
            raise AssertionError(op.name)

    def after(self, mode: str, seed: int = 0) -> dict[str, bytes]:
        """The files after a restart: `kill` (the kernel lives: nothing is lost), `power` (all that
        was not synced is lost), `torn` (each unsynced sector is lost or not, by the seed)."""
        if mode == "kill":
            return {name: bytes(data) for name, data in self.files.items()}
        out = {name: bytearray(data) for name, data in self.durable.items()}
        if mode == "torn":
            source = random.Random(seed)
            for name in sorted(out):
                for sector in sorted(self.dirty[name]):
                    if source.random() < 0.5:
                        at = slice(sector * SECTOR, (sector + 1) * SECTOR)
                        out[name][at] = self.files[name][at]
        return {name: bytes(data) for name, data in out.items()}


def images(log: Sequence[Op]) -> Iterator[tuple[Image, Op | None]]:
    """The image before every op, with that op, and the last one. The image is the same object."""
    image = Image()
    for op in log:
        yield image, op
        image.apply(op)
    yield image, None


class Troubled(FileCalls):
    """Fails what it is told to, for segment files only, and counts what took effect.

    `errors[name]` is raised by that call (`pwrite`, `preadv`, `sync`, `allocate`, `open`); with
    `after` it lets so many through first, with `once` it fails one call. `short` cuts every
    transfer to at most so many bytes. `forget` acknowledges writes and syncs, and `lose` undoes
    what was not really synced."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.after = 0
        self.once = False
        self.short = 0
        self.forget = False
        self.took_effect: Counter[str] = Counter()
        self._before: dict[tuple[str, int], bytes] = {}
        self._paths: dict[int, Path] = {}

    def _fail(self, name: str) -> None:
        error = self.errors.get(name, 0)
        if not error:
            return
        if self.after > 0:
            self.after -= 1
            return
        self.took_effect[name] += 1
        if self.once:
            self.errors = {}
        raise OSError(error, os.strerror(error))

    def open(self, path: Path, **options) -> int:
        if path.suffix == ".seg":
            self._fail("open")
        descriptor = super().open(path, **options)
        self._paths[descriptor] = path
        return descriptor

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self._fail("allocate")
        super().allocate(descriptor, size_bytes)

    def pwrite(self, descriptor: int, data, offset: int) -> int:
        if self._paths[descriptor].suffix == ".seg":
            self._fail("pwrite")
            data = self._cut("pwrite", data)
            self._remember(descriptor, len(data), offset)
        return super().pwrite(descriptor, data, offset)

    def pwritev(self, descriptor: int, buffers, offset: int) -> int:
        self._fail("pwrite")
        whole = b"".join(map(bytes, buffers))
        if self.short and len(whole) > self.short or self.forget:
            return self.pwrite(descriptor, _aligned(whole), offset)
        return super().pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor: int, buffers, offset: int) -> int:
        self._fail("preadv")
        first = self._cut("preadv", buffers[0])
        if self.short and len(first) < sum(map(len, buffers)):
            self.took_effect["short preadv"] += len(first) == len(buffers[0])
            buffers = [first]
        return super().preadv(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        self._fail("sync")
        if not self.forget:
            self._before = {
                key: data for key, data in self._before.items() if key[0] != self._name(descriptor)
            }
            super().sync(descriptor)

    def _name(self, descriptor: int) -> str:
        return str(self._paths[descriptor])

    def _cut(self, name: str, data):
        view = memoryview(data)
        if self.short and len(view) > self.short:
            self.took_effect[f"short {name}"] += 1
            return view[: self.short]
        return view

    def _remember(self, descriptor: int, count: int, offset: int) -> None:
        with open(self._paths[descriptor], "rb") as file:
            for at in range(offset // SECTOR * SECTOR, offset + count, SECTOR):
                if (self._name(descriptor), at) not in self._before:
                    file.seek(at)
                    self._before[self._name(descriptor), at] = file.read(SECTOR)

    def lose(self) -> int:
        """The power fails: what was not (really) synced is as before; how many sectors."""
        for (path, at), data in self._before.items():
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(data)
        lost = len(self._before)
        self._before.clear()
        self.took_effect["lost"] += lost
        return lost


class Hanging(FileCalls):
    """Counts reads of segment files; once armed they stand still until `go` is set."""

    def __init__(self) -> None:
        self.armed, self.go, self.stood, self.reads = False, threading.Event(), 0, 0
        self._segments: set[int] = set()

    async def standing(self) -> bool:
        return self.stood > 0

    def open(self, path: Path, **options) -> int:
        descriptor = super().open(path, **options)
        if path.suffix == ".seg":
            self._segments.add(descriptor)
        return descriptor

    def preadv(self, descriptor, buffers, offset):
        self.reads += descriptor in self._segments
        if self.armed and descriptor in self._segments:
            self.stood += 1
            assert self.go.wait(HANGS_S), "nobody let the disk go on"
        return super().preadv(descriptor, buffers, offset)


def _aligned(data: bytes):
    from headrace.kvstore.files import aligned_buffer

    view = aligned_buffer(len(data))
    view[:] = data
    return view
