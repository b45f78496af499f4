"""Slots held in advance cost nobody anything: a client that was stopped, a full arena, small
domains, a store that ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.deployment import Deployment
from headrace.core.errors import ConfigError
from headrace.core.limits import LeaseTimes
from headrace.kvstore import Kind, ahead
from headrace.kvstore.policy import DomainShare

PROCESS = Path(__file__).with_name("store_process.py")
SIZE = 3000


def read(client, place, digest):
    dest = bytearray(SIZE)
    return bytes(dest) if client.read_into(place, digest, dest) else None


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def reserve_of(rig, reserve_s: float) -> None:
    leases = LeaseTimes(connection_reserve_s=reserve_s)
    rig.role = replace(rig.role, deployment=Deployment(leases=leases))


async def put_row(client, things, begin, end, step=8, **options):
    """Blocks of one chain, `step` a put; their places."""
    places = []
    for number in range(begin, end, step):
        places += await client.put(
            Kind.KV,
            things.blocks(*range(number, min(number + step, end))),
            first_block=number,
            parent=things.digest(number - 1) if number else None,
            **options,
        )
    return places


@pytest.mark.fault
async def test_a_client_stopped_while_it_asks_writes_over_nobody(
    rig, things, wait_until, when_idle
):
    """What it was granted has been another's for long when it reads the answer."""
    reserve_of(rig, 1.0)
    await rig.start(ahead_slots=12)
    client = await rig.client()
    told = {"address": rig.role.listen, "namespace": things.namespace.hex()}
    late = subprocess.Popen(
        [sys.executable, "-P", str(PROCESS), "late", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:

        async def granted(count: int) -> bool:
            stat = await client.stat()
            return (stat.granted > 0) == (count > 0)

        async def stopped() -> bool:
            return is_stopped(late.pid)

        await wait_until(stopped, "the client stops")
        await wait_until(lambda: granted(1), "its slots")
        await wait_until(lambda: granted(0), "their end")
        assert is_stopped(late.pid)
        mine = (await client.stat()).arena_free
        places = await put_row(client, things, 0, mine, 1, lease=things.lease(), wait_s=0.2)
        numbers = [number for number, place in enumerate(places) if place is not None]
        assert len(numbers) > 100
        await when_idle(client)
        late.send_signal(signal.SIGCONT)
        line = await asyncio.to_thread(late.stdout.readline)
        assert json.loads(line)["asked"] >= 1  # it has put more since
        for number in numbers:
            assert read(client, places[number], things.digest(number)) == things.payload(number)
        assert (await client.stat()).damaged == 0
    finally:
        late.send_signal(signal.SIGCONT)
        late.kill()
        late.wait(10)
        late.stdin.close()
        late.stdout.close()


async def test_what_is_too_few_for_a_batch_is_not_kept(rig, things, when_idle):
    """In an arena where others lease all but 32 slots, a client puts so many blocks again and
    again, nobody leasing them: its own slots in advance are not what it lacks."""
    await rig.start(arena_bytes=2 << 20, ssd_bytes=16 << 20, segment_bytes=1 << 20)
    client, other = await rig.client(), await rig.client()
    slots = client._connection.arena.region(Kind.KV).slots
    for number in range(500_000, 500_000 + slots - 32):
        (place,) = await other.put(
            Kind.KV, things.blocks(number), lease=things.lease(), wait_s=5.0, first_block=number
        )
        assert place is not None
    other._connection.ahead.give_back()
    await when_idle(other)
    dropped = 0
    for begin in range(0, 32 * 12, 32):
        places = await put_row(client, things, begin, begin + 32, 32)
        dropped += places.count(None)
        assert len(client._connection.ahead) == 0
        await when_idle(client)  # what it put before may leave
        await asyncio.sleep(0.002)
    assert dropped == 0


async def test_batches_above_the_bound_hold_and_push_out_nothing(rig, things, when_idle):
    await rig.start(arena_bytes=4 << 20, ssd_bytes=16 << 20, segment_bytes=1 << 20, ahead_slots=8)
    client = await rig.client()
    for begin in range(0, 320, 16):
        await put_row(client, things, begin, begin + 16, 16, wait_s=5.0)
        assert (len(client._connection.ahead), (await client.stat()).granted) == (0, 0)
    stat = await when_idle(client)
    assert (stat.blocks, stat.refused) == (320, 0)


@pytest.mark.parametrize("domain", ["small", ""])
async def test_a_short_row_pushes_out_about_as_much_as_it_puts(rig, things, when_idle, domain):
    """34 new blocks, two at a time, into a share or an arena that is full of others."""
    share = DomainShare("small", 0.1, 0.1)
    await rig.start(
        arena_bytes=8 << 20, ssd_bytes=32 << 20, segment_bytes=4 << 20, domain_shares=(share,)
    )
    client, other = await rig.client(), await rig.client()
    slots = client._connection.arena.region(Kind.KV).slots
    full = int(slots * share.most) if domain else slots
    await put_row(other, things, 0, full, domain=domain, wait_s=5.0)
    other._connection.ahead.give_back()
    before = await when_idle(client)
    assert domain or before.arena_free < 16 + slots // 4  # windows and pictures have their own
    await put_row(client, things, 10_000, 10_034, 2, domain=domain)
    stat = await client.stat()
    assert 0 < stat.granted <= 4  # it was served in advance
    assert stat.evicted - before.evicted <= 34 + 4


async def test_a_domain_grants_a_sixteenth_of_its_most(rig, things):
    share = DomainShare("small", 0.1, 0.1)
    await rig.start(arena_bytes=8 << 20, ssd_bytes=32 << 20, domain_shares=(share,))
    client = await rig.client()
    slots = client._connection.arena.region(Kind.KV).slots
    most = 0
    for begin in range(0, 400, 2):
        await put_row(client, things, begin, begin + 2, 2, domain="small")
        most = max(most, (await client.stat()).granted)
    assert 2 <= most <= int(slots * share.most) // 16


async def test_a_long_row_holds_many_and_never_more_than_it_put(rig, things, when_idle):
    await rig.start(arena_bytes=64 << 20, ssd_bytes=32 << 20, segment_bytes=4 << 20)
    client = await rig.client()
    bound = min(1024, client._connection.arena.region(Kind.KV).slots // 16)
    most = 0
    for begin in range(0, 800, 8):
        assert None not in await put_row(client, things, begin, begin + 8)
        held = (await client.stat()).granted
        assert held <= min(bound, max(16, begin + 8 - ahead.IN_A_ROW))
        most = max(most, held)
    assert 256 < most <= bound
    stat = await when_idle(client)
    assert (stat.blocks, stat.granted, stat.refused, stat.dropped) == (800, 0, 0, 0)


@pytest.mark.parametrize(
    ("row", "took_s", "goal"),
    [(40, 0.01, 16), (100, 0.01, 68), (1000, 0.2, 968), (1000, 1.0, 250), (1000, 100.0, 16)],
)
async def test_a_client_wants_no_more_than_it_uses_soon(rig, row, took_s, goal):
    await rig.start()
    stock = (await rig.client())._connection.ahead
    stock._row, stock._last_s = row, stock._began_s + took_s
    assert stock._goal(8) == goal


@pytest.mark.parametrize("reserve_s", [0.0, 0.99, 3600.5])
def test_the_time_for_which_slots_wait_has_bounds(reserve_s):
    with pytest.raises(ConfigError, match="connection_reserve_s.*1.0.*3600.0.*got"):
        Deployment(leases=LeaseTimes(connection_reserve_s=reserve_s))


@pytest.mark.parametrize("step", [8, 1])
async def test_an_orderly_stop_keeps_all_that_was_answered(rig, things, step):
    """A store that ends amid a stream of puts into slots held in advance."""
    await rig.start(arena_bytes=16 << 20, ssd_bytes=24 << 20, segment_bytes=4 << 20)
    writer = await rig.client()
    answered = 0
    stopping = None
    while answered < 2400:
        begin = answered
        places = await put_row(writer, things, begin, begin + step, step)
        if None in places:
            break
        answered += step
        if answered >= 400 and stopping is None and len(writer._connection.ahead) > step:
            stopping = asyncio.create_task(rig.stop())
    assert stopping is not None and None in places
    await stopping
    await rig.start()
    reader = await rig.client()
    found = await reader.open_objects(Kind.KV, [things.digest(n) for n in range(answered)], None)
    assert found.count(None) == 0 and len(found) == answered
    for number in range(max(0, answered - 64), answered):
        assert read(reader, found[number], things.digest(number)) == things.payload(number)


@pytest.mark.fault
async def test_a_client_that_does_not_see_the_end_holds_it_up_for_a_moment(rig, things):
    """Stopped while the store ends: what it had sent is kept, and the store ends all the same."""
    await rig.start()
    client = await rig.client()
    told = {"address": rig.role.listen, "namespace": things.namespace.hex()}
    late = subprocess.Popen(
        [sys.executable, "-P", str(PROCESS), "late", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        while not is_stopped(late.pid):
            await asyncio.sleep(0.01)
        assert (await client.stat()).connections == 2
        await asyncio.wait_for(rig.stop(), 10)
        assert is_stopped(late.pid)
        late.send_signal(signal.SIGCONT)
        line = await asyncio.to_thread(late.stdout.readline)
        assert json.loads(line)["asked"] >= 1  # its puts end as misses, and itself
    finally:
        late.kill()
        late.wait(10)
        late.stdin.close()
        late.stdout.close()


@pytest.mark.parametrize(
    "told",
    [
        {"first_block": 1 << 32},
        {"first_block": (1 << 32) - 8},
        {"first_block": -1},
        {"domain": b"x"},
        {"parent": b"x"},
    ],
)
async def test_a_put_of_what_no_header_holds_loses_no_slots(rig, things, told):
    await rig.start()
    client = await rig.client()
    await put_row(client, things, 0, 80)
    held = len(client._connection.ahead)
    assert held > 0
    with pytest.raises(ValueError, match="bytes|bits"):
        await client.put(Kind.KV, things.blocks(*range(80, 88)), **told)
    assert (client.connected, len(client._connection.ahead)) == (True, held)
    assert None not in await put_row(client, things, 88, 96)


async def test_a_client_that_closes_leaves_nothing_unsaid(rig, things, monkeypatch, when_idle):
    monkeypatch.setattr(ahead, "IN_A_ROW", 0)
    await rig.start()
    reader = await rig.client()
    for round_ in range(10):
        writer = await rig.client()
        numbers = range(round_ * 16, round_ * 16 + 16)
        places = await writer.put(Kind.KV, things.blocks(*numbers[:8]), lease=things.lease())
        places += await writer.put(Kind.KV, things.blocks(*numbers[8:]), lease=things.lease())
        await writer.close()
        assert None not in places
        found = await reader.open_prefix([things.digest(n) for n in numbers], None)
        assert found == places
    assert (await when_idle(reader)).leased_objects == 160


async def test_puts_of_many_domains_take_turns(rig, things, monkeypatch, when_idle):
    monkeypatch.setattr(ahead, "IN_A_ROW", 0)
    await rig.start()
    client = await rig.client()

    async def stream(number: int) -> None:
        for begin in range(number * 40, number * 40 + 40, 4):
            items = things.blocks(*range(begin, begin + 4))
            places = await client.put(
                Kind.KV,
                items,
                lease=things.lease(f"{number}"),
                wait_s=9.0,
                domain=f"d{number // 2}",
            )
            for place, (digest, payload) in zip(places, items, strict=True):
                assert read(client, place, digest) == payload

    await asyncio.gather(*(stream(number) for number in range(4)))
    stat = await when_idle(client)
    assert (stat.blocks, stat.granted, stat.refused, stat.damaged) == (160, 0, 0, 0)
