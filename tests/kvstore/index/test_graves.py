"""Records of stores that do not come back leave the index; those of living ones never do."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.core.clock import SYSTEM_CLOCK, FakeClock
from headrace.core.limits import LeaseTimes
from headrace.kvstore import Kind, StoreClient
from headrace.kvstore.graves import Graves
from headrace.kvstore.questions import Topic
from headrace.kvstore.records import FORGET, NUMBERS_KEY, folder_key, store_key, unpack_records
from headrace.kvstore.redis_link import RedisLink
from headrace.kvstore.settings import Tier

pytestmark = [pytest.mark.redis, pytest.mark.fault]
TOKEN = "a cluster token of tests"
PATIENT = {"index_deadline_s": 3.0}


class Undertaker:
    """A sweeper with a clock of its own, and what the index holds."""

    def __init__(self, url: str, plain) -> None:
        self.clock = FakeClock()
        self.link = RedisLink(url, 3.0, SYSTEM_CLOCK)
        self.graves = Graves(self.link, LeaseTimes(), self.clock, 3600.0)
        self.plain = plain

    async def look(self) -> int:
        """Two looks with more than the time of grace between them."""
        first = await self.graves.look()
        assert first == 0  # absent for too short a time
        self.clock.advance(60)
        return await self.graves.look()

    def age(self, number: int) -> None:
        assert self.plain.zscore(NUMBERS_KEY, number) is not None
        self.plain.zadd(NUMBERS_KEY, {str(number): 1.0})

    def numbers(self) -> set[int]:
        return {int(key.rpartition(b":")[2]) for key in self.plain.keys("kv:store:*")}

    def records(self) -> list[int]:
        """The store number of every record that stands in the index."""
        found = []
        for kind in Kind:
            for key in self.plain.keys(f"{kind.value}:*"):
                if not key.startswith(b"kv:store:"):
                    found += [r.store for r in unpack_records(self.plain.get(key) or b"")]
        return found


@pytest_asyncio.fixture
async def undertaker(valkey, plain):
    made = Undertaker(valkey.url, plain)
    yield made
    await made.graves.close()


async def _filled(address, things, listed, wait_until, *numbers) -> None:
    client = StoreClient(address, TOKEN, things.namespace)
    assert await client.connect(10.0)
    await client.put(Kind.KV, things.blocks(*numbers))
    await client.put(Kind.SWA, things.windows(numbers[-1]))
    await listed(client, wait_until)
    await client.close()


async def _dead(rig, undertaker, things, listed, wait_until, **settings) -> int:
    """A store that has listed 22 records and is gone; its number."""
    await rig.start(**PATIENT, **settings)
    await _filled(rig.role.listen, things, listed, wait_until, *range(10))
    (number,) = undertaker.numbers()
    await rig.cut()
    assert undertaker.numbers() == set() and undertaker.records().count(number) >= 22
    return number


@pytest.fixture
def stopped():
    """`stopped(process)`: by SIGSTOP, verified; let go afterwards."""
    done = []

    def stop(process) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        done.append(process)
        for _ in range(500):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return
        raise AssertionError(f"SIGSTOP had no effect: {state}")

    yield stop
    for process in done:
        if process.process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)


async def test_a_store_that_never_returns_leaves_the_index(
    undertaker, start_process, home, valkey, things, listed, wait_until, new_rig, reader_for, answer
):
    dead = start_process(valkey.url, **PATIENT)
    await _filled(f"unix://{home}/store.sock", things, listed, wait_until, *range(10))
    (number,) = undertaker.numbers()
    theirs = len(undertaker.records())
    assert theirs == 2 * 11  # in memory and on disk
    dead.kill()
    undertaker.plain.delete(store_key(number))  # as when its lease has run out
    os.makedirs(f"{home}/b")
    rig = new_rig(f"{home}/b", valkey.url, **PATIENT)
    await rig.start()
    try:
        await _filled(rig.role.listen, things, listed, wait_until, *range(5, 15))
        ours = undertaker.records().count(next(iter(undertaker.numbers())))
        assert await undertaker.graves.look() == 0  # not silent for long enough
        undertaker.age(number)
        assert await undertaker.look() == theirs
        assert undertaker.records().count(number) == 0 and len(undertaker.records()) == ours
        assert undertaker.plain.zscore(NUMBERS_KEY, number) is None
        assert number not in undertaker.numbers()
        reader = reader_for(valkey.url)
        hits = await answer(reader, things.namespace, [things.digest(n) for n in range(5, 15)])
        assert hits.blocks == 10
        # And never twice: with nobody dead no look scans anything.
        before = undertaker.plain.info("commandstats").get("cmdstat_scan", {}).get("calls", 0)
        assert await undertaker.graves.look() == 0
        after = undertaker.plain.info("commandstats").get("cmdstat_scan", {}).get("calls", 0)
        assert after == before
    finally:
        await rig.close()


async def test_a_living_store_is_left_alone_whatever_the_list_says(
    undertaker, listed_rig, things, listed, wait_until
):
    await listed_rig.start(**PATIENT)
    await _filled(listed_rig.role.listen, things, listed, wait_until, *range(6))
    before = sorted(undertaker.records())
    (number,) = undertaker.numbers()
    undertaker.age(number)
    assert await undertaker.look() == 0
    assert await undertaker.graves.sweep_all() == (0, 0)
    assert sorted(undertaker.records()) == before != []


async def test_one_that_was_stopped_comes_back_and_lists_everything_again(
    undertaker, start_process, stopped, home, valkey, things, listed, wait_until, reader_for, answer
):
    process = start_process(valkey.url, **PATIENT)
    await _filled(f"unix://{home}/store.sock", things, listed, wait_until, *range(10))
    (number,) = undertaker.numbers()
    stopped(process)
    undertaker.plain.delete(store_key(number))
    undertaker.age(number)
    assert await undertaker.look() == 22 and undertaker.records() == []
    os.kill(process.pid, signal.SIGCONT)
    reader = reader_for(valkey.url)

    async def all_there() -> bool:
        hits = await answer(reader, things.namespace, [things.digest(n) for n in range(10)])
        return hits.blocks == 10

    await wait_until(all_there, "a store that lists again")


class Meddling(RedisLink):
    """Runs `before` ahead of the first removal of records."""

    before = None

    async def script_each(self, lua, keys, shared, each=()):
        if lua == FORGET and self.before is not None:
            todo, self.before = self.before, None
            await todo()
        return await super().script_each(lua, keys, shared, each)


@pytest.mark.parametrize("stood_still", [False, True])
async def test_an_owner_that_returns_in_the_middle_of_the_sweep(
    undertaker, start_process, stopped, home, valkey, things, listed, wait_until, stood_still,
    reader_for, answer,
):  # fmt: skip
    """It finds its number taken and lists under another; or (`stood_still`: the sweeper was stopped
    between its look and its removal, longer than a number is held) its records are removed under
    it, and it is made to list them again."""
    process = start_process(valkey.url, **PATIENT)
    await _filled(f"unix://{home}/store.sock", things, listed, wait_until, *range(10))
    (number,) = undertaker.numbers()
    stopped(process)
    undertaker.plain.delete(store_key(number))
    undertaker.age(number)
    link = Meddling(valkey.url, 3.0, SYSTEM_CLOCK)
    graves = Graves(link, LeaseTimes(), undertaker.clock, 3600.0)

    async def the_owner_returns() -> None:
        if stood_still:
            undertaker.clock.advance(60)
            undertaker.plain.delete(store_key(number))  # its time was over
        os.kill(process.pid, signal.SIGCONT)
        lists = number if stood_still else number + 1
        await wait_until(lambda: _returned(lists), "the owner's return")

    async def _returned(lists: int) -> bool:
        told = undertaker.plain.get(store_key(lists))
        return told is not None and undertaker.records().count(lists) == 22

    link.before = the_owner_returns
    assert await graves.look() == 0
    undertaker.clock.advance(60)
    removed = await graves.look()
    assert link.before is None and removed > 0  # it was met in the middle
    await graves.close()
    reader = reader_for(valkey.url)

    async def all_there() -> bool:
        hits = await answer(reader, things.namespace, [things.digest(n) for n in range(10)])
        return hits.blocks == 10

    await wait_until(all_there, "a store that is listed as a whole")
    alive = number if stood_still else number + 1
    assert undertaker.records().count(alive) == 22


async def test_two_sweepers_at_once(
    undertaker, listed_rig, valkey, plain, things, listed, wait_until
):
    number = await _dead(listed_rig, undertaker, things, listed, wait_until)
    undertaker.age(number)
    other = Undertaker(valkey.url, plain)
    assert await asyncio.gather(undertaker.graves.look(), other.graves.look()) == [0, 0]
    undertaker.clock.advance(60)
    other.clock.advance(60)
    removed = await asyncio.gather(undertaker.graves.look(), other.graves.look())
    assert sorted(removed) == [0, 22] and undertaker.records() == []
    assert undertaker.numbers() == set()  # nobody holds the number any more
    await other.graves.close()


async def test_what_a_mounted_folder_holds_stays_until_nobody_reads_it(
    undertaker, listed_rig, plain, things, listed, wait_until
):
    number = await _dead(listed_rig, undertaker, things, listed, wait_until, shared=True)
    tiers = [
        record.tier
        for key in plain.keys("kv:*")
        if not key.startswith(b"kv:store:")
        for record in unpack_records(plain.get(key))
    ]
    assert tiers.count(Tier.SHARED) == 10
    value = next(plain.get(k) for k in plain.keys("kv:*") if not k.startswith(b"kv:store:"))
    epoch = next(r.epoch for r in unpack_records(value) if r.tier is Tier.SHARED)
    plain.set(folder_key(epoch), b"1")
    undertaker.age(number)
    assert await undertaker.look() == 22 and len(undertaker.records()) == 11
    assert plain.zscore(NUMBERS_KEY, number) > 1e9  # looked at again later
    plain.delete(folder_key(epoch))
    undertaker.age(number)
    assert await undertaker.look() == 11 and undertaker.records() == []


async def test_a_running_store_sweeps_by_itself(
    undertaker, listed_rig, home, valkey, plain, things, listed, wait_until, new_rig
):
    number = await _dead(listed_rig, undertaker, things, listed, wait_until)
    plain.zadd(NUMBERS_KEY, {str(number): 1.0})
    os.makedirs(f"{home}/b")
    rig = new_rig(f"{home}/b", valkey.url, forget_stores_s=1.0, **PATIENT)
    await rig.start()
    try:

        async def gone() -> bool:
            return plain.keys("kv:[^s]*") == [] and plain.keys("swa:*") == []

        await wait_until(gone, "the records of the other store going", 30.0)
        client = await rig.client()
        told = await client.ask(Topic.METRICS)
        assert "headrace_store_index_swept_total 22.0" in told["text"]
    finally:
        await rig.close()


async def test_a_tool_has_the_whole_index_gone_through(
    undertaker, listed_rig, home, valkey, plain, things, listed, wait_until, new_rig
):
    """Also what an older build listed, which noted no numbers."""
    await _dead(listed_rig, undertaker, things, listed, wait_until)
    plain.delete(NUMBERS_KEY)
    os.makedirs(f"{home}/b")
    rig = new_rig(f"{home}/b", valkey.url, **PATIENT)
    await rig.start()
    try:
        client = await rig.client()
        await client.put(Kind.KV, things.blocks(77))
        await listed(client, wait_until)
        assert await client.ask(Topic.SWEEP) == {"stores": 1, "records": 22}
        assert len(plain.keys("kv:[^s]*")) == 1
    finally:
        await rig.close()


async def test_redis_away_ends_nothing(undertaker):
    link = RedisLink("redis://127.0.0.1:1", 0.05, SYSTEM_CLOCK)
    graves = Graves(link, LeaseTimes(), undertaker.clock, 3600.0)
    for _ in range(4):
        assert await graves.look() == 0
    await graves.close()
