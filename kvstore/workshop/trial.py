"""A quick measurement of one folder and this machine: a store of its own, one client, one process.

For people who choose a disk; bench/kvstore measures the store against its limits."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.role import RoleSettings
from headrace.kvstore.client import StoreClient
from headrace.kvstore.layout import slot_bytes
from headrace.kvstore.server import run_store
from headrace.kvstore.settings import Kind, StoreSettings
from headrace.kvstore.workshop.shipping import Progress

_BATCH = 16
_STAGES = 5
_SHORT_BYTES = 64  # of a path, below which one of a unix socket has its 107
_LEAST_BLOCK_BYTES = 1024
_WINDOW_BYTES = 4096
_LEASE = JobKey(RequestId("trial"), 0)


@dataclass(frozen=True, slots=True)
class Trial:
    """Bytes a second; `bare` is a preallocated file of the same slots, written in turn, synced
    once and read with its part of the page cache dropped."""

    blocks: int
    block_bytes: int
    bare_write: float
    bare_read: float
    put_host: float  # until sealed
    put_ssd: float  # until all is durable
    get_host: float
    get_ssd: float  # after a restart, page cache dropped


def run_trial(folder: Path, blocks: int, block_bytes: int, progress: Progress) -> Trial:
    """Measure in a new folder under `folder`, which is removed afterwards. Raises `ConfigError`
    when memory or disk have not the room, or blocks are so small that headers are measured."""
    if block_bytes < _LEAST_BLOCK_BYTES:
        raise ConfigError(f"block_bytes must be at least {_LEAST_BLOCK_BYTES}, got {block_bytes}")
    size = slot_bytes(block_bytes) * blocks
    if size * 3 > shutil.disk_usage(folder).free:
        raise ConfigError(f"{folder} must have {3 * size} bytes free for {blocks} blocks")
    home = tempfile.mkdtemp(prefix=".trial-", dir=folder)
    temp = tempfile.gettempdir()
    short = temp if len(os.fsencode(temp)) < _SHORT_BYTES else "/tmp"
    sockets = tempfile.mkdtemp(prefix="hs-", dir=short)
    try:
        bare = _bare(Path(home), blocks, block_bytes)
        progress(1, _STAGES)
        return asyncio.run(_measure(home, sockets, blocks, block_bytes, bare, progress))
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(sockets, ignore_errors=True)


def _bare(home: Path, blocks: int, block_bytes: int) -> tuple[float, float]:
    path, data = home / "bare", os.urandom(block_bytes)
    slot = slot_bytes(block_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, slot * blocks)
        began_s = time.perf_counter()
        for number in range(blocks):
            os.pwrite(descriptor, data, number * slot)
        os.fdatasync(descriptor)
        write_s = time.perf_counter() - began_s
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        dest = bytearray(block_bytes)
        began_s = time.perf_counter()
        for number in range(blocks):
            os.preadv(descriptor, [dest], number * slot)
        read_s = time.perf_counter() - began_s
    finally:
        os.close(descriptor)
        path.unlink()
    total = blocks * block_bytes
    return total / write_s, total / read_s


async def _measure(
    home: str,
    sockets: str,
    blocks: int,
    block_bytes: int,
    bare: tuple[float, float],
    progress: Progress,
) -> Trial:
    address = f"unix://{sockets}/store.sock"
    role = RoleSettings("trial", address, "trial", "", address, home, "trial", Deployment())
    settings = _settings(home, blocks, block_bytes)
    digests = [Digest(hashlib.sha256(b"%d" % n).digest()) for n in range(blocks)]
    seconds: dict[str, float] = {}

    async def write(client: StoreClient) -> None:
        began_s = time.perf_counter()
        await _put_all(client, digests, block_bytes)
        seconds["put_host"] = time.perf_counter() - began_s
        progress(2, _STAGES)
        while (stat := await client.stat()) is None or stat.pending:
            await asyncio.sleep(0.002)
        seconds["put_ssd"] = time.perf_counter() - began_s
        progress(3, _STAGES)
        seconds["get_host"] = await _get_all(client, digests, block_bytes)
        await client.release(_LEASE)

    async def read_cold(client: StoreClient) -> None:
        seconds["get_ssd"] = await _get_all(client, digests, block_bytes)

    await _serving(role, settings, write)
    for path in Path(settings.directory).glob("*.seg"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    progress(4, _STAGES)
    await _serving(role, settings, read_cold)
    progress(5, _STAGES)
    rates = {name: blocks * block_bytes / spent for name, spent in seconds.items()}
    return Trial(blocks, block_bytes, bare[0], bare[1], **rates)


def _settings(home: str, blocks: int, block_bytes: int) -> StoreSettings:
    slot = slot_bytes(block_bytes)
    segment_bytes = max(8 << 20, 4 * slot + 4096)
    return StoreSettings(
        directory=f"{home}/store",
        arena_bytes=int(blocks * slot * 1.5) + (1 << 20),
        ssd_bytes=(blocks * slot // segment_bytes + 4) * segment_bytes,
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        window_bytes=_WINDOW_BYTES,
        window_share=0.05,
    )


async def _put_all(client: StoreClient, digests: Sequence[Digest], block_bytes: int) -> None:
    payloads = [os.urandom(block_bytes) for _ in range(min(len(digests), 64))]
    for begin in range(0, len(digests), _BATCH):
        batch = range(begin, min(len(digests), begin + _BATCH))
        places = await client.put(
            Kind.KV,
            [(digests[n], payloads[n % len(payloads)]) for n in batch],
            lease=_LEASE,
            wait_s=10.0,
            parent=digests[begin - 1] if begin else None,
            first_block=begin,
        )
        if None in places:
            raise ConfigError("the store took not everything; is the machine short of memory?")


async def _get_all(client: StoreClient, digests: Sequence[Digest], block_bytes: int) -> float:
    dest = bytearray(block_bytes)
    began_s = time.perf_counter()
    for begin in range(0, len(digests), _BATCH):
        end = min(len(digests), begin + _BATCH)
        places = await client.open_prefix(digests[:end], _LEASE)
        for digest, place in zip(digests[begin:end], places[begin:end], strict=True):
            if not client.read_into(place, digest, dest):
                raise ConfigError("a block that was stored could not be read back")
    return time.perf_counter() - began_s


async def _serving(
    role: RoleSettings, settings: StoreSettings, work: Callable[[StoreClient], Awaitable[None]]
) -> None:
    """Run a store for as long as `work` takes."""
    serving, halt = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        run_store(role, settings, ready=lambda member: serving.set(), stop=halt)
    )
    waiting = asyncio.create_task(serving.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    client = StoreClient(role.store_address, role.token, bytes(32))
    try:
        if task.done():
            task.result()
        await client.connect(10.0)
        await work(client)
    finally:
        waiting.cancel()
        await client.close()
        halt.set()
        await task
