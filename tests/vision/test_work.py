"""A vision replica without sockets: batches, one look at a picture asked for twice, epochs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.core.clock import SYSTEM_CLOCK
from headrace.core.errors import IllegalTransition
from headrace.core.ids import Digest, JobKey, RequestId
from headrace.core.messages import JobFailed, VisionDone, VisionJob
from headrace.model import ModelConfig, Numerics
from headrace.model.vision import VisionTower
from headrace.vision import ImageEncoder, VisionSettings
from headrace.vision.jobs import JOB_TABLE, TERMINAL, JobEvent, JobState
from headrace.vision.work import VisionWork

TOY = ModelConfig.load("toy")


class FakeStore:
    """A store that keeps everything, or with `full` nothing; leases are counted by owner. One that
    is not `connected` answers as a client of a store that is away."""

    def __init__(self) -> None:
        self.objects: dict[Digest, bytes] = {}
        self.leases: dict[JobKey, set[Digest]] = {}
        self.full = False
        self.connected = True

    async def open_objects(self, kind: Any, digests: list[Digest], lease: JobKey) -> list[Any]:
        await asyncio.sleep(0)
        if not self.connected:
            return [None] * len(digests)
        found = [digest for digest in digests if digest in self.objects]
        self.leases.setdefault(lease, set()).update(found)
        return [digest if digest in self.objects else None for digest in digests]

    async def put(self, kind: Any, items: Any, *, lease: JobKey, wait_s: float) -> list[Any]:
        if self.full or not self.connected:
            return [None] * len(items)
        self.objects.update(items)
        self.leases.setdefault(lease, set()).update(digest for digest, _ in items)
        return [digest for digest, _ in items]

    async def release(self, lease: JobKey) -> None:
        self.leases.pop(lease, None)

    async def renew(self, lease: JobKey) -> bool:
        return lease in self.leases


class FakeRouter:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def post(self, message: Any) -> None:
        self.heard.append(message)


class Bench:
    """A worker on the toy tower; `passes` lists how many pictures shared each pass."""

    def __init__(self, files: Any, **settings: Any) -> None:
        self.files = files
        self.encoder = ImageEncoder(VisionTower.random(TOY, 9, Numerics.FAST))
        self.store, self.router = FakeStore(), FakeRouter()
        self.passes: list[int] = []
        real = self.encoder.encode_prepared

        def counted(pictures: Any) -> Any:
            self.passes.append(len(pictures))
            return real(pictures)

        self.encoder.encode_prepared = counted  # type: ignore[method-assign]
        self.work = VisionWork(
            self.encoder, self.store, VisionSettings(**settings), SYSTEM_CLOCK, lambda: None
        )

    def ask(self, name: str, picture: int, *, epoch: int = 0, n_tokens: int = 22) -> JobKey:
        key = JobKey(RequestId(name), epoch)
        data = self.files.file(96 + picture, 96 + picture, "PNG")
        digest = Digest(bytes([picture] * 32))
        self.work.accept(self.router, VisionJob(key, digest, data, n_tokens, 1))
        return key

    async def returned(self) -> None:
        """Until nothing is leased."""
        async with asyncio.timeout(30):
            while self.store.leases:
                await asyncio.sleep(0.001)

    async def settled(self) -> list[Any]:
        async with asyncio.timeout(30):
            while self.work.jobs:
                await asyncio.sleep(0.005)
        heard, self.router.heard = self.router.heard, []
        return heard


def tokens_of(bench: Bench, picture: int) -> int:
    data = bench.files.file(96 + picture, 96 + picture, "PNG")
    return bench.encoder.prepare(data).grid.n_tokens


async def test_pictures_that_wait_share_passes_up_to_the_bound(files: Any) -> None:
    bench = Bench(files, max_patches_per_step=400)  # two pictures of 144 to 169 patches
    for picture in range(1, 6):
        bench.ask(f"r{picture}", picture, n_tokens=tokens_of(bench, picture))
    heard = await bench.settled()
    assert [type(m) for m in heard] == [VisionDone] * 5 and all(m.made for m in heard)
    assert sorted(bench.passes) == [1, 2, 2]
    assert len(bench.store.objects) == 5 and len(bench.store.leases) == 5
    await bench.work.stop("over")


async def test_a_picture_asked_for_twice_is_looked_at_once(files: Any) -> None:
    bench = Bench(files)
    keys = [bench.ask(name, 3, n_tokens=tokens_of(bench, 3)) for name in ("a", "b", "c")]
    heard = await bench.settled()
    assert sorted(m.made for m in heard) == [False, False, True]
    assert {m.key for m in heard} == set(keys) == set(bench.store.leases)
    assert sum(bench.passes) == 1 and bench.work.counts.found == 2
    # A duplicate of an answered job is answered again, and leases nothing new.
    bench.ask("a", 3, n_tokens=tokens_of(bench, 3))
    assert [m.made for m in await bench.settled()] == [False]
    await bench.work.stop("over")


async def test_cancel_gives_leases_back_and_later_jobs_of_the_key_are_late(files: Any) -> None:
    bench = Bench(files)
    n_tokens = tokens_of(bench, 1)
    key = bench.ask("a", 1, n_tokens=n_tokens)
    await bench.settled()
    assert bench.store.leases[key] and bench.work.held_leases == 1
    bench.work.cancel(key)
    bench.work.cancel(key)
    await bench.returned()
    assert bench.work.held_leases == 0
    late = bench.work.counts.late
    bench.ask("a", 1, n_tokens=n_tokens)
    assert bench.work.counts.late == late + 1 and not bench.work.jobs
    bench.ask("a", 1, epoch=1, n_tokens=n_tokens)
    (done,) = await bench.settled()
    assert (done.key.epoch, done.made) == (1, False)
    bench.work.peer_left(bench.router)
    await bench.returned()
    await bench.work.stop("over")


async def test_a_newer_attempt_replaces_an_older_one(files: Any) -> None:
    bench = Bench(files)
    n_tokens = tokens_of(bench, 2)
    bench.ask("a", 2, n_tokens=n_tokens)
    bench.ask("a", 2, epoch=1, n_tokens=n_tokens)
    heard = await bench.settled()
    assert [m.key.epoch for m in heard] == [1]
    await bench.work.stop("over")


async def test_what_fails_is_said_and_whether_it_may_go_well_elsewhere(files: Any) -> None:
    bench = Bench(files, max_waiting=1)
    bench.ask("wrong count", 1, n_tokens=23)
    assert [(m.code, m.retryable) for m in await bench.settled()] == [("state_error", True)]
    bad = VisionJob(JobKey(RequestId("bad"), 0), Digest(bytes(32)), b"GIF89a", 22, 1)
    bench.work.accept(bench.router, bad)
    assert [(m.code, m.retryable) for m in await bench.settled()] == [("invalid_value", False)]
    n_tokens = tokens_of(bench, 1)
    bench.ask("first", 1, n_tokens=n_tokens)
    bench.ask("second", 1, n_tokens=n_tokens)
    refused, _ = await bench.settled()
    assert isinstance(refused, JobFailed) and (refused.code, refused.retryable) == (
        "overloaded",
        True,
    )
    bench.store.full = True
    bench.ask("no room", 4, n_tokens=tokens_of(bench, 4))
    assert [(m.code, m.retryable) for m in await bench.settled()] == [("overloaded", True)]
    bench.store.full, bench.store.connected = False, False
    bench.ask("no store", 4, n_tokens=tokens_of(bench, 4))
    (away,) = await bench.settled()
    assert (away.code, away.retryable) == ("no_replica", True) and "store" in away.message
    bench.store.connected = True
    bench.work.draining = True
    bench.ask("drained", 4, n_tokens=tokens_of(bench, 4))
    assert [(m.code, m.retryable) for m in await bench.settled()] == [("no_replica", True)]
    await bench.work.stop("over")


async def test_one_bad_picture_of_a_pass_fails_alone(files: Any) -> None:
    bench = Bench(files)
    good = bench.files.file(100, 100, "PNG")
    cut = bytearray(bench.files.file(101, 101, "PNG"))
    at = cut.index(b"IDAT") + 4
    cut[at : at + 8] = bytes(8)
    n_tokens = bench.encoder.prepare(good).grid.n_tokens
    for number, data in enumerate((good, bytes(cut))):
        key, digest = JobKey(RequestId(f"r{number}"), 0), Digest(bytes([number] * 32))
        bench.work.accept(bench.router, VisionJob(key, digest, data, n_tokens, 1))
    heard = {m.key.request_id: m for m in await bench.settled()}
    assert isinstance(heard["r0"], VisionDone) and isinstance(heard["r1"], JobFailed)
    assert not heard["r1"].retryable
    await bench.work.stop("over")


def test_nothing_is_sealed_that_the_tower_did_not_take_and_nothing_leaves_an_end() -> None:
    assert all(JOB_TABLE.step(state, event).ignored for state in TERMINAL for event in JobEvent)
    with pytest.raises(IllegalTransition):
        JOB_TABLE.step(JobState.LOOKING, JobEvent.SEALED)
