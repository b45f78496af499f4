"""An I/O thread that fails in an unforeseen way fails its operation, counted, and nothing hangs."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

import pytest

from headrace.core.clock import FakeClock
from headrace.kvstore import Kind
from headrace.kvstore.files import FileCalls
from headrace.kvstore.io_threads import ThreadFailed, guarded
from headrace.kvstore.questions import StoreRefused, Topic

pytestmark = pytest.mark.fault
SMALL = {"arena_bytes": 160_000, "ssd_bytes": 6 * (64 << 10), "segment_bytes": 64 << 10}
# A StopIteration in a future never arrives, a CancelledError or SystemExit ends who waits.
FAILURES = [
    MemoryError,
    StopIteration,
    SystemExit,
    *(
        pytest.param(failure, marks=pytest.mark.slow)
        for failure in (
            KeyError,
            RecursionError,
            concurrent.futures.CancelledError,
            asyncio.CancelledError,
            KeyboardInterrupt,
        )
    ),
]
REUSES = [
    pytest.param(
        call, failure, marks=() if (n + m) % 3 == 0 else pytest.mark.slow, id=f"{call}-{m}"
    )
    for n, call in enumerate(("pwritev", "sync", "preadv"))
    for m, failure in enumerate((MemoryError, StopIteration, SystemExit))
]


class Raising(FileCalls):
    """Raises `failure` from `call` on segment files, `times` times, and counts it."""

    def __init__(self) -> None:
        self.call, self.failure, self.times, self.raised = "", MemoryError, 0, 0
        self.total = 0
        self._segments: set[int] = set()

    def fail(self, call: str, failure: type[BaseException], times: int = 1) -> None:
        self.call, self.failure, self.times, self.raised = call, failure, times, 0

    def _hit(self, call: str, descriptor: int) -> None:
        if call == self.call and self.raised < self.times and descriptor in self._segments:
            self.raised += 1
            self.total += 1
            raise self.failure("injected")

    def open(self, path: Path, **options) -> int:
        descriptor = super().open(path, **options)
        if path.suffix == ".seg":
            self._segments.add(descriptor)
        return descriptor

    def pwritev(self, descriptor, buffers, offset):
        self._hit("pwritev", descriptor)
        return super().pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor, buffers, offset):
        self._hit("preadv", descriptor)
        return super().preadv(descriptor, buffers, offset)

    def sync(self, descriptor):
        self._hit("sync", descriptor)
        super().sync(descriptor)


async def _exact(client, things, numbers) -> list[int]:
    found = []
    for number in numbers:
        async with asyncio.timeout(30):  # nothing hangs
            (place,) = await client.open_objects(Kind.KV, [things.digest(number)], None)
        if place is not None:
            dest = bytearray(place.payload_bytes)
            assert client.read_into(place, things.digest(number), dest)
            assert bytes(dest) == things.payload(number)
            found.append(number)
    return found


@pytest.fixture
def disk(rig) -> Raising:
    disk = Raising()
    rig.options = {"calls": disk}
    return disk


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("call", ["pwritev", "sync"])
async def test_a_write_that_fails_costs_its_objects_their_disk(
    rig, things, when_idle, disk, call, failure
):
    await rig.start(**SMALL)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(4)))  # its segment is begun
    await when_idle(client)
    disk.fail(call, failure)
    await client.put(Kind.KV, things.blocks(*range(4, 8)))
    stat = await when_idle(client)
    assert disk.raised == 1
    assert (stat.ssd_objects, stat.pending) == (4, 0) and stat.write_errors > 0
    assert await _exact(client, things, range(8)) == list(range(8))  # from memory
    await client.put(Kind.KV, things.blocks(*range(8, 12)))
    assert (await when_idle(client)).ssd_objects == 8  # the writer lives on
    await rig.restart()
    assert await _exact(client, things, range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_read_that_fails_is_a_miss_and_the_object_stays(
    rig, things, when_idle, disk, failure
):
    await rig.start(**SMALL)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(6)))
    await when_idle(client)
    await rig.restart()  # the arena is empty
    disk.fail("preadv", failure)
    others = asyncio.create_task(_exact(client, things, [3, 4, 5]))  # one fails, whichever
    first = await _exact(client, things, [0, 1, 2])
    rest = await others
    assert disk.raised == 1 and len(first) + len(rest) == 5
    stat = await when_idle(client)
    assert (stat.damaged, stat.ssd_objects, stat.connections) == (0, 6, 1)
    text = (await client.ask(Topic.METRICS))["text"]
    assert "headrace_store_read_errors_total 1.0" in text
    assert await _exact(client, things, range(6)) == list(range(6))  # it is still there


@pytest.mark.parametrize(("call", "failure"), REUSES)
async def test_a_reuse_that_fails_in_any_of_its_steps(rig, things, when_idle, disk, call, failure):
    """Header, sync, what is read to be carried over and what is written: hits, and no more."""
    disk_clock = FakeClock()
    rig.options["clock"] = disk_clock
    await rig.start(arena_bytes=60_000, ssd_bytes=2 * (64 << 10), segment_bytes=64 << 10)
    client = await rig.client()
    put = 0
    for times in range(1, 5):
        for _ in range(4):  # more than the disk holds
            numbers = range(put, put + 5)
            await client.put(Kind.KV, things.blocks(*numbers))
            put += 5
            await when_idle(client)
            await _exact(client, things, numbers[:3])  # used again: they are carried over
        disk.fail(call, failure, times)
        for _ in range(3):
            await client.put(Kind.KV, things.blocks(*range(put, put + 5)))
            put += 5
            await when_idle(client)
        disk_clock.advance(60)  # the disk is tried again
    assert disk.total > 2
    disk.fail("", failure, 0)
    await client.put(Kind.KV, things.blocks(9000))
    before = (await when_idle(client)).writes
    await client.put(Kind.KV, things.blocks(9001))
    assert (await when_idle(client)).writes > before  # the writer lives
    await _exact(client, things, range(put))
    await rig.restart()
    assert 9001 in await _exact(client, things, range(9000, 9002))
    await _exact(client, things, range(put))
    assert (await when_idle(client)).damaged == 0


@pytest.mark.parametrize("failure", [MemoryError, StopIteration])
async def test_a_scrub_that_fails_is_refused_in_words(rig, things, when_idle, disk, failure):
    await rig.start(**SMALL)
    client = await rig.client()
    await client.put(Kind.KV, things.blocks(*range(6)))
    await when_idle(client)
    disk.fail("preadv", failure)
    with pytest.raises(StoreRefused, match=failure.__name__):
        await client.ask(Topic.SCRUB, segment=0, drop=True)
    assert disk.raised == 1
    assert (await client.ask(Topic.SCRUB, segment=0, drop=True))["damaged"] == 0
    assert (await when_idle(client)).connections == 1


@pytest.mark.parametrize("failure", FAILURES)
def test_what_a_thread_raises_is_an_ordinary_error(failure):
    def work() -> None:
        raise failure("x")

    with pytest.raises(ThreadFailed, match=failure.__name__) as caught:
        guarded(work)()
    assert isinstance(caught.value.__cause__, failure)


def test_errors_that_are_known_stay_what_they_are():
    def work() -> None:
        raise OSError(28, "no room")

    with pytest.raises(OSError, match="no room"):
        guarded(work)()
