"""One client of LMCache's file store for `bench_others.py`: orders and answers as JSON lines."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import select
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the bench starts its children without it

from client_process import BATCH, SOURCES, Measured  # noqa: E402

IN_FLIGHT = {"put": 4, "get": 2}  # batches a client keeps under way, in either store
WORKERS = 4  # I/O threads of LMCache's client: its default
UNIT_BYTES = mmap.PAGESIZE


def load(path: str) -> Any:
    """LMCache's extension module alone; it wants torch's libraries to be there already."""
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location("lmcache_fs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Other:
    """One client process of LMCache's file store."""

    def __init__(self, module: str, folder: str, number: int, block_bytes: int, direct: bool):
        self.size = -(-block_bytes // UNIT_BYTES) * UNIT_BYTES if direct else block_bytes
        self.folder, self.number = Path(folder), number
        step = -(-block_bytes // UNIT_BYTES) * UNIT_BYTES
        self._area = mmap.mmap(-1, step * SOURCES * 2)
        whole = memoryview(self._area)
        whole[: step * SOURCES] = os.urandom(step * SOURCES)
        self.payloads = [whole[n * step : n * step + self.size] for n in range(SOURCES)]
        rest = whole[step * SOURCES :]
        self.dest = [rest[n * step : n * step + self.size] for n in range(SOURCES)]
        self._client = load(module).LMCacheFSClient(folder, WORKERS, "", direct, 0)
        self._poll = select.poll()
        self._poll.register(self._client.event_fd(), select.POLLIN)

    def _key(self, number: int) -> str:
        return f"bench@{self.number:08x}@00000000@{number:016x}"

    def _run(self, submit: Any, buffers: list[memoryview], count: int, width: int) -> int:
        """All keys in batches, at most `width` under way; how many batches came back good."""
        good, under_way, begin = 0, 0, 0
        while begin < count or under_way:
            while begin < count and under_way < width:
                numbers = range(begin, min(begin + BATCH, count))
                views = [buffers[n % SOURCES] for n in numbers]
                submit([self._key(n) for n in numbers], views)
                under_way += 1
                begin += BATCH
            self._poll.poll()
            for done in self._client.drain_completions():
                under_way -= 1
                if not done[1]:
                    raise SystemExit(f"LMCache: {done[2]}")
                good += 1
        return good

    def put(self, at_s: float, count: int) -> dict[str, float]:
        with Measured(at_s) as measured:
            good = self._run(self._client.submit_batch_set, self.payloads, count, IN_FLIGHT["put"])
        self._all(good, count)
        return measured.told()

    def get(self, at_s: float, count: int) -> dict[str, float]:
        with Measured(at_s) as measured:
            good = self._run(self._client.submit_batch_get, self.dest, count, IN_FLIGHT["get"])
        self._all(good, count)
        return measured.told()

    def _all(self, good: int, count: int) -> None:
        if good != -(-count // BATCH):
            raise SystemExit(f"{good} good batches of {count} blocks")

    def one(self, number: int) -> bool | None:
        """Block `number` read alone: whether the bytes are right, None for a miss."""
        dest = self.dest[0]
        dest[:] = bytes(len(dest))
        self._client.submit_batch_get([self._key(number)], [dest])
        self._poll.poll()
        (done,) = self._client.drain_completions()
        if not done[1] or (len(done) > 3 and done[3] is not None and not all(done[3])):
            return None
        return bytes(dest) == bytes(self.payloads[number % SOURCES])

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def drop(self) -> dict[str, float]:
        """Out of the page cache, so that a get reads the disk."""
        for path in self.files():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return {}

    def damage(self) -> dict[str, str]:
        """Three kinds of damage to one file each, and what a get answers."""
        word = {True: "right bytes", False: "WRONG BYTES AS GOOD", None: "miss"}
        of = {number: self._file(number) for number in range(4)}
        whole = of[0].read_bytes()
        half = len(whole) // 2
        of[0].write_bytes(whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :])
        of[1].write_bytes(of[3].read_bytes())
        spoilt = bytearray(of[2].read_bytes())
        spoilt[UNIT_BYTES : 2 * UNIT_BYTES] = bytes(UNIT_BYTES)
        of[2].write_bytes(spoilt)
        self.drop()
        names = ("one bit flipped", "the file of another block", "a page of zeros")
        return {name: word[self.one(number)] for number, name in enumerate(names)}

    def _file(self, number: int) -> Path:
        payload = bytes(self.payloads[number % SOURCES])
        key = self._key(number).split("@")[-1]
        (path,) = [p for p in self.files() if f"@0x{self.number:08x}@" in p.name and key in p.name]
        if path.read_bytes()[: len(payload)] != payload:
            raise SystemExit(f"{path.name} does not hold the bytes that were put")
        return path


def main() -> None:
    other = Other(**json.loads(sys.argv[1]))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(other, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    main()
